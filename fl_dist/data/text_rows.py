"""Texts of files as arrays of token ids, their masks and targets."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_dist.common.errors import DataError
from fl_dist.common.formatting import format_bytes, pluralize
from fl_dist.common.terminal import print_progress
from fl_dist.data.dataset import NOT_LEARNT, SPLITS
from fl_dist.data.shared_arrays import Allocate
from fl_dist.data.tables import draw_test_rows, number_clients, number_labels
from fl_dist.data.text_files import Document, Table, fill_template, read_tables, template_columns
from fl_dist.data.tokenizer import TextTokenizer
from fl_dist.data.tokens import Documents, count_packed, join_documents, pack, pad, pad_for_prediction

MIN_BYTES_FOR_PROGRESS = 100e6
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
    def columns(self) -> list[str]:
        """Those that are read."""
        templates = [self.text] if self.answer is None else [self.prompt, self.answer]
        columns = [column for template in templates for column in template_columns(template)]
        return list(dict.fromkeys([*columns, *filter(None, (self.label, self.client))]))


@dataclass(frozen=True)
class Texts:
    """Tokenized texts, with their clients and labels if there are any."""

    documents: Documents
    clients: list[Any]
    labels: list[Any]

    def select(self, numbers: np.ndarray) -> "Texts":
        clients, labels = ([own[k] for k in numbers] if own else [] for own in (self.clients, self.labels))
        return Texts(self.documents.select(numbers), clients, labels)


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
    _print_size(files)
    splits = {split: _tokenize(own, tokenizer, settings) for split, own in files.items()}
    if isinstance(test, float):
        is_test = draw_test_rows(len(splits["train"].documents), test)
        splits = {s: splits["train"].select(np.flatnonzero(is_test == (s == "test"))) for s in SPLITS}
    classes = 0
    if settings.label is not None:
        labels = {split: texts.labels for split, texts in splits.items()}
        numbers, classes = number_labels(labels, settings.label, settings.classes)
        for split, own in numbers.items():
            allocate(f"y_{split}", own.shape, np.int64)[:] = own
    for split, texts in splits.items():
        write = _write_packed if settings.is_packed else _write_padded
        write(allocate, split, texts, tokenizer.padding, settings)
    allocate("classes", (), np.int64)[...] = classes
    allocate("vocabulary", (), np.int64)[...] = tokenizer.vocabulary


def _print_size(files: dict[str, list[Path]]) -> None:
    size = sum(file.stat().st_size for own in files.values() for file in own)
    if size > MIN_BYTES_FOR_PROGRESS:
        print_progress(f"tokenizing {format_bytes(size)} of text, once on this machine", sys.stdout)


def _tokenize(files: list[Path], tokenizer: TextTokenizer, settings: TextSettings) -> Texts:
    documents: list[tuple[np.ndarray, np.ndarray]] = []
    clients: list[Any] = []
    labels: list[Any] = []
    if settings.label is not None:
        tokenizer.tokenizer.enable_truncation(settings.length)  # keeps the special tokens at both ends
    for table in read_tables(files, settings.columns, settings.document):
        documents += _encode(table, tokenizer, settings)
        clients += table[settings.client] if settings.client else []
        labels += table[settings.label] if settings.label else []
    return Texts(join_documents(documents), clients, labels)


def _encode(table: Table, tokenizer: TextTokenizer, settings: TextSettings) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The ids of each text, and which of them are learnt."""
    encode, end = tokenizer.tokenizer.encode_batch_fast, tokenizer.end
    if settings.answer is None:
        for encoding in encode(fill_template(settings.text, table)):
            ids = encoding.ids if settings.label is not None else _append_end(encoding.ids, end)
            yield np.array(ids, np.int32), np.ones(len(ids), bool)
        return
    prompts = encode(fill_template(settings.prompt, table))
    answers = encode(fill_template(settings.answer, table), add_special_tokens=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        first, last = _remove_end(prompt.ids, end), _append_end(answer.ids, end)
        yield np.array(first + last, np.int32), np.arange(len(first) + len(last)) >= len(first)


def _append_end(ids: list[int], end: int | None) -> list[int]:
    """With the end token, unless the tokenizer has added it."""
    assert end is not None
    return ids if ids[-1:] == [end] else [*ids, end]


def _remove_end(ids: list[int], end: int | None) -> list[int]:
    return ids[:-1] if ids[-1:] == [end] else ids


def _write_packed(allocate: Allocate, split: str, texts: Texts, padding: int, settings: TextSettings) -> None:
    """The texts of each client are joined, so that no row holds those of two."""
    documents, length = texts.documents, settings.length
    ids = number_clients(texts.clients, str(settings.client)) if texts.clients and split == "train" else None
    ends = np.array([len(documents.ids)])
    if ids is not None:
        documents = documents.select(np.argsort(ids, kind="stable"))
        ends = documents.ends[np.cumsum(np.bincount(ids)) - 1]
    bounds = [0, *ends.tolist()]
    counts = [count_packed(last - first, length) for first, last in zip(bounds, bounds[1:], strict=False)]
    x = allocate(f"x_{split}", (sum(counts), length), np.int32)
    y = allocate(f"y_{split}", (sum(counts), length), np.int64)
    row = 0
    for first, last, count in zip(bounds, bounds[1:], counts, strict=False):
        rows, tokens = slice(row, row + count), slice(first, last)
        pack(documents.ids[tokens], documents.is_learnt[tokens], x[rows], y[rows], padding)
        row += count
    if ids is not None:
        allocate("client", (sum(counts),), np.int64)[:] = np.repeat(np.arange(len(counts)), counts)


def _write_padded(allocate: Allocate, split: str, texts: Texts, padding: int, settings: TextSettings) -> None:
    shape, types = (len(texts.documents), settings.length), (np.int32, np.bool_)
    x, mask = (allocate(f"x_{split}.{name}", shape, kind) for name, kind in zip(TENSOR_NAMES, types, strict=True))
    if settings.label is not None:
        pad(texts.documents, x, mask, padding)
        _check_rows(np.any(mask, axis=1), split, "no token; remove them")
    else:
        y = allocate(f"y_{split}", shape, np.int64)
        pad_for_prediction(texts.documents, x, mask, y, padding)
        advice = f"no token to learn among their first {settings.length} tokens; raise data.length or remove them"
        _check_rows(np.any(y != NOT_LEARNT, axis=1), split, advice)
    if texts.clients and split == "train":
        allocate("client", shape[:1], np.int64)[:] = number_clients(texts.clients, str(settings.client))


def _check_rows(is_good: Any, split: str, what: str) -> None:
    if bad := np.flatnonzero(~is_good).tolist():
        raise DataError(f"{pluralize(len(bad), 'text')} to {split} on, the first is number {bad[0] + 1}: {what}")
