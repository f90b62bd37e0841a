"""What one rank has of its job, in one process or in many: device, collectives, key-value store, failure detector."""

import contextlib
import itertools
import json
import math
import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from fl_dist.config import Communication, Topology
from fl_dist.config.schema import MAX_SECONDS
from fl_dist.distributed import fault_injection
from fl_dist.distributed.collectives import Collectives, DistributedCollectives, LocalCollectives
from fl_dist.distributed.devices import DeviceSlot, check_device_slots, device_slot, pick_device
from fl_dist.distributed.failure_detector import FailureDetector
from fl_dist.distributed.failures import Failure, error_line, exit_code, is_transient
from fl_dist.distributed.key_value_store import KeyValueStore
from fl_dist.distributed.rank_info import SINGLE_PROCESS, RankInfo
from fl_dist.distributed.rendezvous import RendezvousWait, connect_store, new_store_connection
from fl_dist.distributed.signals import StopRequest

COLLECTIVE_TIMEOUT = timedelta(seconds=MAX_SECONDS)
"""No collective times out: heartbeats decide who is lost."""
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}
"""Switches torch's watchdog and its monitor off: they would end the process before this program can say why."""
REPORT_TIMEOUT_SECONDS = 10.0
"""How long a rank without a usable device tries to tell the others."""
_run_numbers = itertools.count()


class ProcessGroup:
    """Rank 0 is the server; the other ranks, and rank 0 too if the server is shared, are workers."""

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        backend: str = "gloo",
        rank_info: RankInfo = SINGLE_PROCESS,
        store: KeyValueStore | None = None,
        timeout: float = math.inf,
        stop: StopRequest | None = None,
    ) -> None:
        """Without a store it is a group of one process; with one, `connect` completes it."""
        self.rank, self.size, self.device = rank_info.rank, rank_info.size, device
        self.ranks_on_node = rank_info.local_size
        self.has_dedicated_server = has_dedicated_server(topology, self.size)
        self.workers: Sequence[int] = range(int(self.has_dedicated_server), self.size)
        self._topology, self._backend = topology, backend
        self._is_distributed, self._uses_nccl = store is not None, "nccl" in backend
        self.device_slots = [device_slot(hostname(), device)]
        """Of each rank, once they are connected."""
        self.store = store or KeyValueStore(dist.HashStore())
        self.failure_detector = FailureDetector(
            self.store, self.rank, self.size, timeout, stop or StopRequest(math.inf)
        )
        self.store.waiting = self.failure_detector.waiting
        self.collectives: Collectives = LocalCollectives()
        if self._is_distributed:
            self.collectives = DistributedCollectives(
                self.rank, self.size, device, self._uses_nccl, self.failure_detector
            )
        else:
            self.store.set("host/0", hostname())

    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [self.store.get(f"host/{rank}") or "unknown" for rank in range(self.size)]

    def fail(self, error: Exception) -> None:
        """Tell the other ranks why this one is about to leave, and whether a restart may help."""
        if self._is_distributed:
            reason = f"rank {self.rank} on {hostname()} failed: {error_line(error)}"
            self.failure_detector.report(Failure(reason, exit_code(error), is_transient(error)))

    def close(self) -> None:
        """At the end of a run that has not failed."""
        if self._is_distributed:
            if self.failure_detector.failure is None:  # NCCL waits for all ranks here, and heartbeats continue
                dist.destroy_process_group()
            self.failure_detector.stop()

    def connect(self, wait: RendezvousWait, prefix: str) -> None:
        """Wait for all ranks, compare their devices, connect them."""
        self.failure_detector.start()
        try:
            self._rendezvous(wait)
            self.device_slots = self._read_device_slots()
            check_device_slots(self.device_slots, self._topology.oversubscribe)
            with self.failure_detector.connecting(wait.timeout):
                self._connect_backend(wait, prefix)
        except Exception as e:
            self.fail(e)
            raise

    def _rendezvous(self, wait: RendezvousWait) -> None:
        """Wait until every rank is there: torch's own wait for one that never comes cannot report or be ended."""
        with self.failure_detector.waiting():
            self.failure_detector.send_heartbeat()  # whoever is there has a heartbeat
            self.store.set(f"slot/{self.rank}", json.dumps(self.device_slots[0]))
            self.store.set(f"host/{self.rank}", hostname())
            while not self._is_complete():
                wait.sleep(self._missing_ranks)

    def _is_complete(self) -> bool:
        """Rank 0 looks for all ranks and tells the others."""
        if self.rank == 0 and not self._missing_ranks():
            self.store.set("complete", "1")
        return self.store.get("complete") is not None

    def _missing_ranks(self) -> list[int]:
        return [rank for rank in range(self.size) if self.store.get(f"host/{rank}") is None]

    def _read_device_slots(self) -> list[DeviceSlot]:
        with self.failure_detector.waiting():
            texts = self.store.get_all([f"slot/{rank}" for rank in range(self.size)])
        return [DeviceSlot(*json.loads(text)) for text in texts]

    def _connect_backend(self, wait: RendezvousWait, prefix: str) -> None:
        """The failure detector watches meanwhile, over its own connection to the store."""
        fault_injection.point("connect")
        store = dist.PrefixStore(prefix, new_store_connection(wait.rank_info, wait.timeout))
        # With its device given, NCCL connects here and not in the first round.
        device = self.device if self._uses_nccl else None
        dist.init_process_group(self._backend, None, COLLECTIVE_TIMEOUT, self.size, self.rank, store, device_id=device)
        for kind in {torch.device("cpu"), self.device}:  # the first collective connects
            dist.all_reduce(torch.zeros(1, device=kind))


