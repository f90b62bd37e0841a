"""Texts that every rank can read and write. They live in rank 0's process, which may have been killed or stopped."""

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch.distributed as dist

POLL_INTERVAL_SECONDS = 0.02


class KeyValueStore:
    """torch's store for texts. One process alone uses it over a `HashStore`.

    A request raises a RuntimeError if rank 0 is gone and never returns if it is stopped: the failure detector notices.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """The context of a wait for other ranks."""

    def with_prefix(self, prefix: str) -> "KeyValueStore":
        return KeyValueStore(dist.PrefixStore(prefix, self._store))

    def set(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def get_all(self, keys: list[str]) -> list[str]:
        """The texts of keys that exist: it would wait for others."""
        return [text.decode() for text in self._store.multi_get(keys)] if keys else []

    def compare_set(self, key: str, text: str) -> str:
        """Set the key unless it exists; return its text."""
        return self._store.compare_set(key, "", text).decode()

    def delete(self, key: str) -> None:
        self._store.delete_key(key)

    def broadcast_text(self, key: str, text: str | None) -> str:
        """The text of the one rank that has it, on every rank; the others pass None."""
        if text is not None:
            self.set(key, text)
        with self.waiting():
            while (shared := self.get(key)) is None:
                time.sleep(POLL_INTERVAL_SECONDS)
        return shared
