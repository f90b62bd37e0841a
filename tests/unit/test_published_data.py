"""Readers of published files: on small files in their layouts, and on the real ones if available."""

import gzip
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_dist.common.errors import DataError
from fl_dist.data import cifar, cinic10, datasets
from fl_dist.data.ag_news import tokenize
from fl_dist.main import main
from tests.support.data_files import CifarFiles
from tests.support.processes import NO_WANDB
from tests.support.requirements import published_path
from tests.support.run_folder import read_records

FETCH = "fl-dist data fetch"


def data_error(name: str, root: Path, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        datasets.build(name, {"root": str(root), **settings})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("pickled", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_cifar_is_read_in_both_layouts(classes: int, pickled: bool, inside: bool, tmp_path: Path) -> None:
    cifar = CifarFiles(classes, pickled)
    root = cifar.write(tmp_path)
    data = datasets.build(f"cifar{classes}", {"root": str(root / cifar.folder if inside else root)})
    assert cifar.equals(data)
    assert data.x_train.shape[1:] == (3, 32, 32) and data.x_train.dtype == torch.uint8 and data.classes == classes


def test_data_of_a_run_may_move_but_not_change(tmp_path: Path) -> None:
    CifarFiles(10, False).write(tmp_path / "old")
    run = [*NO_WANDB, "partition=iid", "model={name: mlp, hidden: []}", "clients={total: 5, per_round: 2}"]
    run += ["data.name=cifar10", f"run.dir={tmp_path / 'run'}"]
    assert main([*run, f"data.root={tmp_path / 'old'}", "rounds=1"]) == 0
    (tmp_path / "old").rename(tmp_path / "new")
    assert main([*run, f"data.root={tmp_path / 'new'}", "rounds=2"]) == 0
    assert len(read_records(tmp_path / "run")) == 2
    file = tmp_path / "new" / "cifar-10-batches-bin" / "data_batch_1.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    assert main([*run, f"data.root={tmp_path / 'new'}", "rounds=3"]) != 0
    assert len(read_records(tmp_path / "run")) == 2


def test_channel_statistics_are_those_of_the_papers() -> None:
    """FedGF uses FedLESAM's; FedNSAM uses those of CIFAR-10 for CIFAR-100 too."""
    fednsam = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    assert {
        "fedgmt": {
            10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
            100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        },
        "fedlesam": {
            10: ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
            100: ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
        },
        "fednsam": {10: fednsam, 100: fednsam},
    } == cifar.CHANNEL_STATISTICS
    assert (cinic10.MEAN, cinic10.STD) == ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))


class ExecutesCommand:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.trace}",)


def test_a_pickle_that_executes_code_is_refused(tmp_path: Path) -> None:
    root = CifarFiles(10, True).write(tmp_path)
    (root / "cifar-10-batches-py" / "data_batch_3").write_bytes(
        pickle.dumps({b"data": ExecutesCommand(tmp_path / "trace")})
    )
    text = data_error("cifar10", root)
    assert "data_batch_3 is not a batch of CIFAR (it contains posix.system, which is not an array)" in text
    assert not (tmp_path / "trace").exists()


