"""Networks of the package timm, as ViT-B and Swin in FedNSAM's and FedLESAM's experiments; LoRA: Hu et al. (2022)."""

import math
import os
from typing import Annotated, Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fl_dist.common.words import message, nearest, shortened
from fl_dist.models.base import models

SCALE = 2.0
"""Of the adapters' product: alpha over the rank, with an alpha of twice the rank as in FedNSAM's code (32 and 16)."""


class LoRA(nn.Linear):
    """A linear layer plus a product of low rank; `weight` and `bias` are the layer's own, and keep their names.

    So a file of weights that was made without adapters fits. Those are called weights, too: FedASAM scales by the name.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.weight_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.weight_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.weight_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + SCALE * F.linear(F.linear(x, self.weight_a), self.weight_b)


@models.register
def timm(
    shape: tuple[int, ...],
    outputs: int,
    *,
    model: Annotated[str, Field(description="timm's name of an architecture")] = "vit_base_patch16_224",
    lora: Annotated[
        int,
        Field(ge=0, le=10**4, description="rank of adapters on qkv and proj, trained with the head only; 0: none"),
    ] = 0,
) -> nn.Module:
    """A network of timm without dropout; weights come from model.pretrained. ViT-B/16: 85,952,456 for 200 classes."""
    if len(shape) != 3:
        raise ValueError(f"model timm needs images [C, H, W], not {list(shape)}; use model mlp")
    module = _create(_package(), model, shape, outputs)
    if lora and not _adapt(module, lora):
        raise ValueError(f"model timm: {model} has no attention with layers qkv and proj; set model.lora to 0")
    return module


def _package() -> Any:
    """The package, which looks nothing up in a hub unless the user's environment says that it may."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import timm
    except ImportError:
        raise ValueError("model timm needs the package timm: pip install timm") from None
    except RuntimeError as error:  # of operators that are missing
        raise ValueError(
            f"timm cannot be imported ({message(error)}); install the torchvision that was built for this torch"
        ) from None
    return timm


def _create(package: Any, name: str, shape: tuple[int, ...], outputs: int) -> nn.Module:
    known = package.list_models()
    if name not in known:
        raise ValueError(f"model timm: timm has no model {shortened(name)!r}; {shortened(nearest(name, known))}")
    # Other networks take images of any size, and no such argument.
    size = {"img_size": shape[1:]} if package.get_pretrained_cfg(name).fixed_input_size else {}
    options = {"num_classes": outputs, "in_chans": shape[0], "drop_rate": 0.0, "drop_path_rate": 0.0}
    try:
        return package.create_model(name, pretrained=False, **options, **size)
    except Exception as error:
        raise ValueError(f"model timm: {name} cannot be built for images {list(shape)}: {message(error)}") from error


def _adapt(module: Any, rank: int) -> bool:
    """Freeze all but the head, and add adapters to the attention; False: there is none that they could be added to."""
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
    # Where the bias of q and v is apart, timm takes qkv's weight and does not call the layer.
    return all(isinstance(layer, nn.Linear) for layer in layers) and getattr(part, "q_bias", None) is None
