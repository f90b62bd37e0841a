"""A full or read-only disk loses no checkpoint (mounting one needs root)."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_dist.main import main
from tests.support.checkpoints import arguments, read_newest, run_forked, train_undisturbed
from tests.support.harness import synchronous_checkpoints
from tests.support.requirements import skip_or_fail
from tests.support.run_folder import assert_same_run, reproducible_records


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("reference") / "run")


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    result = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if result.returncode:
        skip_or_fail("root", "mounting a small disk needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_gives_a_warning_and_training_continues(
    tmp_path: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk has space for the model of 300 kB, but not for a checkpoint, which is several times larger."""
    with small_disk(tmp_path / "disk", "700k") as disk:
        more = ("model={name: mlp, hidden: [1024]}", "rounds=3")
        assert main(arguments(disk / "run", *more)) == 1
        output = capsys.readouterr()
        assert "No space left on device" in output.err
        assert "training continues" in output.err
        assert "no checkpoint could be" in output.err
        assert "Traceback" not in output.err
        assert len(reproducible_records(disk / "run")) == 3
        assert not [p for p in (disk / "run" / "checkpoint").rglob("*") if p.is_file()]


def test_a_disk_that_fills_up_keeps_the_last_complete_checkpoint(tmp_path: Path, reference: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        with synchronous_checkpoints():
            assert run_forked(disk / "run", "server:3") == -signal.SIGKILL
        complete = read_newest(disk / "run").manifest
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1 << 10))
        assert run_forked(disk / "run", "server:3") == -signal.SIGKILL
        assert read_newest(disk / "run").manifest.round >= complete.round
        (disk / "filler").unlink()
        assert main(arguments(disk / "run")) == 0
        assert_same_run(disk / "run", reference)


def test_an_error_of_a_full_disk_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        assert run_forked(disk / "run", "server:3") == -signal.SIGKILL
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1 << 10))
        assert main(arguments(disk / "run")) == 1
        assert f"error: No space left on device: {disk}/run/model.safetensors" in capsys.readouterr().err


def test_a_read_only_folder_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert main(arguments(disk / "run")) == 2
        assert "cannot use the run folder" in capsys.readouterr().err
