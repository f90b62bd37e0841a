"""AG News (Zhang et al., 2015): short articles of four classes, as rows of tokens; 120,000 to train, 7,600 to test.

As in FedGMT's experiments: words in lower case, punctuation as separate tokens, a vocabulary from the training and the
test texts, 200 tokens per row, and 0 for padding as well as for words outside the vocabulary.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.paths import expand_path
from fl_dist.data import shared_arrays
from fl_dist.data.dataset import Dataset, dataset_from_arrays, datasets
from fl_dist.data.download_sources import FETCH_COMMAND, SOURCES, find_folder, missing_data_message, redownload_hint

CLASSES = 4
PADDING = 0
PUNCTUATION = re.compile(r"['.,()!?]")
IGNORED = re.compile(r"<br />|[;:\"]")


@datasets.register
def ag_news(
    *,
    root: Annotated[str, Field(min_length=1, description="folder with train.csv and test.csv, or its parent")],
    length: Annotated[int, Field(ge=1, le=10**5, description="tokens per row: longer texts are truncated")] = 200,
    train: Annotated[str, Field(min_length=1, description="the file of training rows")] = "train.csv",
) -> Dataset:
    """AG News from its published files: class (from 1), title, description."""
    base = expand_path(root)
    folder = find_folder(base, "ag_news_csv")
    files = {"train": folder / train, "test": folder / "test.csv"}
    for file in files.values():
        if not file.is_file():
            raise DataError(_missing_file_message(base, file.name))

    def build(allocate: shared_arrays.Allocate) -> None:
        texts = {split: _read_rows(file) for split, file in files.items()}
        token_ids = _build_vocabulary(words for rows in texts.values() for _, words in rows)
        allocate("words", (), np.int64)[...] = len(token_ids)
        for split, rows in texts.items():
            allocate(f"y_{split}", (len(rows),), np.int64)[:] = [label for label, _ in rows]
            _encode(rows, token_ids, allocate(f"x_{split}", (len(rows), length), np.int32))

    arrays = shared_arrays.load_or_build("ag_news", files.values(), length, build)
    return dataset_from_arrays(arrays, CLASSES, vocabulary=int(arrays["words"]) + 1)


def tokenize(text: str) -> list[str]:
    """Words in lower case and punctuation marks; some of the latter are dropped."""
    text = IGNORED.sub(" ", text.lower().replace('"', ""))
    return PUNCTUATION.sub(lambda match: f" {match[0]} ", text).split()


def _missing_file_message(root: Path, name: str) -> str:
    if _is_published(name):
        return missing_data_message("ag_news", root, f"ag_news_csv/{name}")
    return (
        f"no ag_news_csv/{name} in {root}: put it there, or set data.train to the published train.csv"
        f" ({FETCH_COMMAND} ag_news --root {root})"
    )


def _is_published(name: str) -> bool:
    return name in {file.name for file in SOURCES["ag_news"].files}


def _read_rows(file: Path) -> list[tuple[int, list[str]]]:
    try:
        with open(file, encoding="utf-8", newline="") as lines:
            rows = [(_parse_label(file, row), tokenize(" ".join(row[1:]))) for row in csv.reader(lines)]
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        hint = f"; {redownload_hint('ag_news')}" if _is_published(file.name) else ""
        raise DataError(f"AG News: {file} cannot be read ({error_message(e)}){hint}") from None
    if not rows:
        raise DataError(f"AG News: {file} has no rows")
    return rows


def _parse_label(file: Path, row: list[str]) -> int:
    if len(row) < 2 or row[0] not in ("1", "2", "3", "4"):
        raise DataError(f"AG News: {file} has a row that is not class (1 to 4), title, description: {row[:1]}")
    return int(row[0]) - 1


def _build_vocabulary(texts: Iterable[list[str]]) -> dict[str, int]:
    """The id of each word, from 1: the most frequent first, then in alphabetical order."""
    counts = Counter(word for text in texts for word in text)
    return {word: k for k, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)), 1)}


def _encode(rows: list[tuple[int, list[str]]], token_ids: dict[str, int], out: np.ndarray) -> None:
    out[:] = PADDING
    for row, (_, words) in zip(out, rows, strict=True):
        ids = [token_ids[word] for word in words[: len(row)]]
        row[: len(ids)] = ids
