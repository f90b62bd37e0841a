"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 32x32 colour images, 50,000 to train and 10,000 to test.

Read from the published folders, in either layout: `cifar-10-batches-bin` or `-py`, `cifar-100-binary` or `-python`.
"""

import io
import pickle
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.paths import expand_path
from fl_dist.data import shared_arrays
from fl_dist.data.dataset import Dataset, dataset_from_arrays, datasets
from fl_dist.data.download_sources import missing_data_message, redownload_hint

IMAGE = (3, 32, 32)
PIXELS = 3 * 32 * 32
Statistics = tuple[tuple[float, ...], tuple[float, ...]]
FEDNSAM: Statistics = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
CHANNEL_STATISTICS: dict[str, dict[int, Statistics]] = {
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
"""Mean and std per channel, by the paper that uses them and the number of classes; FedGF takes FedLESAM's."""


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
Root = Annotated[str, Field(min_length=1, description="the published folder, or its parent")]
Normalise = Annotated[
    Literal["fedgmt", "fedlesam", "fednsam"], Field(description="whose mean and deviation; FedGF takes fedlesam's")
]


@datasets.register
def cifar10(*, root: Root, normalise: Normalise = "fedgmt") -> Dataset:
    """Ten classes."""
    return _load(10, root, normalise)


@datasets.register
def cifar100(*, root: Root, normalise: Normalise = "fedgmt") -> Dataset:
    """A hundred classes (the fine labels)."""
    return _load(100, root, normalise)


def _load(classes: int, root: str, normalise: str) -> Dataset:
    folder, layout = _find_folder(classes, expand_path(root))
    files = {"train": [folder / name for name in layout.train], "test": [folder / name for name in layout.test]}

    def build(allocate: shared_arrays.Allocate) -> None:
        for split, batches in files.items():
            x, y = (np.concatenate(arrays) for arrays in zip(*(_read_batch(f, layout) for f in batches), strict=True))
            if y.max() >= classes:
                raise DataError(f"{folder} has a label {y.max()}; CIFAR-{classes} has 0 to {classes - 1}")
            allocate(f"x_{split}", (len(x), *IMAGE), np.uint8)[:] = x.reshape(-1, *IMAGE)
            allocate(f"y_{split}", y.shape, np.int64)[:] = y

    arrays = shared_arrays.load_or_build(layout.name, [*files["train"], *files["test"]], layout.labels, build)
    mean, std = CHANNEL_STATISTICS[normalise][classes]
    return dataset_from_arrays(arrays, classes, mean=mean, std=std)


def _find_folder(classes: int, root: Path) -> tuple[Path, Layout]:
    for layout in LAYOUTS[classes]:
        for folder in (root / layout.folder, root):
            names = {*layout.train, *layout.test}
            missing = {name for name in names if not (folder / name).is_file()}
            if not missing:
                return folder, layout
            if missing != names:
                hint = redownload_hint(layout.name)
                raise DataError(f"CIFAR-{classes} in {folder} is incomplete: {min(missing)} is missing; {hint}")
    folders = " or ".join(layout.folder for layout in LAYOUTS[classes])
    raise DataError(missing_data_message(f"cifar{classes}", root, f"folder {folders}"))


def _read_batch(file: Path, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels."""
    try:
        if isinstance(layout.labels, int):
            return _parse_binary(file.read_bytes(), layout.labels)
        return _parse_pickle(file.read_bytes(), layout.labels)
    except OSError as e:
        raise DataError(f"{file} cannot be read ({error_message(e)})") from None
    except DataError as e:
        raise DataError(f"{file} {e}; {redownload_hint(layout.name)}") from None


def _parse_binary(content: bytes, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    if not content or len(content) % (label_bytes + PIXELS):
        raise DataError(f"is damaged: its {len(content):,} bytes are not a whole number of images")
    rows = np.frombuffer(content, np.uint8).reshape(-1, label_bytes + PIXELS)
    return rows[:, label_bytes:], rows[:, label_bytes - 1]


def _parse_pickle(content: bytes, key: bytes) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        x, labels = batch[b"data"], np.asarray(batch[key])
    except Exception as e:  # a damaged pickle may raise anything
        raise DataError(f"is not a batch of CIFAR ({error_message(e)})") from None
    is_batch = isinstance(x, np.ndarray) and x.dtype == np.uint8 and x.shape == (len(labels), PIXELS)
    if not is_batch or labels.dtype.kind not in "iu" or not len(labels):
        raise DataError(f"is not a batch of CIFAR: it needs bytes [n, {PIXELS}] and n labels")
    return x, labels


class ArrayUnpickler(pickle.Unpickler):
    """Reads only numpy arrays and plain data: other pickles could run any program."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return lambda text, codec: text.encode("latin1")
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not an array")
