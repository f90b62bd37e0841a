"""Texts of files as arrays of token ids, their masks and targets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fl_dist.common.errors import DataError
from fl_dist.data.shared_arrays import Allocate
from fl_dist.data.splits import number_clients, number_labels, print_size, split_masks
from fl_dist.data.text_files import Document, Table, fill_template, read_tables, template_columns
from fl_dist.data.tokenizer import TextTokenizer
from fl_dist.data.tokens import (
    Documents,
    count_packed,
    join_documents,
    pack,
    pad,
    pad_for_prediction,
    to_documents,
)

MAX_CHARACTERS = 2**20
"""Of the texts that are tokenized at a time: the tokenizer needs a hundred bytes per token."""
TENSOR_NAMES = ("input_ids", "attention_mask")
"""Those of padded rows, as models of the transformers library name them."""


@dataclass(frozen=True)
class TextSettings:
    """How rows of the files become rows of tokens."""

    length: int
    is_packed: bool
    text: str
    prompt: str
    answer: str | None
    label: str | None
    client: str | None
    classes: int | list[str] | None
    document: Document

    @property
    def text_columns(self) -> list[str]:
        templates = [self.text] if self.answer is None else [self.prompt, self.answer]
        return [column for template in templates for column in template_columns(template)]

    @property
    def columns(self) -> list[str]:
        """Those that are read."""
        return list(dict.fromkeys([*self.text_columns, *filter(None, (self.label, self.client))]))


@dataclass(frozen=True)
class Texts:
    """Tokenized texts, with their clients and labels if there are any."""

    documents: Documents
    clients: list[Any]
    labels: list[Any]


@dataclass(frozen=True)
class Split:
    """The texts of some files, and the numbers of those that belong to the split."""

    texts: Texts
    numbers: np.ndarray

    @property
    def labels(self) -> list[Any]:
        return [self.texts.labels[number] for number in self.numbers]

    @property
    def clients(self) -> list[Any]:
        return [self.texts.clients[number] for number in self.numbers]


def write_rows(
    allocate: Allocate,
    files: dict[str, list[Path]],
    test: str | float,
    tokenizer: TextTokenizer,
    settings: TextSettings,
) -> None:
    """Arrays x and y of each split, client ids, and the numbers of classes and ids."""
    if settings.label is None and tokenizer.end is None:
        raise DataError("the tokenizer's files name no end token; set data.end to one of its tokens, such as </s>")
    print_size(files, "tokenizing")
    of_test = replace(settings, client=None)  # test rows belong to no client
    texts = {
        split: _tokenize(own, tokenizer, settings if split == "train" else of_test) for split, own in files.items()
    }
    splits = {
        split: Split(own, np.flatnonzero(mask))
        for source, own in texts.items()
        for split, mask in split_masks(source, len(own.documents.ends), test).items()
    }
    classes = _write_labels(allocate, splits, settings)
    write = _write_packed if settings.is_packed else _write_padded
    for name, split in splits.items():
        ids = number_clients(split.clients, settings.client) if settings.client and name == "train" else None
        client = write(allocate, name, split, ids, tokenizer.padding, settings)
        if client is not None:
            allocate("client", client.shape, np.int64)[:] = client
    allocate("classes", (), np.int64)[...] = classes
    allocate("vocabulary", (), np.int64)[...] = tokenizer.vocabulary


def _write_labels(allocate: Allocate, splits: dict[str, Split], settings: TextSettings) -> int:
    """Returns the number of classes."""
    if settings.label is None:
        return 0
    labels = {name: split.labels for name, split in splits.items()}
    numbers, classes = number_labels(labels, settings.label, settings.classes)
    for name, own in numbers.items():
        allocate(f"y_{name}", own.shape, np.int64)[:] = own
    return classes


def _tokenize(files: list[Path], tokenizer: TextTokenizer, settings: TextSettings) -> Texts:
    parts: list[Documents] = []
    clients: list[Any] = []
    labels: list[Any] = []
    if settings.label is not None:
        tokenizer.truncate(settings.length)
    encode = _encode_for_prediction if settings.label is None else _encode_labelled
    for table in read_tables(files, settings.columns, settings.document):
        for piece in _split_table(table, settings.text_columns):
            part, rows = encode(piece, tokenizer, settings)
            parts.append(part)
            clients += [piece.columns[settings.client][row] for row in rows] if settings.client else []
            labels += [piece.columns[settings.label][row] for row in rows] if settings.label else []
    if not sum(len(part.ends) for part in parts):
        raise DataError(f"{files[0]} has no text: each of its rows is empty")
    return Texts(join_documents(parts), clients, labels)


def _split_table(table: Table, columns: Sequence[str]) -> Iterator[Table]:
    """Tables of consecutive rows, each of at most MAX_CHARACTERS in these columns or of a single row."""
    first = characters = 0
    for row, values in enumerate(zip(*(table.columns[column] for column in columns), strict=True)):
        length = sum(len(str(value)) for value in values)
        if characters and characters + length > MAX_CHARACTERS:
            yield table.slice(first, row)
            first, characters = row, 0
        characters += length
    yield table.slice(first, len(table.columns[columns[0]]))


def _encode_labelled(table: Table, tokenizer: TextTokenizer, settings: TextSettings) -> tuple[Documents, Sequence[int]]:
    """Documents, and which rows they are."""
    ids = tokenizer.encode(fill_template(settings.text, table), table.file)
    if empty := [row for row, own in enumerate(ids) if not own]:
        raise DataError(f"{table.locate(empty[0])}: the text has no token; remove the row")
    return to_documents(ids, [0] * len(ids)), range(len(ids))


def _encode_for_prediction(
    table: Table, tokenizer: TextTokenizer, settings: TextSettings
) -> tuple[Documents, Sequence[int]]:
    """The same, without rows that are empty."""
    if settings.answer is None:
        texts = fill_template(settings.text, table)
        ids = tokenizer.encode_texts(texts, table.file, is_answer=False)
        rows = [row for row, own in enumerate(ids) if len(own) > 1 and texts[row].strip()]
        return to_documents([ids[row] for row in rows], [0] * len(rows)), rows
    prompts = tokenizer.encode_prompts(fill_template(settings.prompt, table), table.file)
    answers = tokenizer.encode_texts(fill_template(settings.answer, table), table.file, is_answer=True)
    if not settings.is_packed:
        _check_prompts(prompts, settings.length, table)
    ids = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    rows = [row for row, own in enumerate(ids) if len(own) > 1]
    return to_documents([ids[row] for row in rows], [len(prompts[row]) for row in rows]), rows


def _check_prompts(prompts: list[list[int]], length: int, table: Table) -> None:
    for row, own in enumerate(prompts):
        if len(own) > length:
            what = f"the prompt has {len(own):,} tokens, which leaves none of {length:,} for its answer"
            raise DataError(f"{table.locate(row)}: {what}; raise data.length, or shorten or remove the row")


def _write_packed(
    allocate: Allocate, name: str, split: Split, ids: np.ndarray | None, padding: int, settings: TextSettings
) -> np.ndarray | None:
    """The texts of each client are joined, so that no row holds those of two. Returns the client of each row."""
    documents, length, numbers = split.texts.documents, settings.length, split.numbers
    groups = (
        [numbers]
        if ids is None
        else np.split(numbers[np.argsort(ids, kind="stable")], np.cumsum(np.bincount(ids))[:-1])
    )
    tokens = documents.lengths
    counts = [count_packed(int(tokens[group].sum()), length) for group in groups]
    x = allocate(f"x_{name}", (sum(counts), length), np.int32)
    y = allocate(f"y_{name}", (sum(counts), length), np.int64)
    for group, end, count in zip(groups, np.cumsum(counts).tolist(), counts, strict=True):
        pack(documents, group, x[end - count : end], y[end - count : end], padding)
    return None if ids is None else np.repeat(np.arange(len(counts)), counts)


def _write_padded(
    allocate: Allocate, name: str, split: Split, ids: np.ndarray | None, padding: int, settings: TextSettings
) -> np.ndarray | None:
    """A row for each text. Returns the client of each row."""
    documents, shape = split.texts.documents, (len(split.numbers), settings.length)
    types = (np.int32, np.bool_)
    x, mask = (allocate(f"x_{name}.{own}", shape, kind) for own, kind in zip(TENSOR_NAMES, types, strict=True))
    if settings.label is not None:
        pad(documents, split.numbers, x, mask, padding)
    else:
        y = allocate(f"y_{name}", shape, np.int64)
        pad_for_prediction(documents, split.numbers, x, mask, y, padding)
    return ids
