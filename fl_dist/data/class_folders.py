"""The user's own images in one folder per class, as torchvision's ImageFolder."""

from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fl_dist.common.errors import DataError
from fl_dist.common.formatting import suggest
from fl_dist.common.paths import expand_path
from fl_dist.data import shared_arrays
from fl_dist.data.dataset import SPLITS, Dataset, dataset_from_arrays, datasets
from fl_dist.data.image_folders import MEAN, STD, subfolders
from fl_dist.data.images import center_crop, list_labelled_images, resize, write_labelled_images
from fl_dist.data.tables import draw_test_rows

DEFAULT_TEST_SHARE = 0.1
Channels = Annotated[list[float], Field(min_length=3, max_length=3)]
Folders = dict[str, list[Path]]


@datasets.register
def image_folder(
    *,
    path: Annotated[
        str, Field(min_length=1, description="folder of the classes, or of train/ and test/ (or val/) with them")
    ],
    test: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[float, Field(gt=0, lt=1)] | None,
        Field(description="test images: a folder of classes, or the share held out; null: test/ or val/, else 0.1"),
    ] = None,
    size: Annotated[int, Field(ge=1, le=1024, description="pixels per side: images are scaled to it")] = 32,
    crop: Annotated[bool, Field(description="the centre of each image instead of the whole, squeezed")] = False,
    mean: Annotated[Channels | None, Field(description="of each channel of x/255; null: ImageNet's")] = None,
    std: Annotated[Channels | None, Field(description="of each channel of x/255; null: ImageNet's")] = None,
) -> Dataset:
    """Images of your own (.png, .jpg) in one folder per class."""
    base = expand_path(path)
    train = base / "train" if (base / "train").is_dir() else base
    test_rows = _find_test(base, train) if test is None else expand_path(test) if isinstance(test, str) else test
    classes = _class_names(train, "data.path")
    folders = {"train": [train / name for name in classes]}
    if isinstance(test_rows, Path):
        folders["test"] = [test_rows / name for name in _known_classes(test_rows, train, classes)]
    sources = [folder for own in folders.values() for folder in own if folder.is_dir()]

    def build(allocate: shared_arrays.Allocate) -> None:
        for split, files in _list_images(folders, test_rows).items():
            if not files:
                raise DataError(f"{base} has no image (.png, .jpg) to {split} on")
            transform = partial(center_crop if crop else resize, size=size)
            write_labelled_images(allocate, split, files, transform, (3, size, size), "image_folder")

    arrays = shared_arrays.load_or_build("image_folder", sources, (size, crop, str(test_rows)), build)
    return dataset_from_arrays(arrays, len(classes), mean=tuple(mean or MEAN), std=tuple(std or STD))


def _find_test(base: Path, train: Path) -> Path | float:
    """The folder beside train/, or the share to hold out."""
    beside = [base / name for name in ("test", "val") if train != base and (base / name).is_dir()]
    return beside[0] if beside else DEFAULT_TEST_SHARE


def _class_names(folder: Path, key: str) -> list[str]:
    names = [entry.name for entry in subfolders(folder)] if folder.is_dir() else []
    if not names:
        what = "has no folder per class" if folder.is_dir() else "does not exist"
        raise DataError(f"{key} {folder} {what}; images have to be in <class>/*.png or *.jpg")
    return names


def _known_classes(folder: Path, train: Path, classes: list[str]) -> list[str]:
    """All classes, of which the folder may lack some."""
    if unknown := sorted(set(_class_names(folder, "data.test")) - set(classes)):
        raise DataError(f"{folder} has a class {unknown[0]!r}, which {train} lacks; {suggest(unknown[0], classes)}")
    return classes


def _list_images(folders: Folders, test_rows: Path | float) -> dict[str, list[tuple[Path, int]]]:
    files = {split: list_labelled_images(own) for split, own in folders.items()}
    if isinstance(test_rows, Path) or not files["train"]:
        return files
    is_test = draw_test_rows(len(files["train"]), test_rows)
    return {s: [f for f, held in zip(files["train"], is_test, strict=True) if held == (s == "test")] for s in SPLITS}
