"""Checkpoints of several ranks under stress: slow disks, failed parts, lost ranks, missing and foreign files."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from fl_dist.main import main
from fl_dist.metrics.file import MetricsFile
from fl_dist.storage import checkpoint
from tests.support.checkpoints import read_newest, run_forked
from tests.support.harness import synchronous_checkpoints
from tests.support.marks import examples, exhaustive, timing
from tests.support.processes import NO_WANDB, run_ranks, start_ranks
from tests.support.run_folder import assert_same_run, reproducible_records
from tests.support.waiting import wait_for

SETTINGS = (
    *NO_WANDB,
    "rounds=8",
    "model={name: mlp, hidden: [16]}",
    "partition={name: dirichlet, alpha: 0.3, variant: unbalanced}",
    "clients={total: 8, per_round: 3, on_failure: drop}",
    "local={epochs: 1, batch_size: 32, lr: 0.05, momentum: 0.0}",
    "algorithm.name=scaffold",
)


def arguments(folder: Path, *more: str) -> list[str]:
    return [*SETTINGS, f"run.dir={folder}", *more]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert main(arguments(folder)) == 0
    return folder


class TestResult:
    @timing
    def test_a_slow_disk_fails_no_checkpoint(self, reference: Path, tmp_path: Path) -> None:
        """A sync takes 3 s, longer than comm.timeout: the checkpoint waits, no client is lost."""
        slow = {"FL_DIST_FAULT": "sync:1@1=sleep:3"}
        codes, outputs = run_ranks(3, arguments(tmp_path, "comm.timeout=2"), **slow)
        assert codes == [0, 0, 0], outputs
        assert read_newest(tmp_path).index.keys() == read_newest(reference).index.keys()
        assert_same_run(tmp_path, reference)

    @pytest.mark.parametrize("rank", examples([0, 1, 2], [1]))
    def test_a_failed_checkpoint_of_any_rank_loses_no_client(self, rank: int, reference: Path, tmp_path: Path) -> None:
        """A rank's first sync fails; the run is killed later and resumed."""
        faults = {"FL_DIST_FAULT": f"sync:1@{rank}=fail,broadcast:5=sleep:3,server:7@0"}
        codes, outputs = run_ranks(3, arguments(tmp_path), **faults)
        assert codes[0] == -signal.SIGKILL
        assert "could not be written: rank" in outputs[0]
        assert main(arguments(tmp_path)) == 0
        assert_same_run(tmp_path, reference)


def fail(*_: Any) -> None:
    raise OSError(5, "disk trouble")


class TestFolder:
    """A folder with parts of a run is never treated as new, and no foreign file is removed."""

    @pytest.fixture
    def interrupted(self, tmp_path: Path) -> Path:
        with synchronous_checkpoints():
            assert run_interrupted(tmp_path / "run") == -signal.SIGKILL
        return tmp_path / "run"

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda f: (f / "config.yaml").unlink(), "but not its config.yaml; restore it"),
            (lambda f: (f / "run.json").unlink(), "run.json is missing or damaged"),
            (lambda f: (f / "run.json").write_text("{"), "run.json is missing or damaged"),
            (lambda f: shutil.rmtree(f / "checkpoint"), "no longer holds a checkpoint; restore it"),
            (lambda f: empty_folder(f / "checkpoint"), "no longer holds a checkpoint; restore it"),
            (lambda f: replace_by_dangling_link(f / "checkpoint"), "checkpoint cannot be read"),
            (lambda f: replace_by_text(f / "checkpoint"), "checkpoint cannot be read"),
        ],
    )
    def test_a_missing_or_damaged_file_is_named(
        self, damage: Callable[[Path], None], message: str, interrupted: Path, capsys
    ) -> None:
        damage(interrupted)
        before = sorted(p for p in interrupted.parent.rglob("*") if "logs" not in p.parts and p.name != "lock")
        assert main(arguments(interrupted)) in (1, 2)
        assert message in capsys.readouterr().err
        assert sorted(p for p in interrupted.parent.rglob("*") if "logs" not in p.parts and p.name != "lock") == before

    def test_foreign_files_and_links_are_kept(self, reference: Path, interrupted: Path) -> None:
        outside = interrupted.parent / "outside"
        outside.mkdir()
        root = interrupted / "checkpoint"
        foreign = [outside / "a", root / "round-000001-backup" / "b", root / "round-000002" / "mine", root / "notes"]
        foreign += [root / "round-000777" / "clients-1.pack"]
        for file in foreign:
            file.parent.mkdir(exist_ok=True)
            file.write_text("foreign")
        (root / "round-000888").symlink_to(outside)
        (root / "round-zzz").symlink_to(outside)
        assert main(arguments(interrupted)) == 0
        assert [f.read_text() for f in foreign] == ["foreign"] * len(foreign)
        assert_same_run(interrupted, reference)

    def test_a_live_run_survives_the_loss_of_its_checkpoints(self, reference: Path, tmp_path: Path) -> None:
        folder, rounds = tmp_path / "run", 20_000
        # The first three clients do not change again, so that their files are needed later.
        (tmp_path / "schedule.json").write_text(json.dumps([[0, 1, 2], *[[3, 4, 5]] * (rounds - 1)]))
        more = (f"rounds={rounds}", "local.epochs=3", f"clients.schedule={tmp_path / 'schedule.json'}")
        with start_ranks(2, arguments(folder, *more)) as ranks:
            wait_for(lambda: newest_round(folder) >= 3, "the third checkpoint")
            shutil.rmtree(folder / "checkpoint", ignore_errors=True)
            current_round = len(reproducible_records(folder)) + 1
            wait_for(lambda: newest_round(folder) > current_round, "another checkpoint")
            os.kill(ranks[0].pid, signal.SIGKILL)
            outputs = [rank.communicate()[0] for rank in ranks]
        assert "files of earlier checkpoints are missing" in outputs[0]
        assert read_newest(folder).index.keys() >= {0, 1, 2}


