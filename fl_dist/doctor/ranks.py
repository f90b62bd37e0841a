"""The doctor's own processes, one per rank: they exchange texts through a store and never touch a device.

What may crash, hang or occupy a GPU runs in their child processes.
"""

import itertools
import json
import time
from typing import Any

import torch.distributed as dist

from fl_dist.distributed.failures import RankLostError
from fl_dist.distributed.key_value_store import POLL_INTERVAL_SECONDS, KeyValueStore
from fl_dist.distributed.process_group import hostname
from fl_dist.distributed.rank_info import SINGLE_PROCESS, RankInfo
from fl_dist.distributed.rendezvous import RendezvousWait, connect_store
from fl_dist.distributed.signals import StopRequest

CONNECT_TIMEOUT_SECONDS = 90.0
ANSWER_TIMEOUT_SECONDS = 600.0
"""For rank 0's next request: longer than all that it does meanwhile."""


class Ranks:
    def __init__(self, rank_info: RankInfo | None) -> None:
        self.info = rank_info or SINGLE_PROCESS
        self.rank, self.size = self.info.rank, self.info.size
        self.hosts = [hostname()]
        self._store, self._numbers = _connect(rank_info), itertools.count()

    def gather(self, value: Any, seconds: float) -> list[Any]:
        """On rank 0, the value of each rank, None for those that did not answer in time; empty on other ranks."""
        number = next(self._numbers)
        self._store.set(f"{number}/{self.rank}", json.dumps(value))
        if self.rank != 0:
            return []
        deadline = time.monotonic() + seconds
        return [self._wait_for(f"{number}/{rank}", deadline) for rank in range(self.size)]

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""
        key = f"{next(self._numbers)}/all"
        if self.rank == 0:
            self._store.set(key, json.dumps([value]))
            return value
        answer = self._wait_for(key, time.monotonic() + ANSWER_TIMEOUT_SECONDS)
        if answer is None:
            raise RankLostError("rank 0 did not answer")
        return answer[0]

    def _wait_for(self, key: str, deadline: float) -> Any:
        while (text := self._store.get(key)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_INTERVAL_SECONDS)
        return json.loads(text)


def _connect(rank_info: RankInfo | None) -> KeyValueStore:
    if rank_info is None:
        return KeyValueStore(dist.HashStore())
    wait = RendezvousWait(rank_info, CONNECT_TIMEOUT_SECONDS, StopRequest(0.0))
    return connect_store(rank_info, wait).with_prefix("fl_dist/doctor")
