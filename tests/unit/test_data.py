"""Data sets are read exactly or refused with one line; augmentation equals a plain loop over images."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_dist.common.errors import DataError
from fl_dist.data import Dataset, datasets, normalise
from fl_dist.data.augmentation import augmentations
from fl_dist.data.cinic10 import CLASSES
from fl_dist.main import main
from tests.support.data_files import SMALL_RUN, save_npz
from tests.support.data_files import npz_arguments as npz_settings
from tests.support.processes import ROOT
from tests.support.run_folder import model_hash, read_records


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    good = {
        "x_train": rng.normal(size=(8, 5)),
        "y_train": np.arange(8) % 3,
        "x_test": rng.normal(size=(4, 5)),
        "y_test": np.arange(4) % 3,
    }
    return {name: array for name, array in (good | changes).items() if array is not None}


def read_npz(path: Path) -> Dataset:
    return datasets.build("npz", {"path": str(path)})


def write_npz(folder: Path, **changes: Any) -> Path:
    np.savez(folder / "data.npz", **arrays(**changes))
    return folder / "data.npz"


def data_error(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(DataError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_setting_has_a_description() -> None:
    for registry in (datasets, augmentations):
        for name in registry:
            assert all(field.description for field in registry.schema(name).model_fields.values())


def test_a_new_file_in_the_data_folder_is_registered(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fl_dist", tmp_path / "fl_dist", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "fl_dist/data/new_file.py").write_text(
        "from fl_dist.data.augmentation import augmentations\n"
        "from fl_dist.data.dataset import datasets\n"
        "from fl_dist.data.partition import partitions\n"
        "for registry in (augmentations, datasets, partitions):\n"
        "    registry.register_as('new_name')(lambda: None)\n"
    )
    program = (
        "from fl_dist.config.builder_sections import augmentations, datasets, partitions\n"
        "print(['new_name' in registry for registry in (augmentations, datasets, partitions)])\n"
    )
    run = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(tmp_path)}, "text": True}
    assert subprocess.check_output([sys.executable, "-c", program], **run) == "[True, True, True]\n"


def test_digits_are_the_shipped_bytes() -> None:
    data = datasets.build("digits", {})
    assert (data.x_train.shape, data.x_test.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (data.x_train.dtype, data.y_train.dtype, data.classes) == (torch.uint8, torch.int64, 10)
    assert data.y_test.bincount().tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]
    digest = hashlib.sha256()
    for tensor in (data.x_train, data.y_train, data.x_test, data.y_test):
        digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest() == "f2dace36684efa637c7bb2af508a63fc112c4e6ac6ea2c0d49b630b9588e24ef"


def test_digits_are_standardised() -> None:
    data = datasets.build("digits", {})
    x = normalise(data.x_train, data, torch.float64)
    assert abs(x.mean()) < 1e-6 and abs(x.std(correction=0) - 1) < 1e-6


def test_normalise_is_per_channel_in_units_of_255() -> None:
    x = torch.arange(2 * 3 * 2 * 2, dtype=torch.uint8).view(2, 3, 2, 2)
    data = Dataset(x, x, x, x, 2, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0))
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (data.mean, data.std))
    expected = (x.double() / 255 - mean) / std
    torch.testing.assert_close(normalise(x, data, torch.float64), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(normalise(x, data, torch.float32), expected.float(), rtol=0, atol=1e-6)
    assert normalise(x, data, torch.bfloat16).equal(normalise(x, data, torch.float32).bfloat16())


def test_normalise_without_constants_only_scales_bytes() -> None:
    x = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    features = torch.tensor([[0.25, -3.0]], dtype=torch.float64)
    data = Dataset(x, x, x, x, 2)
    assert normalise(x, data, torch.float64).tolist() == [[0.0, 0.2, 1.0]]
    assert normalise(features, data, torch.float64).equal(features)
    assert normalise(features, data, torch.float32).dtype == torch.float32


def test_normalise_does_not_modify_its_input() -> None:
    x = torch.ones(2, 1, 2, 2)
    normalise(x, Dataset(x, x, x, x, 2, mean=(1.0,), std=(2.0,)), torch.float32)
    assert x.eq(1).all()


def test_npz_keeps_bits_and_client_ids(tmp_path: Path) -> None:
    client = np.arange(8) // 2
    data = read_npz(
        write_npz(tmp_path, client=client, y_test=np.array([0, 1, 4, 2], np.uint8), extra=np.full(3, np.nan))
    )
    assert (data.x_train.numpy() == arrays()["x_train"]).all() and data.x_train.dtype == torch.float64
    assert data.classes == 5 and data.y_test.tolist() == [0, 1, 4, 2] and data.y_test.dtype == torch.int64
    assert data.client is not None and data.client.tolist() == client.tolist()
    assert data.shape == (5,) and data.mean == ()


def test_npz_reads_other_byte_orders_and_widths(tmp_path: Path) -> None:
    x = np.arange(40).reshape(8, 5)
    data = read_npz(write_npz(tmp_path, x_train=x.astype(">f8"), x_test=x[:4].astype("f2")))
    assert data.x_train.tolist() == x.tolist() and data.x_train.dtype == torch.float64
    assert data.x_test.tolist() == x[:4].tolist() and data.x_test.dtype == torch.float32


def waveforms(rows: int, seed: int = 0, dtype: str = "int16") -> np.ndarray:
    return np.random.default_rng(seed).integers(-3000, 3000, (rows, 3)).astype(dtype)


@pytest.mark.parametrize("dtype", ["int8", "int16", ">i2"])
def test_small_signed_integers_are_numeric(dtype: str, tmp_path: Path) -> None:
    x = waveforms(8, dtype=dtype)
    data = read_npz(write_npz(tmp_path, x_train=x, x_test=x[:4]))
    assert data.x_train.dtype == (torch.int8 if dtype == "int8" else torch.int16)
    assert data.is_numeric and data.vocabulary_size == 0
    raw = torch.from_numpy(x.astype(np.float64))
    assert normalise(data.x_train, data, torch.float64).equal(raw), "no implicit scale"
    settings = {"path": str(tmp_path / "data.npz"), "mean": [1.0, 2.0, 3.0], "std": [4.0, 5.0, 6.0]}
    shifted = datasets.build("npz", settings)
    expected = (raw - torch.tensor([1.0, 2, 3])) / torch.tensor([4.0, 5, 6], dtype=torch.float64)
    assert normalise(data.x_train, shifted, torch.float64).equal(expected)
    auto = datasets.build("npz", {"path": str(tmp_path / "data.npz"), "normalise": "auto"})
    assert auto.mean == pytest.approx(raw.mean(0).tolist()) and auto.std == pytest.approx(raw.std(0, False).tolist())


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16", "uint32"])
def test_other_integers_are_token_ids(dtype: str, tmp_path: Path) -> None:
    x = np.arange(24).reshape(8, 3).astype(dtype)
    data = read_npz(write_npz(tmp_path, x_train=x, x_test=x[:4]))
    assert not data.is_numeric and data.vocabulary_size == 24 and data.x_train.dtype == torch.int32
    assert normalise(data.x_train, data, torch.float32).dtype == torch.int64


def test_rows_of_different_types_are_refused(tmp_path: Path) -> None:
    x, y = torch.ones(4, 3, dtype=torch.int16), torch.zeros(4)
    for other in (torch.float32, torch.int32, torch.uint8, torch.int8):
        assert "x_train are int16 [3]" in data_error(Dataset, x, y, x.to(other), y)
    path = write_npz(tmp_path, x_train=waveforms(8), x_test=waveforms(4).astype(np.float32))
    assert "x_train is int16, x_test float32; store both in one type" in data_error(read_npz, path)


def test_audio_samples_train_like_float_values(tmp_path: Path) -> None:
    for dtype in ("int16", "float32"):
        path = tmp_path / f"{dtype}.npz"
        save_npz(path, x_train=waveforms(40, 1).astype(dtype), x_test=waveforms(8, 2).astype(dtype))
        settings = [
            *SMALL_RUN,
            *npz_settings(path),
            "data.normalise=auto",
            "rounds=2",
            "model={name: mlp, hidden: [8]}",
        ]
        assert main([*settings, f"run.dir={tmp_path / dtype}"]) == 0
    assert len(read_records(tmp_path / "int16")) == 2
    assert model_hash(tmp_path / "int16") == model_hash(tmp_path / "float32")


def test_next_token_refuses_audio_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_npz(tmp_path / "data.npz", x_train=abs(waveforms(40)), x_test=abs(waveforms(8)))
    assert main([*SMALL_RUN, *npz_settings(path), "task=next_token", f"run.dir={tmp_path / 'run'}"]) == 1
    error = capsys.readouterr().err
    assert "x_train has type int16 and shape [40, 3]: store ids as int32 or int64" in error


def with_nan(value: float) -> np.ndarray:
    x = arrays()["x_train"]
    x[5, 2] = x[7, 0] = value
    return x


BAD_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"y_test": None, "x_test": None}, "lacks x_test; it needs x_train, y_train, x_test, y_test"),
    "nan": ({"x_train": with_nan(np.nan)}, "x_train has a NaN or an infinity, first in row 5"),
    "infinity": ({"x_train": with_nan(-np.inf)}, "x_train has a NaN or an infinity, first in row 5"),
    "integers": ({"x_train": np.ones((8, 5), int)}, "x_train is int64"),
    "objects": ({"x_train": np.array([[{}]] * 8)}, "x_train is not a plain numeric array"),
    "flat rows": ({"x_train": np.ones(8)}, "x_train has shape (8,)"),
    "no rows": ({"x_test": np.ones((0, 5)), "y_test": np.ones(0, int)}, "x_test has shape (0, 5)"),
    "channels last": (
        {"x_train": np.ones((8, 9, 9, 3), np.uint8)},
        "store images as [n, channels, height, width]",
    ),
    "other rows": ({"x_test": np.ones((4, 6))}, "rows of x_train are (5,), of x_test (6,)"),
    "other type": ({"x_test": np.ones((4, 5), np.uint8)}, "x_train is float64, x_test uint8"),
    "too few labels": ({"y_train": np.zeros(7, int)}, "y_train has shape (7,)"),
    "one-hot labels": ({"y_train": np.zeros((8, 3), int)}, "rows of y_train are (3,), of y_test ()"),
    "one number": ({"y_train": np.array(0.5)}, "y_train is a single number"),
    "float labels": ({"y_train": np.zeros(8)}, "y_train is float64"),
    "negative label": ({"y_test": np.array([0, 1, -1, 2])}, "y_test is -1 in row 2"),
    "huge label": ({"y_test": np.array([0, 2**40, 1, 2])}, "y_test is 1099511627776 in row 1"),
    "float clients": ({"client": np.zeros(8)}, "client is float64"),
    "negative client": ({"client": np.array([0, 0, 0, -2, 0, 0, 0, 0])}, "client is -2 in row 3"),
    "too many clients": ({"client": np.zeros(9, int)}, "one entry for each of the 8 rows of x_train"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_npz_errors_are_one_line(name: str, tmp_path: Path) -> None:
    changes, expected = BAD_ARRAYS[name]
    path = write_npz(tmp_path, **changes)
    text = data_error(read_npz, path)
    assert expected in text and str(path) in text


def test_npz_names_an_absent_or_damaged_file(tmp_path: Path) -> None:
    assert "does not exist" in data_error(read_npz, tmp_path / "none.npz")
    assert "does not exist" in data_error(read_npz, tmp_path)
    path = write_npz(tmp_path)
    content = path.read_bytes()
    for damaged in (b"", b"text", content[:100], content[:-30], content[:300] + b"\0\xff" + content[302:]):
        path.write_bytes(damaged)
        text = data_error(read_npz, path)
        assert f"{path}: cannot be read" in text and "pickle" not in text
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    assert "not a .npz archive" in data_error(read_npz, path)


@pytest.fixture
def cinic(tmp_path: Path) -> Path:
    """Two training images and one test image per class; the pixels encode class, row and part."""
    for part, count in (("train", 2), ("test", 1)):
        for label, name in enumerate(CLASSES):
            (tmp_path / part / name).mkdir(parents=True)
            for row in range(count):
                pixels = np.full((32, 32, 3), (label, row, count), np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"image-{row}.png")
    return tmp_path


def cinic10(root: Path) -> Dataset:
    return datasets.build("cinic10", {"root": str(root)})


def test_cinic10_reads_folders_in_sorted_order(cinic: Path) -> None:
    (cinic / "train" / "cat" / "readme.txt").touch()
    data = cinic10(cinic)
    assert data.x_train.shape == (20, 3, 32, 32) and data.x_test.shape == (10, 3, 32, 32)
    assert data.y_train.tolist() == [label for label in range(10) for _ in range(2)]
    assert data.y_test.tolist() == list(range(10))
    assert data.x_train[:, :, 7, 9].tolist() == [[label, row, 2] for label in range(10) for row in range(2)]
    assert data.classes == 10 and data.mean == (0.4789, 0.4723, 0.4305) and data.std == (0.2421, 0.2383, 0.2587)


def test_cinic10_reads_grey_images_as_colour(cinic: Path) -> None:
    Image.fromarray(np.full((32, 32), 99, np.uint8)).save(cinic / "test" / "airplane" / "image-0.png")
    assert cinic10(cinic).x_test[0].eq(99).all()


def test_cinic10_reads_a_packed_file(cinic: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    data, root = cinic10(cinic), tmp_path_factory.mktemp("packed")
    parts = {name: getattr(data, name).numpy() for name in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(root / "cinic10.npz", **parts)
    packed = cinic10(root)
    assert all(getattr(packed, name).equal(getattr(data, name)) for name in parts)
    assert (packed.classes, packed.mean, packed.std) == (data.classes, data.mean, data.std)
    np.savez(root / "cinic10.npz", **parts | {"y_test": np.arange(1, 11)})
    assert "labels 0..9" in data_error(cinic10, root)


def test_cinic10_names_missing_and_damaged_files(cinic: Path) -> None:
    assert f"{cinic / 'absent' / 'train'} (or cinic10.npz) is missing; download it" in data_error(
        cinic10, cinic / "absent"
    )
    image = cinic / "test" / "dog" / "image-0.png"
    Image.fromarray(np.zeros((32, 31, 3), np.uint8)).save(image)
    assert f"{image} is 31x32" in data_error(cinic10, cinic)
    image.write_bytes(b"not an image")
    assert f"{image} cannot be read" in data_error(cinic10, cinic)
    image.unlink()
    assert f"{image.parent} contains no image" in data_error(cinic10, cinic)
    image.parent.rename(cinic / "test" / "wolf")
    assert "missing classes ['dog'], unknown ['wolf']" in data_error(cinic10, cinic)


def test_cinic10_without_pillow_names_the_package(cinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install pillow" in data_error(cinic10, cinic)


def plain_crop_flip(
    x: torch.Tensor, padding: int, flip: bool, generator: torch.Generator, share: float = 1.0
) -> torch.Tensor:
    """Crop and flip one image at a time, with the same random numbers."""
    n, channels, height, width = x.shape
    top, left = torch.randint(2 * padding + 1, (2, n), generator=generator).tolist()
    mirror = torch.randint(2 if flip else 1, (n,), generator=generator).tolist()
    cropped = (torch.rand(n, generator=generator) < share).tolist() if share < 1 else [True] * n
    out = []
    for image, row, column, m, is_cropped in zip(x, top, left, mirror, cropped, strict=True):
        row, column = (row, column) if is_cropped else (padding, padding)
        canvas = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=x.dtype)
        canvas[:, padding : padding + height, padding : padding + width] = image
        crop = canvas[:, row : row + height, column : column + width]
        out.append(crop.flip(-1) if m else crop)
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize(("padding", "flip"), [(4, True), (2, False), (0, True), (0, False)])
def test_crop_flip_equals_a_loop_over_images(dtype: torch.dtype, padding: int, flip: bool) -> None:
    x = torch.randint(1, 256, (40, 3, 6, 9), generator=torch.Generator().manual_seed(1)).to(dtype)
    augment = augmentations.build("crop_flip", {"padding": padding, "flip": flip})
    out = augment(x, torch.Generator().manual_seed(2))
    assert out.dtype == dtype
    assert out.equal(plain_crop_flip(x, padding, flip, torch.Generator().manual_seed(2)))
    assert out.equal(x) == (padding == 0 and not flip)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (7, 2, 5, 3), (50, 3, 32, 32), (3, 4, 2, 40)])
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize(("padding", "flip"), [(4, True), (1, False), (0, True), (9, False)])
def test_crop_flip_equals_the_loop_on_any_shape(shape: tuple[int, ...], share: float, padding: int, flip: bool) -> None:
    x = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    augment = augmentations.build("crop_flip", {"padding": padding, "flip": flip, "share": share})
    fast, plain = (torch.Generator().manual_seed(4) for _ in range(2))
    for images in (x, x.to(memory_format=torch.channels_last)):
        out = augment(images, fast)
        assert out.equal(plain_crop_flip(x, padding, flip, plain, share)) and out.is_contiguous()
    assert fast.get_state().equal(plain.get_state())


@pytest.mark.parametrize("image_format", [torch.channels_last, torch.contiguous_format])
def test_images_become_model_input_in_the_format_of_the_run(image_format: torch.memory_format) -> None:
    x = torch.randint(0, 256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    for images in (x, x.float()):
        data = Dataset(images, torch.zeros(4), images, torch.zeros(4))
        rows = normalise(images, data, torch.float32, image_format)
        assert rows.is_contiguous(memory_format=image_format)
        assert rows.equal(normalise(images, data, torch.float32))


def test_crop_flip_is_random_for_each_image_and_call() -> None:
    x = torch.arange(64.0).view(1, 1, 8, 8).expand(30, 1, 8, 8)
    augment, generator = augmentations.build("crop_flip", {}), torch.Generator().manual_seed(0)
    first, second = augment(x, generator), augment(x, generator)
    assert len(first.unique(dim=0)) > 20 and not first.equal(second)


def test_crop_flip_can_crop_a_share_of_the_images() -> None:
    x = torch.rand(400, 1, 8, 8) + 1
    augment = augmentations.build("crop_flip", {"share": 0.3, "flip": False, "padding": 3})
    changed_share = augment(x, torch.Generator().manual_seed(0)).ne(x).flatten(1).any(1).double().mean()
    assert abs(float(changed_share) - 0.3 * (1 - 1 / 49)) < 0.07, "one of 49 crops is the image itself"


def test_augmentation_none_draws_nothing() -> None:
    x, generator = torch.ones(2, 3), torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert augmentations.build("none", {})(x, generator) is x
    assert generator.get_state().equal(before)


def test_crop_flip_refuses_features() -> None:
    augment = augmentations.build("crop_flip", {})
    assert "needs images" in data_error(augment, torch.ones(2, 3), torch.Generator())


@pytest.mark.parametrize(
    ("y", "advice"),
    [
        (np.arange(40)[:, None] % 2, "reshape it to [n]"),
        (np.arange(40) % 2 * 1.0, "convert it to integers; for real targets set task=regression"),
        (np.ones((40, 2), int), "set task.name to one that fits"),
    ],
)
def test_targets_that_are_no_labels_get_advice(
    y: np.ndarray, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_npz(tmp_path / "d.npz", y_train=y, y_test=y[:8])
    assert main([*SMALL_RUN, *npz_settings(path), f"run.dir={tmp_path / 'run'}"]) == 1
    assert capsys.readouterr().err.endswith(f": {advice}\n")


@pytest.mark.parametrize("first", [0, 1])
def test_labels_that_do_not_start_at_0_are_a_warning(
    first: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    y = np.arange(40) % 3 + first
    path = save_npz(tmp_path / "d.npz", y_train=y, y_test=y[:8])
    assert main([*SMALL_RUN, *npz_settings(path), f"run.dir={tmp_path / 'run'}"]) == 0
    warning = "warning: no training row has label 0; labels count from 0\n"
    assert capsys.readouterr().err == (warning if first else "")
