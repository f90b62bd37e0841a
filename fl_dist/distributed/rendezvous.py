"""How the ranks of a job find each other: a TCP store in rank 0. Every wait for it reports itself and ends."""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist

from fl_dist.common.terminal import print_error, print_progress
from fl_dist.distributed.failures import RankLostError
from fl_dist.distributed.key_value_store import KeyValueStore
from fl_dist.distributed.rank_info import RankInfo
from fl_dist.distributed.signals import EXIT_REQUEUE, StopRequest

REPORT_INTERVAL_SECONDS = 10.0
"""Between two lines about missing ranks."""


class RendezvousWait:
    """The wait for missing ranks: it names them, and ends with a signal or after its timeout."""

    def __init__(self, rank_info: RankInfo, timeout: float, stop: StopRequest, error: str = "") -> None:
        """`error`: why this rank cannot take part; it waits only to say so."""
        self.rank_info, self.timeout, self.stop, self._error = rank_info, timeout, stop, error
        self._start = time.monotonic()
        self._next_report = REPORT_INTERVAL_SECONDS

    def sleep(self, missing: Callable[[], list[int]]) -> None:
        """A short sleep; RankLostError if the wait is over."""
        waited = time.monotonic() - self._start
        if self.stop.is_requested:
            self._give_up(missing(), "interrupted while waiting for {}; nothing had begun", EXIT_REQUEUE)
        if waited > self.timeout:
            self._give_up(missing(), f"{{}} did not connect within {self.timeout:g} s (comm.rendezvous_timeout)", 1)
        if waited > self._next_report:
            self._next_report += REPORT_INTERVAL_SECONDS
            self._report(missing, waited)
        time.sleep(0.05 + self.rank_info.size / 2000)  # all ranks query rank 0

    def _report(self, missing: Callable[[], list[int]], waited: float) -> None:
        """Rank 0 reports for all ranks; rank 1 reports a missing rank 0."""
        if self.rank_info.rank == 0 or (self.rank_info.rank == 1 and missing() == [0]):
            print_progress(f"waiting for {self._describe(missing())} ({waited:.0f} s)")

    def _give_up(self, missing: list[int], reason: str, code: int) -> None:
        message = reason.format(self._describe(missing))
        if self.rank_info.rank != 0 and missing == [0]:  # rank 0, which prints errors, is not there
            print_error(self._error or message)
        raise RankLostError(message, code, missing)

    def _describe(self, ranks: list[int]) -> str:
        """They may have arrived since."""
        names = ", ".join(map(str, ranks))
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {names} of {self.rank_info.size}" if ranks else "other ranks"


_stores: dict[RankInfo, KeyValueStore] = {}


def connect_store(rank_info: RankInfo, wait: RendezvousWait) -> KeyValueStore:
    """The store of the job; one process may run several configurations in turn over it."""
    if rank_info not in _stores:
        _stores[rank_info] = KeyValueStore(_open_store(rank_info, wait))
    return _stores[rank_info]


def new_store_connection(rank_info: RankInfo, seconds: float) -> dist.Store:
    """Another connection to the store: a thread that waits on one blocks all other threads on it."""
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(_address(rank_info), rank_info.port, rank_info.size, False, timeout, wait_for_workers=False)


def _open_store(rank_info: RankInfo, wait: RendezvousWait) -> dist.Store:
    is_local = _is_loopback(rank_info)
    if is_local:  # nothing needs to listen on any other address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank_info.rank != 0 or _torchrun_has_store():
        return _connect_to_rank_0(rank_info, wait)
    listener = socket.create_server(("127.0.0.1", rank_info.port)).detach() if is_local else None
    address, timeout = _address(rank_info), timedelta(seconds=wait.timeout)
    return dist.TCPStore(
        address, rank_info.port, rank_info.size, True, timeout, wait_for_workers=False, master_listen_fd=listener
    )


def _connect_to_rank_0(rank_info: RankInfo, wait: RendezvousWait) -> dist.Store:
    while True:
        try:
            # torch's own attempts would print warnings.
            socket.create_connection((_address(rank_info), rank_info.port), timeout=1.0).close()
            return _connect_in_thread(rank_info, wait)
        except (OSError, RuntimeError):
            wait.sleep(lambda: [0])


def _connect_in_thread(rank_info: RankInfo, wait: RendezvousWait) -> dist.Store:
    """A stopped rank 0 never answers, which cannot be interrupted; a rank that gives up leaves without the thread."""
    connection: Future[dist.Store] = Future()

    def connect() -> None:
        try:
            connection.set_result(new_store_connection(rank_info, wait.timeout))
        except RuntimeError as e:
            connection.set_exception(e)

    threading.Thread(target=connect, daemon=True).start()
    while not connection.done():
        wait.sleep(lambda: [0])
    return connection.result()


def _torchrun_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_loopback(rank_info: RankInfo) -> bool:
    return rank_info.is_single_node and not _torchrun_has_store()


def _address(rank_info: RankInfo) -> str:
    return "127.0.0.1" if _is_loopback(rank_info) else rank_info.host
