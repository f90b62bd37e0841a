"""What a data set is, and how its rows become model input."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_dist.common.errors import DataError
from fl_dist.common.registry import Registry
from fl_dist.common.rows import R, Rows, count_rows, describe_rows, main_tensor, map_rows

SPLITS = ("train", "test")
IGNORE_INDEX = -100
"""The target of a token that is not learnt: padding, or a prompt."""
NUMERIC_INTEGERS = ("uint8", "int8", "int16")
"""Integer types of rows that are numbers (pixels, audio samples); all other integers are ids."""


@dataclass(frozen=True)
class Dataset:
    """Training and test rows with their targets; a rank that has only one of both has no rows of the other."""

    x_train: Rows
    """uint8 images [n, C, H, W], features of floating point, int8 or int16 samples, or int32 or int64 ids (tokens); or
    several such tensors by name. The first of them decides what `shape` and `vocabulary` are."""
    y_train: Tensor
    """int64 labels [n], targets of floating point [n] or [n, k], or whatever the task takes; [n, 0]: none."""
    x_test: Rows
    """Test rows, of the shape and type of `x_train`."""
    y_test: Tensor
    """Targets of the test rows."""
    classes: int = 0
    """Labels are 0 to classes - 1; 0: no labels."""
    mean: tuple[float, ...] = ()
    """Per channel (of x/255 for uint8, of the raw values otherwise); empty: not normalised."""
    std: tuple[float, ...] = ()
    """What each channel is divided by, after the mean is subtracted; empty: not divided."""
    vocabulary: int = 0
    """Ids are 0 to vocabulary - 1; 0: the largest id in the data decides."""
    client: np.ndarray | None = None
    """Client id of each training row, if the data set has one."""

    def __post_init__(self) -> None:
        for split in SPLITS:
            x, y = getattr(self, f"x_{split}"), getattr(self, f"y_{split}")
            if not isinstance(y, Tensor):
                raise DataError(f"y_{split} of a data set is of type {type(y).__name__}, not a tensor")
            if (rows := _check_and_count(f"x_{split}", x)) != len(y):
                raise DataError(f"a data set needs one target per row; x_{split} has {rows} rows, y_{split} {len(y)}")
            if y.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
                object.__setattr__(self, f"y_{split}", y.long())  # the type of labels in torch
        if not count_rows(self.x_train) + count_rows(self.x_test):
            raise DataError("a data set needs rows, but x_train and x_test are empty")
        if describe_rows(self.x_train, _kind_and_shape) != describe_rows(self.x_test, _kind_and_shape):
            train, test = (describe_rows(x, _describe_row) for x in (self.x_train, self.x_test))
            raise DataError(f"a data set's rows of x_train are {train}, of x_test {test}; give both one type and shape")
        channels = self.shape[0] if self.shape else 1
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values and not isinstance(self.x_train, Tensor):
                raise DataError(f"{name} of a data set is for rows of one tensor; normalise its tensors yourself")
            if len(values) not in (0, 1, channels):
                raise DataError(f"{name} of a data set has {len(values)} values, but its rows have {channels} channels")
        if not all(self.std):
            raise DataError("std of a data set contains a 0, and its rows are divided by it")
        if self.client is not None and not _are_client_ids(self.client, len(self.y_train)):
            raise DataError("client of a data set must be a numpy array of ids from 0, one per training row")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(main_tensor(self.x_train).shape[1:])

    @property
    def vocabulary_size(self) -> int:
        """How many ids there are; 0 for numbers."""
        if self.is_numeric:
            return 0
        ids = map(main_tensor, (self.x_train, self.x_test))
        return self.vocabulary or 1 + max(int(own.max()) for own in ids if len(own))

    @property
    def is_numeric(self) -> bool:
        """Whether rows are numbers that can be scaled and shifted, not ids."""
        return row_kind(main_tensor(self.x_train)) != "ids"

    @property
    def has_targets_of_tokens(self) -> bool:
        """Whether each id has a target of its own."""
        y = self.y_train
        return not self.is_numeric and y.shape == main_tensor(self.x_train).shape and not y.is_floating_point()


def dataset_from_arrays(
    arrays: Mapping[str, np.ndarray], classes: int, tensor_names: Sequence[str] = (), **known: Any
) -> Dataset:
    """A data set from arrays x_train, y_train and so on; of a split without arrays it has no rows.

    `tensor_names`: of the tensors of a row, if there are several; their arrays are called x_train.NAME.
    """
    present = next(split for split in SPLITS if f"y_{split}" in arrays)

    def tensor(kind: str, split: str, name: str = "") -> Tensor:
        array = arrays.get(f"{kind}_{split}{name}")
        return torch.from_numpy(arrays[f"{kind}_{present}{name}"][:0] if array is None else array)

    def rows(split: str) -> Rows:
        return {name: tensor("x", split, f".{name}") for name in tensor_names} or tensor("x", split)

    x_train, x_test, y_train, y_test = rows("train"), rows("test"), tensor("y", "train"), tensor("y", "test")
    return Dataset(x_train, y_train, x_test, y_test, classes, client=arrays.get("client"), **known)


datasets: Registry[Dataset] = Registry("data set", Dataset, supplied=("splits",))
"""A builder may take `splits`: those of SPLITS that this rank needs; it gives no rows of the other."""


def keep_splits(dataset: Dataset, splits: Collection[str]) -> Dataset:
    """The data set without the rows of the other splits, which are freed."""
    dropped = [f"{x}_{split}" for split in SPLITS if split not in splits for x in "xy"]
    empty: dict[str, Any] = {name: map_rows(lambda x: x[:0].clone(), getattr(dataset, name)) for name in dropped}
    return replace(dataset, client=None, **empty)


def fill_empty_splits(dataset: Dataset) -> Dataset:
    """The data set with the same rows in both splits if one has none: for checks that need one row of each."""
    pairs = [(split, other) for split, other in (SPLITS, SPLITS[::-1]) if not len(getattr(dataset, f"y_{split}"))]
    rows = {f"{x}_{split}": getattr(dataset, f"{x}_{other}") for split, other in pairs for x in "xy"}
    return replace(dataset, client=None, **rows) if rows else dataset


def row_kind(x: Tensor | np.ndarray) -> str:
    """ "float", "ids", or the integer type of rows that are numbers; training and test rows must have the same."""
    name = _dtype_name(x)
    return name if name in NUMERIC_INTEGERS else "float" if "float" in name else "ids"


def _check_and_count(name: str, rows: object) -> int:
    """The number of rows, if they are a tensor or several of equal length by name."""
    if isinstance(rows, Tensor):
        return len(rows)
    if not isinstance(rows, dict) or not rows or not all(isinstance(own, Tensor) for own in rows.values()):
        raise DataError(f"{name} of a data set is of type {type(rows).__name__}, not a tensor or a dict of tensors")
    lengths = {str(key): len(own) for key, own in rows.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the tensors of {name} need equal numbers of rows; they have {lengths}")
    return min(lengths.values())


def _kind_and_shape(x: Tensor) -> tuple[str, tuple[int, ...]]:
    return row_kind(x), tuple(x.shape[1:])


def _describe_row(x: Tensor) -> str:
    return f"{_dtype_name(x)} {list(x.shape[1:])}"


def _dtype_name(x: Tensor | np.ndarray) -> str:
    return x.dtype.name if isinstance(x, np.ndarray) else str(x.dtype).removeprefix("torch.")


def _are_client_ids(client: object, rows: int) -> bool:
    is_array = isinstance(client, np.ndarray) and client.shape == (rows,) and client.dtype.kind in "iu"
    return is_array and int(client.min()) >= 0  # type: ignore[attr-defined]


def class_labels(targets: np.ndarray) -> np.ndarray | None:
    """The class of each row, or None if the targets are no labels."""
    return targets if targets.ndim == 1 and targets.dtype.kind in "iu" else None


def normalise(
    rows: R, dataset: Dataset, dtype: torch.dtype, image_format: torch.memory_format = torch.channels_last
) -> R:
    """Raw rows as model input: uint8 over 255, then minus the mean, over the standard deviation; ids as int64."""
    return map_rows(lambda x: _normalise(x, dataset, dtype, image_format), rows)


def _normalise(x: Tensor, dataset: Dataset, dtype: torch.dtype, image_format: torch.memory_format) -> Tensor:
    if row_kind(x) == "ids":
        return x.long()
    order = image_format if x.dim() == 4 else torch.contiguous_format
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    if scale == 1.0 and not dataset.mean and not dataset.std:
        return x.to(dtype, memory_format=order)
    compute_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    rows = x.to(compute_dtype, memory_format=order, copy=True)
    if dataset.mean:
        rows.sub_(_constant(dataset.mean, scale, x.dim(), compute_dtype, x.device))
    return rows.div_(_constant(dataset.std or (1.0,), scale, x.dim(), compute_dtype, x.device)).to(dtype)


# Tensors on the device, because CUDA divides by a Python number with other bits than the CPU does;
# cached, because creating one waits for the device.
@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _constant(values: tuple[float, ...], scale: float, dims: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One value per channel, in units of the raw rows."""
    shape = (-1,) + (1,) * (dims - 2)
    return torch.tensor([scale * value for value in values], dtype=dtype, device=device).view(shape)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; through pinned memory to a GPU, without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
