"""Data sets, one file each; partition.py divides them among clients, augmentation.py varies their images.

A new file in this folder registers its data sets, partitions and augmentations by being here.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fl_dist.common.registry import import_submodules

if TYPE_CHECKING:
    from fl_dist.data.dataset import Dataset, class_labels, datasets, normalise

__all__ = ["Dataset", "class_labels", "datasets", "normalise"]


def __getattr__(name: str) -> Any:
    """The registries are filled at their first use: `--help` of a command needs neither them nor torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_submodules(__name__)
    return globals().setdefault(name, getattr(importlib.import_module(f"{__name__}.dataset"), name))
