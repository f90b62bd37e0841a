"""Arrays shared by the processes of a machine, and image folders decoded into them."""

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_dist.common.errors import DataError
from fl_dist.data import datasets, shared_arrays
from fl_dist.federation.batch_loader import PREFETCH, BatchLoader
from tests.support.data_files import load_numbers, write_domains, write_image
from tests.support.requirements import published_path
from tests.support.waiting import wait_for


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(shared_arrays.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Log records, even after a run in this process has stopped the logger's propagation."""
    logger = logging.getLogger(shared_arrays.__name__)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


class TestArrays:
    def test_arrays_are_built_once(self, cache: Path, tmp_path: Path) -> None:
        source, calls = tmp_path / "source", []
        source.write_text("a")
        first, second = load_numbers(source, calls), load_numbers(source, calls)
        assert first.tolist() == second.tolist() == np.arange(12).reshape(3, 4).tolist()
        assert len(calls) == 1 and isinstance(second, np.memmap)

    def test_a_changed_source_is_built_again(self, cache: Path, tmp_path: Path) -> None:
        source, calls = tmp_path / "source", []
        source.write_text("a")
        load_numbers(source, calls)
        source.write_text("ab")
        load_numbers(source, calls)
        assert len(calls) == 2
        assert len(shared_arrays.list_cache()) == 2
        shared_arrays.clear_cache()
        assert shared_arrays.list_cache() == []

    def test_writes_of_one_process_are_private(self, cache: Path, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_text("a")
        load_numbers(source, [])[:] = 0
        assert load_numbers(source, [])[2, 3] == 11

    def test_without_a_writable_folder_each_process_keeps_its_own_copy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("no folder")
        monkeypatch.setenv(shared_arrays.CACHE_VARIABLE, str(tmp_path / "file"))
        assert load_numbers(tmp_path / "file", [])[2, 3] == 11
        monkeypatch.setattr(shared_arrays, "MAX_PRIVATE_BYTES", 95)
        with pytest.raises(DataError, match="x needs a file of 96 B: set FL_DIST_CACHE to a folder with space for it"):
            load_numbers(tmp_path / "file", [])
        assert warnings.messages[0].startswith("every process keeps its own copy of numbers: ")
        assert "\n" not in warnings.messages[0] and warnings.records[0].levelname == "WARNING"

    def test_a_full_disk_falls_back_to_private_memory(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        assert load_numbers(tmp_path, [])[2, 3] == 11
        assert "No space left on device" in warnings.text
        assert not list(cache.glob("*.new"))

    def test_a_folder_of_another_user_is_not_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(shared_arrays.CACHE_VARIABLE)
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
        assert shared_arrays.cache_folder() == tmp_path / f"fl_dist-{os.getuid()}"
        assert shared_arrays.cache_folder().stat().st_mode & 0o777 == 0o700
        shared_arrays.cache_folder().chmod(0o777)
        with pytest.raises(shared_arrays.CacheError, match="another user, or others may write"):
            shared_arrays.cache_folder()

    def test_an_error_of_the_builder_is_raised_unchanged(self, cache: Path, tmp_path: Path) -> None:
        def build(allocate: shared_arrays.Allocate) -> None:
            raise ValueError("a damaged file")

        with pytest.raises(ValueError, match="a damaged file"):
            shared_arrays.load_or_build("bad", [tmp_path], None, build)
        assert shared_arrays.list_cache() == []


def data_error(name: str, root: Path, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        datasets.build(name, {"root": str(root), **settings})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def tiny(cache: Path, tmp_path: Path) -> Path:
    """Two classes in the published layout of Tiny-ImageNet, with grey images and unsorted classes."""
    folder = tmp_path / "tiny-imagenet-200"
    for k, word in enumerate(("n02", "n01")):
        for n in range(3):
            write_image(
                folder / "train" / word / "images" / f"{word}_{n}.JPEG", 10 * k + n, mode="L" if n == 1 else "RGB"
            )
    for n in range(2):
        write_image(folder / "val" / "images" / f"val_{n}.JPEG", 50 + n)
    (folder / "wnids.txt").write_text("n02\nn01\n")
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    return tmp_path


class TestTinyImageNet:
    def test_tiny_imagenet_is_read(self, tiny: Path) -> None:
        data = datasets.build("tiny_imagenet", {"root": str(tiny)})
        assert data.x_train.shape == (6, 3, 64, 64) and data.classes == 2
        assert data.y_train.tolist() == [0, 0, 0, 1, 1, 1] and data.y_test.tolist() == [1, 0]
        first = np.asarray(Image.open(tiny / "tiny-imagenet-200/train/n01/images/n01_0.JPEG")).transpose(2, 0, 1)
        assert np.array_equal(data.x_train[0].numpy(), first)
        grey = data.x_train[1]
        assert grey[0].equal(grey[1]) and grey[0].equal(grey[2])

    def test_lists_may_end_without_a_line_break(self, tiny: Path) -> None:
        for name in ("wnids.txt", "val/val_annotations.txt"):
            file = tiny / "tiny-imagenet-200" / name
            file.write_text(file.read_text().removesuffix("\n"))
        data = datasets.build("tiny_imagenet", {"root": str(tiny)})
        assert data.classes == 2 and len(data.y_test) == 2

    def test_images_are_resized(self, tiny: Path) -> None:
        data = datasets.build("tiny_imagenet", {"root": str(tiny), "size": 32})
        assert data.x_test.shape == (2, 3, 32, 32)
        resized = Image.open(tiny / "tiny-imagenet-200/val/images/val_0.JPEG").resize(
            (32, 32), Image.Resampling.BILINEAR
        )
        assert np.array_equal(data.x_test[0].numpy(), np.asarray(resized).transpose(2, 0, 1))

    def test_missing_and_damaged_files_are_named(self, tiny: Path) -> None:
        assert "fetch tiny_imagenet --root" in data_error("tiny_imagenet", tiny / "elsewhere")
        folder = tiny / "tiny-imagenet-200"
        (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09\t0\t0\t9\t9\n")
        assert "names a class n09" in data_error("tiny_imagenet", tiny)
        (folder / "val" / "val_annotations.txt").write_text("val_7.JPEG\tn02\t0\t0\t9\t9\n")
        assert "val_7.JPEG cannot be read" in data_error("tiny_imagenet", tiny)
        (folder / "train" / "n02").rename(folder / "elsewhere")
        assert "train/n02/images is missing" in data_error("tiny_imagenet", tiny)


@pytest.fixture
def domains(cache: Path, tmp_path: Path) -> Path:
    return write_domains(tmp_path)


class TestDomains:
    def test_the_target_domain_is_the_test_set(self, domains: Path) -> None:
        data = datasets.build("pacs", {"root": str(domains), "target": "photo", "size": 16})
        assert data.x_train.shape == (4 + 4 + 6, 3, 16, 16) and data.x_test.shape == (10, 3, 16, 16)
        assert data.client is not None and data.client.tolist() == [1] * 6 + [0] * 8, "sketch, then art"
        assert data.y_train.tolist() == [0] * 6 + [0] * 4 + [1] * 4 and data.classes == 2
        image = Image.open(domains / "PACS" / "art" / "cat" / "0.jpg")
        scale = 16 * 8 / 7 / 30
        width, height = round(40 * scale), round(30 * scale)
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = (width - 16) // 2, (height - 16) // 2
        expected = np.asarray(resized.crop((left, top, left + 16, top + 16))).transpose(2, 0, 1)
        assert np.array_equal(data.x_train[6].numpy(), expected)

    @pytest.mark.parametrize("name", ["domains", "domain_folders"])
    def test_user_folders_are_read_like_the_published_ones(self, name: str, domains: Path) -> None:
        pacs, user_data = (
            datasets.build(kind, {"root": str(domains / "PACS"), "target": "photo", "size": 16})
            for kind in ("pacs", name)
        )
        assert user_data.x_train.equal(pacs.x_train) and user_data.y_test.equal(pacs.y_test) and user_data.classes == 2

    def test_images_are_decoded_once_for_all_targets(self, domains: Path) -> None:
        names = ["art", "photo", "sketch"]
        data = {t: datasets.build("pacs", {"root": str(domains), "target": t, "size": 16}) for t in names}
        assert len(shared_arrays.list_cache()) == 1
        for target, dataset in data.items():
            others = [name for name in names if name != target]
            assert dataset.client is not None and set(dataset.client) == {0, 1}
            for number, other in enumerate(others):
                rows = np.flatnonzero(dataset.client == number)
                assert dataset.x_train[rows].equal(data[other].x_test) and dataset.y_train[rows].equal(
                    data[other].y_test
                )

    def test_missing_and_damaged_files_are_named(self, domains: Path) -> None:
        assert "did you mean 'photo'?" in data_error("pacs", domains, target="foto")
        assert "github.com/facebookresearch/DomainBed" in data_error("pacs", domains / "elsewhere", target="art")
        assert "hemanthdv.org" in data_error("officehome", domains / "elsewhere", target="Art")
        assert "cannot be read (No such file" in data_error("domains", domains / "elsewhere", target="art")
        (domains / "PACS" / "photo" / "cat" / "0.jpg").write_bytes(b"no image")
        assert "photo/cat/0.jpg cannot be read" in data_error("pacs", domains, target="photo", size=16)


class TestBatchLoader:
    def loader(self, max_bytes: float) -> BatchLoader:
        x = torch.arange(60, dtype=torch.uint8).reshape(20, 3)
        return BatchLoader(x, torch.arange(20), torch.device("cpu"), torch.float32, max_bytes)

    def test_prefetched_batches_equal_batches_in_memory(self) -> None:
        pieces = torch.randperm(20, generator=torch.Generator().manual_seed(0)).split(1)
        assert len(pieces) > 2 * PREFETCH
        in_memory, read = (list(self.loader(max_bytes).load(pieces)) for max_bytes in (220, 219))
        assert all(a.equal(c) and b.equal(d) for (a, b), (c, d) in zip(in_memory, read, strict=True))
        assert [y.tolist() for _, y in read] == [piece.tolist() for piece in pieces]
        in_memory, read = (list(self.loader(max_bytes).sequential_batches(7)) for max_bytes in (220, 219))
        assert all(a.equal(c) and b.equal(d) for (a, b), (c, d) in zip(in_memory, read, strict=True))

    def test_no_reader_thread_outlives_an_abandoned_iteration(self) -> None:
        before = threading.active_count()
        batches = self.loader(0).load(torch.arange(20).split(1))
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        wait_for(lambda: threading.active_count() <= before, "the end of the threads")
        assert threading.active_count() == before


def test_published_domains_are_read(cache: Path) -> None:
    data = datasets.build("domains", {"root": str(published_path("pacs_small")), "target": "sketch", "size": 64})
    assert data.classes == 7 and data.client is not None and data.client.max() == 2
    assert len(data.x_train) == 3 * len(data.x_test) == 3 * 7 * 12