def test_missing_and_damaged_cifar_files_are_named(tmp_path: Path) -> None:
    absent = data_error("cifar10", tmp_path)
    assert "folder cifar-10-batches-bin or cifar-10-batches-py is missing;" in absent
    assert f"download it ({FETCH} cifar10 --root {tmp_path})" in absent
    root = CifarFiles(10, False).write(tmp_path)
    file = root / "cifar-10-batches-bin" / "data_batch_4.bin"
    data = file.read_bytes()
    file.write_bytes(data[:-5])
    assert "data_batch_4.bin is damaged: its 21,506 bytes are not a whole number of images" in data_error(
        "cifar10", root
    )
    file.write_bytes(b"\x0b" + data[1:])
    assert "has a label 11; CIFAR-10 has 0 to 9" in data_error("cifar10", root)
    file.unlink()
    assert "is incomplete: data_batch_4.bin is missing" in data_error("cifar10", root)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(
    folder: Path, parts: tuple[str, str], classes: int, packed: bool, first: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, rows in zip(parts, (30, 8), strict=True):
        arrays[part] = rng.integers(0, 256, (rows, 28, 28))
        arrays[f"{part}y"] = first + np.arange(rows) % classes
        for name, array in (("images-idx3-ubyte", arrays[part]), ("labels-idx1-ubyte", arrays[f"{part}y"])):
            data = idx_bytes(array)
            suffix = ".gz" if packed else ""
            (folder / f"{part}{name}{suffix}").write_bytes(gzip.compress(data) if packed else data)
    return arrays


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST/raw"), ("fashion_mnist", "FashionMNIST"), ("mnist", "")])
def test_idx_files_are_read(name: str, folder: str, packed: bool, tmp_path: Path) -> None:
    arrays = write_idx(tmp_path / folder, ("train-", "t10k-"), 10, packed)
    data = datasets.build(name, {"root": str(tmp_path)})
    assert data.x_train.shape == (30, 1, 28, 28) and np.array_equal(data.x_train[:, 0].numpy(), arrays["train-"])
    assert data.y_test.tolist() == arrays["t10k-y"].tolist() and data.classes == 10


@pytest.mark.parametrize(("split", "classes", "first"), [("byclass", 62, 0), ("letters", 26, 1), ("balanced", 47, 0)])
def test_emnist_is_transposed_and_labels_start_at_0(split: str, classes: int, first: int, tmp_path: Path) -> None:
    parts = (f"emnist-{split}-train-", f"emnist-{split}-test-")
    arrays = write_idx(tmp_path, parts, min(classes, 8), packed=True, first=first)
    data = datasets.build("emnist", {"root": str(tmp_path), "split": split})
    assert data.classes == classes and int(data.y_train.min()) == 0
    assert np.array_equal(data.x_test[3, 0].numpy(), arrays[parts[1]][3].T)


def test_a_share_of_emnist_is_the_same_in_every_run(tmp_path: Path) -> None:
    parts = ("emnist-byclass-train-", "emnist-byclass-test-")
    arrays = write_idx(tmp_path / "EMNIST" / "gzip", parts, 8, packed=True)
    subset, full = (datasets.build("emnist", {"root": str(tmp_path), "share": share}) for share in (0.5, 1.0))
    assert len(subset.x_train) == 15 and len(full.x_train) == 30 == len(arrays[parts[0]])
    positions = [next(k for k, x in enumerate(full.x_train) if x.equal(row)) for row in subset.x_train]
    assert positions == sorted(set(positions)) and full.y_train[positions].equal(subset.y_train)
    (tmp_path / "again").symlink_to(tmp_path / "EMNIST" / "gzip")
    again = datasets.build("emnist", {"root": str(tmp_path / "again"), "share": 0.5})
    assert again.x_train.equal(subset.x_train)


def test_damaged_idx_files_are_named(tmp_path: Path) -> None:
    assert "train-images-idx3-ubyte or train-images-idx3-ubyte.gz is missing" in data_error("mnist", tmp_path)
    write_idx(tmp_path, ("train-", "t10k-"), 10, packed=False)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "t10k-labels-idx1-ubyte"
    full = images.read_bytes()
    for data, expected in (
        (full[:-1], "its header says 30x28x28, but it contains 23.5 kB"),
        (full[:3], "is not an idx file of bytes with 3 dimensions"),
        (full[:9], "is damaged"),
        (b"\0\0\x08\x01" + full[4:], "is not an idx file of bytes with 3 dimensions"),
        (full[:4] + b"\xff" * 12, "is damaged"),
    ):
        images.write_bytes(data)
        assert expected in data_error("mnist", tmp_path)
    images.write_bytes(full)
    labels.write_bytes(labels.read_bytes()[:8] + bytes([12] * 8))
    assert "has labels 12 to 12; mnist has 0 to 9" in data_error("mnist", tmp_path)
    labels.write_bytes(idx_bytes(np.arange(5)))
    assert "t10k-images-idx3-ubyte has 8 rows, t10k-labels-idx1-ubyte 5" in data_error("mnist", tmp_path)


def test_tokens_are_words_and_punctuation() -> None:
    text = 'It\'s "big" news: Reuters - (AP) 3.5% up!'
    assert tokenize(text) == ["it", "'", "s", "big", "news", "reuters", "-", "(", "ap", ")", "3", ".", "5%", "up", "!"]


def test_ag_news_is_rows_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('"3","The cat","the cat sat"\n"1","A dog, a cat","x"\n')
    (tmp_path / "test.csv").write_text('"4","The zebra",""\n')
    data = datasets.build("ag_news", {"root": str(tmp_path), "length": 6})
    numbers = {"cat": 1, "the": 2, "a": 3, ",": 4, "dog": 5, "sat": 6, "x": 7, "zebra": 8}
    words = [["the", "cat", "the", "cat", "sat"], ["a", "dog", ",", "a", "cat", "x"]]
    assert data.x_train.tolist() == [[numbers[w] for w in row] + [0] * (6 - len(row)) for row in words]
    assert data.y_train.tolist() == [2, 0] and data.x_test.tolist() == [[2, 8, 0, 0, 0, 0]]
    assert (data.classes, data.vocabulary, data.vocabulary_size, data.is_numeric) == (4, 9, 9, False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "has no rows"), ("5,a,b\n", "a row that is not class (1 to 4)"), ("1\n", "a row that is not class (1 to 4)")],
)
def test_missing_and_damaged_ag_news_files_are_named(text: str, expected: str, tmp_path: Path) -> None:
    assert f"ag_news_csv/train.csv is missing; download it ({FETCH} ag_news --root {tmp_path})" in data_error(
        "ag_news", tmp_path
    )
    (tmp_path / "train.csv").write_text(text)
    (tmp_path / "test.csv").write_text("1,a,b\n")
    assert expected in data_error("ag_news", tmp_path)


