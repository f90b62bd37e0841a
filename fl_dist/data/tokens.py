"""Documents of tokens as rows of equal length: packed without gaps, or padded one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from fl_dist.data.dataset import IGNORE_INDEX


@dataclass(frozen=True)
class Documents:
    """Token ids of documents, one after another."""

    ids: np.ndarray
    """int32, of all documents."""
    ends: np.ndarray
    """int64, where each document ends."""
    prompts: np.ndarray
    """int64, how many tokens at the start of each document are not to be predicted."""

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    def select(self, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """Ids and length of the prompt of these documents, in this order."""
        for number in numbers.tolist():
            first = self.ends[number - 1] if number else 0
            yield self.ids[first : self.ends[number]], int(self.prompts[number])


def to_documents(ids: Sequence[Sequence[int]], prompts: Sequence[int]) -> Documents:
    """From the ids of each, and the lengths of their prompts."""
    ends = np.cumsum([len(own) for own in ids], dtype=np.int64)
    return Documents(np.array(list(chain.from_iterable(ids)), np.int32), ends, np.array(prompts, np.int64))


def join_documents(parts: Sequence[Documents]) -> Documents:
    """Those of the first part, then those of the second, and so on."""
    firsts = np.cumsum([0, *(len(part.ids) for part in parts)])
    return Documents(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.ends + first for part, first in zip(parts, firsts, strict=False)]),
        np.concatenate([part.prompts for part in parts]),
    )


def count_packed(tokens: int, length: int) -> int:
    """Rows for so many tokens: the first one is predicted nowhere."""
    return -(-max(0, tokens - 1) // length)


def pack(documents: Documents, numbers: np.ndarray, x: np.ndarray, y: np.ndarray, padding: int) -> None:
    """Fill rows with these documents as one stream. Each of its tokens but the first is a target once, or in a prompt.

    The rest of the last row is padding behind the text, which a causal model does not see.
    """
    stream, learnt, end = np.full(x.size + 1, padding, x.dtype), np.full(y.size + 1, IGNORE_INDEX, x.dtype), 0
    for ids, prompt in documents.select(numbers):
        first, end = end, end + len(ids)
        stream[first:end], learnt[first + prompt : end] = ids, ids[prompt:]
    stream[end - 1] = padding  # the last token predicts none
    x.reshape(-1)[:], y.reshape(-1)[:] = stream[:-1], learnt[1:]


def pad(documents: Documents, numbers: np.ndarray, x: np.ndarray, mask: np.ndarray, padding: int) -> None:
    """A row for each of these documents; what is longer is cut off."""
    x[:], mask[:] = padding, False
    for row, valid, (ids, _) in zip(x, mask, documents.select(numbers), strict=True):
        used = min(len(ids), len(row))
        row[:used], valid[:used] = ids[:used], True


def pad_for_prediction(
    documents: Documents, numbers: np.ndarray, x: np.ndarray, mask: np.ndarray, y: np.ndarray, padding: int
) -> None:
    """The same, with the token after each as its target; so the last one is no input."""
    x[:], mask[:], y[:] = padding, False, IGNORE_INDEX
    for row, valid, target, (ids, prompt) in zip(x, mask, y, documents.select(numbers), strict=True):
        used, skipped = min(len(ids) - 1, len(row)), max(prompt, 1)
        row[:used], valid[:used] = ids[:used], True
        target[skipped - 1 : used] = ids[skipped : used + 1]