def newest_round(folder: Path) -> int:
    return checkpoint.newest_checkpoint_round(folder / "checkpoint")


def run_interrupted(folder: Path) -> int:
    return run_forked(folder, "server:5", *SETTINGS[1:])


def empty_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def replace_by_dangling_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("/no/such/folder")


def replace_by_text(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file")


class TestContents:
    """Other contents under the same names are another run."""

    @staticmethod
    def write_data(path: Path, seed: int) -> None:
        rng = np.random.default_rng(seed)
        y = np.arange(40) % 2
        np.savez(path, x_train=rng.normal(size=(40, 3)), y_train=y, x_test=rng.normal(size=(8, 3)), y_test=y[:8])

    def test_a_rank_with_different_data_is_named(self, tmp_path: Path) -> None:
        for rank in (0, 1):
            (tmp_path / str(rank)).mkdir()
            self.write_data(tmp_path / str(rank) / "d.npz", rank)
        inputs = [
            *NO_WANDB,
            f"data={{name: npz, path: {tmp_path}/$RANK/d.npz}}",
            "model={name: mlp}",
            "clients.total=4",
        ]
        codes, outputs = run_ranks(2, [*inputs, "clients.per_round=2", "rounds=1", f"run.dir={tmp_path / 'run'}"])
        assert codes == [2, 2], outputs
        assert "rank 1 on" in outputs[0] and "sees another data than rank 0" in outputs[0]


class TestRecords:
    def test_unwritten_records_are_in_the_checkpoint(self, reference: Path, tmp_path: Path) -> None:
        child = os.fork()
        if child == 0:
            MetricsFile.flush = fail  # type: ignore[method-assign]
            os._exit(run_main_with_fault(tmp_path))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert not (tmp_path / "metrics.jsonl").exists()
        assert main(arguments(tmp_path)) == 0
        assert_same_run(tmp_path, reference)


def run_main_with_fault(folder: Path) -> int:
    from fl_dist.distributed import fault_injection

    fault_injection.point = fault_injection.parse_faults("server:6")
    with synchronous_checkpoints():
        return main(arguments(folder))


def test_an_error_reading_client_state_ends_the_run_and_drops_no_client(tmp_path: Path, capsys) -> None:
    with synchronous_checkpoints():
        assert run_interrupted(tmp_path) == -signal.SIGKILL
    with mock.patch("fl_dist.federation.client_state.read_client", side_effect=OSError(5, "Input/output error")):
        assert main(arguments(tmp_path)) == 1
    assert "Input/output error" in capsys.readouterr().err
    assert not (tmp_path / "model.safetensors").exists()


@timing
def test_a_rank_that_dies_in_the_last_checkpoint_blocks_no_other(tmp_path: Path, reference: Path) -> None:
    """No later round would detect the loss; its updates are in the model."""
    settings = arguments(tmp_path, "comm.timeout=3", "checkpoint.every=100")
    (server, worker), outputs = run_ranks(2, settings, FL_DIST_FAULT="save-begin:1@1")
    assert (server, worker) == (1, -signal.SIGKILL), outputs
    assert "error: the model is written, but no checkpoint could be: rank 1 on " in outputs[0]
    assert_same_run(tmp_path, reference)


@exhaustive
@timing
def test_the_run_waits_for_a_slow_last_checkpoint(tmp_path: Path, reference: Path) -> None:
    settings = arguments(tmp_path, "comm.timeout=3", "checkpoint.every=100")
    codes, outputs = run_ranks(2, settings, FL_DIST_FAULT="save-begin:1@1=sleep:7")
    assert codes == [0, 0], outputs
    assert_same_run(tmp_path, reference)
    assert checkpoint.newest_checkpoint_round(tmp_path / "checkpoint") == 8
