"""A disk that is full or read-only loses nothing that was saved (mounting one needs root)."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_dist.main import main
from tests.support.checkpoints import arguments, forked, newest_of, train_undisturbed
from tests.support.harness import saving_at_once
from tests.support.requirements import lacking
from tests.support.run_folder import assert_same, results


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("calm") / "run")


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        lacking("root", "mounting a small disk needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_warns_and_training_goes_on(tmp_path: Path, calm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One with room for the model of 300 kB and all else, and not for a save, which holds several of its size."""
    with small_disk(tmp_path / "disk", "700k") as disk:
        more = ("model={name: mlp, hidden: [1024]}", "rounds=3")
        assert main(arguments(disk / "run", *more)) == 1
        told = capsys.readouterr()
        assert "No space left on device" in told.err
        assert "training goes on" in told.err
        assert "no checkpoint could be" in told.err
        assert "Traceback" not in told.err
        assert len(results(disk / "run")) == 3
        assert not [p for p in (disk / "run" / "checkpoint").rglob("*") if p.is_file()]


def test_a_disk_that_fills_up_keeps_the_last_good_save(tmp_path: Path, calm: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        with saving_at_once():
            assert forked(disk / "run", "server:3") == -signal.SIGKILL
        good = newest_of(disk / "run").manifest
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1 << 10))
        assert forked(disk / "run", "server:3") == -signal.SIGKILL
        assert newest_of(disk / "run").manifest.round >= good.round
        (disk / "filler").unlink()
        assert main(arguments(disk / "run")) == 0
        assert_same(disk / "run", calm)


def test_a_read_only_folder_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert main(arguments(disk / "run")) == 2
        assert "cannot use the run folder" in capsys.readouterr().err
