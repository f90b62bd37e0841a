"""Texts that every rank can read and write. They live in rank 0's process, which may have been killed or stopped."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch.distributed as dist

from fl_dist.distributed import sockets
from fl_dist.distributed.failures import ConnectionLostError

POLL_INTERVAL_SECONDS = 0.02


class KeyValueStore:
    """torch's store, with waits that end. One process alone uses it over a `HashStore`."""

    def __init__(self, store: dist.Store, port: int = 0) -> None:
        self._store, self._port, self._is_silent = store, port, False
        self.waiting: Callable[[], AbstractContextManager[Callable[[], None]]] = lambda: contextlib.nullcontext(_pass)
        """The context of a wait for other ranks; it gives the function to call between two looks."""

    def with_prefix(self, prefix: str) -> "KeyValueStore":
        return KeyValueStore(dist.PrefixStore(prefix, self._store), self._port)

    def set_timeout(self, seconds: float) -> None:
        """Limit the wait for each answer; torch's own timeout does not cover all requests."""
        sockets.set_timeout(self._port, seconds)

    def set(self, key: str, text: str) -> None:
        with self._request():
            self._store.set(key, text)

    def get(self, key: str) -> str | None:
        with self._request():
            return self._store.get(key).decode() if self._store.check([key]) else None

    def get_all(self, keys: list[str]) -> list[str]:
        """The texts of keys that exist: it would wait for others."""
        with self._request():
            return [text.decode() for text in self._store.multi_get(keys)] if keys else []

    def compare_set(self, key: str, text: str) -> str:
        """Set the key unless it exists; return its text."""
        with self._request():
            return self._store.compare_set(key, "", text).decode()

    def delete(self, key: str) -> None:
        with self._request():
            self._store.delete_key(key)

    def broadcast_text(self, key: str, text: str | None) -> str:
        """The text of the one rank that has it, on every rank; the others pass None."""
        if text is not None:
            self.set(key, text)
        with self.waiting() as check:
            while (shared := self.get(key)) is None:
                check()
                time.sleep(POLL_INTERVAL_SECONDS)
        return shared

    @contextlib.contextmanager
    def _request(self) -> Iterator[None]:
        if self._is_silent:
            raise ConnectionLostError("rank 0 did not answer")
        try:
            yield
        except RuntimeError:
            # A late answer would be taken for the answer to the next request.
            self._is_silent = True
            raise


def _pass() -> None:
    pass
