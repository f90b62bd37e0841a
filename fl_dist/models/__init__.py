"""Models, one file a family; weights.py says where their weights come from."""

from typing import Any, NamedTuple

import torch
from torch import nn

from fl_dist.models import cnn, emnist, fasttext, lenet, mlp, resnet, timm, vgg, vit  # noqa: F401  (importing a family registers it)
from fl_dist.models.base import models
from fl_dist.models.weights import choose_trained, load_init, load_pretrained, taken_over

__all__ = ["MadeFor", "build_model", "load_init", "models", "taken_over"]


class MadeFor(NamedTuple):
    """What a model has to fit."""

    shape: tuple[int, ...]
    """Of one row of the data."""
    outputs: int
    vocabulary: int = 0


def build_model(section: dict[str, Any], fit: MadeFor, dtype: torch.dtype) -> nn.Module:
    """The model of a configuration's section, with its first weights; frozen is what is not trained."""
    settings = dict(section)
    name, init, pretrained, train = (settings.pop(key, None) for key in ("name", "init", "pretrained", "train"))
    supplied = fit._asdict() | {"classes": fit.outputs}
    module = models.build(name, settings, **supplied).to(dtype)
    if pretrained is not None and init is not None:
        raise ValueError("model.init holds every parameter: give either that or model.pretrained")
    if pretrained is not None:
        load_pretrained(module, pretrained)
    if init is not None:
        load_init(module, init)
    if train is not None:
        choose_trained(module, train)
    return module
