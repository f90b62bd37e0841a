"""Ranks on simulated GPUs: the bits of the CPU, known memory, placement, and an exit when a rank is lost."""

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

from fl_dist.algorithms import algorithms, build
from fl_dist.algorithms.memory_needs import SUM_BYTES, MemoryNeeds, memory_needs
from fl_dist.optimizers.adamw import AdamW
from fl_dist.optimizers.sgd import SGD
from tests.support import simulated_gpu
from tests.support.gpu_comparison import (
    ALGORITHMS,
    DeviceComparison,
    run_diagnostics,
    small_models,
)
from tests.support.harness import algorithm, merge, representatives
from tests.support.marks import examples, exhaustive, timing
from tests.support.processes import NO_WANDB, RankProcess, run, run_ranks, start_ranks
from tests.support.run_folder import model_hash, reproducible_records
from tests.support.waiting import Hold, wait_for


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceComparison]:
    with small_models(tmp_path_factory.mktemp("gpu")) as comparison:
        yield comparison


class TestDeterminism:
    def test_no_compiler_is_imported(self, tmp_path: Path) -> None:
        code = (
            "import sys; from fl_dist.main import main; code = main(sys.argv[1:]); "
            "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules]); sys.exit(code)"
        )
        settings = [*NO_WANDB, "rounds=1", "clients={total: 4, per_round: 1}", "local.epochs=1", f"run.dir={tmp_path}"]
        code, output = run([sys.executable, "-c", code, *settings])
        assert (code, output.splitlines()[-1]) == (0, "[]"), output


JOB = {"algorithm": algorithm("scaffold"), "rounds": 4, "clients": {"schedule": [[0, 1], [2, 3], [0, 2], [0, 3]]}}
"""Some of the last cohorts trained on one worker before, so that client state has to move to another."""


