"""AG News (Zhang et al., 2015): short articles of four classes, as rows of tokens; 120,000 to train, 7,600 to test.

As in FedGMT's experiments: words in lower case with punctuation apart, a vocabulary from the training and the test
texts, 200 tokens a row, and 0 for padding as well as for what is not in the vocabulary.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from fl_dist.common.paths import expand
from fl_dist.common.words import message
from fl_dist.data import shared
from fl_dist.data.dataset import Dataset, datasets, of_arrays
from fl_dist.data.sources import COMMAND, SOURCES, absent, again

CLASSES = 4
PADDING = 0
APART = re.compile(r"['.,()!?]")
BLANK = re.compile(r"<br />|[;:\"]")


@datasets.register
def ag_news(
    *,
    root: Annotated[str, Field(min_length=1, description="folder with train.csv and test.csv, or its parent")],
    length: Annotated[int, Field(ge=1, le=10**5, description="tokens of a row: longer texts are cut")] = 200,
    train: Annotated[str, Field(min_length=1, description="the file of training rows")] = "train.csv",
) -> Dataset:
    """AG News from its published files: class (from 1), title, description."""
    given = expand(root)
    folder = given / "ag_news_csv" if (given / "ag_news_csv").is_dir() else given
    files = {"train": folder / train, "test": folder / "test.csv"}
    for file in files.values():
        if not file.is_file():
            raise ValueError(_missing(given, file.name))

    def make(new: shared.Allocate) -> None:
        read = {part: _read(file) for part, file in files.items()}
        numbers = _vocabulary(words for rows in read.values() for _, words in rows)
        new("words", (), np.int64)[...] = len(numbers)
        for part, rows in read.items():
            new(f"y_{part}", (len(rows),), np.int64)[:] = [label for label, _ in rows]
            _number(rows, numbers, new(f"x_{part}", (len(rows), length), np.int32))

    arrays = shared.arrays("ag_news", files.values(), length, make)
    return of_arrays(arrays, CLASSES, vocabulary=int(arrays["words"]) + 1)


def tokens(text: str) -> list[str]:
    """Words in lower case, punctuation apart; some of it is dropped."""
    text = BLANK.sub(" ", text.lower().replace('"', ""))
    return APART.sub(lambda found: f" {found[0]} ", text).split()


def _missing(root: Path, name: str) -> str:
    if _is_published(name):
        return absent("ag_news", root, f"ag_news_csv/{name}")
    get = f"{COMMAND} ag_news --root {root}"
    return f"no ag_news_csv/{name} in {root}: put it there, or set data.train to the published train.csv ({get})"


def _is_published(name: str) -> bool:
    return name in {file.name for file in SOURCES["ag_news"].files}


def _read(file: Path) -> list[tuple[int, list[str]]]:
    try:
        with open(file, encoding="utf-8", newline="") as lines:
            rows = [(_label(file, row), tokens(" ".join(row[1:]))) for row in csv.reader(lines)]
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        remedy = f"; {again('ag_news')}" if _is_published(file.name) else ""
        raise ValueError(f"AG News: {file} cannot be read ({message(e)}){remedy}") from None
    if not rows:
        raise ValueError(f"AG News: {file} has no rows")
    return rows


def _label(file: Path, row: list[str]) -> int:
    if len(row) < 2 or row[0] not in ("1", "2", "3", "4"):
        raise ValueError(f"AG News: {file} has a row that is not class (1 to 4), title, description: {row[:1]}")
    return int(row[0]) - 1


def _vocabulary(texts: Iterable[list[str]]) -> dict[str, int]:
    """The number of each word, from 1 on: the most frequent first, then by the alphabet."""
    counts = Counter(word for text in texts for word in text)
    return {word: k for k, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)), 1)}


def _number(rows: list[tuple[int, list[str]]], numbers: dict[str, int], into: np.ndarray) -> None:
    into[:] = PADDING
    for row, (_, words) in zip(into, rows, strict=True):
        known = [numbers[word] for word in words[: len(row)]]
        row[: len(known)] = known
