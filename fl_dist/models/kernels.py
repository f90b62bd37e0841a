"""Which kernels a model uses: the fastest, of which some can be differentiated once only, or those for second order."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_dist.models.onednn_layout import BlockedModule


def allow_first_order_kernels(module: nn.Module, allowed: bool = True) -> list[BlockedModule]:
    """Let the module use kernels that can be differentiated once only; the layers for which that changes something."""
    layers = [m for m in module.modules() if isinstance(m, BlockedModule) and m.allows_blocks != allowed]
    for layer in layers:
        layer.allows_blocks = allowed
    return layers


@contextlib.contextmanager
def second_order(module: nn.Module) -> Iterator[None]:
    """Within it, the module uses only kernels that can be differentiated twice, and that pass NaN on.

    Attention and recurrent layers keep their kernels where nothing is differentiated.
    """
    layers = allow_first_order_kernels(module, False)
    try:
        with contextlib.ExitStack() as stack:
            if torch.is_grad_enabled():
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                stack.enter_context(differentiable_rnn(module))
            yield
    finally:
        for layer in layers:
            layer.allows_blocks = True


@contextlib.contextmanager
def differentiable_rnn(module: nn.Module) -> Iterator[None]:
    """Within it, recurrent layers can be differentiated in evaluation mode, and twice: those of cuDNN cannot."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.enabled
    # Not cudnn.flags, which also sets the precision of products and does not restore it.
    cudnn.enabled = before and not any(isinstance(layer, nn.RNNBase) for layer in module.modules())
    try:
        yield
    finally:
        cudnn.enabled = before
