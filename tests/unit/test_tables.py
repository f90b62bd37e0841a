"""The data sets `parquet` and `image_folder`: the user's own tables and folders of images."""

import builtins
import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor

from fl_dist.common.errors import DataError
from fl_dist.data import Dataset, datasets, shared_arrays
from fl_dist.data.images import IMAGENET_MEAN, IMAGENET_STD

BOTH = ("train", "test")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(shared_arrays.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_table(columns: dict[str, Any], name: str = "rows.parquet") -> str:
    table = pa.table(columns)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".parquet"):
        pq.write_table(table, name, row_group_size=7)
    elif name.endswith(".feather"):
        pyarrow.feather.write_feather(table, name)
    else:
        with pa.ipc.new_stream(name, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return name


def build(kind: str = "parquet", splits: tuple[str, ...] = BOTH, **settings: Any) -> Dataset:
    return datasets.build(kind, settings, splits=splits)


def error_of(kind: str = "parquet", splits: tuple[str, ...] = BOTH, **settings: Any) -> str:
    with pytest.raises(DataError) as error:
        build(kind, splits, **settings)
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    return message


def x_of(data: Dataset, split: str = "train") -> Tensor:
    rows = getattr(data, f"x_{split}")
    assert isinstance(rows, Tensor)
    return rows


RNG = np.random.default_rng(0)
HEIGHT, AGE = RNG.normal(size=20), np.arange(20)
NUMBERS = {"height": HEIGHT, "age": AGE, "name": list("abcdefghijklmnopqrst"), "label": AGE % 3, "site": AGE % 4}
FEATURES = np.column_stack([HEIGHT, AGE])


class TestColumnsOfNumbers:
    @pytest.mark.parametrize("name", ["rows.parquet", "rows.feather", "rows.arrow"])
    def test_numbers_that_are_not_used_otherwise_are_features(self, name: str) -> None:
        path, test = write_table(NUMBERS, name), write_table(NUMBERS, f"test/{name}")
        data = build(path=path, test=test, client="site")
        assert x_of(data).dtype == torch.float64 and np.array_equal(x_of(data).numpy(), FEATURES)
        assert data.y_train.tolist() == (AGE % 3).tolist() and data.classes == 3
        assert data.client is not None and data.client.tolist() == (AGE % 4).tolist()
        assert np.array_equal(x_of(data, "test").numpy(), FEATURES) and not data.mean

    def test_chosen_columns_in_their_order(self) -> None:
        columns = NUMBERS | {"flag": AGE % 2 == 0, "small": AGE.astype(np.float32)}
        data = build(
            path=write_table(columns), test=write_table(columns, "test.parquet"), features=["small", "flag", "age"]
        )
        assert x_of(data).dtype == torch.float32
        assert x_of(data).tolist() == [[k, float(k % 2 == 0), k] for k in range(20)]

    @pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 3)])
    def test_lists_of_numbers(self, kind: pa.DataType) -> None:
        values = RNG.normal(size=(20, 3)).astype(np.float32)
        columns = {"age": AGE, "embedding": pa.array(values.tolist(), kind), "label": AGE % 3}
        data = build(path=write_table(columns), test=write_table(columns, "test.parquet"))
        assert np.array_equal(x_of(data).numpy(), np.column_stack([AGE.astype(np.float32), values]))

    def test_several_files_in_the_order_of_their_names(self) -> None:
        for k in (2, 0, 1):
            part = {name: column[k * 6 : k * 6 + 6] for name, column in NUMBERS.items()}
            write_table(dict(sorted(part.items(), reverse=k == 1)), f"parts/{k}.parquet")
        data = build(path="parts", test=write_table(NUMBERS, "test.parquet"), client="site")
        assert np.array_equal(np.sort(x_of(data).numpy(), axis=1), np.sort(FEATURES[:18], axis=1))
        assert x_of(data)[:, 0].tolist() == x_of(build(path="parts/*.parquet", test="test.parquet"))[:, 0].tolist()
        assert data.y_train.tolist() == (AGE[:18] % 3).tolist()

    def test_the_index_of_pandas_is_no_feature(self) -> None:
        frame = pd.DataFrame({"height": HEIGHT, "label": AGE % 3}).sample(frac=1, random_state=0)
        frame.to_parquet("rows.parquet")
        assert "__index_level_0__" in pq.read_schema("rows.parquet").names
        data = build(path="rows.parquet")
        assert x_of(data).shape[1] == 1

    def test_a_share_is_held_out_and_stays_the_same(self) -> None:
        path = write_table(NUMBERS)
        data, again = build(path=path, test=0.25, client="site"), build(path=path, test=0.25, features=["age"])
        held_out, kept = x_of(data, "test")[:, 1].tolist(), x_of(data)[:, 1].tolist()
        assert len(held_out) == 5 and sorted([*held_out, *kept]) == AGE.tolist()
        assert x_of(again, "test").flatten().tolist() == held_out
        assert data.y_test.tolist() == [age % 3 for age in held_out] and data.y_train.tolist() == [
            age % 3 for age in kept
        ]
        assert data.client is not None and data.client.tolist() == [age % 4 for age in kept]

    def test_real_targets(self) -> None:
        data = build(path=write_table(NUMBERS), test=write_table(NUMBERS, "test.parquet"), label="height")
        assert data.y_train.dtype == torch.float64 and data.y_train.tolist() == HEIGHT.tolist() and data.classes == 0
        assert x_of(data).shape[1] == 3

    def test_names_of_labels_and_clients(self) -> None:
        columns = {"age": AGE, "label": pa.array(["no", "yes"] * 10).dictionary_encode(), "site": list("ba") * 10}
        data = build(
            path=write_table(columns), test=write_table(columns, "test.parquet"), client="site", features=["age"]
        )
        assert data.y_train.tolist() == [0, 1] * 10 and data.client is not None and data.client.tolist() == [1, 0] * 10

    def test_normalise(self) -> None:
        data = build(
            path=write_table(NUMBERS), test=write_table(NUMBERS, "test.parquet"), client="site", normalise="auto"
        )
        assert np.allclose(data.mean, FEATURES.mean(0)) and np.allclose(data.std, FEATURES.std(0))


