"""A lost or stuck rank is named with its round and clients, and all others end."""

import itertools
import re
import time
from pathlib import Path

import pytest

from tests.support.marks import examples, exhaustive, timing
from tests.support.processes import run_ranks, start_ranks
from tests.support.waiting import wait_for

pytestmark = timing

SMALL = (
    "model={name: mlp, hidden: [16]}",
    "clients={total: 8, per_round: 4}",
    "local={epochs: 1, batch_size: 32, lr: 0.05}",
    "monitor.wandb.mode=disabled",
)


def arguments(folder: Path, *more: str) -> list[str]:
    return [*SMALL, f"run.dir={folder}", *more]


class TestRealRanks:
    def test_a_round_may_take_longer_than_the_timeout(self, tmp_path: Path) -> None:
        long = arguments(tmp_path, "rounds=1", "local.epochs=4", "comm.timeout=3", "checkpoint.every=0")
        codes, outputs = run_ranks(2, long, FL_DIST_FAULT="step:*@1=sleep:0.1")
        assert codes == [0, 0], outputs
        assert float(re.findall(r"round 1/1.* ([\d.]+) s", outputs[0])[0]) > 3

    @pytest.mark.parametrize(
        ("action", "server"),
        examples(itertools.product(("", "=stop"), ("dedicated", "shared")), [("", "dedicated"), ("=stop", "shared")]),
    )
    def test_a_rank_lost_during_local_training_is_detected(self, action: str, server: str, tmp_path: Path) -> None:
        """Local training of all ranks would never end."""
        endless = arguments(tmp_path, "local.epochs=1000000", f"topology.server={server}")
        with start_ranks(3, endless, FL_DIST_FAULT=f"step:30@2{action}") as processes:
            wait_for(lambda: processes[2].is_stopped, "the end of rank 2")
            start_time = time.monotonic()
            output = processes[0].communicate()[0]
            processes[1].communicate()
            assert time.monotonic() - start_time < 30
            assert processes[0].returncode == processes[1].returncode == 1
        assert re.search(r"error: rank 2 on \S+ was lost \(.*\) in round 1, whose clients were \d", output), output

    @pytest.mark.parametrize("action", examples(["", "=stop"], ["=stop"]))
    def test_a_server_lost_during_local_training_is_detected(self, action: str, tmp_path: Path) -> None:
        endless = arguments(tmp_path, "local.epochs=1000000")
        # The server waits for the workers right after the broadcast.
        with start_ranks(3, endless, FL_DIST_FAULT=f"reduce:1@0=sleep:3,reduce:1@0{action}") as processes:
            wait_for(lambda: processes[0].is_stopped, "the end of rank 0")
            start_time = time.monotonic()
            assert [process.wait() for process in processes[1:]] == [1, 1]
            assert time.monotonic() - start_time < 30
        for rank in (1, 2):
            log = (tmp_path / "logs" / f"rank{rank}.log").read_text()
            assert re.search(r"rank 0 on \S+, the server, was lost \(.*\) in round 1", log), log

    @pytest.mark.parametrize("action", examples(["", "=stop"], [""]))
    def test_a_rank_lost_while_connecting_is_detected(self, action: str, tmp_path: Path) -> None:
        with start_ranks(3, arguments(tmp_path), FL_DIST_FAULT=f"connect:1@2{action}") as processes:
            output = processes[0].communicate()[0]
            processes[1].communicate()
            assert processes[0].returncode == processes[1].returncode == 1
        assert re.search(r"^error: rank 2 on \S+ was lost \(", output, re.MULTILINE), output

    @pytest.mark.parametrize("action", examples(["", "=stop"], [""]))
    def test_a_server_lost_while_connecting_ends_the_others(self, action: str, tmp_path: Path) -> None:
        with start_ranks(3, arguments(tmp_path), FL_DIST_FAULT=f"connect:1@0{action}") as processes:
            assert [process.wait() for process in processes[1:]] == [1, 1]

    def test_an_error_while_connecting_is_reported_by_rank_0(self, tmp_path: Path) -> None:
        with start_ranks(3, arguments(tmp_path), FL_DIST_FAULT="connect:1@1=fail") as processes:
            output = processes[0].communicate()[0]
            assert [process.wait() for process in processes] == [1, 1, 1]
        assert re.search(r"^error: rank 1 on \S+ failed: .*injected fault", output, re.MULTILINE), output

    @pytest.mark.parametrize(
        ("point", "where"),
        [
            ("step:30@2", r"in round \d, client \d+"),
            pytest.param("evaluate:2@0", "in the evaluation of round 1", marks=exhaustive),
            pytest.param("server:2@0", "in the server step of round 2", marks=exhaustive),
        ],
    )
    def test_a_stuck_rank_reports_itself(self, point: str, where: str, tmp_path: Path) -> None:
        slow = arguments(tmp_path, "comm.timeout=3", "evaluate.batch_size=100")
        with start_ranks(3, slow, FL_DIST_FAULT=f"{point}=sleep:100") as processes:
            wait_for((tmp_path / "logs" / "rank2.log").exists, "the log of rank 2")
            start_time = time.monotonic()
            output = processes[0].communicate()[0]
            for process in processes:
                process.communicate()
            assert time.monotonic() - start_time < 60
            assert all(process.returncode == 1 for process in processes)
        rank = point[-1]
        assert re.search(rf"error: rank {rank} on \S+ is stuck: no progress for 3 s .*{where}", output), output
