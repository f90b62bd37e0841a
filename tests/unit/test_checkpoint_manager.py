"""Checkpoints under stress: slow disks, failed parts, missing files, records that cannot be written, growth."""

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

from fl_dist.callbacks.always_on.console import Console
from fl_dist.config import Topology
from fl_dist.distributed.process_group import ProcessGroup, single_process_group
from fl_dist.main import main
from fl_dist.metrics import file as metrics_file
from fl_dist.metrics.file import MetricsFile
from fl_dist.metrics.record import RoundRecord
from fl_dist.storage import checkpoint, checkpoint_files, checkpoint_manager
from fl_dist.storage.checkpoint import checkpoint_rounds, folder_name, load_checkpoint, newest_checkpoint
from fl_dist.storage.checkpoint_manager import CheckpointManager
from fl_dist.storage.checkpoint_writer import CheckpointRequest, CheckpointWriter
from tests.support.harness import synchronous_checkpoints
from tests.support.processes import NO_WANDB
from tests.support.run_folder import model_hash

SETTINGS = (
    *NO_WANDB,
    "rounds=8",
    "model={name: mlp, hidden: [16]}",
    "partition={name: dirichlet, alpha: 0.3, variant: unbalanced}",
    "clients={total: 8, per_round: 3, on_failure: drop}",
    "local={epochs: 1, batch_size: 32, lr: 0.05, momentum: 0.0}",
    "algorithm.name=scaffold",
)


COMMON = {"test_accuracy": None, "bytes_down": 1, "bytes_up": 1, "dropped": [], "seconds": {"total": 1.0}}
"""Fields of every record."""


def arguments(folder: Path, *more: str) -> list[str]:
    return [*SETTINGS, f"run.dir={folder}", *more]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert main(arguments(folder)) == 0
    return folder


def new_group() -> ProcessGroup:
    return single_process_group(Topology(device="cpu"))


class Checkpointing:
    """One rank's checkpoint_writer and rank 0's manager, driven by checkpoints; clients are small vectors."""

    def __init__(
        self, root: Path, keep: int = 2, has_state: bool = True, warn: Callable[[str], Any] = pytest.fail
    ) -> None:
        self.root = root
        self.manager = CheckpointManager(root, "run", keep, newest_checkpoint(root, "run", warn), lambda: None)
        self.writer = CheckpointWriter(root, new_group(), "run", self.manager, has_state=has_state)
        self.committed: dict[int, float] = {}

    def save(self, round_: int, clients: dict[int, float]) -> bool:
        tensors = {c: {"h": torch.full((4,), value)} for c, value in clients.items()}
        self.writer.start(round_, tensors, {"x": torch.tensor([float(round_)])}, {"rows": []})
        self.writer.join()
        finished_round, is_committed = self.manager.pop_result()
        assert finished_round == round_
        if is_committed:
            self.committed |= clients
        else:
            self.writer.discard(round_)
        return is_committed

    def stored(self, round_: int | None = None) -> dict[int, float]:
        loaded = load_checkpoint(self.root, round_ or self.manager.committed_round)
        return {c: float(checkpoint.read_client(self.root, e)["h"][0]) for c, e in loaded.index.items()}