def test_errors_on_user_files_do_not_suggest_fetching(tmp_path: Path) -> None:
    """`fetch` provides train.csv and test.csv; users must provide any other file they name."""
    text = data_error("ag_news", tmp_path, train="other.csv")
    assert text.startswith(f"no ag_news_csv/other.csv in {tmp_path}: put it there, or set data.train to the published")
    (tmp_path / "other.csv").write_bytes(b"\xff")
    (tmp_path / "test.csv").write_text("1,a,b\n")
    assert (
        "other.csv cannot be read" in (text := data_error("ag_news", tmp_path, train="other.csv")) and FETCH not in text
    )
    (tmp_path / "other.csv").write_text("2,a b\n")
    assert datasets.build("ag_news", {"root": str(tmp_path), "train": "other.csv"}).y_train.tolist() == [1]


@pytest.mark.parametrize(
    ("name", "folder"),
    [("cifar10", "cifar-10-batches-bin"), ("mnist", "MNIST/raw"), ("fashion_mnist", "FashionMNIST/raw")],
)
def test_published_data_has_its_statistics(name: str, folder: str) -> None:
    data = datasets.build(name, {"root": str(published_path(folder))})
    assert len(data.y_test) == 10_000 and data.classes == 10
    pixels = data.x_train.double() / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(data.mean, abs=1e-4)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx(data.std, abs=1e-4)


def test_published_articles_have_their_counts() -> None:
    """The full data set, or a common subset."""
    folder = published_path("ag_news_csv")
    full = (folder / "train.csv").exists()
    train, counts = ("train.csv", [30_000] * 4) if full else ("train_subset.csv", [3163, 1257, 1280, 3114])
    data = datasets.build("ag_news", {"root": str(folder), "train": train, "length": 50})
    assert data.classes == 4 and data.y_train.bincount().tolist() == counts
    assert data.y_test.bincount().tolist() == [1900] * 4
    assert data.x_train.shape == (sum(counts), 50) and int(data.x_train.max()) < (data.vocabulary or 0)
