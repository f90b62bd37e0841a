"""Documents of tokens as rows of equal length: packed without gaps, or padded one by one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fl_dist.data.dataset import NOT_LEARNT


@dataclass(frozen=True)
class Documents:
    """Token ids of documents, one after another."""

    ids: np.ndarray
    """int32, of all documents."""
    is_learnt: np.ndarray
    """bool, whether a token is to be predicted."""
    ends: np.ndarray
    """int64, where each document ends."""

    def __len__(self) -> int:
        return len(self.ends)

    def spans(self) -> list[slice]:
        """Where each document is."""
        return [
            slice(first, last) for first, last in zip([0, *self.ends[:-1].tolist()], self.ends.tolist(), strict=True)
        ]

    def select(self, numbers: Sequence[int] | np.ndarray) -> "Documents":
        """These documents, in this order."""
        spans = self.spans()
        chosen = [spans[number] for number in numbers]
        return join_documents((self.ids[span], self.is_learnt[span]) for span in chosen)


def join_documents(documents: Iterable[tuple[np.ndarray, np.ndarray]]) -> Documents:
    """From the ids of each, and whether they are learnt."""
    pairs = list(documents)
    ends = np.cumsum([len(ids) for ids, _ in pairs], dtype=np.int64)
    ids = np.concatenate([ids for ids, _ in pairs]) if pairs else np.empty(0, np.int32)
    is_learnt = np.concatenate([learnt for _, learnt in pairs]) if pairs else np.empty(0, bool)
    return Documents(ids, is_learnt, ends)


def count_packed(tokens: int, length: int) -> int:
    """Rows for so many tokens: the first one is predicted nowhere."""
    return -(-max(0, tokens - 1) // length)


def pack(ids: np.ndarray, is_learnt: np.ndarray, x: np.ndarray, y: np.ndarray, padding: int) -> None:
    """Fill rows with one text. Each token but the first is a target once.

    The rest of the last row is padding behind the text, which a causal model does not see.
    """
    inputs, targets, used = x.reshape(-1), y.reshape(-1), max(0, len(ids) - 1)
    inputs[:used], inputs[used:] = ids[:-1], padding
    targets[:used], targets[used:] = np.where(is_learnt, ids, NOT_LEARNT)[1:], NOT_LEARNT


def pad(documents: Documents, x: np.ndarray, mask: np.ndarray, padding: int) -> None:
    """A row for each document; what is longer is cut off."""
    x[:], mask[:] = padding, False
    for row, valid, span in zip(x, mask, documents.spans(), strict=True):
        ids = documents.ids[span][: len(row)]
        row[: len(ids)], valid[: len(ids)] = ids, True


def pad_for_prediction(documents: Documents, x: np.ndarray, mask: np.ndarray, y: np.ndarray, padding: int) -> None:
    """The same, with the token after each as its target; so the last one is no input."""
    x[:], mask[:], y[:] = padding, False, NOT_LEARNT
    for row, valid, target, span in zip(x, mask, y, documents.spans(), strict=True):
        ids, is_learnt = documents.ids[span][: len(row) + 1], documents.is_learnt[span][: len(row) + 1]
        used = len(ids) - 1
        row[:used], valid[:used] = ids[:-1], True
        target[:used] = np.where(is_learnt[1:], ids[1:], NOT_LEARNT)
