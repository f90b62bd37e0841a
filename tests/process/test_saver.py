"""Saves of several ranks under stress: slow disks, failed parts, lost ranks, vanished and foreign files."""

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
from fl_dist.storage import checkpoint
from fl_dist.storage.metrics import MetricsFile
from tests.support.checkpoints import forked, newest_of
from tests.support.harness import saving_at_once
from tests.support.marks import examples, exhaustive, timing
from tests.support.processes import QUIET, run_ranks, started_ranks
from tests.support.run_folder import assert_same, results
from tests.support.waiting import wait_for

SETTINGS = (
    *QUIET,
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
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm") / "run"
    assert main(arguments(folder)) == 0
    return folder


class TestFate:
    @timing
    def test_a_slow_disk_is_no_failure(self, calm: Path, tmp_path: Path) -> None:
        """A sync of 3 s where ranks count as lost after 2: the save waits, the clients are not forgotten."""
        slow = {"FL_DIST_FAULT": "sync:1@1=sleep:3"}
        codes, outputs = run_ranks(3, arguments(tmp_path, "comm.timeout=2"), **slow)
        assert codes == [0, 0, 0], outputs
        assert newest_of(tmp_path).index.keys() == newest_of(calm).index.keys()
        assert_same(tmp_path, calm)

    @pytest.mark.parametrize("rank", examples([0, 1, 2], [1]))
    def test_a_failed_save_of_any_rank_loses_no_client(self, rank: int, calm: Path, tmp_path: Path) -> None:
        """A rank's first sync fails; the run is killed later and resumed."""
        faults = {"FL_DIST_FAULT": f"sync:1@{rank}=fail,broadcast:5=sleep:3,server:7@0"}
        codes, outputs = run_ranks(3, arguments(tmp_path), **faults)
        assert codes[0] == -signal.SIGKILL
        assert "could not be written: rank" in outputs[0]
        assert main(arguments(tmp_path)) == 0
        assert_same(tmp_path, calm)


def fail(*_: Any) -> None:
    raise OSError(5, "disk trouble")


class TestFolder:
    """A folder that shows traces of a run is never taken for a new one, and nothing foreign is removed."""

    @pytest.fixture
    def stopped(self, tmp_path: Path) -> Path:
        with saving_at_once():
            assert forked_here(tmp_path / "run") == -signal.SIGKILL
        return tmp_path / "run"

    @pytest.mark.parametrize(
        ("harm", "message"),
        [
            (lambda f: (f / "config.yaml").unlink(), "but not its config.yaml: put that back"),
            (lambda f: (f / "run.json").unlink(), "run.json is missing or damaged"),
            (lambda f: (f / "run.json").write_text("{"), "run.json is missing or damaged"),
            (lambda f: shutil.rmtree(f / "checkpoint"), "holds no save any more"),
            (lambda f: emptied(f / "checkpoint"), "holds no save any more"),
            (lambda f: dangling(f / "checkpoint"), "checkpoint cannot be read"),
            (lambda f: replaced(f / "checkpoint"), "checkpoint cannot be read"),
        ],
    )
    def test_what_is_missing_is_said(self, harm: Callable[[Path], None], message: str, stopped: Path, capsys) -> None:
        harm(stopped)
        before = sorted(p for p in stopped.parent.rglob("*") if "logs" not in p.parts and p.name != "lock")
        assert main(arguments(stopped)) in (1, 2)
        assert message in capsys.readouterr().err
        assert sorted(p for p in stopped.parent.rglob("*") if "logs" not in p.parts and p.name != "lock") == before

    def test_foreign_files_and_links_stay(self, calm: Path, stopped: Path) -> None:
        outside = stopped.parent / "outside"
        outside.mkdir()
        root = stopped / "checkpoint"
        precious = [outside / "a", root / "round-000001-backup" / "b", root / "round-000002" / "mine", root / "notes"]
        precious += [root / "round-000777" / "clients-1.pack"]
        for file in precious:
            file.parent.mkdir(exist_ok=True)
            file.write_text("precious")
        (root / "round-000888").symlink_to(outside)
        (root / "round-zzz").symlink_to(outside)
        assert main(arguments(stopped)) == 0
        assert [f.read_text() for f in precious] == ["precious"] * len(precious)
        assert_same(stopped, calm)

    def test_a_live_run_survives_the_loss_of_its_checkpoints(self, calm: Path, tmp_path: Path) -> None:
        folder, rounds = tmp_path / "run", 20_000
        # The first three clients are not saved anew, so that they are missed.
        (tmp_path / "schedule.json").write_text(json.dumps([[0, 1, 2], *[[3, 4, 5]] * (rounds - 1)]))
        more = (f"rounds={rounds}", "local.epochs=3", f"clients.schedule={tmp_path / 'schedule.json'}")
        with started_ranks(2, arguments(folder, *more)) as ranks:
            wait_for(lambda: newest_round(folder) >= 3, "the third save")
            shutil.rmtree(folder / "checkpoint", ignore_errors=True)
            under_way = len(results(folder)) + 1
            wait_for(lambda: newest_round(folder) > under_way, "another save")
            os.kill(ranks[0].pid, signal.SIGKILL)
            outputs = [rank.communicate()[0] for rank in ranks]
        assert "have vanished" in outputs[0]
        assert newest_of(folder).index.keys() >= {0, 1, 2}


def newest_round(folder: Path) -> int:
    return checkpoint.newest_round(folder / "checkpoint")


def forked_here(folder: Path) -> int:
    return forked(folder, "server:5", *SETTINGS[1:])


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def dangling(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("/no/such/folder")


def replaced(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file")


class TestContents:
    """Other contents behind the same names are another run."""

    @staticmethod
    def write_data(path: Path, seed: int) -> None:
        rng = np.random.default_rng(seed)
        y = np.arange(40) % 2
        np.savez(path, x_train=rng.normal(size=(40, 3)), y_train=y, x_test=rng.normal(size=(8, 3)), y_test=y[:8])

    def test_a_rank_that_sees_other_data_is_named(self, tmp_path: Path) -> None:
        for rank in (0, 1):
            (tmp_path / str(rank)).mkdir()
            self.write_data(tmp_path / str(rank) / "d.npz", rank)
        inputs = [*QUIET, f"data={{name: npz, path: {tmp_path}/$RANK/d.npz}}", "model={name: mlp}", "clients.total=4"]
        codes, outputs = run_ranks(2, [*inputs, "clients.per_round=2", "rounds=1", f"run.dir={tmp_path / 'run'}"])
        assert codes == [2, 2], outputs
        assert "rank 1 on" in outputs[0] and "sees another data than rank 0" in outputs[0]


class TestRows:
    def test_unwritten_rows_are_in_the_checkpoint(self, calm: Path, tmp_path: Path) -> None:
        child = os.fork()
        if child == 0:
            MetricsFile.flush = fail  # type: ignore[method-assign]
            os._exit(forked_main(tmp_path))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert not (tmp_path / "metrics.jsonl").exists()
        assert main(arguments(tmp_path)) == 0
        assert_same(tmp_path, calm)


def forked_main(folder: Path) -> int:
    from fl_dist.machine import faults

    faults.point = faults.armed("server:6")
    with saving_at_once():
        return main(arguments(folder))


def test_a_read_error_of_a_clients_state_is_no_fault_of_the_client(tmp_path: Path, capsys) -> None:
    with saving_at_once():
        assert forked_here(tmp_path) == -signal.SIGKILL
    with mock.patch("fl_dist.engine.train.read_client", side_effect=OSError(5, "Input/output error")):
        assert main(arguments(tmp_path)) == 1
    assert "Input/output error" in capsys.readouterr().err
    assert not (tmp_path / "model.safetensors").exists()


@timing
def test_a_rank_that_dies_in_the_last_save_holds_nobody(tmp_path: Path, calm: Path) -> None:
    """No message of a round would tell of it any more; what it trained is in the model."""
    once = arguments(tmp_path, "comm.timeout=3", "checkpoint.every=100")
    (server, worker), outputs = run_ranks(2, once, FL_DIST_FAULT="save-begin:1@1")
    assert (server, worker) == (1, -signal.SIGKILL), outputs
    assert "error: the model is written, but no checkpoint could be: rank 1 on " in outputs[0]
    assert_same(tmp_path, calm)


@exhaustive
@timing
def test_a_rank_whose_last_save_is_slow_is_waited_for(tmp_path: Path, calm: Path) -> None:
    once = arguments(tmp_path, "comm.timeout=3", "checkpoint.every=100")
    codes, outputs = run_ranks(2, once, FL_DIST_FAULT="save-begin:1@1=sleep:7")
    assert codes == [0, 0], outputs
    assert_same(tmp_path, calm)
    assert checkpoint.newest_round(tmp_path / "checkpoint") == 8
