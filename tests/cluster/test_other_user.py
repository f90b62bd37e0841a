"""Whoever is not root, has no Slurm and an empty home folder gets the same, and clear words where they may not."""

import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.data_files import npz, save_npz
from tests.support.processes import environment, run
from tests.support.requirements import lacking
from tests.support.run_folder import metrics
from tests.support.wandb_records import entries, of, records

NOBODY = pwd.getpwnam("nobody")
SMALL = ("rounds=2", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")


@pytest.fixture
def desk() -> Iterator[Path]:
    """A folder of that user's, which others may look into."""
    if os.geteuid() or not shutil.which("setpriv"):
        lacking("root", "becoming another user needs root and setpriv")
    folder = Path(tempfile.mkdtemp(prefix="fl_dist-"))
    try:
        for path in (folder, folder / "home", folder / "tmp"):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
            os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)
        child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import fl_dist.main'], check=True)"
        code, output = as_nobody(folder, "-c", child)
        if code:
            lacking("root", f"another user cannot use this Python and this repository: {output.splitlines()[-1]}")
        yield folder
    finally:
        shutil.rmtree(folder)


def as_nobody(desk: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of Python there."""
    rights = [f"--reuid={NOBODY.pw_uid}", f"--regid={NOBODY.pw_gid}", "--clear-groups"]
    own = {"HOME": str(desk / "home"), "TMPDIR": str(desk / "tmp"), "PATH": str(Path(sys.executable).parent)}
    env = environment(**own, FL_DIST_CACHE=str(desk / "tmp"), MPLCONFIGDIR=str(desk / "tmp"))
    return run([shutil.which("setpriv") or "", *rights, sys.executable, *words], cwd=desk, env=env)


def test_ranks_train_and_leave_nothing_elsewhere(desk: Path) -> None:
    code, output = as_nobody(desk, "-m", "launch.local", "-n", "3", *SMALL, "run.dir=runs/a")
    assert code == 0, output
    assert len(metrics(desk / "runs" / "a")) == 2
    assert len(of("history", entries(records(desk / "runs" / "a")[-1]))) == 2
    assert [path for path in (desk / "home").rglob("*") if path.is_file()] == []
    assert {path.stat().st_uid for path in (desk / "runs").rglob("*")} == {NOBODY.pw_uid}


def test_a_folder_of_somebody_else_is_refused_in_one_line(desk: Path) -> None:
    (desk / "theirs").mkdir(mode=0o755)
    code, output = as_nobody(desk, "-m", "fl_dist.main", *SMALL, "run.dir=theirs")
    assert code == 2
    assert [line for line in output.splitlines() if line.startswith("error: cannot use the run folder theirs")]
    assert "Traceback" not in output and list((desk / "theirs").iterdir()) == []


def test_data_that_may_not_be_read_is_said_in_one_line(desk: Path) -> None:
    file = save_npz(desk / "secret.npz")
    file.chmod(0o600)
    code, output = as_nobody(desk, "-m", "fl_dist.main", *SMALL, *npz(file), "run.dir=run")
    assert code in (1, 2)
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert str(file) in error and "ermission denied" in error and "Traceback" not in output


def test_without_slurm_submitting_says_so(desk: Path) -> None:
    code, output = as_nobody(desk, "-m", "launch.submit", *SMALL, "run.dir=run")
    assert (code, "no sbatch on the PATH" in output, "Traceback" in output) == (2, True, False), output
