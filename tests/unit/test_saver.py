"""Saves under stress: slow disks, failed parts, vanished and foreign files, rows that cannot be written, growth."""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fl_dist.config import Topology
from fl_dist.engine.record import add_test
from fl_dist.machine.comm import Alone
from fl_dist.main import main
from fl_dist.monitor.console import Console
from fl_dist.storage import checkpoint, metrics, saver
from fl_dist.storage.checkpoint import folder_name, load_save, newest, rounds_in
from fl_dist.storage.metrics import MetricsFile
from fl_dist.storage.saver import Chief, Saver
from tests.support.harness import saving_at_once
from tests.support.processes import QUIET
from tests.support.run_folder import model_hash

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


class Store(Alone):
    """A communicator for savers that are driven by hand."""

    def __init__(self) -> None:
        super().__init__(Topology(device="cpu"))


class Hand:
    """One rank's saver and rank 0's chief, driven by hand; clients are small vectors."""

    def __init__(
        self, root: Path, keep: int = 2, clients: bool = True, warn: Callable[[str], Any] = pytest.fail
    ) -> None:
        self.root, self.saver = root, Saver(root, Store(), "run", clients=clients)
        self.chief = self.saver.chief = Chief(root, "run", keep, newest(root, "run", warn), lambda: None)
        self.now: dict[int, float] = {}

    def save(self, round_: int, clients: dict[int, float]) -> bool:
        tensors = {c: {"h": torch.full((4,), value)} for c, value in clients.items()}
        self.saver.start(round_, tensors, {"x": torch.tensor([float(round_)])}, {"rows": []})
        self.saver.join()
        told, whole = self.chief.take_fate()
        assert told == round_
        if whole:
            self.now |= clients
        else:
            self.saver.discard(round_)
        return whole

    def stored(self, round_: int | None = None) -> dict[int, float]:
        save = load_save(self.root, round_ or self.chief.round)
        return {c: float(checkpoint.read_client(self.root, e)["h"][0]) for c, e in save.index.items()}


