"""Promise: with a worker per client, a client's rows are there alone, and the bits are those of any other placement."""

import json
import mmap
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fl_dist
from fl_dist.common.errors import ConfigError
from fl_dist.diagnose import main as diagnose
from fl_dist.main import main
from tests.support.harness import CLASSES, SIZES, TrainingHarness, algorithm, merge
from tests.support.processes import NO_WANDB, environment, run, run_ranks, start_ranks, torchrun
from tests.support.run_folder import assert_same_run, model_hash, newest_saved_round, read_records, reproducible_records
from tests.support.user_guide import PROCESS_PER_CLIENT, guide_snippets, write_files
from tests.support.waiting import Hold, wait_for

Settings = dict[str, Any]
PROCESS = {"clients": {"placement": "process"}}
RANKS = len(SIZES) + 1
DIAGNOSTICS = {
    "sharpness": {"every": 4},
    "spectrum": {"every": 4, "rows": 12},
    "surface": {"every": 4, "client": 1, "points": 3},
    "clients": {"every": 2},
    "personalization": {"every": 2},
    "flatness_distance": {"every": 4},
    "directions": {"every": 2},
}
DIAGNOSTICS_OF_PARTS = {
    "clients": {"every": 2},
    "personalization": {"every": 4, "clients": 3},
    "surface": {"every": 4, "on": "test", "points": 3},
    "flatness_distance": {"every": 4},
}
"""Of single clients, and of the test rows."""
PER_CLIENT = ("clients", "personalization", "flatness_distance", "directions")
"""Diagnostics whose batches never mix clients, wherever they are computed."""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> TrainingHarness:
    return TrainingHarness(tmp_path_factory.mktemp("placement"))