def png(value: int, size: int = 4) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((size, size, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


class TestColumnsOfImages:
    @pytest.mark.parametrize("is_struct", [False, True])
    def test_bytes_of_image_files(self, is_struct: bool) -> None:
        images = [png(10 * k) for k in range(20)]
        column: Any = [{"bytes": image, "path": f"{k}.png"} for k, image in enumerate(images)] if is_struct else images
        columns = {"image": column, "label": AGE % 3}
        data = build(path=write_table(columns), image="image", size=4, test=0.25)
        assert x_of(data).shape == (15, 3, 4, 4) and x_of(data).dtype == torch.uint8
        values = [x_of(data, split)[:, 0, 0, 0].tolist() for split in BOTH]
        assert sorted([*values[0], *values[1]]) == [10 * k for k in range(20)]
        labels = [value // 10 % 3 for value in values[0]]
        assert data.y_train.tolist() == labels and all(bool((image == image[0, 0, 0]).all()) for image in x_of(data))

    def test_images_are_scaled(self) -> None:
        columns = {"image": [png(k, 3 + k) for k in range(20)], "label": AGE % 3}
        data = build(path=write_table(columns), image="image", size=5, test=write_table(columns, "test.parquet"))
        assert x_of(data).shape == (20, 3, 5, 5) and x_of(data)[:, 0, 2, 2].tolist() == list(range(20))

    def test_errors_name_the_row(self) -> None:
        images = [png(k) for k in range(20)]
        broken = {"image": [*images[:8], b"no image", *images[9:]], "label": AGE % 3}
        assert "image rows.parquet, row 9 cannot be read" in error_of(path=write_table(broken), image="image")
        none = {
            "image": [{"bytes": png(k) if k % 5 else None, "path": f"{k}.png"} for k in range(20)],
            "label": AGE % 3,
        }
        message = error_of(path=write_table(none), image="image")
        assert "has 4 rows without the bytes of an image; store the files themselves" in message
        text = {"image": list("abcdefghijklmnopqrst"), "label": AGE % 3}
        assert "the column 'image' is string; images need the bytes" in error_of(path=write_table(text), image="image")

    def test_only_png_and_jpeg_are_decoded(self) -> None:
        """For PostScript Pillow would run a program."""
        file = io.BytesIO()
        Image.new("RGB", (4, 4)).save(file, "EPS")
        columns = {"image": [file.getvalue()] * 20, "label": AGE % 3}
        assert "row 1 cannot be read (cannot identify" in error_of(path=write_table(columns), image="image")


class Extension(pa.ExtensionType):  # type: ignore[misc]
    """A type of somebody's own."""

    def __init__(self) -> None:
        super().__init__(pa.int64(), "tests.extension")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, *_: Any) -> "Extension":
        return cls()


class TestTableErrors:
    @pytest.mark.parametrize(
        ("changes", "settings", "expected"),
        [
            ({"label": None}, {}, "rows.parquet has no column 'label'; valid: age, height, name, site"),
            ({}, {"label": "labell"}, "no column 'labell'; did you mean 'label'?"),
            ({}, {"features": ["heightt"]}, "no column 'heightt'; did you mean 'height'?"),
            ({}, {"features": ["name"]}, "the column 'name' is string; data.features have to be columns of numbers"),
            ({}, {"client": "sites"}, "did you mean 'site'?"),
            ({"age": pa.array([None, *range(19)])}, {}, "the column 'age' has 1 missing value; fill or remove them"),
            ({"age": [[1.0, 2.0], [3.0]] * 10}, {}, "lists in the column 'age' have different lengths"),
            ({"age": [[1.0, None]] * 20}, {}, "the column 'age' has 20 missing values"),
            ({"age": [None, [1.0]] * 10}, {}, "the column 'age' has 10 missing values"),
            ({"label": pa.array([None, *range(19)])}, {}, "the column 'label' is empty in 1 row"),
            ({"label": pa.array([None, *HEIGHT[1:]])}, {}, "the column 'label' is empty in 1 row"),
            ({"site": pa.array([None, *range(19)])}, {"client": "site"}, "the column 'site' is empty in 1 row"),
            ({"height": None, "age": None, "site": None}, {}, "has no column of numbers besides label"),
            ({"label": [k % 2 == 0 for k in range(20)]}, {}, "holds labels of type bool"),
        ],
    )
    def test_columns(self, changes: dict[str, Any], settings: dict[str, Any], expected: str) -> None:
        columns = {name: column for name, column in (NUMBERS | changes).items() if column is not None}
        assert expected in error_of(path=write_table(columns), **settings)

    def test_files_that_differ(self) -> None:
        write_table({"x": [[1.0, 2.0]] * 4, "label": [0, 1] * 2}, "parts/a.parquet")
        write_table({"x": [[1.0, 2.0, 3.0]] * 4, "label": [0, 1] * 2}, "parts/b.parquet")
        message = error_of(path="parts")
        assert "b.parquet: rows have 3 numbers, those before them 2; make them equal" in message

    def test_tables_without_rows(self) -> None:
        path = write_table({name: column[:0] for name, column in NUMBERS.items()})
        assert "rows.parquet has no rows" in error_of(path=path)
        assert "there is only 1 row" in error_of(path=write_table({"x": [1.0], "label": [0]}))

    def test_columns_of_one_name(self) -> None:
        table = pa.table([pa.array([1.0, 2.0]), pa.array([2.0, 3.0]), pa.array([0, 1])], names=["x", "x", "label"])
        with pa.ipc.new_file("rows.arrow", table.schema) as writer:
            writer.write_table(table)
        assert "rows.arrow has 2 columns 'x'; rename all but one" in error_of(path="rows.arrow", features=["x"])

    @pytest.mark.parametrize("is_known", [True, False])
    def test_extension_types_are_refused(self, is_known: bool) -> None:
        values = pa.ExtensionArray.from_storage(Extension(), pa.array(AGE))
        if is_known:
            pa.register_extension_type(Extension())
        try:
            path = write_table({"x": values, "label": AGE % 3})
            assert "the column 'x' is of an extension type; store plain numbers" in error_of(path=path, features=["x"])
        finally:
            if is_known:
                pa.unregister_extension_type("tests.extension")

    @pytest.mark.parametrize("name", ["rows.parquet", "rows.feather", "rows.arrow"])
    def test_damaged_files(self, name: str) -> None:
        path, rng = (
            Path(write_table({"x": RNG.normal(size=3000), "label": np.arange(3000) % 3}, name)),
            np.random.default_rng(0),
        )
        content = path.read_bytes()
        for damaged in (b"", content[:20], content[: len(content) // 2], content[len(content) // 2 :]):
            path.write_bytes(damaged)
            assert name in error_of(path=name) and f"{name} does not exist" not in error_of(path=name)
        for _ in range(30):  # whatever is read, it ends in rows or in an error for people
            changed = bytearray(content)
            for place in rng.integers(0, len(content), 20):
                changed[place] = rng.integers(0, 256)
            path.write_bytes(bytes(changed))
            with contextlib.suppress(DataError):
                assert len(build(path=name, features=["x"]).y_train)

    def test_without_pyarrow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path, real = write_table(NUMBERS), builtins.__import__

        def block(name: str, *arguments: Any, **more: Any) -> Any:
            if name.partition(".")[0] == "pyarrow":
                raise ImportError(f"No module named {name!r}")
            return real(name, *arguments, **more)

        monkeypatch.setattr(builtins, "__import__", block)
        assert "needs pyarrow: pip install 'fl_dist[parquet]'" in error_of(path=path)

    def test_local_data(self) -> None:
        path = write_table(NUMBERS | {"kind": ["a", "b"] * 10})
        train = ("train",)
        assert "data.features has to list the columns" in error_of(splits=train, path=path, test="t")
        chosen: dict[str, Any] = {"path": path, "test": "t", "features": ["age"]}
        assert "data.classes has to list all of them" in error_of(splits=train, label="kind", **chosen)
        assert "data.normalise=auto needs the training rows" in error_of(splits=train, normalise="auto", **chosen)
        assert "with data.local it has to name the server's" in error_of(splits=train, **chosen | {"test": 0.1})
        data = build(splits=train, label="kind", classes=["b", "a"], **chosen)
        assert data.y_train.tolist() == [1, 0] * 10 and not len(data.y_test)

    def test_rows_are_built_once_and_again_if_anything_changes(self) -> None:
        variants: list[dict[str, Any]] = [
            {},
            {"features": ["age"]},
            {"client": "site"},
            {"test": 0.3},
            {"label": "age"},
        ]
        for variant in variants:
            build(**{"path": write_table(NUMBERS)} | variant)
        assert len(shared_arrays.list_cache()) >= len(variants)


COLOURS = {"cat": 10, "dog": 20, "owl": 30}


def write_images(
    base: str, classes: Sequence[str] = tuple(COLOURS), count: int = 4, size: tuple[int, int] = (6, 6)
) -> None:
    for name in classes:
        Path(base, name).mkdir(parents=True, exist_ok=True)
        for k in range(count):
            suffix = (".png", ".PNG")[k % 2]
            pixels = np.full((size[1], size[0], 3), COLOURS.get(name, 0) + k, np.uint8)
            Image.fromarray(pixels).save(Path(base, name, f"{k}{suffix}"))


def folders(splits: tuple[str, ...] = BOTH, **settings: Any) -> Dataset:
    return build("image_folder", splits, **{"path": "photos", "size": 6} | settings)


def folder_error(splits: tuple[str, ...] = BOTH, **settings: Any) -> str:
    return error_of("image_folder", splits, **{"path": "photos", "size": 6} | settings)


def values(data: Dataset, split: str) -> list[int]:
    return x_of(data, split)[:, 0, 0, 0].tolist()


class TestImageFolders:
    @pytest.mark.parametrize("test", ["test", "val"])
    def test_folders_of_splits(self, test: str) -> None:
        write_images("photos/train")
        write_images(f"photos/{test}", ["owl", "cat"], count=1)
        data = folders()
        assert x_of(data).shape == (12, 3, 6, 6) and x_of(data).dtype == torch.uint8 and data.classes == 3
        assert values(data, "train") == [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33]
        assert data.y_train.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert values(data, "test") == [10, 30] and data.y_test.tolist() == [0, 2]
        assert (data.mean, data.std) == (IMAGENET_MEAN, IMAGENET_STD)

    def test_test_is_chosen_before_val_and_both_may_be_named(self) -> None:
        write_images("photos/train")
        write_images("photos/val", count=1)
        write_images("photos/test", count=2)
        assert len(folders().y_test) == 6 and len(folders(test="photos/val").y_test) == 3
        data = folders(test=0.25, mean=[0.0, 0.0, 0.0], std=[1.0, 1.0, 1.0])
        assert len(data.y_train) == 9 and len(data.y_test) == 3 and data.std == (1.0, 1.0, 1.0)

    def test_a_share_of_one_folder_is_held_out(self) -> None:
        write_images("photos")
        data, again = folders(), folders(size=7)
        assert len(data.y_test) == 1 and sorted(values(data, "train") + values(data, "test")) == sorted(
            colour + k for colour in COLOURS.values() for k in range(4)
        )
        assert values(again, "test") == values(data, "test")
        for split in BOTH:
            assert getattr(data, f"y_{split}").tolist() == [value // 10 - 1 for value in values(data, split)]

    def test_images_are_squeezed_or_cropped(self) -> None:
        Path("photos/all").mkdir(parents=True)
        gradient = np.repeat(np.arange(0, 240, 8, dtype=np.uint8)[None, :, None], 12, 0).repeat(3, 2)
        for k in range(2):
            Image.fromarray(gradient).save(f"photos/all/{k}.png")
        squeezed, cropped = x_of(folders(size=10))[0, 0, 5], x_of(folders(size=10, crop=True))[0, 0, 5]
        assert squeezed[-1] > 210 and squeezed[0] < 20
        assert cropped[-1] < 170 and cropped[0] > 60

    def test_names_of_classes(self) -> None:
        write_images("photos")
        data = folders(classes=["owl", "dog", "cat", "bat"], test=0.25)
        assert data.classes == 4 and data.y_train.tolist() == [3 - value // 10 for value in values(data, "train")]
        assert "has a class 'owl' that is not among the classes; did you mean 'own'?" in folder_error(
            classes=["cat", "dog", "own"]
        )

    def test_local_folders(self) -> None:
        write_images("photos/0", ["dog", "owl"])
        write_images("photos/server", count=1)
        names, settings = list(COLOURS), {"test": "photos/server"}
        assert "data.classes has to list the names" in folder_error(("train",), path="photos/0", **settings)
        data = folders(("train",), path="photos/0", classes=names, **settings)
        assert data.y_train.tolist() == [1] * 4 + [2] * 4 and not len(data.y_test)
        data = folders(("test",), path="none", classes=names, **settings)
        assert data.y_test.tolist() == [0, 1, 2] and not len(data.y_train)
        assert "name the server's folder" in folder_error(("test",), path="photos/0", classes=names)

    def test_errors(self) -> None:
        assert "data.path photos cannot be read (No such file" in folder_error()
        Path("photos/empty").mkdir(parents=True)
        assert "photos/empty has no image (.png, .jpg, .jpeg); write some to it" in folder_error()
        Path("photos/empty").rmdir()
        assert "data.path photos has no folder per class" in folder_error()
        write_images("photos/train")
        write_images("photos/test", ["cat", "dgo"])
        assert "test has a class 'dgo' that is not among the classes; did you mean 'dog'?" in folder_error()
        assert "data.test none cannot be read" in folder_error(test="none")
        Path("photos/train/dog/1.png").write_bytes(b"no image")
        message = folder_error(test=0.5)
        assert "photos/train/dog/1.png cannot be read" in message and message.endswith("replace or remove it")

    def test_other_files_are_ignored(self) -> None:
        write_images("photos", ["cat", "dog"])
        Path("photos/cat/notes.txt").write_text("no image")
        Path("photos/cat/.hidden.png").write_text("no image")
        Path("photos/README").write_text("no class")
        assert folders().classes == 2