def connect(
    rank_info: RankInfo | None, topology: Topology, communication: Communication, stop: StopRequest
) -> ProcessGroup:
    """This process among the ranks of its job; alone, if it has no rank."""
    if rank_info is None:
        return single_process_group(topology)
    prefix = f"fl_dist/{_attempt(rank_info)}/{next(_run_numbers)}"
    try:
        device, backend = _prepare_device(topology, rank_info.local_rank)
    except Exception as e:
        _report_device_failure(e, topology, rank_info, prefix, stop)
        raise
    wait = RendezvousWait(rank_info, communication.rendezvous_timeout, stop)
    store = connect_store(rank_info, wait).with_prefix(prefix)
    group = ProcessGroup(topology, device, backend, rank_info, store, communication.timeout, stop)
    group.connect(wait, f"{prefix}/group")
    return group


def _prepare_device(topology: Topology, local_rank: int) -> tuple[torch.device, str]:
    """This rank's device and backend."""
    fault_injection.point("device")
    device = pick_device(topology, local_rank)
    return device, select_backend(device, topology.oversubscribe)


def _report_device_failure(
    error: Exception, topology: Topology, rank_info: RankInfo, prefix: str, stop: StopRequest
) -> None:
    """Tell the other ranks, which would wait for this one, unless rank 0 is gone for the same reason."""
    wait = RendezvousWait(rank_info, REPORT_TIMEOUT_SECONDS, stop, error_line(error))
    with contextlib.suppress(Exception):
        store = connect_store(rank_info, wait).with_prefix(prefix)
        group = ProcessGroup(topology, torch.device("cpu"), rank_info=rank_info, store=store, stop=stop)
        group.failure_detector.start()  # rank 0, which holds the store, stays until the others know
        group.fail(error)


def single_process_group(topology: Topology) -> ProcessGroup:
    """One process is server and worker."""
    return ProcessGroup(topology, pick_device(topology, 0))


def has_dedicated_server(topology: Topology, size: int) -> bool:
    """Whether rank 0 trains no clients, so that it has time while the others train."""
    return topology.server != "shared" and size > 1


def select_backend(device: torch.device, oversubscribe: bool) -> str:
    """NCCL cannot connect ranks that share a GPU. Makes a GPU the current one of this process."""
    if device.type != "cuda":
        return "gloo"
    torch.cuda.set_device(device)
    os.environ.update(NCCL_ENVIRONMENT)
    return "gloo" if oversubscribe else "cpu:gloo,cuda:nccl"


def hostname() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _attempt(rank_info: RankInfo) -> str:
    """torchrun's restarts may share a store, whose old keys must not be read. Agents of several nodes count
    differently, but there the launchers give every attempt its own store."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if rank_info.is_single_node else "0"
