"""Ranks on one machine accept connections from that machine only."""

from pathlib import Path

from tests.support.checkpoints import arguments
from tests.support.marks import timing
from tests.support.processes import listening_addresses, start_ranks
from tests.support.waiting import wait_for

pytestmark = timing


def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path: Path) -> None:
    with start_ranks(3, arguments(tmp_path, "rounds=100000")) as processes:
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists(), "a round")
        assert listening_addresses([p.pid for p in processes]) == {"0100007F"}
