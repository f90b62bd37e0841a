"""Data sets are read exactly or refused with one line; augmentation equals a plain loop over images."""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_dist.data import Dataset, datasets, normalise
from fl_dist.data.augment import augmentations
from fl_dist.data.cinic10 import CLASSES


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    good = {
        "x_train": rng.normal(size=(8, 5)),
        "y_train": np.arange(8) % 3,
        "x_test": rng.normal(size=(4, 5)),
        "y_test": np.arange(4) % 3,
    }
    return {name: array for name, array in (good | changes).items() if array is not None}


def read(path: Path) -> Dataset:
    return datasets.build("npz", {"path": str(path)})


def save(folder: Path, **changes: Any) -> Path:
    np.savez(folder / "data.npz", **arrays(**changes))
    return folder / "data.npz"


def message(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_setting_has_a_description() -> None:
    for registry in (datasets, augmentations):
        for name in registry:
            assert all(field.description for field in registry.schema(name).model_fields.values())


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


def test_normalise_leaves_its_input_alone() -> None:
    x = torch.ones(2, 1, 2, 2)
    normalise(x, Dataset(x, x, x, x, 2, mean=(1.0,), std=(2.0,)), torch.float32)
    assert x.eq(1).all()


def test_npz_keeps_bits_and_client_ids(tmp_path: Path) -> None:
    client = np.arange(8) // 2
    data = read(save(tmp_path, client=client, y_test=np.array([0, 1, 4, 2], np.uint8), extra=np.full(3, np.nan)))
    assert (data.x_train.numpy() == arrays()["x_train"]).all() and data.x_train.dtype == torch.float64
    assert data.classes == 5 and data.y_test.tolist() == [0, 1, 4, 2] and data.y_test.dtype == torch.int64
    assert data.client is not None and data.client.tolist() == client.tolist()
    assert data.shape == (5,) and data.mean == ()


def test_npz_reads_other_byte_orders_and_widths(tmp_path: Path) -> None:
    x = np.arange(40).reshape(8, 5)
    data = read(save(tmp_path, x_train=x.astype(">f8"), x_test=x[:4].astype("f2")))
    assert data.x_train.tolist() == x.tolist() and data.x_train.dtype == torch.float64
    assert data.x_test.tolist() == x[:4].tolist() and data.x_test.dtype == torch.float32


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
    "float labels": ({"y_train": np.zeros(8)}, "y_train is float64"),
    "negative label": ({"y_test": np.array([0, 1, -1, 2])}, "y_test is -1 in row 2"),
    "huge label": ({"y_test": np.array([0, 2**40, 1, 2])}, "y_test is 1099511627776 in row 1"),
    "float clients": ({"client": np.zeros(8)}, "client is float64"),
    "negative client": ({"client": np.array([0, 0, 0, -2, 0, 0, 0, 0])}, "client is -2 in row 3"),
    "too many clients": ({"client": np.zeros(9, int)}, "one entry for each of the 8 rows of x_train"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_npz_refuses_in_one_line(name: str, tmp_path: Path) -> None:
    changes, expected = BAD_ARRAYS[name]
    path = save(tmp_path, **changes)
    text = message(read, path)
    assert expected in text and str(path) in text


def test_npz_names_an_absent_or_damaged_file(tmp_path: Path) -> None:
    assert "does not exist" in message(read, tmp_path / "none.npz")
    assert "does not exist" in message(read, tmp_path)
    path = save(tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", b"text", whole[:100], whole[:-30], whole[:300] + b"\0\xff" + whole[302:]):
        path.write_bytes(damaged)
        text = message(read, path)
        assert f"{path} cannot be read" in text and "pickle" not in text
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    assert "not a .npz archive" in message(read, path)


@pytest.fixture
def cinic(tmp_path: Path) -> Path:
    """Two training images and one test image of each class; the pixels are class, row and part."""
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
    assert "labels 0..9" in message(cinic10, root)


def test_cinic10_says_what_is_wrong_with_a_folder(cinic: Path) -> None:
    assert f"{cinic / 'absent' / 'train'} (or cinic10.npz) is missing there; get it" in message(
        cinic10, cinic / "absent"
    )
    image = cinic / "test" / "dog" / "image-0.png"
    Image.fromarray(np.zeros((32, 31, 3), np.uint8)).save(image)
    assert f"{image} is 31x32" in message(cinic10, cinic)
    image.write_bytes(b"not an image")
    assert f"{image} cannot be read" in message(cinic10, cinic)
    image.unlink()
    assert f"{image.parent} holds no image" in message(cinic10, cinic)
    image.parent.rename(cinic / "test" / "wolf")
    assert "missing classes ['dog'], unknown ['wolf']" in message(cinic10, cinic)


def test_cinic10_without_pillow_says_how_to_get_it(cinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install pillow" in message(cinic10, cinic)


def plain_crop_flip(x: torch.Tensor, padding: int, flip: bool, generator: torch.Generator) -> torch.Tensor:
    """One image at a time, from the same random numbers."""
    n, channels, height, width = x.shape
    top, left = torch.randint(2 * padding + 1, (2, n), generator=generator).tolist()
    mirror = torch.randint(2 if flip else 1, (n,), generator=generator).tolist()
    out = []
    for image, row, column, m in zip(x, top, left, mirror, strict=True):
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


def test_crop_flip_draws_anew_for_each_image_and_call() -> None:
    x = torch.arange(64.0).view(1, 1, 8, 8).expand(30, 1, 8, 8)
    augment, generator = augmentations.build("crop_flip", {}), torch.Generator().manual_seed(0)
    first, second = augment(x, generator), augment(x, generator)
    assert len(first.unique(dim=0)) > 20 and not first.equal(second)


def test_crop_flip_can_crop_a_share_of_the_images() -> None:
    x = torch.rand(400, 1, 8, 8) + 1
    augment = augmentations.build("crop_flip", {"share": 0.3, "flip": False, "padding": 3})
    moved = augment(x, torch.Generator().manual_seed(0)).ne(x).flatten(1).any(1).double().mean()
    assert abs(float(moved) - 0.3 * (1 - 1 / 49)) < 0.07, "one of 49 crops is the image itself"


def test_augmentation_none_draws_nothing() -> None:
    x, generator = torch.ones(2, 3), torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert augmentations.build("none", {})(x, generator) is x
    assert generator.get_state().equal(before)


def test_crop_flip_refuses_features() -> None:
    augment = augmentations.build("crop_flip", {})
    assert "needs images" in message(augment, torch.ones(2, 3), torch.Generator())
