"""Ranks on pretended GPUs: the bits of the CPU, known memory, placement, and an end when one of them is lost."""

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_dist.algorithms import algorithms
from fl_dist.algorithms.memory import needs
from tests.support import gpu
from tests.support.gpu_runs import (
    ALGORITHMS,
    Lab,
    diagnosed,
    small_models,
)
from tests.support.harness import algorithm, merge, representatives
from tests.support.marks import examples, exhaustive, timing
from tests.support.processes import QUIET, Rank, run, run_ranks, started_ranks
from tests.support.run_folder import model_hash, results
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with small_models(tmp_path_factory.mktemp("gpu")) as lab:
        yield lab


class TestSameBitsEachTime:
    def test_no_compiler_is_imported_for_it(self, tmp_path: Path) -> None:
        code = (
            "import sys; from fl_dist.main import main; code = main(sys.argv[1:]); "
            "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules]); sys.exit(code)"
        )
        settings = [*QUIET, "rounds=1", "clients={total: 4, per_round: 1}", "local.epochs=1", f"run.dir={tmp_path}"]
        code, output = run([sys.executable, "-c", code, *settings])
        assert (code, output.splitlines()[-1]) == (0, "[]"), output


JOB = {"algorithm": algorithm("scaffold"), "rounds": 4, "clients": {"schedule": [[0, 1], [2, 3], [0, 2], [0, 3]]}}
"""Two of the last pairs have met one worker before, so that the variables of one have to move."""


