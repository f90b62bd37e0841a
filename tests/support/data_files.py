"""Write small data files."""

import pickle
from pathlib import Path

import numpy as np
from PIL import Image

from fl_dist.data import Dataset, shared_arrays
from tests.support.processes import NO_WANDB

SMALL_RUN = (
    *NO_WANDB,
    "rounds=1",
    "model={name: mlp, hidden: []}",
    "clients={total: 4, per_round: 2}",
    "local.epochs=1",
)


def save_npz(path: Path, **changes: np.ndarray) -> Path:
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.normal(size=(40, 3)),
        "y_train": np.arange(40) % 2,
        "x_test": rng.normal(size=(8, 3)),
        "y_test": np.arange(8) % 2,
        "client": np.arange(40) % 4,
    }
    np.savez(path, **(arrays | changes))
    return path


def npz_arguments(path: Path) -> list[str]:
    return [f"data={{name: npz, path: {path}}}", "partition.name=given"]


class CifarFiles:
    """Random images in the files of a CIFAR layout."""

    def __init__(self, classes: int, pickled: bool, protocol: int = 2) -> None:
        rng = np.random.default_rng(classes)
        self.classes, self.pickled, self.protocol = classes, pickled, protocol
        kind = {(10, True): "batches-py", (10, False): "batches-bin", (100, True): "python", (100, False): "binary"}
        self.folder = f"cifar-{classes}-{kind[classes, pickled]}"
        names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"] if classes == 10 else ["train", "test"]
        self.files = {name: (rng.integers(0, 256, (7, 3072), np.uint8), rng.integers(0, classes, 7)) for name in names}

    def write(self, root: Path) -> Path:
        (root / self.folder).mkdir(parents=True)
        for name, (x, y) in self.files.items():
            file = root / self.folder / (name if self.pickled else f"{name}.bin")
            file.write_bytes(self._pickle(x, y) if self.pickled else self._binary(x, y))
        return root

    def _pickle(self, x: np.ndarray, y: np.ndarray) -> bytes:
        key = b"labels" if self.classes == 10 else b"fine_labels"
        return pickle.dumps({b"data": x, key: y.tolist(), b"batch_label": b"a batch"}, protocol=self.protocol)

    def _binary(self, x: np.ndarray, y: np.ndarray) -> bytes:
        labels = [y] if self.classes == 10 else [y // 5, y]
        return np.column_stack([*labels, x]).astype(np.uint8).tobytes()

    def equals(self, data: Dataset) -> bool:
        *train, test = self.files.values()
        x, y = (np.concatenate([part[k] for part in train]) for k in (0, 1))
        same = np.array_equal(data.x_train.numpy().reshape(-1, 3072), x) and data.y_train.tolist() == y.tolist()
        return (
            same
            and np.array_equal(data.x_test.numpy().reshape(-1, 3072), test[0])
            and (data.y_test.tolist() == test[1].tolist())
        )


def write_diverging_client(path: Path) -> list[str]:
    """Write data on which client 2 diverges in the first round; return the arguments of a run."""
    rng = np.random.default_rng(0)
    x, client = rng.normal(size=(60, 3)), np.arange(60) % 6
    x[client == 2] = 1e30
    np.savez(path, x_train=x, y_train=np.arange(60) % 2, x_test=x[:6], y_test=np.arange(6) % 2, client=client)
    return [f"data={{name: npz, path: {path}}}", "partition={name: given}", "model={name: mlp, hidden: []}"]


def write_image(file: Path, seed: int, size: tuple[int, int] = (64, 64), mode: str = "RGB") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(file)


def write_domains(root: Path) -> Path:
    """PACS as three domains of two classes, one without images of the second class; images of several shapes."""
    folder = root / "PACS"
    for d, domain in enumerate(("art", "photo", "sketch")):
        for c, name in enumerate(("cat", "dog")):
            if (domain, name) != ("sketch", "dog"):
                for n in range(4 + d):
                    suffix = ("jpg", "PNG")[n % 2]
                    write_image(folder / domain / name / f"{n}.{suffix}", 100 * d + 10 * c + n, (40 + n, 30))
    (folder / "splits").mkdir()  # archives contain such folders too
    (folder / "art" / "cat" / "notes.txt").write_text("no image")
    return root


def load_numbers(source: Path, calls: list[str], name: str = "x") -> np.ndarray:
    """An array in the cache; `calls` counts how often it is built."""

    def build(allocate: shared_arrays.Allocate) -> None:
        calls.append(name)
        allocate(name, (3, 4), np.int64)[:] = np.arange(12).reshape(3, 4)

    return shared_arrays.load_or_build("numbers", [source], None, build)[name]
