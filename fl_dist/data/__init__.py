"""Data sets, one file each; partition.py divides them among clients, augment.py varies their images."""

from fl_dist.data import ag_news, cifar, cinic10, digits, folders, idx, npz  # noqa: F401  (importing registers them)
from fl_dist.data.dataset import Dataset, datasets, labels_of, normalise

__all__ = ["Dataset", "datasets", "labels_of", "normalise"]
