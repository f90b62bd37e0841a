"""Data sets, one file each; partition.py divides them among clients, augmentation.py varies their images.

A new file in this folder registers its data sets, partitions and augmentations by being here.
"""

import importlib
import pkgutil

from fl_dist.data.dataset import Dataset, class_labels, datasets, normalise

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Dataset", "class_labels", "datasets", "normalise"]
