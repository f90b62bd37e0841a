"""Where a model's weights come from, and which of them are trained."""

import fnmatch
import os
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_dist.common.errors import ModelError
from fl_dist.common.formatting import shorten, suggest
from fl_dist.common.paths import expand_path
from fl_dist.models.base import PretrainedModule

T = TypeVar("T")
MAX_LISTED_LENGTH = 140
"""Characters of names in a message."""


def load_init(module: nn.Module, path: str | Path) -> None:
    """Copy parameters by name from a .safetensors file into the module; buffers too, if the file has them."""
    tensors = _read("model.init", expand_path(path), module)
    parameters = _drop_external(module, dict(module.named_parameters()))
    known = parameters | dict(module.named_buffers())
    _check_names(path, missing=parameters.keys() - tensors, unexpected=tensors.keys() - known)
    for name, tensor in tensors.items():
        if tensor.shape != known[name].shape:
            raise ModelError(
                f"model.init {path}: {name} has shape {list(tensor.shape)}, in the model"
                f" {list(known[name].shape)}; set model to the one the file was saved from"
            )
    _copy("model.init", path, tensors, known)


def load_pretrained(module: nn.Module, path: str | Path) -> None:
    """Copy the tensors that match by name and shape; the rest keeps its initial values."""
    tensors, known = _read("model.pretrained", expand_path(path), module), _drop_external(module, module.state_dict())
    matching = {name: t for name, t in tensors.items() if name in known and t.shape == known[name].shape}
    if not matching:
        raise ModelError(
            f"model.pretrained {path} shares no tensor by name and shape with the model: the file has "
            f"{_list_names(set(tensors))}, the model {_list_names(set(known))}"
        )
    _copy("model.pretrained", path, matching, known)


def describe_pretrained(module: nn.Module, path: str | Path) -> str:
    """How much of the module comes from a file of pretrained weights, as a sentence; only its header is read."""
    known = _drop_external(module, module.state_dict())
    with safe_open(expand_path(path), "pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    shapes = _rename(module, shapes)
    matching = {name for name, shape in shapes.items() if name in known and shape == list(known[name].shape)}
    copied, size = (sum(known[name].numel() for name in names) for names in (matching, known))
    fresh = _list_names(known.keys() - matching)
    return f"{copied:,} of {size:,} numbers of the model are from {path}" + (f"; new are {fresh}" if fresh else "")


@torch.no_grad()
def _copy(key: str, path: str | Path, tensors: dict[str, Tensor], known: dict[str, Tensor]) -> None:
    """Copy between floating-point types; integers, booleans and complex numbers would be converted silently."""
    for name, tensor in tensors.items():
        target = known[name]
        if tensor.dtype != target.dtype and not (tensor.is_floating_point() and target.is_floating_point()):
            types = f"{name} is of type {tensor.dtype}, in the model {target.dtype}"
            raise ModelError(f"{key} {path}: {types}; save it again in floating point".replace("torch.", ""))
        target.copy_(tensor)


def freeze_except(module: nn.Module, patterns: list[str]) -> None:
    """Freeze all parameters except those that match a pattern."""
    parameters = dict(module.named_parameters(remove_duplicate=False))  # a shared one has two names
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    for pattern in patterns:
        if not fnmatch.filter(parameters, pattern):
            raise ModelError(f"model.train: no parameter is named {shorten(pattern)!r}; {suggest(pattern, parameters)}")
        for name in fnmatch.filter(parameters, pattern):
            parameters[name].requires_grad_()


def _drop_external(module: nn.Module, tensors: dict[str, T]) -> dict[str, T]:
    """Without those that are in other files of the user's."""
    external = module.external if isinstance(module, PretrainedModule) else ()
    return {name: tensor for name, tensor in tensors.items() if name not in external}


def _rename(module: nn.Module, values: dict[str, T]) -> dict[str, T]:
    """By the names in the module, from those of another package's files."""
    names = module.file_names if isinstance(module, PretrainedModule) else {}
    return {names.get(name, name): value for name, value in values.items()}


def _read(key: str, path: Path, module: nn.Module) -> dict[str, Tensor]:
    if not os.path.isfile(path):
        raise ModelError(f"{key} {shorten(path)} does not exist; set it to a .safetensors file, or to null")
    try:
        return _rename(module, load_file(path))
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{key} {path} is not a readable .safetensors file ({reason}); save it again") from None


def _check_names(path: str | Path, missing: set[str], unexpected: set[str]) -> None:
    if missing or unexpected:
        problems = [
            f"{kind} {_list_names(names)}" for kind, names in (("lacks", missing), ("has unknown", unexpected)) if names
        ]
        raise ModelError(f"model.init {path} {' and '.join(problems)}; set model to the one the file was saved from")


def _list_names(names: set[str]) -> str:
    """Up to five of them; of very long ones fewer."""
    ordered = sorted(names)
    limit = max(1, min(5, MAX_LISTED_LENGTH // len(max(ordered, key=len, default="-"))))
    shown = [repr(name) for name in ordered[:limit]]
    return ", ".join(shown) + (f" and {len(names) - limit} more" if len(names) > limit else "")
