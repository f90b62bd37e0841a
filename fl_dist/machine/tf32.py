"""TensorFloat32: a GPU's products of float32 with 10 bits of mantissa instead of 23, if a run says so, else nowhere."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fl_dist.config import ConfigError

OLDEST = 8
"""Compute capability of the first GPUs that have it; older ones would compute in float32 without a word."""
_matmul: Any = torch.backends.cuda.matmul
_cudnn: Any = torch.backends.cudnn
_NAMED = [_matmul, _cudnn.conv, _cudnn.rnn] if hasattr(_matmul, "fp32_precision") else []
"""Newer versions of torch give each its own name of a precision, and refuse to read switches that say otherwise."""


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Within it, float32 on a GPU is that, or TF32 throughout."""
    before = [kind.fp32_precision for kind in _NAMED] or [_name(_matmul.allow_tf32), _name(_cudnn.allow_tf32)]
    _set([_name(allowed)] * len(before))
    try:
        yield
    finally:
        _set(before)


def check(precision: str, device: torch.device) -> None:
    """ConfigError if a run is to have TF32 where there is none: it would not be the run that it says."""
    if precision == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < OLDEST):
        raise ConfigError(
            f"local.precision is tf32, which this {'GPU' if device.type == 'cuda' else 'CPU'} does not have: "
            "use float32, or a GPU of compute capability 8 or higher"
        )


def _name(allowed: bool) -> str:
    return "tf32" if allowed else "ieee"


def _set(names: Sequence[str]) -> None:
    _matmul.allow_tf32, _cudnn.allow_tf32 = names[0] == "tf32", names[1] == "tf32"
    for kind, name in zip(_NAMED, names, strict=False):
        kind.fp32_precision = name