class TestDurable:
    """Of the checkpoints that rank 0 writes alone, those soon after a durable one are not synced."""

    @pytest.fixture
    def synced(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Files and folders that were synced to disk."""
        paths: list[str] = []
        monkeypatch.setattr(os, "fsync", lambda handle: paths.append(os.readlink(f"/proc/self/fd/{handle}")))
        return paths

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [100.0]
        monkeypatch.setattr(checkpoint_manager, "time", mock.Mock(monotonic=lambda: now[0]))
        return now

    def save(self, checkpoints: Checkpointing, round_: int, last: bool = False) -> None:
        checkpoints.writer.start(round_, {}, {"x": torch.tensor([float(round_)])}, {"rows": []}, last)
        checkpoints.writer.join()
        assert checkpoints.manager.pop_result() == (round_, True)

    def test_the_first_the_last_and_one_per_second_are_durable(
        self, tmp_path: Path, synced: list[str], clock: list[float]
    ) -> None:
        checkpoints = Checkpointing(tmp_path, has_state=False)
        for round_, elapsed, last in (
            (1, 0.0, False),
            (2, 0.9, False),
            (3, 0.2, False),
            (4, 0.1, False),
            (5, 0.1, True),
        ):
            clock[0] += elapsed
            self.save(checkpoints, round_, last)
            synced_names = {Path(path).name.partition(".json")[0].lstrip(".") for path in synced}
            folder = folder_name(round_)
            assert synced_names == (
                {"server.safetensors", "manifest", folder, tmp_path.name} if round_ in (1, 3, 5) else set()
            )
            synced.clear()

    def test_a_power_failure_leaves_a_complete_checkpoint(self, tmp_path: Path, clock: list[float]) -> None:
        checkpoints = Checkpointing(tmp_path, keep=1, has_state=False)
        for round_ in range(1, 6):
            self.save(checkpoints, round_)
            assert checkpoint_rounds(tmp_path) == sorted({1, round_}), "the durable one and the newest"
        for name in (checkpoint.SERVER, checkpoint.MANIFEST):
            (tmp_path / folder_name(5) / name).write_bytes(b"")
        newest = newest_checkpoint(tmp_path, "run", lambda warning: None)
        assert newest is not None and newest.manifest.round == 1
        assert checkpoint.read_server(tmp_path, newest.manifest)["x"].tolist() == [1.0]

    def test_an_old_durable_checkpoint_is_removed_after_the_next_one(
        self, tmp_path: Path, synced: list[str], clock: list[float]
    ) -> None:
        checkpoints = Checkpointing(tmp_path, keep=1, has_state=False)
        self.save(checkpoints, 1)
        self.save(checkpoints, 2)
        clock[0] += 1.1
        self.save(checkpoints, 3)
        self.save(checkpoints, 4)
        assert checkpoint_rounds(tmp_path) == [3, 4]
        resumed = Checkpointing(tmp_path, keep=1, has_state=False)
        synced.clear()
        self.save(resumed, 5)
        assert f"{tmp_path / folder_name(5)}/server.safetensors" in synced, "after a restart the first is durable"
        assert checkpoint_rounds(tmp_path) == [5]

    @pytest.mark.parametrize("has_marker", [False, True])
    def test_checkpoints_emptied_by_a_power_failure_are_removed_at_the_next_start(
        self, has_marker: bool, tmp_path: Path, clock: list[float]
    ) -> None:
        checkpoints = Checkpointing(tmp_path, keep=4, has_state=False)
        for round_ in (1, 2, 3, 4):
            self.save(checkpoints, round_, last=round_ in (1, 3))
        for round_ in (2, 4):
            (tmp_path / folder_name(round_) / checkpoint.MANIFEST).write_bytes(b"")
            if has_marker:  # the last removal is undone as well
                (tmp_path / folder_name(round_) / checkpoint.UNFINISHED_MARKER).write_text("run")
        (tmp_path / "round-000007").mkdir()
        warnings = list[str]()
        resumed = Checkpointing(tmp_path, keep=4, has_state=False, warn=warnings.append)
        assert resumed.manager.committed_round == 3 and sorted(p.name for p in tmp_path.iterdir()) == list(
            map(folder_name, (1, 3))
        )
        assert len(warnings) == 1 and "trying the checkpoint before it" in warnings[0]

    def test_with_client_state_all_are_durable(self, tmp_path: Path, synced: list[str], clock: list[float]) -> None:
        checkpoints = Checkpointing(tmp_path)
        for round_ in (1, 2, 3):
            assert checkpoints.save(round_, {0: 1.0})
            assert {"server.safetensors", "clients-0.pack"} <= {Path(path).name for path in synced}
            synced.clear()

    def test_a_run_ends_with_a_durable_checkpoint(self, tmp_path: Path, synced: list[str]) -> None:
        with synchronous_checkpoints(), mock.patch.object(checkpoint_manager, "SYNC_INTERVAL_SECONDS", 1e9):
            assert main(arguments(tmp_path, "algorithm.name=fedavg", "checkpoint.keep=1")) == 0
        assert f"{tmp_path}/checkpoint/{folder_name(8)}/server.safetensors" in synced
        assert checkpoint_rounds(tmp_path / "checkpoint") == [8]


class TestResult:
    def test_a_failed_part_changes_no_client(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checkpoints = Checkpointing(tmp_path)
        assert checkpoints.save(1, {0: 1.0, 1: 1.0})
        monkeypatch.setattr(checkpoint_files, "sync", fail)
        assert not checkpoints.save(2, {1: 2.0})
        monkeypatch.undo()
        assert "disk trouble" in checkpoints.manager.last_error
        assert checkpoint_rounds(tmp_path) == [1], "a failed checkpoint leaves nothing"
        assert checkpoints.stored() == {0: 1.0, 1: 1.0}
        assert checkpoints.save(3, {1: 3.0})
        assert checkpoints.manager.last_error == ""
        assert checkpoints.stored() == {0: 1.0, 1: 3.0}

    def test_a_result_that_is_set_right_after_a_pop_is_kept_for_the_next(self, tmp_path: Path) -> None:
        manager = CheckpointManager(tmp_path, "run", 2, None, lambda: None)

        class ThreadIsNext:
            """A lock after whose first release the other thread runs at once."""

            has_run = False

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: object) -> None:
                if not self.has_run:
                    self.has_run = True
                    manager.finish(5, "disk trouble")

        manager._lock = ThreadIsNext()
        assert manager.pop_result() == (0, True)
        assert manager.pop_result() == (5, False)
        assert manager.pop_result() == (0, True)

    def test_a_checkpoint_is_committed_by_its_manifest_and_not_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoints, original = Checkpointing(tmp_path), checkpoint.write_atomically
        assert checkpoints.save(1, {0: 1.0, 1: 1.0})

        def write(path: str, *rest: Any) -> None:
            original(path, *rest) if Path(path).name != "manifest.json" else fail()

        monkeypatch.setattr(checkpoint, "write_atomically", write)
        assert not checkpoints.save(2, {1: 2.0})
        monkeypatch.undo()
        newest = newest_checkpoint(tmp_path, "run", pytest.fail)
        assert newest is not None and newest.manifest.round == 1

    def test_an_unexpected_error_affects_neither_the_thread_nor_the_next_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        checkpoints = Checkpointing(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.manager, "complete", lambda *_: {}["lost"])
            assert not checkpoints.save(1, {0: 1.0})
        assert "the checkpoint of round 1 was not completed" in caplog.text and "KeyError: 'lost'" in caplog.text
        assert checkpoints.manager.last_error == "KeyError: 'lost'"
        assert checkpoint_rounds(tmp_path) == [], "its files are removed"
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.manager, "_collect_garbage", lambda *_: {}["lost"])
            assert checkpoints.save(2, {0: 2.0}), "its manifest was written"
        assert checkpoints.save(3, {1: 3.0}) and checkpoints.stored() == {0: 2.0, 1: 3.0}

    def test_a_writer_ends_its_thread(self, tmp_path: Path) -> None:
        before, checkpoints = threading.active_count(), Checkpointing(tmp_path)
        assert checkpoints.save(1, {}) and checkpoints.save(2, {})
        assert threading.active_count() == before + 1
        checkpoints.writer.close()
        assert threading.active_count() == before
        CheckpointWriter(tmp_path, new_group(), "run", None).close()

    def test_an_error_after_the_commit_does_not_affect_the_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        checkpoints = Checkpointing(tmp_path, keep=1)
        assert checkpoints.save(1, {0: 1.0})
        monkeypatch.setattr(checkpoints.manager, "_on_commit", fail)
        assert checkpoints.save(2, {0: 2.0})
        assert "the checkpoint of round 2 is complete, but: disk trouble" in caplog.text
        monkeypatch.undo()
        assert checkpoints.stored() == {0: 2.0}
        assert checkpoints.save(3, {0: 3.0}) and checkpoint_rounds(tmp_path) == [3], (
            "leftover files are removed with the next checkpoint"
        )

    @pytest.mark.parametrize("clients", [{}, {0: 2.0}])
    @pytest.mark.parametrize("last", range(1, 7))
    def test_a_kill_while_old_files_are_removed_leaves_nothing_behind(
        self, clients: dict[int, float], last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files are removed in an order in which the rest can be recognised, and removed later."""

        class Killed(BaseException):
            pass

        removed, unlink = [], os.unlink

        def unlink_until(path: str | Path) -> None:
            if len(removed) == last:
                raise Killed
            removed.append(path)
            unlink(path)

        checkpoints = Checkpointing(tmp_path, keep=1)
        assert checkpoints.save(1, dict.fromkeys(clients, 1.0))
        monkeypatch.setattr(os, "unlink", unlink_until)
        tensors = {c: {"h": torch.full((4,), value)} for c, value in clients.items()}
        with contextlib.suppress(Killed):
            part = checkpoints.writer._write(CheckpointRequest(2, tensors, {"x": torch.ones(1)}, {}, durable=True))
            checkpoints.manager.complete(2, [part], {"rows": []})
        monkeypatch.undo()
        resumed = Checkpointing(tmp_path, keep=1)
        assert resumed.manager.committed_round == 2
        assert resumed.save(3, dict.fromkeys(clients, 3.0))
        assert resumed.save(4, dict.fromkeys(clients, 4.0))
        assert checkpoint_rounds(tmp_path) == [4]


def fail(*_: Any) -> None:
    raise OSError(5, "disk trouble")


class TestWithoutClientState:
    """Without client state, only the server's variables are saved."""

    def test_only_rank_0_has_a_part(self, tmp_path: Path) -> None:
        ranks = [new_group(), new_group()]
        for number, rank in enumerate(ranks):
            rank.rank, rank.size = number, 2
        manager = CheckpointManager(tmp_path, "run", 2, None, lambda: None)
        server = CheckpointWriter(tmp_path, ranks[0], "run", manager, has_state=False)
        worker = CheckpointWriter(tmp_path, ranks[1], "run", None, has_state=False)
        worker.start(1, {}, None, {})
        assert not worker.is_busy and not list(tmp_path.iterdir())
        server.start(1, {}, {"x": torch.zeros(1)}, {"rows": []})
        server.join()
        assert manager.committed_round == 1

    def test_a_manifest_without_clients_has_no_copy(self, tmp_path: Path) -> None:
        checkpoints = Checkpointing(tmp_path)
        assert checkpoints.save(1, {}) and checkpoints.save(2, {0: 1.0})
        names = [{f.name for f in (tmp_path / folder_name(r)).iterdir()} for r in (1, 2)]
        assert names[0] == {"manifest.json", "server.safetensors"}
        assert {"manifest.json", "manifest.copy.json"} < names[1]

    def test_a_damaged_manifest_falls_back_to_the_previous_checkpoint(self, tmp_path: Path) -> None:
        checkpoints, warnings = Checkpointing(tmp_path), list[str]()
        assert checkpoints.save(1, {}) and checkpoints.save(2, {})
        (tmp_path / folder_name(2) / "manifest.json").write_text("{}")
        newest = newest_checkpoint(tmp_path, "run", warnings.append)
        assert newest is not None and newest.manifest.round == 1 and len(warnings) == 1


def test_a_record_that_is_being_saved_does_not_change() -> None:
    record = RoundRecord.from_json({"round": 1, **COMMON, "workers": {"0": {"memory": 1}}})
    before = record.to_json()
    evaluated = record.with_test({"loss": 0.5}, {}, 2.0, ranks=2).to_json()
    assert record.to_json() == before
    assert evaluated["seconds"] == {**before["seconds"], "evaluate": 2.0} and evaluated["test_loss"] == 0.5
    assert evaluated["workers"] == {"0": {"memory": 1, "evaluate": 2.0}, "1": {"evaluate": 2.0}}


class TestFolder:
    """A folder with parts of a run is never treated as new."""

    def test_a_finished_model_is_never_overwritten(self, reference: Path, tmp_path: Path, capsys) -> None:
        shutil.copytree(reference, tmp_path / "run")
        (tmp_path / "run" / "config.yaml").unlink()
        assert main(arguments(tmp_path / "run")) == 2
        assert model_hash(tmp_path / "run") == model_hash(reference)

    def test_missing_checkpoints_are_detected_and_written_again(self, tmp_path: Path) -> None:
        checkpoints = Checkpointing(tmp_path)
        assert checkpoints.save(1, {0: 1.0, 1: 1.0, 2: 1.0})
        shutil.rmtree(tmp_path)
        assert not checkpoints.save(2, {1: 2.0})
        assert (
            "files of earlier checkpoints are missing" in checkpoints.manager.last_error
            and checkpoints.manager.has_missing_files
        )
        assert checkpoints.save(3, {0: 1.0, 1: 2.0, 2: 1.0})
        assert not checkpoints.manager.has_missing_files
        assert checkpoints.stored() == {0: 1.0, 1: 2.0, 2: 1.0}

    def test_missing_checkpoints_of_clients_that_no_rank_holds_end_the_run(self, tmp_path: Path) -> None:
        checkpoints = Checkpointing(tmp_path)
        assert checkpoints.save(1, {0: 1.0, 1: 1.0})
        shutil.rmtree(tmp_path)
        assert not checkpoints.save(2, {1: 2.0})
        assert not checkpoints.save(3, {1: 2.0})
        assert "the variables of 1 client that no rank holds" in checkpoints.manager.unrecoverable_error


class TestContents:
    """Inputs with the same names and other contents are another run."""

    @staticmethod
    def write_data(path: Path, seed: int) -> None:
        rng = np.random.default_rng(seed)
        y = np.arange(40) % 2
        np.savez(path, x_train=rng.normal(size=(40, 3)), y_train=y, x_test=rng.normal(size=(8, 3)), y_test=y[:8])

    @pytest.mark.parametrize("what", ["data", "model", "schedule"])
    def test_changed_files_are_detected(self, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        def write(seed: int) -> None:
            if what == "data" or not (tmp_path / "d.npz").exists():
                self.write_data(tmp_path / "d.npz", seed)
            if what == "model" or not (tmp_path / "w.safetensors").exists():
                layer = {"layers.0.weight": torch.full((2, 3), float(seed)), "layers.0.bias": torch.zeros(2)}
                save_file(layer, tmp_path / "w.safetensors")
            if what == "schedule" or not (tmp_path / "s.yaml").exists():
                (tmp_path / "s.yaml").write_text(f"[[0], [{seed}], [2], [3]]")

        inputs = [
            *NO_WANDB,
            f"data={{name: npz, path: {tmp_path}/d.npz}}",
            f"model={{name: mlp, hidden: [], init: {tmp_path}/w.safetensors}}",
            f"clients={{total: 4, schedule: {tmp_path}/s.yaml}}",
            f"run.dir={tmp_path / 'run'}",
        ]
        write(1)
        assert main([*inputs, "rounds=2"]) == 0
        write(2)
        assert main([*inputs, "rounds=4"]) == 2
        assert f"started with a different {what}; restore the old files" in capsys.readouterr().err
        write(1)
        assert main([*inputs, "rounds=4"]) == 0


class TestRecords:
    RECORDS = [RoundRecord.from_json({"round": k, **COMMON}) for k in range(1, 6)]

    def test_a_partial_write_leaves_no_fragment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = MetricsFile(tmp_path / "m.jsonl")
        file.append(self.RECORDS[0])
        original = os.write
        monkeypatch.setattr(metrics_file.os, "write", write_half_then_fail(original))
        with pytest.raises(OSError, match="No space"):
            file.append(self.RECORDS[1])
        monkeypatch.undo()
        assert read_records(file) == self.RECORDS[:1]
        file.append(self.RECORDS[2])
        assert read_records(file) == self.RECORDS[:3]

    def test_reading_keeps_good_records_after_a_bad_line(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        lines = [json.dumps(record.to_json()) for record in self.RECORDS]
        path.write_text("\n".join([lines[0], '{"round": 2, "lo', lines[2], "[]", lines[3]]) + '\n{"round": 5')
        file = MetricsFile(path)
        assert [record.round for record in file.resume(5, [self.RECORDS[1]])] == [1, 2, 3, 4]
        assert read_records(file) == self.RECORDS[:4]
        assert (tmp_path / metrics_file.DAMAGED).exists()

    def test_records_after_the_checkpoint_are_removed(self, tmp_path: Path) -> None:
        file = MetricsFile(tmp_path / "m.jsonl")
        for record in self.RECORDS:
            file.append(record)
        assert file.resume(3) == self.RECORDS[:3]
        assert read_records(file) == self.RECORDS[:3]

    def test_records_in_the_file_count_and_are_not_written_again(self, tmp_path: Path) -> None:
        file = MetricsFile(tmp_path / "m.jsonl")
        for record in self.RECORDS[:2]:
            file.append(record)
        before = file.path.read_bytes(), file.path.stat().st_ino
        other = self.RECORDS[1].model_copy(update={"test": {"loss": 9.0}})
        assert file.resume(2, [other]) == self.RECORDS[:2]
        assert (file.path.read_bytes(), file.path.stat().st_ino) == before

    def test_records_of_a_checkpoint_are_kept_while_the_disk_is_full(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "m.jsonl"
        MetricsFile(path).append(self.RECORDS[0])
        file = MetricsFile(path)
        monkeypatch.setattr(metrics_file.os, "write", write_half_then_fail(os.write))
        assert file.resume(3, self.RECORDS[1:3]) == self.RECORDS[:3]
        monkeypatch.undo()
        assert (read_records(file), file.unwritten) == (self.RECORDS[:1], self.RECORDS[1:3])
        file.append(self.RECORDS[3])
        assert read_records(file) == self.RECORDS[:4]

    def test_records_that_cannot_be_written_end_the_run_with_an_error(self, tmp_path: Path, capsys) -> None:
        blocked, on_round_end = tmp_path / "run" / "metrics.jsonl", Console.on_round_end

        def block(console: Console, *arguments_: Any) -> None:
            """Put a folder where the file is."""
            if blocked.is_file():
                blocked.rename(blocked.with_suffix(".gone"))
                blocked.mkdir()
            on_round_end(console, *arguments_)

        with mock.patch.object(Console, "on_round_end", block):
            assert main(arguments(tmp_path / "run", "rounds=4")) == 1
        error = capsys.readouterr().err
        assert "the model is written, but metrics.jsonl lacks" in error
        assert "Traceback" not in error


def write_half_then_fail(original: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    calls = []

    def write(handle: int, data: bytes) -> int:
        if calls:
            raise OSError(28, "No space left on device")
        calls.append(True)
        return original(handle, data[: len(data) // 2])

    return write


def read_records(file: MetricsFile) -> list[RoundRecord]:
    return [RoundRecord.from_json(json.loads(line)) for line in file.path.read_text().splitlines()]


class TestGrowth:
    """The cost of a checkpoint depends on the clients that changed, not on those that exist."""

    def test_packs_are_bounded_and_all_clients_are_found(self, tmp_path: Path) -> None:
        checkpoints, rng = Checkpointing(tmp_path), np.random.default_rng(0)
        assert checkpoints.save(1, {c: 1.0 for c in range(200)})
        for round_ in range(2, 150):
            assert checkpoints.save(round_, {int(c): float(round_) for c in rng.choice(200, 5, replace=False)})
        assert checkpoints.stored() == checkpoints.committed
        entries = sum(len(checkpoint.Manifest.read(tmp_path, r).clients) for r in checkpoint_rounds(tmp_path))
        assert entries <= 2 * 200 + 20 * 10
        before = load_checkpoint(tmp_path, 148)
        assert before.manifest.round == 148 and len(before.index) == 200
        resumed = Checkpointing(tmp_path)
        assert resumed.stored() == checkpoints.committed
        assert resumed.save(150, {0: 150.0})
        assert resumed.stored() == checkpoints.committed | {0: 150.0}

    def test_a_checkpoint_writes_only_changed_clients(self, tmp_path: Path) -> None:
        sizes = {}
        for total in (20, 2000):
            root = tmp_path / str(total)
            checkpoints = Checkpointing(root)
            assert checkpoints.save(1, {c: 1.0 for c in range(total)})
            assert checkpoints.save(2, {c: 2.0 for c in range(10)})
            sizes[total] = sum(f.stat().st_size for f in (root / folder_name(2)).iterdir())
        assert sizes[2000] < 1.1 * sizes[20]

    def test_keys_of_finished_checkpoints_are_removed(self, tmp_path: Path) -> None:
        checkpoints = Checkpointing(tmp_path)
        store = checkpoints.writer.group.store._store
        keys = store.num_keys()
        for round_ in (1, 2, 3):
            assert checkpoints.save(round_, {0: float(round_)})
        assert store.num_keys() == keys


def test_a_compacted_client_is_found_by_a_rank_that_has_not_read_it(reference: Path, tmp_path: Path) -> None:
    """After a resume, rank 0 may copy a client that no rank has run yet to a newer pack."""
    from fl_dist.federation.client_state import client_reader

    root = tmp_path / "checkpoint"
    checkpoints, start = Checkpointing(root), None
    assert checkpoints.save(1, {c: float(c) for c in range(10)})
    start = load_checkpoint(root, 1)
    read = client_reader(root, start)
    for round_ in range(2, 40):
        assert checkpoints.save(round_, {c: 100.0 for c in range(1, 8)})
    assert 1 not in checkpoint_rounds(root)
    newest = read(9)
    assert newest is not None and float(newest["h"][0]) == 9.0