class TestDurable:
    """Of the saves that rank 0 makes alone, those that follow a durable one at once need not reach the disk."""

    @pytest.fixture
    def synced(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Files and folders that were brought to disk."""
        paths: list[str] = []
        monkeypatch.setattr(os, "fsync", lambda handle: paths.append(os.readlink(f"/proc/self/fd/{handle}")))
        return paths

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [100.0]
        monkeypatch.setattr(saver, "time", mock.Mock(monotonic=lambda: now[0]))
        return now

    def save(self, hand: Hand, round_: int, last: bool = False) -> None:
        hand.saver.start(round_, {}, {"x": torch.tensor([float(round_)])}, {"rows": []}, last)
        hand.saver.join()
        assert hand.chief.take_fate() == (round_, True)

    def test_the_first_the_last_and_one_a_second_are(
        self, tmp_path: Path, synced: list[str], clock: list[float]
    ) -> None:
        hand = Hand(tmp_path, clients=False)
        for round_, passes, last in (
            (1, 0.0, False),
            (2, 0.9, False),
            (3, 0.2, False),
            (4, 0.1, False),
            (5, 0.1, True),
        ):
            clock[0] += passes
            self.save(hand, round_, last)
            reached = {Path(path).name.partition(".json")[0].lstrip(".") for path in synced}
            folder = folder_name(round_)
            assert reached == (
                {"server.safetensors", "manifest", folder, tmp_path.name} if round_ in (1, 3, 5) else set()
            )
            synced.clear()

    def test_what_a_power_cut_leaves_is_a_whole_save(self, tmp_path: Path, clock: list[float]) -> None:
        hand = Hand(tmp_path, keep=1, clients=False)
        for round_ in range(1, 6):
            self.save(hand, round_)
            assert rounds_in(tmp_path) == sorted({1, round_}), "the durable one, and the newest"
        for name in (checkpoint.SERVER, checkpoint.MANIFEST):
            (tmp_path / folder_name(5) / name).write_bytes(b"")
        found = newest(tmp_path, "run", lambda warning: None)
        assert found is not None and found.manifest.round == 1
        assert checkpoint.read_server(tmp_path, found.manifest)["x"].tolist() == [1.0]

    def test_the_durable_one_goes_when_there_is_another(
        self, tmp_path: Path, synced: list[str], clock: list[float]
    ) -> None:
        hand = Hand(tmp_path, keep=1, clients=False)
        self.save(hand, 1)
        self.save(hand, 2)
        clock[0] += 1.1
        self.save(hand, 3)
        self.save(hand, 4)
        assert rounds_in(tmp_path) == [3, 4]
        again = Hand(tmp_path, keep=1, clients=False)
        synced.clear()
        self.save(again, 5)
        assert f"{tmp_path / folder_name(5)}/server.safetensors" in synced, "after a restart the first is durable"
        assert rounds_in(tmp_path) == [5]

    @pytest.mark.parametrize("marked", [False, True])
    def test_what_a_power_cut_emptied_goes_at_the_next_start(
        self, marked: bool, tmp_path: Path, clock: list[float]
    ) -> None:
        hand = Hand(tmp_path, keep=4, clients=False)
        for round_ in (1, 2, 3, 4):
            self.save(hand, round_, last=round_ in (1, 3))
        for round_ in (2, 4):
            (tmp_path / folder_name(round_) / checkpoint.MANIFEST).write_bytes(b"")
            if marked:  # what was removed last is there again
                (tmp_path / folder_name(round_) / checkpoint.UNFINISHED).write_text("run")
        (tmp_path / "round-000007").mkdir()
        warnings = list[str]()
        again = Hand(tmp_path, keep=4, clients=False, warn=warnings.append)
        assert again.chief.round == 3 and sorted(p.name for p in tmp_path.iterdir()) == list(map(folder_name, (1, 3)))
        assert len(warnings) == 1 and "trying the checkpoint before it" in warnings[0]

    def test_with_clients_variables_all_are(self, tmp_path: Path, synced: list[str], clock: list[float]) -> None:
        hand = Hand(tmp_path)
        for round_ in (1, 2, 3):
            assert hand.save(round_, {0: 1.0})
            assert {"server.safetensors", "clients-0.pack"} <= {Path(path).name for path in synced}
            synced.clear()

    def test_a_run_ends_with_a_durable_save(self, tmp_path: Path, synced: list[str]) -> None:
        with saving_at_once(), mock.patch.object(saver, "SETTLED", 1e9):
            assert main(arguments(tmp_path, "algorithm.name=fedavg", "checkpoint.keep=1")) == 0
        assert f"{tmp_path}/checkpoint/{folder_name(8)}/server.safetensors" in synced
        assert rounds_in(tmp_path / "checkpoint") == [8]


class TestFate:
    def test_a_part_that_fails_gives_all_clients_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hand = Hand(tmp_path)
        assert hand.save(1, {0: 1.0, 1: 1.0})
        monkeypatch.setattr(checkpoint, "sync", fail)
        assert not hand.save(2, {1: 2.0})
        monkeypatch.undo()
        assert "disk trouble" in hand.chief.failure
        assert rounds_in(tmp_path) == [1], "a failed save leaves nothing"
        assert hand.stored() == {0: 1.0, 1: 1.0}
        assert hand.save(3, {1: 3.0})
        assert hand.chief.failure == ""
        assert hand.stored() == {0: 1.0, 1: 3.0}

    def test_a_fate_that_is_decided_while_it_is_asked_for_is_told_the_next_time(self, tmp_path: Path) -> None:
        class Asked(Chief):
            told: tuple[int, bool] | None = None

            @property
            def _fate(self) -> tuple[int, bool] | None:  # the thread decides right after the look
                now, self.told = self.told, (5, False)
                return now

            @_fate.setter
            def _fate(self, fate: tuple[int, bool] | None) -> None:
                self.told = fate

        chief = Asked(tmp_path, "run", 2, None, lambda: None)
        assert chief.take_fate() == (0, True)
        assert chief.take_fate() == (5, False)

    def test_a_save_is_whole_with_its_manifest_and_not_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hand, real = Hand(tmp_path), checkpoint.write_atomically
        assert hand.save(1, {0: 1.0, 1: 1.0})

        def write(path: str, *rest: Any) -> None:
            real(path, *rest) if Path(path).name != "manifest.json" else fail()

        monkeypatch.setattr(checkpoint, "write_atomically", write)
        assert not hand.save(2, {1: 2.0})
        monkeypatch.undo()
        found = newest(tmp_path, "run", pytest.fail)
        assert found is not None and found.manifest.round == 1

    def test_a_defect_in_a_save_ends_neither_it_nor_the_next(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        hand = Hand(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(hand.chief, "complete", lambda *_: {}["lost"])
            assert not hand.save(1, {0: 1.0})
        assert "the save of round 1 was not completed" in caplog.text and "KeyError: 'lost'" in caplog.text
        assert hand.chief.failure == "KeyError: 'lost'"
        assert rounds_in(tmp_path) == [], "what it wrote is removed"
        with monkeypatch.context() as patch:
            patch.setattr(hand.chief, "_collect", lambda *_: {}["lost"])
            assert hand.save(2, {0: 2.0}), "its manifest was written"
        assert hand.save(3, {1: 3.0}) and hand.stored() == {0: 2.0, 1: 3.0}

    def test_a_saver_ends_its_thread(self, tmp_path: Path) -> None:
        before, hand = threading.active_count(), Hand(tmp_path)
        assert hand.save(1, {}) and hand.save(2, {})
        assert threading.active_count() == before + 1
        hand.saver.close()
        assert threading.active_count() == before
        Saver(tmp_path, Store(), "run").close()

    def test_what_cannot_be_done_after_a_save_does_it_no_harm(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        hand = Hand(tmp_path, keep=1)
        assert hand.save(1, {0: 1.0})
        monkeypatch.setattr(hand.chief, "_on_whole", fail)
        assert hand.save(2, {0: 2.0})
        assert "the checkpoint of round 2 is whole, but: disk trouble" in caplog.text
        monkeypatch.undo()
        assert hand.stored() == {0: 2.0}
        assert hand.save(3, {0: 3.0}) and rounds_in(tmp_path) == [3], "what was left is removed with the next"

    @pytest.mark.parametrize("clients", [{}, {0: 2.0}])
    @pytest.mark.parametrize("last", range(1, 7))
    def test_a_kill_while_old_files_are_removed_leaves_nothing_for_good(
        self, clients: dict[int, float], last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files are removed in an order in which what is left of a save can be told, and removed later."""

        class Killed(BaseException):
            pass

        removed, unlink = [], os.unlink

        def some(path: str | Path) -> None:
            if len(removed) == last:
                raise Killed
            removed.append(path)
            unlink(path)

        hand = Hand(tmp_path, keep=1)
        assert hand.save(1, dict.fromkeys(clients, 1.0))
        monkeypatch.setattr(os, "unlink", some)
        tensors = {c: {"h": torch.full((4,), value)} for c, value in clients.items()}
        with contextlib.suppress(Killed):
            part = {"clients": {}, "server": {}, "error": ""}
            hand.saver._write(2, tensors, {"x": torch.ones(1)}, part, durable=True)
            hand.chief.complete(2, [part], {"rows": []})
        monkeypatch.undo()
        again = Hand(tmp_path, keep=1)
        assert again.chief.round == 2
        assert again.save(3, dict.fromkeys(clients, 3.0))
        assert again.save(4, dict.fromkeys(clients, 4.0))
        assert rounds_in(tmp_path) == [4]


def fail(*_: Any) -> None:
    raise OSError(5, "disk trouble")


class TestWithoutVariables:
    """Of clients that keep nothing, only the server's variables are to be saved."""

    def test_only_rank_0_has_a_part(self, tmp_path: Path) -> None:
        ranks = [Store(), Store()]
        for number, rank in enumerate(ranks):
            rank.rank, rank.size = number, 2
        server, worker = (Saver(tmp_path, rank, "run", clients=False) for rank in ranks)
        worker.start(1, {}, None, {})
        assert not worker.busy and not list(tmp_path.iterdir())
        server.chief = Chief(tmp_path, "run", 2, None, lambda: None)
        server.start(1, {}, {"x": torch.zeros(1)}, {"rows": []})
        server.join()
        assert server.chief.round == 1

    def test_nothing_relies_on_its_manifest_which_is_written_once(self, tmp_path: Path) -> None:
        hand = Hand(tmp_path)
        assert hand.save(1, {}) and hand.save(2, {0: 1.0})
        names = [{f.name for f in (tmp_path / folder_name(r)).iterdir()} for r in (1, 2)]
        assert names[0] == {"manifest.json", "server.safetensors"}
        assert {"manifest.json", "manifest.copy.json"} < names[1]

    def test_a_damaged_manifest_leaves_the_save_before(self, tmp_path: Path) -> None:
        hand, warned = Hand(tmp_path), list[str]()
        assert hand.save(1, {}) and hand.save(2, {})
        (tmp_path / folder_name(2) / "manifest.json").write_text("{}")
        found = newest(tmp_path, "run", warned.append)
        assert found is not None and found.manifest.round == 1 and len(warned) == 1


def test_a_row_that_is_being_saved_does_not_change() -> None:
    row = {"round": 1, "seconds": {"local": 1.0}, "workers": {"0": {"memory": 1}}}
    saved = dict(row)
    add_test(row, {"test_loss": 0.5}, 2.0, ranks=2)
    assert saved == {"round": 1, "seconds": {"local": 1.0}, "workers": {"0": {"memory": 1}}}
    assert row["seconds"] == {"local": 1.0, "evaluate": 2.0}
    assert row["workers"] == {"0": {"memory": 1, "evaluate": 2.0}, "1": {"evaluate": 2.0}}


class TestFolder:
    """A folder that shows traces of a run is never taken for a new one, and nothing foreign is removed."""

    def test_a_finished_runs_model_is_safe(self, calm: Path, tmp_path: Path, capsys) -> None:
        shutil.copytree(calm, tmp_path / "run")
        (tmp_path / "run" / "config.yaml").unlink()
        assert main(arguments(tmp_path / "run")) == 2
        assert model_hash(tmp_path / "run") == model_hash(calm)

    def test_vanished_checkpoints_are_noticed_and_made_anew(self, tmp_path: Path) -> None:
        hand = Hand(tmp_path)
        assert hand.save(1, {0: 1.0, 1: 1.0, 2: 1.0})
        shutil.rmtree(tmp_path)
        assert not hand.save(2, {1: 2.0})
        assert "have vanished" in hand.chief.failure and hand.chief.vanished
        assert hand.save(3, {0: 1.0, 1: 2.0, 2: 1.0})
        assert not hand.chief.vanished
        assert hand.stored() == {0: 1.0, 1: 2.0, 2: 1.0}

    def test_vanished_checkpoints_of_clients_that_nobody_holds_end_the_run(self, tmp_path: Path) -> None:
        hand = Hand(tmp_path)
        assert hand.save(1, {0: 1.0, 1: 1.0})
        shutil.rmtree(tmp_path)
        assert not hand.save(2, {1: 2.0})
        assert not hand.save(3, {1: 2.0})
        assert "the variables of 1 clients that no rank holds" in hand.chief.hopeless


class TestContents:
    """Other contents behind the same names are another run."""

    @staticmethod
    def write_data(path: Path, seed: int) -> None:
        rng = np.random.default_rng(seed)
        y = np.arange(40) % 2
        np.savez(path, x_train=rng.normal(size=(40, 3)), y_train=y, x_test=rng.normal(size=(8, 3)), y_test=y[:8])

    @pytest.mark.parametrize("what", ["data", "model", "schedule"])
    def test_changed_files_are_noticed(self, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        def write(seed: int) -> None:
            if what == "data" or not (tmp_path / "d.npz").exists():
                self.write_data(tmp_path / "d.npz", seed)
            if what == "model" or not (tmp_path / "w.safetensors").exists():
                layer = {"layers.0.weight": torch.full((2, 3), float(seed)), "layers.0.bias": torch.zeros(2)}
                save_file(layer, tmp_path / "w.safetensors")
            if what == "schedule" or not (tmp_path / "s.yaml").exists():
                (tmp_path / "s.yaml").write_text(f"[[0], [{seed}], [2], [3]]")

        inputs = [
            *QUIET,
            f"data={{name: npz, path: {tmp_path}/d.npz}}",
            f"model={{name: mlp, hidden: [], init: {tmp_path}/w.safetensors}}",
            f"clients={{total: 4, schedule: {tmp_path}/s.yaml}}",
            f"run.dir={tmp_path / 'run'}",
        ]
        write(1)
        assert main([*inputs, "rounds=2"]) == 0
        write(2)
        assert main([*inputs, "rounds=4"]) == 2
        assert f"began with another {what} than there is now" in capsys.readouterr().err
        write(1)
        assert main([*inputs, "rounds=4"]) == 0


COMMON = {"test_accuracy": None, "bytes_down": 1, "bytes_up": 1, "dropped": [], "seconds": {"total": 1.0}}


class TestRows:
    ROWS = [{"round": k, **COMMON} for k in range(1, 6)]

    def test_a_torn_write_leaves_no_fragment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = MetricsFile(tmp_path / "m.jsonl")
        file.append(self.ROWS[0])
        real = os.write
        monkeypatch.setattr(metrics.os, "write", half_then_full(real))
        with pytest.raises(OSError, match="No space"):
            file.append(self.ROWS[1])
        monkeypatch.undo()
        assert rows_of(file) == self.ROWS[:1]
        file.append(self.ROWS[2])
        assert rows_of(file) == self.ROWS[:3]

    def test_reading_keeps_good_rows_after_a_bad_line(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        lines = [json.dumps(row) for row in self.ROWS]
        path.write_text("\n".join([lines[0], '{"round": 2, "lo', lines[2], "[]", lines[3]]) + '\n{"round": 5')
        file = MetricsFile(path)
        assert [row["round"] for row in file.resume(5, [self.ROWS[1]])] == [1, 2, 3, 4]
        assert rows_of(file) == self.ROWS[:4]
        assert (tmp_path / metrics.DAMAGED).exists()

    def test_rows_beyond_the_save_go(self, tmp_path: Path) -> None:
        file = MetricsFile(tmp_path / "m.jsonl")
        for row in self.ROWS:
            file.append(row)
        assert file.resume(3) == self.ROWS[:3]
        assert rows_of(file) == self.ROWS[:3]

    def test_rows_that_cannot_be_written_end_the_run_with_an_error(self, tmp_path: Path, capsys) -> None:
        blocked, row = tmp_path / "run" / "metrics.jsonl", Console.row

        def block(console: Console, *written: Any) -> None:
            """Put a folder where the file is."""
            if blocked.is_file():
                blocked.rename(blocked.with_suffix(".gone"))
                blocked.mkdir()
            row(console, *written)

        with mock.patch.object(Console, "row", block):
            assert main(arguments(tmp_path / "run", "rounds=4")) == 1
        error = capsys.readouterr().err
        assert "the model is written, but metrics.jsonl lacks" in error
        assert "Traceback" not in error


def half_then_full(real: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    done = []

    def write(handle: int, data: bytes) -> int:
        if done:
            raise OSError(28, "No space left on device")
        done.append(True)
        return real(handle, data[: len(data) // 2])

    return write


def rows_of(file: MetricsFile) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.path.read_text().splitlines()]


class TestGrowth:
    """The cost of a save depends on the clients that changed, not on those that exist."""

    def test_packs_are_bounded_and_everything_is_found_again(self, tmp_path: Path) -> None:
        hand, rng = Hand(tmp_path), np.random.default_rng(0)
        assert hand.save(1, {c: 1.0 for c in range(200)})
        for round_ in range(2, 150):
            assert hand.save(round_, {int(c): float(round_) for c in rng.choice(200, 5, replace=False)})
        assert hand.stored() == hand.now
        entries = sum(len(checkpoint.Manifest.read(tmp_path, r).clients) for r in rounds_in(tmp_path))
        assert entries <= 2 * 200 + 20 * 10
        before = load_save(tmp_path, 148)
        assert before.manifest.round == 148 and len(before.index) == 200
        again = Hand(tmp_path)
        assert again.stored() == hand.now
        assert again.save(150, {0: 150.0})
        assert again.stored() == hand.now | {0: 150.0}

    def test_a_save_writes_what_changed(self, tmp_path: Path) -> None:
        sizes = {}
        for total in (20, 2000):
            root = tmp_path / str(total)
            hand = Hand(root)
            assert hand.save(1, {c: 1.0 for c in range(total)})
            assert hand.save(2, {c: 2.0 for c in range(10)})
            sizes[total] = sum(f.stat().st_size for f in (root / folder_name(2)).iterdir())
        assert sizes[2000] < 1.1 * sizes[20]

    def test_keys_of_finished_saves_are_removed(self, tmp_path: Path) -> None:
        hand = Hand(tmp_path)
        for round_ in (1, 2, 3):
            assert hand.save(round_, {0: float(round_)})
        assert not hand.saver.comm._posts  # type: ignore[attr-defined]


def test_a_client_brought_along_is_found_by_a_rank_that_has_not_read_it(calm: Path, tmp_path: Path) -> None:
    """After a resume; rank 0 may meanwhile have moved a client that nobody has run to a newer pack."""
    from fl_dist.engine.train import reader
    from fl_dist.storage.folder import RunFolder

    root = tmp_path / "checkpoint"
    hand, start = Hand(root), None
    assert hand.save(1, {c: float(c) for c in range(10)})
    start = load_save(root, 1)
    read = reader(RunFolder(tmp_path), start)
    for round_ in range(2, 40):
        assert hand.save(round_, {c: 100.0 for c in range(1, 8)})
    assert 1 not in rounds_in(root)
    found = read(9)
    assert found is not None and float(found["h"][0]) == 9.0
