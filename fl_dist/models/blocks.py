"""Images on a CPU in blocks of channels, as the fastest kernels of its convolutions want them.

Other tensors are brought into blocks before each convolution and back after it, or have slower kernels. Blocks are for
training and evaluation only: they know nothing but convolutions, ReLU and pools, can be derived once, and make a number
of what is none. (Rows and trained weights are looked at elsewhere.)
"""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

Blocks = Annotated[
    bool, Field(description="a CPU's fastest layout of images; false: as elsewhere, and can be derived twice")
]

_wanted = False


def blocked(x: Tensor) -> Tensor:
    """The images in blocks, if these are wanted and known here; `to_dense` ends it, and leaves others as they are."""
    return x.to_mkldnn() if _wanted and _has_kernels(x) else x


@contextlib.contextmanager
def in_blocks() -> Iterator[None]:
    """Within it, models may use them."""
    global _wanted
    before, _wanted = _wanted, True
    try:
        yield
    finally:
        _wanted = before


def _has_kernels(x: Tensor) -> bool:
    plain = x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return plain and x.device.type == "cpu" and torch._C._get_mkldnn_enabled() and _is_known()


@cache
def _is_known() -> bool:
    # Elsewhere oneDNN may have but the plainest code for it.
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
