"""Where a model's weights come from, and which of them are trained."""

import fnmatch
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_dist.common.paths import expand
from fl_dist.common.words import nearest, shortened


def load_init(module: nn.Module, path: str | Path) -> None:
    """Copy parameters by name from a .safetensors file into the module; buffers too, if the file has them."""
    tensors = _read("model.init", expand(path))
    parameters = dict(module.named_parameters())
    known = parameters | dict(module.named_buffers())
    _check_names(path, missing=parameters.keys() - tensors, unexpected=tensors.keys() - known)
    for name, tensor in tensors.items():
        if tensor.shape != known[name].shape:
            raise ValueError(
                f"model.init {path}: {name} has shape {list(tensor.shape)}, in the model"
                f" {list(known[name].shape)}; set model to the one the file was made for"
            )
    _copy(tensors, known)


def load_pretrained(module: nn.Module, path: str | Path) -> None:
    """Copy what the file and the module share by name and shape; the rest stays as it was made."""
    tensors, known = _read("model.pretrained", expand(path)), module.state_dict()
    shared = _shared(tensors, known)
    if not shared:
        raise ValueError(
            f"model.pretrained {path} shares no tensor by name and shape with the model: the file has "
            f"{_some(set(tensors))}, the model {_some(set(known))}"
        )
    _copy(shared, known)


def taken_over(module: nn.Module, path: str | Path) -> str:
    """What a file of pretrained weights gave to the module, in words."""
    known = module.state_dict()
    shared = _shared(_read("model.pretrained", expand(path)), known)
    taken, size = (sum(known[name].numel() for name in names) for names in (shared, known))
    fresh = _some(known.keys() - shared)
    return f"{taken:,} of {size:,} numbers of the model are from {path}" + (f"; new are {fresh}" if fresh else "")


@torch.no_grad()
def _copy(tensors: dict[str, Tensor], known: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        known[name].copy_(tensor)


def _shared(tensors: dict[str, Tensor], known: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if name in known and t.shape == known[name].shape}


def choose_trained(module: nn.Module, patterns: list[str]) -> None:
    """Only parameters that a pattern matches are trained."""
    parameters = dict(module.named_parameters(remove_duplicate=False))  # one that is used twice has two names
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    for pattern in patterns:
        if not fnmatch.filter(parameters, pattern):
            raise ValueError(
                f"model.train: no parameter is named {shortened(pattern)!r}; {nearest(pattern, parameters)}"
            )
        for name in fnmatch.filter(parameters, pattern):
            parameters[name].requires_grad_()


def _read(key: str, path: Path) -> dict[str, Tensor]:
    if not os.path.isfile(path):
        raise ValueError(f"{key} {shortened(path)} does not exist; set it to a .safetensors file, or to null")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{key} {path} is not a readable .safetensors file ({reason}); save it again") from None


def _check_names(path: str | Path, missing: set[str], unexpected: set[str]) -> None:
    if missing or unexpected:
        parts = [f"{kind} {_some(names)}" for kind, names in (("lacks", missing), ("has unknown", unexpected)) if names]
        raise ValueError(f"model.init {path} {' and '.join(parts)}; set model to the one the file was made for")


def _some(names: set[str], most: int = 5) -> str:
    shown = [repr(name) for name in sorted(names)[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
