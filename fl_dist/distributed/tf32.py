"""TensorFloat32: float32 products on a GPU with 10 bits of mantissa instead of 23, only if the run asks for it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fl_dist.config import ConfigError

MIN_COMPUTE_CAPABILITY = 8
"""Older GPUs would silently compute in float32."""
_matmul: Any = torch.backends.cuda.matmul
_cudnn: Any = torch.backends.cudnn
_precision_switches = [_matmul, _cudnn.conv, _cudnn.rnn] if hasattr(_matmul, "fp32_precision") else []
"""Newer versions of torch have a named precision for each, and refuse to read the old switches if they disagree."""


@contextlib.contextmanager
def use_tf32(is_allowed: bool) -> Iterator[None]:
    """Within it, all float32 products on a GPU use TF32, or none."""
    before = [switch.fp32_precision for switch in _precision_switches]
    before = before or [_precision_name(_matmul.allow_tf32), _precision_name(_cudnn.allow_tf32)]
    _set_precisions([_precision_name(is_allowed)] * len(before))
    try:
        yield
    finally:
        _set_precisions(before)


def check_tf32_support(precision: str, device: torch.device) -> None:
    """ConfigError if the run asks for TF32 and the device has none."""
    if precision != "tf32":
        return
    is_gpu = device.type == "cuda"
    if not is_gpu or torch.cuda.get_device_capability(device)[0] < MIN_COMPUTE_CAPABILITY:
        raise ConfigError(
            f"local.precision is tf32, which this {'GPU' if is_gpu else 'CPU'} does not have: "
            f"use float32, or a GPU of compute capability {MIN_COMPUTE_CAPABILITY} or higher"
        )


def _precision_name(is_allowed: bool) -> str:
    return "tf32" if is_allowed else "ieee"


def _set_precisions(names: Sequence[str]) -> None:
    _matmul.allow_tf32, _cudnn.allow_tf32 = names[0] == "tf32", names[1] == "tf32"
    for switch, name in zip(_precision_switches, names, strict=False):
        switch.fp32_precision = name
