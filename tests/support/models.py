"""Build models by name; count their parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fl_dist.models import models

CIFAR = (3, 32, 32)
VOCABULARY = 98_635
"""Words in AG News."""


def parameter_count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def build_by_name(name: str, shape: tuple[int, ...] = CIFAR, classes: int = 10, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    return models.build(name, settings, shape=shape, outputs=classes, classes=classes, vocabulary=VOCABULARY)


def error_message(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)
