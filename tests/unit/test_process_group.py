"""A single process has the same process group interface as a rank: store, collectives and failure detection."""

import pytest
import torch
import torch.distributed as dist

from fl_dist.common.errors import FlDistError
from fl_dist.config import Communication, Topology
from fl_dist.distributed.failures import RankLostError
from fl_dist.distributed.heartbeats import FINAL_HEARTBEAT
from fl_dist.distributed.key_value_store import KeyValueStore
from fl_dist.distributed.process_group import connect, hostname, single_process_group
from fl_dist.distributed.rank_info import RankInfo
from fl_dist.distributed.signals import StopRequest
from tests.support.waiting import free_port, wait_for


def test_one_process_is_server_and_worker() -> None:
    group = single_process_group(Topology(device="cpu"))
    assert (group.rank, group.size, list(group.workers), group.has_dedicated_server) == (0, 1, [0], False)
    assert (group.device, group.hosts()) == (torch.device("cpu"), [hostname()])
    tensor = torch.ones(3)
    group.collectives.broadcast(tensor)
    group.collectives.reduce(tensor)
    group.collectives.exchange([], [])
    assert tensor.tolist() == [1, 1, 1]
    assert group.store.broadcast_text("key", "text") == "text"
    with group.failure_detector.activity("a test"):
        group.failure_detector.progress()
    group.fail(RuntimeError("an error without other ranks"))
    group.close()
    assert group.failure_detector.failure_message == ""


def test_heartbeats_continue_while_the_group_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for all ranks there, and rank 0 may still be finishing."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rank_info = RankInfo(0, 1, 0, 1, "127.0.0.1", free_port())
    group = connect(rank_info, Topology(device="cpu"), Communication(), StopRequest(0.0))
    destroy = dist.destroy_process_group

    def destroy_later() -> None:
        heartbeat = group.store.get("heartbeat/0")
        wait_for(lambda: group.store.get("heartbeat/0") != heartbeat, "another heartbeat")
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", destroy_later)
    group.close()
    assert group.store.get("heartbeat/0") == FINAL_HEARTBEAT
    assert not dist.is_initialized()


def test_a_store_keeps_text_by_key() -> None:
    root = KeyValueStore(dist.HashStore())
    store = root.with_prefix("run")
    store.set("a", "1")
    assert (store.get("a"), store.get("b"), root.get("a")) == ("1", None, None)
    assert (store.compare_set("a", "2"), store.compare_set("b", "3")) == ("1", "3")
    assert (store.get_all(["b", "a"]), store.get_all([])) == (["3", "1"], [])
    store.delete("a")
    assert store.get("a") is None


def test_lost_ranks_are_fl_dist_and_runtime_errors() -> None:
    assert issubclass(RankLostError, FlDistError) and issubclass(RankLostError, RuntimeError)