def arguments(folder: Path, config: Settings, *more: str) -> list[str]:
    """The command line of a run in this folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(config))
    return [str(file), f"run.dir={folder}", *more]


def write_silos(harness: TrainingHarness, folder: Path) -> Path:
    """One folder per rank, each with a data.npz of its own: the test rows, or the rows of one client."""
    x, y = harness.x, harness.y
    silos = {"server": {"x_test": x[::3], "y_test": y[::3]}}
    silos |= {str(c): {"x_train": x[harness.client == c], "y_train": y[harness.client == c]} for c in range(len(SIZES))}
    for name, arrays in silos.items():
        (folder / name).mkdir(parents=True)
        np.savez(folder / name / "data.npz", **arrays)
    return folder


def local_config(harness: TrainingHarness, silos: Path, **changes: Any) -> Settings:
    data = {"local": True, "path": str(silos / "{client}" / "data.npz"), "classes": CLASSES}
    return merge(harness.config(algorithm("scaffold"), data=data, **PROCESS), changes)


class TestSharedData:
    @pytest.mark.parametrize("server", ["dedicated", "shared"])
    def test_the_bits_are_those_of_one_process(self, harness: TrainingHarness, server: str, tmp_path: Path) -> None:
        configs = {name: harness.config(algorithm(name)) for name in ("fedavg", "scaffold", "fedgmt", "mimelite")}
        configs["batch_norm"] = harness.image_config(algorithm("fedsam"))
        configs["validation"] = harness.config(algorithm("feddyn"), clients={"validation": 0.3})
        placed = [
            arguments(tmp_path / name, merge(config, PROCESS), f"topology.server={server}")
            for name, config in configs.items()
        ]
        codes, outputs = run_ranks(RANKS - (server == "shared"), *placed)
        assert not any(codes), outputs
        for name, config in configs.items():
            assert_same_run(tmp_path / name, harness.run(config).folder)

    def test_clients_may_share_rows(self, tmp_path: Path) -> None:
        settings = [
            *NO_WANDB,
            "rounds=2",
            "partition={name: pathological, classes: 2}",
            "model=mlp",
            "clients={total: 3, per_round: 2, validation: 0.1}",
            "local={epochs: 1, lr: 0.05}",
        ]
        assert main([*settings, f"run.dir={tmp_path / 'one'}"]) == 0
        codes, outputs = run_ranks(4, [*settings, "clients.placement=process", f"run.dir={tmp_path / 'placed'}"])
        assert not any(codes), outputs
        assert_same_run(tmp_path / "placed", tmp_path / "one")

    def test_diagnostics_are_equal_up_to_the_rounding_of_batches(
        self, harness: TrainingHarness, tmp_path: Path
    ) -> None:
        config = harness.config(algorithm("fedgmt"), diagnostics=DIAGNOSTICS, clients={"validation": 0.3})
        codes, outputs = run_ranks(RANKS, arguments(tmp_path / "run", merge(config, PROCESS)))
        assert not any(codes), outputs
        expected, placed = reproducible_records(harness.run(config).folder), reproducible_records(tmp_path / "run")
        for one, other in zip(expected, placed, strict=True):
            measured, found = one.pop("diagnostics", {}), other.pop("diagnostics", {})
            assert one == other
            assert measured.keys() == found.keys()
            for name in measured:
                if name in PER_CLIENT:
                    assert found[name] == measured[name]
                else:
                    for key, value in measured[name].items():
                        np.testing.assert_allclose(found[name][key], value, 1e-9)

    def test_a_run_may_change_its_placement(self, harness: TrainingHarness, tmp_path: Path) -> None:
        """No result depends on it."""
        config = harness.config(algorithm("scaffold"), checkpoint={"every": 1})
        killed = {"FL_DIST_FAULT": "server:3", "SYNCHRONOUS_CHECKPOINTS": "1"}
        codes, _ = run_ranks(RANKS, arguments(tmp_path / "run", merge(config, PROCESS)), **killed)
        assert codes[0] == -signal.SIGKILL and newest_saved_round(tmp_path / "run") == 2
        assert main(arguments(tmp_path / "run", config)) == 0
        assert_same_run(tmp_path / "run", harness.run(config).folder)

    @pytest.mark.parametrize(("ranks", "there"), [(RANKS - 1, "there are 4"), (RANKS + 1, "there are 6")])
    def test_another_number_of_workers_is_one_line(
        self, harness: TrainingHarness, ranks: int, there: str, tmp_path: Path
    ) -> None:
        codes, outputs = run_ranks(ranks, arguments(tmp_path / "run", harness.config(algorithm("fedavg"), **PROCESS)))
        assert set(codes) == {2}
        lines = [line for line in outputs[0].splitlines() if not line.startswith("starting")]
        assert len(lines) == 1 and "5 clients need as many workers" in lines[0] and there in lines[0]
        assert not (tmp_path / "run").exists()

    def test_a_rank_holds_the_rows_of_its_client_alone(self, tmp_path: Path) -> None:
        rng, clients, rows = np.random.default_rng(0), 3, 12_000  # of each client: 49 MB
        x = rng.standard_normal((clients * rows, 1024), dtype=np.float32)
        y, client = rng.integers(3, size=len(x)), np.repeat(np.arange(clients), rows)
        np.savez(tmp_path / "data.npz", x_train=x, y_train=y, client=client, x_test=x[:9], y_test=np.arange(9) % 3)
        settings = [*NO_WANDB, "rounds=1", "data=npz", f"data.path={tmp_path / 'data.npz'}", "partition=given"]
        settings += ["model={name: mlp, hidden: [1]}", f"clients={{total: {clients}, per_round: 3}}", "local.steps=1"]
        memory = {}
        for placement in ("balanced", "process"):
            folder = tmp_path / placement
            codes, outputs = run_ranks(clients + 1, [*settings, f"clients.placement={placement}", f"run.dir={folder}"])
            assert not any(codes), outputs
            memory[placement] = [worker["memory"] for worker in read_records(folder)[0]["workers"].values()]
        assert model_hash(tmp_path / "process") == model_hash(tmp_path / "balanced")
        saved = [b - p for b, p in zip(memory["balanced"], memory["process"], strict=True)]
        assert saved[0] > 0.9 * x.nbytes
        assert min(saved[1:]) > 0.9 * x.nbytes * (clients - 1) / clients


class TestLocalData:
    def test_the_bits_are_those_of_one_file_with_all_rows(self, harness: TrainingHarness, tmp_path: Path) -> None:
        order, silos = np.argsort(harness.client, kind="stable"), write_silos(harness, tmp_path / "silos")
        np.savez(
            tmp_path / "all.npz",
            x_train=harness.x[order],
            y_train=harness.y[order],
            client=harness.client[order],
            x_test=harness.x[::3],
            y_test=harness.y[::3],
        )
        shared, runs = {}, []
        for name in ("fedavg", "scaffold", "fedgmt"):
            changes = {
                "algorithm": algorithm(name),
                "clients": {"validation": 0.3},
                "diagnostics": DIAGNOSTICS_OF_PARTS,
            }
            path = {"path": str(tmp_path / "all.npz")}
            shared[name] = harness.run(merge(harness.config(algorithm(name), data=path), changes)).folder
            runs.append(arguments(tmp_path / name, local_config(harness, silos, **changes)))
        codes, outputs = run_ranks(RANKS, *runs)
        assert not any(codes), outputs
        for name, folder in shared.items():
            assert_same_run(tmp_path / name, folder)
            assert (tmp_path / name / "clients.json").read_text() == (folder / "clients.json").read_text()

    def test_no_memory_of_a_rank_has_the_rows_of_another_client(self, harness: TrainingHarness, tmp_path: Path) -> None:
        marks = {name: os.urandom(64) for name in ("server", "0", "1")}
        for name, mark in marks.items():
            x = np.tile(np.frombuffer(mark, np.uint8), (20, 1))
            split = "test" if name == "server" else "train"
            np.savez(tmp_path / f"{name}.npz", **{f"x_{split}": x, f"y_{split}": np.arange(20) % 3})
        hold = Hold(tmp_path / "hold")
        settings = [*NO_WANDB, "rounds=2", "data=npz", "data.local=true", f"data.path={tmp_path}/{{client}}.npz"]
        settings += ["partition=given", "clients={total: 2, per_round: 2, placement: process}", "model=mlp"]
        with start_ranks(3, [*settings, f"run.dir={tmp_path / 'run'}"], FL_DIST_FAULT=hold.at("broadcast:2")) as ranks:
            wait_for(lambda: hold.is_reached, "the second round")
            found = [[name for name, mark in marks.items() if _is_in_memory(rank.pid, mark)] for rank in ranks]
            hold.release()
            assert [rank.wait() for rank in ranks] == [0, 0, 0]
        assert found == [["server"], ["0"], ["1"]]

    def test_a_killed_run_resumes_with_the_same_clients_on_any_hosts(
        self, harness: TrainingHarness, tmp_path: Path
    ) -> None:
        """As on node-local disks: one path, and other files behind it on each rank."""
        silos = write_silos(harness, tmp_path / "silos")
        config = local_config(harness, silos, checkpoint={"every": 1})
        codes, outputs = run_ranks(RANKS, arguments(tmp_path / "whole", config))
        assert not any(codes), outputs
        config = merge(config, {"data": {"path": "$SILO/data.npz"}})
        command = arguments(tmp_path / "run", config)
        hosts = [{"SILO": str(silos / name)} for name in ("server", *map(str, range(len(SIZES))))]
        killed = {"FL_DIST_FAULT": "local:2@3", "SYNCHRONOUS_CHECKPOINTS": "1"}
        codes, _ = run_ranks(RANKS, command, rank_env=hosts, **killed)
        assert codes[3] == -signal.SIGKILL and newest_saved_round(tmp_path / "run") > 0
        swapped = [hosts[0], hosts[2], hosts[1], *hosts[3:]]
        codes, outputs = run_ranks(RANKS, command, rank_env=swapped)
        assert set(codes) == {2}
        assert "started with a different data of client 0 and data of client 1" in outputs[0]
        codes, outputs = run_ranks(RANKS, command, rank_env=hosts)
        assert not any(codes), outputs
        assert_same_run(tmp_path / "run", tmp_path / "whole")

    def test_a_finished_run_is_diagnosed_where_its_rows_are(self, harness: TrainingHarness, tmp_path: Path) -> None:
        config = local_config(
            harness, write_silos(harness, tmp_path / "silos"), diagnostics={"clients": {}, "trace": {}}
        )
        codes, outputs = run_ranks(RANKS, arguments(tmp_path / "run", config, "checkpoint.every=1"))
        assert not any(codes), outputs
        code, output = run([*torchrun(RANKS), "-m", "fl_dist.diagnose", str(tmp_path / "run")])
        assert code == 0, output
        measured = [json.loads(line) for line in (tmp_path / "run" / "diagnostics.jsonl").read_text().splitlines()]
        assert measured[1]["values"]["rows"] == sum(SIZES)
        assert diagnose([str(tmp_path / "run")]) == 2

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x, y: (x[:, :3], y), "has rows of shape [3], that of rank 0 [4]"),
            (lambda x, y: (x.astype(np.float32), y), "has rows of type float32, that of rank 0 float64"),
            (lambda x, y: (x, y.astype(float)), "task classification needs a whole number"),
            (lambda x, y: (x, y + CLASSES), "data.classes is 3, but the data has a label"),
        ],
    )
    def test_rows_of_another_kind_are_one_line(
        self, harness: TrainingHarness, change: Callable[..., Any], message: str, tmp_path: Path
    ) -> None:
        silos = write_silos(harness, tmp_path / "silos")
        x, y = change(harness.x[:6], harness.y[:6])
        np.savez(silos / "2" / "data.npz", x_train=x, y_train=y)
        codes, outputs = run_ranks(RANKS, arguments(tmp_path / "run", local_config(harness, silos)))
        assert all(codes)
        line = next(line for line in outputs[0].splitlines() if line.startswith("error"))
        assert message in line

    def test_python_reads_the_test_rows_and_says_where_the_others_are(
        self, harness: TrainingHarness, tmp_path: Path
    ) -> None:
        config = local_config(harness, write_silos(harness, tmp_path / "silos"))
        codes, outputs = run_ranks(RANKS, arguments(tmp_path / "run", config))
        assert not any(codes), outputs
        finished = fl_dist.load(tmp_path / "run")
        assert finished.evaluate()["loss"] == finished.history[-1]["test_loss"]
        with pytest.raises(ConfigError, match="on its own worker"):
            finished.clients  # noqa: B018


def test_the_commands_of_the_guide_work(tmp_path: Path) -> None:
    write_files(tmp_path, PROCESS_PER_CLIENT)
    env = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", WANDB_MODE="disabled")
    for command in [c for snippet in guide_snippets("sh", PROCESS_PER_CLIENT) for c in snippet.commands()]:
        code, output = run(["bash", "-c", command], cwd=tmp_path, env=env)
        assert code == 0, f"{command}\n{output}"
    assert json.loads((tmp_path / "runs" / "silos" / "clients.json").read_text())["sizes"] == [100, 150, 200]


def _is_in_memory(pid: int, mark: bytes) -> bool:
    """Whether the bytes are anywhere in the writable memory of a process."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, access, *_ = line.split()
            first, last = (int(end, 16) for end in span.split("-"))
            if access.startswith("rw") and _contains(memory, first, last, mark):
                return True
    return False


def _contains(memory: Any, first: int, last: int, mark: bytes) -> bool:
    for start in range(first, last, 1 << 24):
        memory.seek(start)
        if mark in memory.read(min(last, start + (1 << 24) + mmap.PAGESIZE) - start):
            return True
    return False
