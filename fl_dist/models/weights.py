"""Where a model's weights come from, and which of them are trained."""

import fnmatch
import logging
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_dist.common.paths import expand
from fl_dist.common.words import nearest, shortened

log = logging.getLogger("fl_dist")


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
    with torch.no_grad():
        for name, tensor in tensors.items():
            known[name].copy_(tensor)


def load_pretrained(module: nn.Module, path: str | Path) -> None:
    """Copy what the file and the module share by name and shape; the rest stays as it was made."""
    tensors, known = _read("model.pretrained", expand(path)), module.state_dict()
    shared = {n: t for n, t in tensors.items() if n in known and t.shape == known[n].shape}
    if not shared:
        raise ValueError(
            f"model.pretrained {path} shares no tensor by name and shape with the model: the file has "
            f"{_some(set(tensors))}, the model {_some(set(known))}"
        )
    with torch.no_grad():
        for name, tensor in shared.items():
            known[name].copy_(tensor)
    fresh, size = known.keys() - shared, sum(known[n].numel() for n in known)
    taken = sum(t.numel() for t in shared.values())
    tell = log.info if 2 * taken >= size else log.warning
    tell("%d of %d numbers of the model are from %s; new are %s", taken, size, path, _some(set(fresh)) or "none")


def choose_trained(module: nn.Module, patterns: list[str]) -> None:
    """Only parameters that a pattern matches are trained."""
    parameters = dict(module.named_parameters())
    for pattern in patterns:
        if not fnmatch.filter(parameters, pattern):
            raise ValueError(
                f"model.train: no parameter is named {shortened(pattern)!r}; {nearest(pattern, parameters)}"
            )
    for name, parameter in parameters.items():
        parameter.requires_grad_(any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


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
