"""oneDNN's blocked layout of images, in which a CPU's convolutions are fastest.

Other layouts are converted before and after each convolution, or have slower kernels. Only convolutions, ReLU and pools
know blocks; they can be differentiated once, and may turn NaN into a number.
"""

from functools import cache
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from fl_dist.common.hook_contract import HookContractError

Blocks = Annotated[
    bool, Field(description="a CPU's fastest layout of images; false: the usual one, which can be differentiated twice")
]


class BlockedModule(nn.Module):
    """A module that may keep images in blocks between `to_blocks` and `to_dense`."""

    allows_blocks = False
    """Set by fl_dist.models.kernels."""

    def __init__(self, blocks: bool) -> None:
        super().__init__()
        self.blocks = blocks

    def to_blocks(self, x: Tensor) -> Tensor:
        return x.to_mkldnn() if self.blocks and self.allows_blocks and _has_kernels(x) else x


def to_dense(x: Tensor) -> Tensor:
    """In the usual layout, in which a tensor without blocks is already."""
    if not x.is_mkldnn:
        return x
    dense: Tensor = _ToDense.apply(x)  # type: ignore[no-untyped-call]
    return dense


def split_off_dense(output: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's output in the usual layout, and what the next layer has to get so that gradients pass through it."""
    dense = to_dense(output)
    return dense, dense.to_mkldnn() if output.is_mkldnn else dense


class _ToDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to_dense()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # create_graph=True; the second pass would end in an error of torch
            raise HookContractError(
                "the blocked layout of images cannot be differentiated twice; set model.blocks=false"
            )
        return gradient.to_mkldnn()


def _has_kernels(x: Tensor) -> bool:
    plain = x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return plain and x.device.type == "cpu" and torch._C._get_mkldnn_enabled() and is_supported()


@cache
def is_supported() -> bool:
    # On other CPUs oneDNN may have only its plainest code for blocks.
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
