"""The registry of models."""

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor, nn

from fl_dist.common.errors import ModelError
from fl_dist.common.registry import Registry

# `outputs` is how many numbers the module has to return for a row (classes, targets) or a token (the vocabulary);
# `classes` is the same number under the name that a classifier would use. Rows of ids have 0 to `vocabulary` - 1; it is
# 0 for numbers. `per_token`: whether the outputs are those of each token of a row.
models: Registry[nn.Module] = Registry(
    "model", nn.Module, supplied=("shape", "outputs", "classes", "vocabulary", "per_token")
)


class PretrainedModule(nn.Module):
    """The base of modules that share files with another package."""

    origin = ""
    """Where weights come from, in a line."""
    external: Collection[str] = ()
    """Names of frozen parameters that are in the user's files, and so not in those of a run."""
    file_names: Mapping[str, str] = {}
    """Names in the other package's files, and what they are called here; model.init and model.pretrained know both."""

    def export(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write the final parameters and buffers, `tensors` by name, to the run folder as the other package does."""


def require_images(name: str, shape: tuple[int, ...], min_pixels: int = 1, instead: str = "mlp") -> None:
    """ModelError unless rows are images [C, H, W] of at least `min_pixels` in height and width."""
    if len(shape) != 3 or min(shape[1:]) < min_pixels:
        minimum = f" of at least {min_pixels}x{min_pixels}" if min_pixels > 1 else ""
        raise ModelError(
            f"model {name} needs images [C, H, W]{minimum}, not {list(shape)}; {advise_on_shape(shape, instead)}"
        )


def advise_on_shape(shape: tuple[int, ...], instead: str = "mlp") -> str:
    """What to do with rows that are not images [C, H, W]."""
    if len(shape) == 2 and min(shape) > 1:
        return f"add a channel axis, x[:, None], or use model {instead}"
    if len(shape) == 3 and shape[2] in (1, 3) and shape[0] > shape[2]:
        return "move the channels first"
    return f"use model {instead}"


def norm_layer(kind: str, channels: int) -> nn.Module:
    """GroupNorm has two groups, as in the papers' ResNets."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(2, channels) if kind == "group" else nn.Identity()
