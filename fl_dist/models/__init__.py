"""Models, one file per family. A new file in this folder registers itself by being here."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_dist.common.errors import ModelError
from fl_dist.common.registry import import_submodules
from fl_dist.models.base import PretrainedModule, models
from fl_dist.models.compiled import CompiledModule, describe_compile_error
from fl_dist.models.kernels import allow_first_order_kernels, differentiable_rnn, second_order
from fl_dist.models.layer_outputs import LayerOutputs
from fl_dist.models.weights import describe_pretrained, freeze_except, load_init, load_pretrained

import_submodules(__name__)
__all__ = [
    "CompiledModule",
    "LayerOutputs",
    "PretrainedModule",
    "allow_first_order_kernels",
    "build_model",
    "describe_compile_error",
    "describe_pretrained",
    "differentiable_rnn",
    "models",
    "second_order",
]


class ModelInterface(NamedTuple):
    """What a model has to fit."""

    shape: tuple[int, ...]
    """Of one row of the data."""
    outputs: int
    vocabulary: int = 0
    per_token: bool = False
    """Whether `outputs` are those of each token of a row, not of the row."""


def build_model(
    section: dict[str, Any], interface: ModelInterface, dtype: torch.dtype, for_training: bool = False
) -> nn.Module:
    """The model of a configuration's section with its initial weights; what is not trained is frozen.

    `for_training`: it may use kernels that can be differentiated once only, except within `second_order`.
    """
    settings = dict(section)
    name, init, pretrained, train = (settings.pop(key, None) for key in ("name", "init", "pretrained", "train"))
    supplied = interface._asdict() | {"classes": interface.outputs}
    module = models.build(name, settings, **supplied)
    if train is not None:
        freeze_except(module, train)
    _convert(module, dtype)
    if pretrained is not None and init is not None:
        raise ModelError("model.init holds every parameter: set either that or model.pretrained")
    if pretrained is not None:
        load_pretrained(module, pretrained)
    if init is not None:
        load_init(module, init)
    if for_training:
        allow_first_order_kernels(module)
    return module


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    """To the type of training; frozen parameters in half precision, such as those under adapters, stay as they are."""

    def convert(tensor: Tensor) -> Tensor:
        is_half = isinstance(tensor, nn.Parameter) and not tensor.requires_grad and tensor.dtype.itemsize < 4
        return tensor if is_half or not tensor.is_floating_point() else tensor.to(dtype)

    module._apply(convert)