@pytest.fixture(scope="module", params=["", "asynchronous"])
def ranks(comparison: DeviceComparison, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The GPU reports of a server and two workers, whose bits equal those of one process on the CPU."""
    job = merge(JOB, {"clients": {"total": 4, "per_round": 2}, "partition": {"name": "iid"}})
    single_process = comparison.run("alone", job)
    folder = comparison.folder / f"ranks {request.param}"
    folder.mkdir()
    arguments = [str(comparison.folder / "alone.json"), f"run.dir={folder / 'run'}", "evaluate.where=server"]
    codes, outputs = run_ranks(3, arguments, SIMULATED_GPU=str(folder), SIMULATED_NCCL=request.param)
    assert not any(codes), outputs
    assert model_hash(folder / "run") == model_hash(single_process.cpu)
    assert reproducible_records(folder / "run") == reproducible_records(single_process.cpu)
    return [simulated_gpu.read_reports(folder, rank)[0] for rank in range(3)]


def test_client_state_from_another_rank_reaches_the_gpu_without_a_wait(ranks: list[dict[str, Any]]) -> None:
    for report in ranks:
        host_copies = [(what, where) for (what, where), _ in report["waits"] if what.startswith("host to device")]
        assert not [
            where for _, where in host_copies if where.startswith(("fl_dist/distributed/", "fl_dist/federation/state"))
        ], host_copies


@exhaustive
def test_diagnostics_on_several_gpus_equal_those_of_the_cpu(comparison: DeviceComparison, tmp_path: Path) -> None:
    single_process = run_diagnostics(comparison)
    arguments = [str(comparison.folder / "diagnostics.json"), f"run.dir={tmp_path / 'run'}"]
    codes, outputs = run_ranks(3, arguments, SIMULATED_GPU=str(tmp_path), SIMULATED_NCCL="asynchronous")
    assert not any(codes), outputs
    assert reproducible_records(tmp_path / "run") == reproducible_records(single_process.cpu)


def test_models_and_sums_use_nccl_and_client_state_uses_gloo(ranks: list[dict[str, Any]]) -> None:
    for report in ranks:
        counts = {tuple(key): n for key, n in report["collectives"]}
        assert {key[1:]: n for key, n in counts.items() if key[0] == "nccl"} == {
            ("allreduce", "float32"): 1,  # the first, which connects the ranks
            ("broadcast", "uint8"): 5,
            ("reduce", "int64"): 4,
        }
    connecting = {("gloo", "allreduce", "float32")}
    transfers = [{tuple(key) for key, _ in report["collectives"] if key[0] == "gloo"} - connecting for report in ranks]
    assert transfers[0] == set()
    assert transfers[1] | transfers[2] == {("gloo", "send", "uint8"), ("gloo", "recv", "uint8")}


@pytest.mark.parametrize(("name", "models"), [("scaffold", 0), ("fedacg", 2)])
def test_all_gpus_evaluate_the_broadcast_model_or_the_next_one(
    comparison: DeviceComparison, tmp_path: Path, name: str, models: int
) -> None:
    """Two ranks have a batch, the third none. Clients of FedACG do not start from the server's model."""
    single_process = comparison.run(f"algorithm {name}", ALGORITHMS[name])
    arguments = [
        str(comparison.folder / f"algorithm {name}.json"),
        f"run.dir={tmp_path / 'run'}",
        "evaluate.where=workers",
    ]
    codes, outputs = run_ranks(3, arguments, SIMULATED_GPU=str(tmp_path), SIMULATED_NCCL="asynchronous")
    assert not any(codes), outputs
    assert model_hash(tmp_path / "run") == model_hash(single_process.cpu)
    assert reproducible_records(tmp_path / "run") == reproducible_records(single_process.cpu)
    for rank in range(3):
        counts = {tuple(key): n for key, n in simulated_gpu.read_reports(tmp_path, rank)[0]["collectives"]}
        assert counts["nccl", "reduce", "int64"] == 2 + 2
        assert counts["nccl", "broadcast", "uint8"] == 3
        assert counts.get(("nccl", "broadcast", "float32"), 0) == models


@pytest.mark.parametrize("names", [sorted(representatives()), pytest.param([*algorithms], marks=exhaustive)], ids=len)
def test_peak_memory_equals_the_table(names: list[str], tmp_path: Path) -> None:
    """The measured peak memory equals the computed one."""
    computed = {name: memory_needs(algorithms.build(name, {}), SGD(0.9, 0.0)) for name in names}
    assert_peaks(computed, simulated_gpu.measure_peaks(tmp_path, {name: [f"algorithm={name}"] for name in names}))
    assert computed["fedavg"].worker <= 30 and computed["fedavg"].server <= 40


@pytest.mark.parametrize("keep", ["round", "client"])
def test_peak_memory_with_adamw(keep: str, tmp_path: Path) -> None:
    names = ["fedavg", "fedsam", "scaffold"]
    computed = {name: memory_needs(algorithms.build(name, {}), AdamW(0.0)) for name in names}
    optimizer = f"local.optimizer={{name: adamw, keep: {keep}}}"
    assert_peaks(computed, simulated_gpu.measure_peaks(tmp_path, {n: [f"algorithm={n}", optimizer] for n in names}))


def test_peak_memory_with_uploads_that_are_changed(tmp_path: Path) -> None:
    """Fewer bytes are gathered than summed: there is no sum of updates."""
    cases = {
        "top_k": ["algorithm={name: scaffold, with: [top_k]}"],
        "sign": ["algorithm={name: fedavg, with: [sign]}"],
        "quantise": ["algorithm={name: fedavg, with: [quantise]}"],
        "clip_and_noise": ["algorithm={name: fedavg, with: [clip_and_noise]}", "server.weighting=uniform"],
        "median": ["algorithm={name: fedavg, with: [median]}", "comm.reduce=gather"],
    }
    names = {"top_k": "scaffold"}
    computed = {
        case: memory_needs(build({"name": names.get(case, "fedavg"), "with": [{case: {}}]}), SGD(0.9, 0.0))
        for case in cases
    }
    worker, server = computed["median"]
    computed["median"] = MemoryNeeds(worker - SUM_BYTES, server - SUM_BYTES)
    assert_peaks(computed, simulated_gpu.measure_peaks(tmp_path, cases))


def assert_peaks(computed: dict[str, MemoryNeeds], measured: dict[str, tuple[float, float]]) -> None:
    """Activations and the entries that are compared or sent count too, but for much less than a byte."""
    for name, peaks in measured.items():
        assert peaks == pytest.approx(tuple(computed[name]), abs=0.25), (name, peaks, computed[name])


class TestPlacement:
    """The launcher gives each rank its own CUDA_VISIBLE_DEVICES."""

    def run(
        self, comparison: DeviceComparison, folder: Path, visible: list[str], *more: str
    ) -> tuple[list[int | None], str, Path]:
        single_process = comparison.run("algorithm scaffold", ALGORITHMS["scaffold"])
        arguments = [str(comparison.folder / "algorithm scaffold.json"), f"run.dir={folder / 'run'}", *more]
        rank_env = [{"CUDA_VISIBLE_DEVICES": gpus, "LOCAL_RANK": "0"} for gpus in visible]
        codes, (output, *_) = run_ranks(len(visible), arguments, rank_env=rank_env, SIMULATED_GPU=str(folder))
        return codes, output, single_process.cpu

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
    def test_a_valid_placement_has_the_bits_of_the_cpu(
        self, comparison: DeviceComparison, visible: list[str], more: tuple[str, ...], group: str, tmp_path: Path
    ) -> None:
        codes, output, single_process = self.run(comparison, tmp_path, visible, *more)
        assert not any(codes), output
        assert model_hash(tmp_path / "run") == model_hash(single_process)
        is_hidden = group == "nccl" and len(visible) > 1 and "MIG" not in visible[0]
        assert ("warning: each rank sees only its own GPU, so NCCL may use PCIe" in output) == is_hidden
        for rank in range(len(visible)):
            (report,) = simulated_gpu.read_reports(tmp_path, rank)
            sums = {tuple(key) for key, _ in report["collectives"] if key[1] in ("reduce", "gather")}
            assert sums == {(group, "reduce" if group == "nccl" else "gather", "int64")}
            assert report["steps"] > 0 or rank == 0

    @pytest.mark.parametrize(
        ("visible", "pattern"),
        [
            (["2", "5", "5"], r"ranks 1 and 2 share one GPU of \S+, which NCCL cannot connect: start one rank per GPU"),
            (["MIG-0-1", "MIG-0-2"], r"ranks 0 and 1 have parts of one GPU of \S+, which NCCL cannot connect: start"),
            (["2", "", "5"], r"rank 1 on \S+ sees no GPU, but rank 0 on \S+ does: ask for GPUs on every node"),
            (["", "4"], r"rank 0 on \S+ sees no GPU, but rank 1 on \S+ does: ask for GPUs on every node"),
        ],
        ids=str,
    )
    def test_an_invalid_placement_is_refused_in_one_line(
        self, comparison: DeviceComparison, visible: list[str], pattern: str, tmp_path: Path
    ) -> None:
        codes, output, _ = self.run(comparison, tmp_path, visible)
        assert 0 not in codes and None not in codes
        (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
        assert re.search(pattern, line)
        assert "Traceback" not in output and not (tmp_path / "run" / "metrics.jsonl").exists()


OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


@timing
def test_a_gpu_that_torch_cannot_use_ends_all_ranks_at_once(comparison: DeviceComparison, tmp_path: Path) -> None:
    """Not after comm.rendezvous_timeout, which is longer than this test may take."""
    (tmp_path / "config.json").write_text(json.dumps(comparison.config({})))
    arguments = [str(tmp_path / "config.json"), f"run.dir={tmp_path / 'run'}"]
    rank_env: list[dict[str, str]] = [{}, {}, {"SIMULATED_DRIVER": OLD_DRIVER}]
    hold = Hold(tmp_path / "hold")
    fault = hold.at("device@2")
    with start_ranks(3, arguments, rank_env=rank_env, SIMULATED_GPU=str(tmp_path), FL_DIST_FAULT=fault) as ranks:
        wait_for(lambda: "waiting for rank 2 of 3" in ranks[0].output(), "the wait for rank 2")
        hold.release()
        codes = [rank.wait() for rank in ranks]
        lines = [line for rank in ranks for line in rank.output().splitlines() if line.startswith("error: ")]
    assert codes == [1, 1, 1]
    (error,) = lines
    reason = r"this build of torch cannot use the GPU \(The NVIDIA driver .* is too old \(found version 11040\)\)"
    assert re.search(rf"^error: rank 2 on \S+ failed: {reason} .*; install the build for this driver", error), error


def test_ranks_of_a_gpu_job_do_not_train_on_the_cpu(tmp_path: Path) -> None:
    arguments = [*NO_WANDB, f"run.dir={tmp_path / 'run'}"]
    codes, outputs = run_ranks(2, arguments, SLURM_GPUS_ON_NODE="2", CUDA_VISIBLE_DEVICES="")
    assert codes == [1, 1] and not (tmp_path / "run").exists()
    errors = {line for output in outputs for line in output.splitlines() if line.startswith("error: ")}
    assert len(errors) == 1 and "Slurm allocated GPUs, but torch" in errors.pop()


LOST = r"^error: rank 1 on \S+ was lost \(.*\) in round 1, whose clients were \d"
STUCK = r"^error: rank 1 on \S+ is stuck: no progress for 3 s \(comm.timeout\) in round 1, client \d"


@contextlib.contextmanager
def endless_round(
    comparison: DeviceComparison, folder: Path, fault: str, nccl: str, *more: str
) -> Iterator[list[RankProcess]]:
    """A server and two workers in endless local training, with a fault on one rank."""
    config = comparison.config({"local": {"epochs": 10**6}, "clients": {"per_round": 3}})
    (folder / "config.json").write_text(json.dumps(config))
    arguments = [str(folder / "config.json"), f"run.dir={folder / 'run'}", *more]
    with start_ranks(3, arguments, FL_DIST_FAULT=fault, SIMULATED_GPU=str(folder), SIMULATED_NCCL=nccl) as ranks:
        yield ranks


def assert_reports(server: RankProcess, pattern: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not (match := re.search(pattern, server.output(), re.MULTILINE)) and time.monotonic() < end:
        time.sleep(0.05)
    assert match, server.output()


@timing
@pytest.mark.parametrize(
    ("nccl", "seconds"),
    examples([("asynchronous", 30.0), ("silent", 30.0)], [("asynchronous", 30.0)]),
)
def test_a_killed_worker_is_named_and_all_ranks_end(
    comparison: DeviceComparison, tmp_path: Path, nccl: str, seconds: float
) -> None:
    with endless_round(comparison, tmp_path, "step:9@1", nccl) as (server, killed, other):
        assert killed.wait() == -signal.SIGKILL
        assert_reports(server, LOST, seconds)
        for rank in (server, other):
            assert rank.wait() == 1


@timing
@pytest.mark.parametrize(("action", "pattern"), examples([("stop", LOST), ("sleep:100", STUCK)], [("stop", LOST)]))
def test_a_stopped_or_stuck_worker_is_named(
    comparison: DeviceComparison, tmp_path: Path, action: str, pattern: str
) -> None:
    with endless_round(comparison, tmp_path, f"step:9@1={action}", "asynchronous", "comm.timeout=3") as (
        server,
        stuck,
        other,
    ):
        log = tmp_path / "run" / "logs" / "rank1.log"
        wait_for(lambda: stuck.is_stopped if action == "stop" else log.exists(), "the first log or stop")
        assert_reports(server, pattern, 30)
        for rank in (server, other, *([stuck] if action != "stop" else [])):
            assert rank.wait() == 1


@timing
@pytest.mark.parametrize("action", examples(["", "=stop"], [""]))
def test_workers_end_without_their_server(comparison: DeviceComparison, tmp_path: Path, action: str) -> None:
    """The server is in local training too."""
    shared = "topology.server=shared"
    with endless_round(comparison, tmp_path, f"step:9@0{action}", "asynchronous", shared) as (server, *others):
        wait_for(lambda: server.is_stopped, "the stop of rank 0")
        for rank in others:
            assert rank.wait() == 1
    for rank in (1, 2):
        log = (tmp_path / "run" / "logs" / f"rank{rank}.log").read_text()
        assert re.search(r"rank 0 on \S+, the server, was lost \(.*\) in round 1, whose clients were \d", log), log