@pytest.fixture(scope="module", params=["", "asynchronous"])
def ranks(lab: Lab, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the GPUs of a server and two workers saw, whose bits are those of one process on the CPU."""
    job = merge(JOB, {"clients": {"total": 4, "per_round": 2}, "partition": {"name": "iid"}})
    alone = lab.pair("alone", job)
    folder = lab.folder / f"ranks {request.param}"
    folder.mkdir()
    arguments = [str(lab.folder / "alone.json"), f"run.dir={folder / 'run'}", "evaluate.where=server"]
    codes, outputs = run_ranks(3, arguments, PRETENDED_GPU=str(folder), PRETENDED_NCCL=request.param)
    assert not any(codes), outputs
    assert model_hash(folder / "run") == model_hash(alone.cpu)
    assert results(folder / "run") == results(alone.cpu)
    return [gpu.reports(folder, rank)[0] for rank in range(3)]


def test_variables_that_come_from_another_rank_reach_the_gpu_without_a_wait(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        slow = [(what, where) for (what, where), _ in seen["waits"] if what.startswith("host to device")]
        assert not [where for _, where in slow if where.startswith(("fl_dist/machine/", "fl_dist/engine/state"))], slow


@exhaustive
def test_diagnostics_of_several_gpus(lab: Lab, tmp_path: Path) -> None:
    alone = diagnosed(lab)
    arguments = [str(lab.folder / "diagnostics.json"), f"run.dir={tmp_path / 'run'}"]
    codes, outputs = run_ranks(3, arguments, PRETENDED_GPU=str(tmp_path), PRETENDED_NCCL="asynchronous")
    assert not any(codes), outputs
    assert results(tmp_path / "run") == results(alone.cpu)


def test_models_and_sums_go_from_gpu_to_gpu_and_client_state_between_hosts(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        found = {tuple(key): n for key, n in seen["collectives"]}
        assert {key[1:]: n for key, n in found.items() if key[0] == "nccl"} == {
            ("allreduce", "float32"): 1,  # the first, which connects
            ("broadcast", "uint8"): 5,
            ("reduce", "int64"): 4,
        }
    connecting = {("gloo", "allreduce", "float32")}
    moved = [{tuple(key) for key, _ in seen["collectives"] if key[0] == "gloo"} - connecting for seen in ranks]
    assert moved[0] == set()
    assert moved[1] | moved[2] == {("gloo", "send", "uint8"), ("gloo", "recv", "uint8")}


@pytest.mark.parametrize(("name", "models"), [("scaffold", 0), ("fedacg", 2)])
def test_all_gpus_evaluate_what_went_down_or_what_follows_it(lab: Lab, tmp_path: Path, name: str, models: int) -> None:
    """Two ranks have a batch, the third none. Clients of FedACG do not start from the server's model."""
    alone = lab.pair(f"algorithm {name}", ALGORITHMS[name])
    arguments = [str(lab.folder / f"algorithm {name}.json"), f"run.dir={tmp_path / 'run'}", "evaluate.where=workers"]
    codes, outputs = run_ranks(3, arguments, PRETENDED_GPU=str(tmp_path), PRETENDED_NCCL="asynchronous")
    assert not any(codes), outputs
    assert model_hash(tmp_path / "run") == model_hash(alone.cpu)
    assert results(tmp_path / "run") == results(alone.cpu)
    for rank in range(3):
        found = {tuple(key): n for key, n in gpu.reports(tmp_path, rank)[0]["collectives"]}
        assert found["nccl", "reduce", "int64"] == 2 + 2
        assert found["nccl", "broadcast", "uint8"] == 3
        assert found.get(("nccl", "broadcast", "float32"), 0) == models


@pytest.mark.parametrize("names", [sorted(representatives()), pytest.param([*algorithms], marks=exhaustive)], ids=len)
def test_memory_is_what_the_table_says(names: list[str], tmp_path: Path) -> None:
    """That of a model on the device, and that of a round of the chain on a stand-in."""
    counted = {name: needs(algorithms.build(name, {})) for name in names}
    measured = gpu.peaks(tmp_path, names)
    assert {name: tuple(map(round, both)) for name, both in measured.items()} == counted
    assert counted["fedavg"].worker <= 30 and counted["fedavg"].server <= 40


class TestPlacement:
    """Ranks whose launcher shows each of them what it wants."""

    def run(self, lab: Lab, folder: Path, visible: list[str], *more: str) -> tuple[list[int | None], str, Path]:
        alone = lab.pair("algorithm scaffold", ALGORITHMS["scaffold"])
        arguments = [str(lab.folder / "algorithm scaffold.json"), f"run.dir={folder / 'run'}", *more]
        own = [{"CUDA_VISIBLE_DEVICES": shown, "LOCAL_RANK": "0"} for shown in visible]
        codes, (output, *_) = run_ranks(len(visible), arguments, own=own, PRETENDED_GPU=str(folder))
        return codes, output, alone.cpu

    @pytest.mark.parametrize(
        ("visible", "more", "group"),
        [
            (["2", "5", "0"], (), "nccl"),
            (["MIG-0-1", "MIG-1-1", "MIG-4-7"], (), "nccl"),
            (["3", "3", "3"], ("topology.oversubscribe=true",), "gloo"),
            (["MIG-0-1", "MIG-0-2"], ("topology.oversubscribe=true",), "gloo"),
            (["1"], (), "nccl"),
        ],
        ids=str,
    )
    def test_what_goes_together_has_the_bits_of_the_cpu(
        self, lab: Lab, visible: list[str], more: tuple[str, ...], group: str, tmp_path: Path
    ) -> None:
        codes, output, alone = self.run(lab, tmp_path, visible, *more)
        assert not any(codes), output
        assert model_hash(tmp_path / "run") == model_hash(alone)
        for rank in range(len(visible)):
            (seen,) = gpu.reports(tmp_path, rank)
            sums = {tuple(key) for key, _ in seen["collectives"] if key[1] == "reduce"}
            assert sums == {(group, "reduce", "int64")}
            assert seen["steps"] > 0 or rank == 0

    @pytest.mark.parametrize(
        ("visible", "words"),
        [
            (["2", "5", "5"], r"ranks 1 and 2 share one GPU of \S+, which NCCL cannot connect: start one rank a GPU"),
            (["MIG-0-1", "MIG-0-2"], r"ranks 0 and 1 have parts of one GPU of \S+, which NCCL cannot connect: start"),
            (["2", "", "5"], r"rank 1 on \S+ sees no GPU, but rank 0 on \S+ does: ask for GPUs on every node"),
            (["", "4"], r"rank 0 on \S+ sees no GPU, but rank 1 on \S+ does: ask for GPUs on every node"),
        ],
        ids=str,
    )
    def test_what_does_not_is_refused_in_one_line(
        self, lab: Lab, visible: list[str], words: str, tmp_path: Path
    ) -> None:
        codes, output, _ = self.run(lab, tmp_path, visible)
        assert 0 not in codes and None not in codes
        (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
        assert re.search(words, line)
        assert "Traceback" not in output and not (tmp_path / "run" / "metrics.jsonl").exists()


LOST = r"^error: rank 1 on \S+ was lost \(.*\) in round 1, whose clients were \d"
STUCK = r"^error: rank 1 on \S+ is stuck: no progress for 3 s \(comm.timeout\) in round 1, client \d"


@contextlib.contextmanager
def endless_round(lab: Lab, folder: Path, fault: str, nccl: str, *more: str) -> Iterator[list[Rank]]:
    """A server and two workers, of which one is disturbed in the middle of steps that would never end."""
    config = lab.config({"local": {"epochs": 10**6}, "clients": {"per_round": 3}})
    (folder / "config.json").write_text(json.dumps(config))
    arguments = [str(folder / "config.json"), f"run.dir={folder / 'run'}", *more]
    with started_ranks(3, arguments, FL_DIST_FAULT=fault, PRETENDED_GPU=str(folder), PRETENDED_NCCL=nccl) as ranks:
        yield ranks


def assert_said(server: Rank, words: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not (found := re.search(words, server.output(), re.MULTILINE)) and time.monotonic() < end:
        time.sleep(0.05)
    assert found, server.output()


@timing
@pytest.mark.parametrize(
    ("nccl", "seconds"),
    examples([("asynchronous", 30.0), ("silent", 30.0), ("hanging", 60.0)], [("asynchronous", 30.0)]),
)
def test_a_killed_worker_is_named_and_everybody_ends(lab: Lab, tmp_path: Path, nccl: str, seconds: float) -> None:
    with endless_round(lab, tmp_path, "step:9@1", nccl) as (server, killed, other):
        assert killed.wait() == -signal.SIGKILL
        assert_said(server, LOST, seconds)
        for rank in (server, other):
            assert rank.wait() == 1


@timing
@pytest.mark.parametrize(("action", "words"), examples([("stop", LOST), ("sleep:100", STUCK)], [("stop", LOST)]))
def test_a_stopped_or_stuck_worker_is_named_too(lab: Lab, tmp_path: Path, action: str, words: str) -> None:
    with endless_round(lab, tmp_path, f"step:9@1={action}", "asynchronous", "comm.timeout=3") as (server, stuck, other):
        log = tmp_path / "run" / "logs" / "rank1.log"
        wait_for(lambda: stuck.stopped if action == "stop" else log.exists(), "the first log or stop")
        assert_said(server, words, 30)
        for rank in (server, other, *([stuck] if action != "stop" else [])):
            assert rank.wait() == 1


@timing
@pytest.mark.parametrize("action", examples(["", "=stop"], [""]))
def test_without_their_server_workers_end(lab: Lab, tmp_path: Path, action: str) -> None:
    """Which is in the middle of steps of its own."""
    shared = "topology.server=shared"
    with endless_round(lab, tmp_path, f"step:9@0{action}", "asynchronous", shared) as (server, *others):
        wait_for(lambda: server.stopped, "the stop of rank 0")
        for rank in others:
            assert rank.wait() == 1
    for rank in (1, 2):
        log = (tmp_path / "run" / "logs" / f"rank{rank}.log").read_text()
        assert re.search(r"rank 0 on \S+, the server, was lost \(.*\) in round 1, whose clients were \d", log), log
