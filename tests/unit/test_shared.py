"""What a machine holds once, and image folders that are decoded into it."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_dist.data import datasets, shared
from fl_dist.engine.rows import AHEAD, Rows
from tests.support.requirements import published
from tests.support.waiting import wait_for


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(shared.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def numbers(source: Path, calls: list[str], name: str = "x") -> np.ndarray:
    def make(new: shared.Allocate) -> None:
        calls.append(name)
        new(name, (3, 4), np.int64)[:] = np.arange(12).reshape(3, 4)

    return shared.arrays("numbers", [source], None, make)[name]


class TestArrays:
    def test_they_are_made_once(self, cache: Path, tmp_path: Path) -> None:
        source, calls = tmp_path / "source", []
        source.write_text("a")
        first, second = numbers(source, calls), numbers(source, calls)
        assert first.tolist() == second.tolist() == np.arange(12).reshape(3, 4).tolist()
        assert len(calls) == 1 and isinstance(second, np.memmap)

    def test_another_source_is_another_array(self, cache: Path, tmp_path: Path) -> None:
        source, calls = tmp_path / "source", []
        source.write_text("a")
        numbers(source, calls)
        source.write_text("ab")
        numbers(source, calls)
        assert len(calls) == 2
        assert len(shared.held()) == 2
        shared.forget()
        assert shared.held() == []

    def test_what_one_process_writes_to_them_no_other_sees(self, cache: Path, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_text("a")
        numbers(source, [])[:] = 0
        assert numbers(source, [])[2, 3] == 11

    def test_without_a_place_each_process_holds_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("no folder")
        monkeypatch.setenv(shared.CACHE, str(tmp_path / "file"))
        assert numbers(tmp_path / "file", [])[2, 3] == 11
        monkeypatch.setattr(shared, "MOST_ALONE", 95)
        with pytest.raises(ValueError, match="x needs 96 B in a file: set FL_DIST_CACHE to a folder with room for it"):
            numbers(tmp_path / "file", [])
        warned = capsys.readouterr().err.splitlines(keepends=True)[0]
        assert warned.startswith("warning: numbers is held by each process on its own") and warned.count("\n") == 1

    def test_a_full_disk_is_no_reason_to_end(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        assert numbers(tmp_path, [])[2, 3] == 11
        assert "No space left on device" in capsys.readouterr().err
        assert not list(cache.glob("*.new"))

    def test_a_folder_of_somebody_else_is_not_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(shared.CACHE)
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
        assert shared.cache() == tmp_path / f"fl_dist-{os.getuid()}"
        assert shared.cache().stat().st_mode & 0o777 == 0o700
        shared.cache().chmod(0o777)
        with pytest.raises(shared.NoPlace, match="somebody else"):
            shared.cache()

    def test_an_error_of_the_reader_is_the_readers(self, cache: Path, tmp_path: Path) -> None:
        def make(new: shared.Allocate) -> None:
            raise ValueError("a damaged file")

        with pytest.raises(ValueError, match="a damaged file"):
            shared.arrays("bad", [tmp_path], None, make)
        assert shared.held() == []


def picture(file: Path, seed: int, size: tuple[int, int] = (64, 64), mode: str = "RGB") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(file)


def refused(name: str, root: Path, **settings: Any) -> str:
    with pytest.raises(ValueError) as caught:
        datasets.build(name, {"root": str(root), **settings})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def tiny(cache: Path, tmp_path: Path) -> Path:
    """Two classes of Tiny-ImageNet as it is published: grey images among them, classes not in alphabetical order."""
    folder = tmp_path / "tiny-imagenet-200"
    for k, word in enumerate(("n02", "n01")):
        for n in range(3):
            picture(folder / "train" / word / "images" / f"{word}_{n}.JPEG", 10 * k + n, mode="L" if n == 1 else "RGB")
    for n in range(2):
        picture(folder / "val" / "images" / f"val_{n}.JPEG", 50 + n)
    (folder / "wnids.txt").write_text("n02\nn01\n")
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    return tmp_path


class TestTinyImageNet:
    def test_it_is_read(self, tiny: Path) -> None:
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

    def test_it_is_scaled(self, tiny: Path) -> None:
        data = datasets.build("tiny_imagenet", {"root": str(tiny), "size": 32})
        assert data.x_test.shape == (2, 3, 32, 32)
        whole = Image.open(tiny / "tiny-imagenet-200/val/images/val_0.JPEG").resize((32, 32), Image.Resampling.BILINEAR)
        assert np.array_equal(data.x_test[0].numpy(), np.asarray(whole).transpose(2, 0, 1))

    def test_what_is_wrong_is_named(self, tiny: Path) -> None:
        assert "fetch tiny_imagenet --root" in refused("tiny_imagenet", tiny / "elsewhere")
        folder = tiny / "tiny-imagenet-200"
        (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09\t0\t0\t9\t9\n")
        assert "names a class n09" in refused("tiny_imagenet", tiny)
        (folder / "val" / "val_annotations.txt").write_text("val_7.JPEG\tn02\t0\t0\t9\t9\n")
        assert "val_7.JPEG cannot be read" in refused("tiny_imagenet", tiny)
        (folder / "train" / "n02").rename(folder / "elsewhere")
        assert "train/n02/images is missing" in refused("tiny_imagenet", tiny)


@pytest.fixture
def domains(cache: Path, tmp_path: Path) -> Path:
    """Three domains of two classes, one of which has no image of the second class; images of all shapes."""
    for d, domain in enumerate(("art", "photo", "sketch")):
        for c, name in enumerate(("cat", "dog")):
            if (domain, name) != ("sketch", "dog"):
                for n in range(4 + d):
                    suffix = ("jpg", "PNG")[n % 2]
                    picture(tmp_path / "PACS" / domain / name / f"{n}.{suffix}", 100 * d + 10 * c + n, (40 + n, 30))
    (tmp_path / "PACS" / "splits").mkdir()  # what archives bring along besides
    (tmp_path / "PACS" / "art" / "cat" / "notes.txt").write_text("no image")
    return tmp_path


class TestDomains:
    def test_one_is_left_out(self, domains: Path) -> None:
        data = datasets.build("pacs", {"root": str(domains), "target": "photo", "size": 16})
        assert data.x_train.shape == (4 + 4 + 6, 3, 16, 16) and data.x_test.shape == (10, 3, 16, 16)
        assert data.client is not None and data.client.tolist() == [1] * 6 + [0] * 8, "sketch, then art"
        assert data.y_train.tolist() == [0] * 6 + [0] * 4 + [1] * 4 and data.classes == 2
        image = Image.open(domains / "PACS" / "art" / "cat" / "0.jpg")
        scale = 16 * 8 / 7 / 30
        width, height = round(40 * scale), round(30 * scale)
        whole = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = (width - 16) // 2, (height - 16) // 2
        expected = np.asarray(whole.crop((left, top, left + 16, top + 16))).transpose(2, 0, 1)
        assert np.array_equal(data.x_train[6].numpy(), expected)

    @pytest.mark.parametrize("name", ["domains", "domain_folders"])
    def test_folders_of_ones_own_are_read_likewise(self, name: str, domains: Path) -> None:
        pacs, own = (
            datasets.build(kind, {"root": str(domains / "PACS"), "target": "photo", "size": 16})
            for kind in ("pacs", name)
        )
        assert own.x_train.equal(pacs.x_train) and own.y_test.equal(pacs.y_test) and own.classes == 2

    def test_each_can_be_the_one_and_the_images_are_decoded_once(self, domains: Path) -> None:
        names = ["art", "photo", "sketch"]
        data = {t: datasets.build("pacs", {"root": str(domains), "target": t, "size": 16}) for t in names}
        assert len(shared.held()) == 1
        for target, found in data.items():
            others = [name for name in names if name != target]
            assert found.client is not None and set(found.client) == {0, 1}
            for number, other in enumerate(others):
                rows = np.flatnonzero(found.client == number)
                assert found.x_train[rows].equal(data[other].x_test) and found.y_train[rows].equal(data[other].y_test)

    def test_what_is_wrong_is_named(self, domains: Path) -> None:
        assert "did you mean 'photo'?" in refused("pacs", domains, target="foto")
        assert "github.com/facebookresearch/DomainBed" in refused("pacs", domains / "elsewhere", target="art")
        assert "hemanthdv.org" in refused("officehome", domains / "elsewhere", target="Art")
        assert "cannot be read (No such file" in refused("domains", domains / "elsewhere", target="art")
        (domains / "PACS" / "photo" / "cat" / "0.jpg").write_bytes(b"no image")
        assert "photo/cat/0.jpg cannot be read" in refused("pacs", domains, target="photo", size=16)


class TestRows:
    def rows(self, most: float) -> Rows:
        x = torch.arange(60, dtype=torch.uint8).reshape(20, 3)
        return Rows(x, torch.arange(20), torch.device("cpu"), torch.float32, most)

    def test_ahead_or_not_they_are_the_same(self) -> None:
        pieces = torch.randperm(20, generator=torch.Generator().manual_seed(0)).split(1)
        assert len(pieces) > 2 * AHEAD
        held, read = (list(self.rows(most).taken(pieces)) for most in (60, 59))
        assert all(a.equal(c) and b.equal(d) for (a, b), (c, d) in zip(held, read, strict=True))
        assert [y.tolist() for _, y in read] == [piece.tolist() for piece in pieces]
        held, read = (list(self.rows(most).in_order(7)) for most in (60, 59))
        assert all(a.equal(c) and b.equal(d) for (a, b), (c, d) in zip(held, read, strict=True))

    def test_no_reader_outlives_who_stops_early(self) -> None:
        before = threading.active_count()
        batches = self.rows(0).taken(torch.arange(20).split(1))
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        wait_for(lambda: threading.active_count() <= before, "the end of the threads")
        assert threading.active_count() == before


def test_real_domains(cache: Path) -> None:
    data = datasets.build("domains", {"root": str(published("pacs_small")), "target": "sketch", "size": 64})
    assert data.classes == 7 and data.client is not None and data.client.max() == 2
    assert len(data.x_train) == 3 * len(data.x_test) == 3 * 7 * 12
