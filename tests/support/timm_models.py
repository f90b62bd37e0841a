"""The program's builder `timm`, also where torchvision's compiled operators do not load (beside a CPU build of torch).

Importing torchvision fails then, and with it timm, for want of the schemas of two operators that no model here calls.
"""

import importlib.util
from pathlib import Path

import torch
from torch import nn

from fl_dist.models.timm import timm

__all__ = ["small_swin", "timm"]

_torchvision = importlib.util.find_spec("torchvision")
assert _torchvision is not None and _torchvision.origin is not None
try:
    torch.ops.load_library(Path(_torchvision.origin).with_name("_C.so"))
except OSError:
    _library = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms", "qnms"):
        _library.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def small_swin(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A Swin of two small stages, of which the first has shifted windows; timm names none that is as small."""
    from timm.models.swin_transformer import SwinTransformer

    sizes = {"window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2)}
    return SwinTransformer(shape[1:], in_chans=shape[0], num_classes=outputs, drop_path_rate=0.0, **sizes)
