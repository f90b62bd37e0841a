"""A single process has the same process group interface as a rank: store, collectives and failure detection."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fl_dist.common.errors import FlDistError
from fl_dist.config import Topology
from fl_dist.distributed.failures import ConnectionLostError, RankLostError
from fl_dist.distributed.key_value_store import KeyValueStore
from fl_dist.distributed.process_group import hostname, single_process_group
from tests.support.waiting import free_port


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
    group.fail("an error without other ranks", 1)
    group.close()
    assert group.failure_detector.failure_message == ""


def test_a_store_keeps_text_by_key() -> None:
    root = KeyValueStore(dist.HashStore())
    store = root.with_prefix("run")
    store.set("a", "1")
    assert (store.get("a"), store.get("b"), root.get("a")) == ("1", None, None)
    assert (store.compare_set("a", "2"), store.compare_set("b", "3")) == ("1", "3")
    assert (store.get_all(["b", "a"]), store.get_all([])) == (["3", "1"], [])
    store.delete("a")
    assert store.get("a") is None


def test_a_store_is_not_used_after_a_timeout() -> None:
    """A late answer would be taken for the answer to another request."""
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=60), wait_for_workers=False)
    server.set_timeout(timedelta(seconds=0.1))
    store = KeyValueStore(server, port)
    with pytest.raises(RuntimeError):
        store.get_all(["absent"])
    with pytest.raises(ConnectionLostError, match="rank 0 did not answer"):
        store.get("absent")


@pytest.mark.parametrize("kind", [RankLostError, ConnectionLostError])
def test_lost_ranks_and_connections_are_fl_dist_and_runtime_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, FlDistError) and issubclass(kind, RuntimeError)
