"""What a data set is, and how its rows become model input."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_dist.common.registry import Registry

PARTS = ("train", "test")


@dataclass(frozen=True)
class Dataset:
    """Training and test rows, and what is to be learnt of them."""

    x_train: Tensor
    """uint8 images [n, C, H, W], features of floating point, or tokens and other ids of any integer type but uint8."""
    y_train: Tensor
    """int64 labels [n], targets of floating point [n] or [n, k], or what else the task takes; [n, 0]: none."""
    x_test: Tensor
    y_test: Tensor
    classes: int = 0
    """Labels are 0 to classes - 1; 0: no labels."""
    mean: tuple[float, ...] = ()
    """A channel (of x/255 for uint8); empty: not normalised."""
    std: tuple[float, ...] = ()
    vocabulary: int = 0
    """Ids are 0 to vocabulary - 1; 0: the largest decides."""
    client: np.ndarray | None = None
    """Client id of each training row, if the data set brings one."""

    def __post_init__(self) -> None:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            if not isinstance(getattr(self, name), Tensor):
                raise ValueError(f"{name} of a data set is of type {type(getattr(self, name)).__name__}, not a tensor")
        for part in ("train", "test"):
            x, y = getattr(self, f"x_{part}"), getattr(self, f"y_{part}")
            if not len(x) or len(x) != len(y):
                raise ValueError(f"a data set needs rows with a target each; x_{part} has {len(x)}, y_{part} {len(y)}")
            if y.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
                object.__setattr__(self, f"y_{part}", y.long())  # what torch takes as labels
        alike = is_real(self.x_train) == is_real(self.x_test) and (
            (self.x_train.dtype == torch.uint8) == (self.x_test.dtype == torch.uint8)
        )
        if self.x_train.shape[1:] != self.x_test.shape[1:] or not alike:
            kinds = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape[1:])}" for x in (self.x_train, self.x_test)]
            raise ValueError(f"rows of a data set's x_train are {kinds[0]}, of its x_test {kinds[1]}; make them alike")
        channels = self.x_train.shape[1] if self.x_train.dim() > 1 else 1
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (0, 1, channels):
                raise ValueError(f"{name} of a data set has {len(values)} values, its rows {channels} channels")
        if not all(self.std):
            raise ValueError("std of a data set has a 0, by which its rows would be divided")
        if self.client is not None and not _are_ids(self.client, len(self.x_train)):
            raise ValueError("client of a data set has to be a numpy array of ids from 0 on, one for each training row")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(self.x_train.shape[1:])

    @property
    def ids(self) -> int:
        """How many ids there are; 0 for numbers."""
        if self.is_real:
            return 0
        return self.vocabulary or 1 + int(max(self.x_train.max(), self.x_test.max()))

    @property
    def is_real(self) -> bool:
        """Whether a model is given numbers that can be scaled and shifted, not ids."""
        return is_real(self.x_train)


def of_arrays(arrays: Mapping[str, np.ndarray], classes: int, **known: Any) -> Dataset:
    """A data set of arrays by the names of its tensors."""
    x_train, y_train, x_test, y_test = (torch.from_numpy(arrays[f"{x}_{part}"]) for part in PARTS for x in "xy")
    return Dataset(x_train, y_train, x_test, y_test, classes, client=arrays.get("client"), **known)


datasets: Registry[Dataset] = Registry("data set", Dataset)


def _are_ids(client: object, rows: int) -> bool:
    is_array = isinstance(client, np.ndarray) and client.shape == (rows,) and client.dtype.kind in "iu"
    return is_array and int(client.min()) >= 0  # type: ignore[attr-defined]


def is_real(x: Tensor) -> bool:
    return x.dtype == torch.uint8 or x.is_floating_point()


def labels_of(targets: np.ndarray) -> np.ndarray | None:
    """The class of each row, if that is what the targets are."""
    return targets if targets.ndim == 1 and targets.dtype.kind in "iu" else None


def normalise(x: Tensor, dataset: Dataset, dtype: torch.dtype) -> Tensor:
    """Raw rows as model input: uint8 over 255, then minus the mean, over the standard deviation; ids as int64."""
    if not is_real(x):
        return x.long()
    # Convolutions are faster on images whose channels lie next to each other.
    order = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    if unit == 1.0 and not dataset.mean and not dataset.std:
        return x.to(dtype, memory_format=order)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    own = x.to(work, memory_format=order, copy=True)
    if dataset.mean:
        own.sub_(_constant(dataset.mean, unit, x.dim(), work, x.device))
    return own.div_(_constant(dataset.std or (1.0,), unit, x.dim(), work, x.device)).to(dtype)


# Tensors on the device, because CUDA divides by a Python number with other bits than the CPU does;
# kept, because creating one waits for the device.
@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _constant(values: tuple[float, ...], unit: float, dims: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A value a channel, in units of the rows'."""
    column = (-1,) + (1,) * (dims - 2)
    return torch.tensor([unit * value for value in values], dtype=dtype, device=device).view(column)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; through pinned memory to a GPU, for which the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
