"""The user's own images in one folder per class, as torchvision's ImageFolder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.formatting import suggest
from fl_dist.common.paths import expand_path
from fl_dist.data import shared_arrays
from fl_dist.data.dataset import SPLITS, Dataset, dataset_from_arrays, datasets
from fl_dist.data.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    SUFFIXES,
    center_crop,
    list_labelled_images,
    resize,
    subfolders,
    write_labelled_images,
)
from fl_dist.data.splits import draw_test_rows

DEFAULT_TEST_SHARE = 0.1
Channels = Annotated[list[float], Field(min_length=3, max_length=3)]
Names = Annotated[
    Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None,
    Field(description="names of the classes in order; null: the training folders, sorted"),
]


@datasets.register
def image_folder(
    splits: Sequence[str] = SPLITS,
    *,
    path: Annotated[
        str, Field(min_length=1, description="folder of the classes, or of train/ and test/ (or val/) with them")
    ],
    test: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[float, Field(gt=0, lt=1)] | None,
        Field(description="test images: a folder of classes, or the share held out; null: test/ or val/, else 0.1"),
    ] = None,
    classes: Names = None,
    size: Annotated[int, Field(ge=1, le=1024, description="pixels per side: images are scaled to it")] = 32,
    crop: Annotated[bool, Field(description="the centre of each image instead of the whole, squeezed")] = False,
    mean: Annotated[Channels | None, Field(description="of each channel of x/255; null: ImageNet's")] = None,
    std: Annotated[Channels | None, Field(description="of each channel of x/255; null: ImageNet's")] = None,
) -> Dataset:
    """Images of your own (.png, .jpg) in one folder per class."""
    base = expand_path(path)
    folders, share = _find_folders(base, test, splits)
    if classes is None and tuple(splits) != SPLITS:
        raise DataError("data.classes has to list the names of all classes with data.local: a client may lack some")
    names = classes or _subfolder_names(folders["train"], "data.path")
    for split, folder in folders.items():
        _check_known(folder, "data.test" if split == "test" else "data.path", names)
    class_folders = {split: [folder / name for name in names] for split, folder in folders.items()}
    sources = [folder for own in class_folders.values() for folder in own if folder.is_dir()]

    def build(allocate: shared_arrays.Allocate) -> None:
        for split, files in _list_images(class_folders, share, may_lack=classes is not None).items():
            write_labelled_images(allocate, split, files, center_crop if crop else resize, size, "image_folder")

    settings = (size, crop, names, share, [(split, len(own)) for split, own in class_folders.items()])
    arrays = shared_arrays.load_or_build("image_folder", sources, settings, build)
    return dataset_from_arrays(arrays, len(names), mean=tuple(mean or IMAGENET_MEAN), std=tuple(std or IMAGENET_STD))


def _find_folders(base: Path, test: str | float | None, splits: Sequence[str]) -> tuple[dict[str, Path], float | None]:
    """Where the classes of each split are, or the share to hold out."""
    train = base / "train" if (base / "train").is_dir() else base
    beside = [base / name for name in ("test", "val") if train != base and (base / name).is_dir()]
    if isinstance(test, str) or (test is None and beside):
        folders = {"train": train, "test": expand_path(test) if isinstance(test, str) else beside[0]}
        return {split: folder for split, folder in folders.items() if split in splits}, None
    if "test" not in splits:
        return {"train": train}, None
    if "train" not in splits:
        raise DataError("data.test has to name the server's folder of test images with data.local")
    return {"train": train}, DEFAULT_TEST_SHARE if test is None else test


def _subfolder_names(folder: Path, key: str) -> list[str]:
    try:
        names = [entry.name for entry in subfolders(folder)]
    except OSError as e:
        raise DataError(f"{key} {folder} cannot be read ({error_message(e)}); name a folder of classes") from None
    if not names:
        raise DataError(f"{key} {folder} has no folder per class; images have to be in <class>/*.png or *.jpg")
    return names


def _check_known(folder: Path, key: str, names: list[str]) -> None:
    """The folder may lack some of the classes, but have no others."""
    if unknown := [name for name in _subfolder_names(folder, key) if name not in names]:
        raise DataError(
            f"{folder} has a class {unknown[0]!r} that is not among the classes; {suggest(unknown[0], names)}"
        )


def _list_images(
    folders: dict[str, list[Path]], share: float | None, may_lack: bool
) -> dict[str, list[tuple[Path, int]]]:
    """Files and labels. `may_lack`: whether a class may have no training image."""
    files = {split: list_labelled_images(own) for split, own in folders.items()}
    for split, own in files.items():
        labels = {label for _, label in own}
        empty = [folder for label, folder in enumerate(folders[split]) if label not in labels]
        if empty and (not own or (split == "train" and not may_lack)):
            raise DataError(f"{empty[0]} has no image ({', '.join(SUFFIXES)}); write some to it, or remove it")
    if share is None:
        return files
    is_test = draw_test_rows(len(files["train"]), share)
    return {s: [f for f, held in zip(files["train"], is_test, strict=True) if held == (s == "test")] for s in SPLITS}
