"""Networks of the package timm, as ViT-B and Swin in FedNSAM's and FedLESAM's experiments; LoRA: Hu et al. (2022)."""

import math
import os
from typing import Annotated, Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fl_dist.common.errors import ModelError, error_message
from fl_dist.common.formatting import shorten, suggest
from fl_dist.models.base import models, require_images

LORA_SCALE = 2.0
"""alpha/rank of the adapters; FedNSAM's code has alpha 32 and rank 16."""


class LoRA(nn.Linear):
    """A linear layer plus a low-rank product.

    `weight` and `bias` keep their names, so that a file of weights without adapters fits. The adapters are called
    weights too, because FedASAM scales by name.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.weight_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.weight_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.weight_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + LORA_SCALE * F.linear(F.linear(x, self.weight_a), self.weight_b)


@models.register
def timm(
    shape: tuple[int, ...],
    outputs: int,
    *,
    model: Annotated[str, Field(description="timm's name of an architecture")] = "vit_base_patch16_224",
    lora: Annotated[
        int, Field(ge=0, le=10**4, description="rank of adapters on qkv and proj, trained with the head only; 0: none")
    ] = 0,
) -> nn.Module:
    """A network of timm without dropout; weights come from model.pretrained. ViT-B/16: 85,952,456 for 200 classes."""
    require_images("timm", shape)
    module = _create_network(_import_timm(), model, shape, outputs)
    if lora and not _add_adapters(module, lora):
        raise ModelError(f"model timm: {model} has no attention with layers qkv and proj; set model.lora to 0")
    return module


def _import_timm() -> Any:
    """The package; it asks no hub unless the user's environment allows that."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import timm
    except ImportError:
        raise ModelError("model timm needs the package timm: pip install timm") from None
    except RuntimeError as error:  # missing operators
        raise ModelError(
            f"timm cannot be imported ({error_message(error)}); install the torchvision that was built for this torch"
        ) from None
    return timm


def _create_network(package: Any, name: str, shape: tuple[int, ...], outputs: int) -> nn.Module:
    known = package.list_models()
    if name not in known:
        raise ModelError(f"model timm: timm has no model {shorten(name)!r}; {shorten(suggest(name, known))}")
    # Networks for images of any size do not have this argument.
    size = {"img_size": shape[1:]} if package.get_pretrained_cfg(name).fixed_input_size else {}
    options = {"num_classes": outputs, "in_chans": shape[0], "drop_rate": 0.0, "drop_path_rate": 0.0}
    try:
        network: nn.Module = package.create_model(name, pretrained=False, **options, **size)
        return network
    except Exception as error:
        raise ModelError(
            f"model timm: {name} cannot be built for images {list(shape)}: {error_message(error)}"
        ) from error


def _add_adapters(module: Any, rank: int) -> bool:
    """Freeze all but the head and add adapters to attention layers; False if there are none."""
    module.requires_grad_(False)
    attentions = [part for part in module.modules() if _is_attention(part)]
    for attention in attentions:
        attention.qkv, attention.proj = LoRA(attention.qkv, rank), LoRA(attention.proj, rank)
    heads = module.get_classifier()
    for head in heads if isinstance(heads, tuple) else (heads,):
        head.requires_grad_(True)
    return bool(attentions)


def _is_attention(part: nn.Module) -> bool:
    layers = (getattr(part, name, None) for name in ("qkv", "proj"))
    # With separate biases of q and v, timm uses qkv's weight without calling the layer.
    return all(isinstance(layer, nn.Linear) for layer in layers) and getattr(part, "q_bias", None) is None
