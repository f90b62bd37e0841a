"""Tiny-ImageNet: two hundred classes of ImageNet in 64x64 pixels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.paths import expand_path
from fl_dist.data import shared_arrays
from fl_dist.data.dataset import Dataset, dataset_from_arrays, datasets
from fl_dist.data.download_sources import find_folder, missing_data_message, redownload_hint
from fl_dist.data.images import IMAGENET_MEAN, IMAGENET_STD, list_labelled_images, resize, write_labelled_images

NAME = "tiny_imagenet"


@datasets.register
def tiny_imagenet(
    *,
    root: Annotated[str, Field(min_length=1, description="the published folder, or its parent")],
    size: Annotated[int, Field(ge=8, le=1024, description="pixels per side: images are scaled to it")] = 64,
) -> Dataset:
    """Two hundred classes of ImageNet in 64x64 pixels: 100,000 to train, 10,000 (published as val) to test."""
    base = expand_path(root)
    folder = find_folder(base, "tiny-imagenet-200")
    class_file, label_file, test_folder = (
        folder / path for path in ("wnids.txt", "val/val_annotations.txt", "val/images")
    )
    _check_exist([class_file, label_file], base)
    labels = {word: k for k, word in enumerate(sorted(_read_lines(class_file)))}
    train_folders = [folder / "train" / word / "images" for word in labels]
    sources = [class_file, label_file, *train_folders, test_folder]
    _check_exist(sources, base)

    def build(allocate: shared_arrays.Allocate) -> None:
        classes = dict(line.split("\t")[:2] for line in _read_lines(label_file))
        if unknown := set(classes.values()) - labels.keys():
            hint = redownload_hint(NAME)
            raise DataError(f"{label_file} names a class {min(unknown)}, which is not in {class_file}; {hint}")
        test = [(test_folder / file, labels[classes[file]]) for file in sorted(classes)]
        for split, files in (("train", list_labelled_images(train_folders)), ("test", test)):
            if not files:
                raise DataError(f"{NAME}: there are no images to {split} on")
            write_labelled_images(allocate, split, files, resize, size, NAME)

    arrays = shared_arrays.load_or_build(NAME, sources, size, build)
    return dataset_from_arrays(arrays, len(labels), mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _check_exist(paths: Sequence[Path], root: Path) -> None:
    for path in paths:
        if not path.exists():
            raise DataError(missing_data_message(NAME, root, str(path)))


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{file} cannot be read ({error_message(e)}); {redownload_hint(NAME)}") from None
