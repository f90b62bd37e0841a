"""Models, one file a family, and how one starts from a file of parameters."""

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_dist.common.paths import expand
from fl_dist.common.words import shortened
from fl_dist.models import cnn, mlp, vit  # noqa: F401  (importing a family registers it)
from fl_dist.models.base import models

__all__ = ["load_init", "models"]


def load_init(module: nn.Module, path: str | Path) -> None:
    """Copy parameters by name from a .safetensors file into the module; buffers too, if the file has them."""
    tensors = _read(expand(path))
    parameters = dict(module.named_parameters())
    known = parameters | dict(module.named_buffers())
    _check_names(path, missing=parameters.keys() - tensors, unexpected=tensors.keys() - known)
    for name, tensor in tensors.items():
        if tensor.shape != known[name].shape:
            raise ValueError(
                f"model.init {path}: {name} has shape {list(tensor.shape)}, in the model"
                f" {list(known[name].shape)}; set model to the one the file was made for"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            known[name].copy_(tensor)


def _read(path: Path) -> dict[str, Tensor]:
    if not os.path.isfile(path):
        raise ValueError(f"model.init {shortened(path)} does not exist; set it to a .safetensors file, or to null")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model.init {path} is not a readable .safetensors file ({reason}); save it again") from None


def _check_names(path: str | Path, missing: set[str], unexpected: set[str]) -> None:
    if missing or unexpected:
        parts = [f"{kind} {_some(names)}" for kind, names in (("lacks", missing), ("has unknown", unexpected)) if names]
        raise ValueError(f"model.init {path} {' and '.join(parts)}; set model to the one the file was made for")


def _some(names: set[str], most: int = 5) -> str:
    shown = [repr(name) for name in sorted(names)[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
