"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 32x32 colour images, 50,000 to train and 10,000 to test.

Read from the published folders, in either layout: `cifar-10-batches-bin` or `-py`, `cifar-100-binary` or `-python`.
"""

import io
import pickle
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from fl_dist.common.paths import expand
from fl_dist.common.words import message
from fl_dist.data import shared
from fl_dist.data.dataset import Dataset, datasets, of_arrays
from fl_dist.data.sources import absent, again

IMAGE = (3, 32, 32)
PIXELS = 3 * 32 * 32
Constants = tuple[tuple[float, ...], tuple[float, ...]]
FEDNSAM: Constants = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
NORMALISED: dict[str, dict[int, Constants]] = {
    "fedgmt": {
        10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    },
    "fedlesam": {
        10: ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
        100: ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    },
    "fednsam": {10: FEDNSAM, 100: FEDNSAM},
}
"""Mean and deviation of each channel, by the paper that uses them and the number of classes; FedGF takes FedLESAM's."""


class Layout(NamedTuple):
    """One of the forms in which the data is published."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: int | bytes
    """Binary: bytes before an image, of which the last is the label; pickled: the key of the labels."""


BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))
LAYOUTS = {
    10: (
        Layout("cifar10", "cifar-10-batches-bin", tuple(f"{name}.bin" for name in BATCHES), ("test_batch.bin",), 1),
        Layout("cifar10", "cifar-10-batches-py", BATCHES, ("test_batch",), b"labels"),
    ),
    100: (
        Layout("cifar100", "cifar-100-binary", ("train.bin",), ("test.bin",), 2),
        Layout("cifar100", "cifar-100-python", ("train",), ("test",), b"fine_labels"),
    ),
}
Root = Annotated[str, Field(min_length=1, description="folder that holds the published one, or that itself")]
Normalise = Annotated[
    Literal["fedgmt", "fedlesam", "fednsam"], Field(description="whose mean and deviation; FedGF takes fedlesam's")
]


@datasets.register
def cifar10(*, root: Root, normalise: Normalise = "fedgmt") -> Dataset:
    """Ten classes."""
    return _read(10, root, normalise)


@datasets.register
def cifar100(*, root: Root, normalise: Normalise = "fedgmt") -> Dataset:
    """A hundred classes (the fine labels)."""
    return _read(100, root, normalise)


def _read(classes: int, root: str, normalise: str) -> Dataset:
    folder, layout = _find(classes, expand(root))
    parts = {"train": [folder / name for name in layout.train], "test": [folder / name for name in layout.test]}

    def make(new: shared.Allocate) -> None:
        for part, files in parts.items():
            x, y = (np.concatenate(batches) for batches in zip(*(_batch(f, layout) for f in files), strict=True))
            if y.max() >= classes:
                raise ValueError(f"{folder} has a label {y.max()}; CIFAR-{classes} has 0 to {classes - 1}")
            new(f"x_{part}", (len(x), *IMAGE), np.uint8)[:] = x.reshape(-1, *IMAGE)
            new(f"y_{part}", y.shape, np.int64)[:] = y

    arrays = shared.arrays(layout.name, [*parts["train"], *parts["test"]], layout.labels, make)
    mean, std = NORMALISED[normalise][classes]
    return of_arrays(arrays, classes, mean=mean, std=std)


def _find(classes: int, root: Path) -> tuple[Path, Layout]:
    """The folder and the layout of its files; an error says what was looked for."""
    for layout in LAYOUTS[classes]:
        for folder in (root / layout.folder, root):
            there = [name for name in (*layout.train, *layout.test) if (folder / name).is_file()]
            missing = {*layout.train, *layout.test} - set(there)
            if there and missing:
                raise ValueError(
                    f"CIFAR-{classes} in {folder} is not whole: {min(missing)} is missing; {again(f'cifar{classes}')}"
                )
            if there:
                return folder, layout
    looked = " or ".join(layout.folder for layout in LAYOUTS[classes])
    raise ValueError(absent(f"cifar{classes}", root, f"folder {looked}"))


def _batch(file: Path, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    read = _binary(file, layout.labels) if isinstance(layout.labels, int) else _pickled(file, layout.labels)
    if isinstance(read, str):
        raise ValueError(f"{file} {read}; {again(layout.name)}")
    return read


def _binary(file: Path, before: int) -> tuple[np.ndarray, np.ndarray] | str:
    """Images and labels, or what is wrong with the file."""
    data = np.fromfile(file, np.uint8)
    if not data.size or data.size % (before + PIXELS):
        return f"is damaged: its {data.size:,} bytes are no whole number of images"
    rows = data.reshape(-1, before + PIXELS)
    return rows[:, before:], rows[:, before - 1]


def _pickled(file: Path, key: bytes) -> tuple[np.ndarray, np.ndarray] | str:
    """Likewise."""
    try:
        batch = Arrays(io.BytesIO(file.read_bytes()), encoding="bytes").load()
        x, labels = batch[b"data"], np.asarray(batch[key])
    except Exception as e:  # a damaged pickle may raise anything
        return f"is not a batch of CIFAR ({message(e)})"
    fits = isinstance(x, np.ndarray) and x.dtype == np.uint8 and x.shape == (len(labels), PIXELS)
    if not fits or labels.dtype.kind not in "iu" or not len(labels):
        return f"is not a batch of CIFAR: it needs bytes [n, {PIXELS}] and n labels"
    return x, labels


class Arrays(pickle.Unpickler):
    """Reads nothing but numpy's arrays and plain data: a pickle could otherwise run any program."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return lambda text, codec: text.encode("latin1")
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no array")
