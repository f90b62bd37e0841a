"""The program's builder `timm`, usable where torchvision's compiled operators do not load (with a CPU build of torch).

Importing torchvision, and so timm, fails there without the schemas of two operators that no model here calls.
"""

import importlib.machinery
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fl_dist.models.timm import timm
from tests.support.models import CIFAR
from tests.support.processes import NO_WANDB

__all__ = ["small_run_arguments", "small_swin", "timm"]

VARIANTS = {
    "full": "model={name: 'tests.support.timm_models:timm', model: test_vit}",
    "adapters": "model={name: 'tests.support.timm_models:timm', model: test_vit, lora: 2}",
    "swin": "model=tests.support.timm_models:small_swin",
}

# Also where the program hides it, as it does while it imports a user's module.
_torchvision = importlib.machinery.PathFinder.find_spec("torchvision")
assert _torchvision is not None and _torchvision.origin is not None
try:
    torch.ops.load_library(Path(_torchvision.origin).with_name("_C.so"))
except OSError:
    _library = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms", "qnms"):
        _library.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def small_swin(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A Swin of two small stages, the first with shifted windows; timm has none as small."""
    from timm.models.swin_transformer import SwinTransformer

    sizes = {"window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2)}
    return SwinTransformer(shape[1:], in_chans=shape[0], num_classes=outputs, drop_path_rate=0.0, **sizes)


def small_run_arguments(folder: Path) -> list[list[str]]:
    """Arguments of a run per variant, on the same random images, below the folder."""
    folder.mkdir(exist_ok=True)
    images, random = folder / "images.npz", np.random.default_rng(0)
    rows = {f"x_{part}": random.integers(0, 256, (n, *CIFAR), np.uint8) for part, n in (("train", 40), ("test", 10))}
    np.savez(images, **rows, y_train=np.arange(40) % 4, y_test=np.arange(10) % 4)
    common = (
        *NO_WANDB,
        "rounds=2",
        f"data={{name: npz, path: {images}}}",
        "partition={name: dirichlet, alpha: 0.5, variant: unbalanced}",
        "clients={total: 4, per_round: 3}",
        "local={epochs: 1, batch_size: 8, lr: 0.01}",
    )
    return [[*common, model, f"run.dir={folder / variant}"] for variant, model in VARIANTS.items()]
