"""Diagnostics are equal on any layout and after an interruption, and do not affect training."""

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest

import fl_dist
from fl_dist.diagnose import main as diagnose
from fl_dist.diagnostics.base import diagnostics
from tests.support.marks import examples, exhaustive
from tests.support.processes import ROOT, environment, run, run_ranks, torchrun
from tests.support.run_folder import model_hash, newest_saved_round, read_records, reproducible_records

PLAIN = """\
rounds: 4
seed: 3
partition: {name: dirichlet, alpha: 0.5}
clients: {total: 10, per_round: 4, on_failure: drop, validation: 0.2}
model: {name: mlp, hidden: [16]}
algorithm: fedlesam_d
local: {epochs: 1, batch_size: 20, lr: 0.1, momentum: 0}
monitor: {wandb: {mode: disabled}}
"""
WITH_DIAGNOSTICS = """\
diagnostics:
  sharpness: {every: 2, steps: 2}
  lpf: {every: 4, samples: 2}
  spectrum: {every: 4, top: 2, rows: 300}
  trace: {every: 4, samples: 2, rows: 300}
  flatness_distance: {every: 2}
  flatness_discrepancy: {every: 2}
  perturbation_drift: {every: 2}
  directions: {every: 1}
  clients: {every: 2}
  personalization: {every: 2}
  personalization_of_some: {name: personalization, every: 4, steps: 5, clients: 3, lr: 0.05}
  surface: {every: 4, points: 3, on: test}
  along: {every: 4, points: 3, directions: 1}
  plane: {every: 2, points: 3}
"""


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process, with and without diagnostics, and their configurations."""
    folder = tmp_path_factory.mktemp("diagnostics")
    for name, text in (("plain", PLAIN), ("measured", PLAIN + WITH_DIAGNOSTICS)):
        (folder / f"{name}.yaml").write_text(text)
        fl_dist.run(folder / f"{name}.yaml", quiet=True, run={"dir": str(folder / name)})
    return folder


class TestRun:
    @pytest.mark.parametrize(
        ("ranks", "server"), examples([(2, "dedicated"), (2, "shared"), (4, "dedicated")], [(4, "dedicated")])
    )
    def test_values_are_equal_on_any_layout(
        self, ranks: int, server: str, single_process: Path, tmp_path: Path
    ) -> None:
        settings = [str(single_process / "measured.yaml"), f"run.dir={tmp_path}", f"topology.server={server}"]
        codes, output = run_ranks(ranks, settings)
        assert set(codes) == {0}, output
        busy = {
            rank for record in read_records(tmp_path) for rank, worker in record["workers"].items() if "busy" in worker
        }
        assert len(busy) == ranks - (server == "dedicated")
        assert reproducible_records(tmp_path) == reproducible_records(single_process / "measured")
        assert model_hash(tmp_path) == model_hash(single_process / "plain")

    def test_all_diagnostics_are_recorded_and_training_is_unchanged(self, single_process: Path) -> None:
        records = read_records(single_process / "measured")
        assert sorted(records[3]["diagnostics"]) == sorted([*diagnostics, "personalization_of_some"])
        assert list(records[0]["diagnostics"]) == ["directions"]
        assert records[1]["seconds"]["diagnostics"] > 0
        assert {"norm_h", "cosine_step_h", "cosine_update_before"} <= records[1]["diagnostics"]["directions"].keys()
        paths = records[3]["diagnostics"]["plane"]["paths"]
        assert paths["FedGMT"] != paths["FedGMT without ADMM"]
        plain = [
            {k: v for k, v in record.items() if k != "diagnostics"}
            for record in reproducible_records(single_process / "measured")
        ]
        assert plain == reproducible_records(single_process / "plain")
        assert model_hash(single_process / "measured") == model_hash(single_process / "plain")

    @pytest.mark.parametrize("point", examples(["diagnose:9@1", "broadcast:4@0"], ["diagnose:9@1"]))
    def test_values_are_equal_after_an_interruption(self, point: str, single_process: Path, tmp_path: Path) -> None:
        settings = [str(single_process / "measured.yaml"), f"run.dir={tmp_path}"]
        codes, _ = run_ranks(3, settings, FL_DIST_FAULT=point, SYNCHRONOUS_CHECKPOINTS="1")
        assert 0 not in codes and newest_saved_round(tmp_path) > 0
        codes, output = run_ranks(2, settings)
        assert set(codes) == {0}, output
        assert reproducible_records(tmp_path) == reproducible_records(single_process / "measured")


class TestCommand:
    def test_the_command_gives_equal_values_on_ranks_and_leaves_the_run_unchanged(
        self, single_process: Path, tmp_path: Path
    ) -> None:
        folder = shutil.copytree(single_process / "measured", tmp_path / "run")
        before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        assert diagnose([str(folder)]) == 0
        code, output = run([*torchrun(3), "-m", "fl_dist.diagnose", str(folder)])
        assert code == 0, output
        entries = [json.loads(line) for line in (folder / "diagnostics.jsonl").read_text().splitlines()]
        one, three = entries[: len(entries) // 2], entries[len(entries) // 2 :]
        assert [e["values"] for e in one] == [e["values"] for e in three]
        assert {e["round"] for e in one if e["label"] in ("sharpness", "clients")} == {4}
        assert {e["round"] for e in one if e["label"] in ("flatness_distance", "directions")} == {5}
        assert all(p.read_bytes() == data for p, data in before.items())

    @pytest.mark.parametrize("number", examples([signal.SIGINT, signal.SIGTERM], [signal.SIGINT]))
    def test_a_signal_ends_the_command_at_once(
        self, number: signal.Signals, single_process: Path, tmp_path: Path
    ) -> None:
        folder = shutil.copytree(single_process / "plain", tmp_path / "run")
        program = (
            "import os, sys; from fl_dist.distributed import fault_injection; from fl_dist.diagnose import main; "
            f"fault_injection.point = lambda name: os.kill(os.getpid(), {int(number)}); sys.exit(main(sys.argv[1:]))"
        )
        code, output = run([sys.executable, "-c", program, str(folder), "lpf.samples=1000000"])
        assert code == 128 + number
        assert output == f"error: {number.name} received: nothing was measured of {folder}\n"
        assert not (folder / "diagnostics.jsonl").exists()


@exhaustive
def test_a_spectrum_has_the_same_bits_with_any_number_of_threads() -> None:
    several = environment()
    del several["OMP_NUM_THREADS"]
    program = "from tests.support.quadratic_loss import large_spectrum; print(large_spectrum())"
    (one, output), (more, other) = (
        run([sys.executable, "-c", program], env=env, cwd=ROOT)
        for env in (environment(OPENBLAS_NUM_THREADS="1"), several | {"OPENBLAS_NUM_THREADS": "2"})
    )
    assert (one, more) == (0, 0), output + other
    assert output == other
