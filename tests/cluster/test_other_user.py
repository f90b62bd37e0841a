"""A user without root, Slurm or files in the home folder can train, and gets clear errors otherwise."""

import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.data_files import npz_arguments, save_npz
from tests.support.processes import environment, run
from tests.support.requirements import skip_or_fail
from tests.support.run_folder import read_records
from tests.support.wandb_records import offline_records, read_entries, select_entries

NOBODY = pwd.getpwnam("nobody")
SMALL = ("rounds=2", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")


@pytest.fixture
def workspace() -> Iterator[Path]:
    """A folder of the user nobody that others may read."""
    if os.geteuid() or not shutil.which("setpriv"):
        skip_or_fail("root", "becoming another user needs root and setpriv")
    folder = Path(tempfile.mkdtemp(prefix="fl_dist-"))
    try:
        for path in (folder, folder / "home", folder / "tmp"):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
            os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)
        child = (
            "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import fl_dist.run_command'], check=True)"
        )
        code, output = run_as_nobody(folder, "-c", child)
        if code:
            skip_or_fail("root", f"another user cannot use this Python and this repository: {output.splitlines()[-1]}")
        yield folder
    finally:
        shutil.rmtree(folder)


def run_as_nobody(workspace: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of Python, run as nobody in the workspace."""
    rights = [f"--reuid={NOBODY.pw_uid}", f"--regid={NOBODY.pw_gid}", "--clear-groups"]
    variables = {
        "HOME": str(workspace / "home"),
        "TMPDIR": str(workspace / "tmp"),
        "PATH": str(Path(sys.executable).parent),
    }
    env = environment(**variables, FL_DIST_CACHE=str(workspace / "tmp"), MPLCONFIGDIR=str(workspace / "tmp"))
    return run([shutil.which("setpriv") or "", *rights, sys.executable, *arguments], cwd=workspace, env=env)


def test_ranks_train_and_write_only_below_the_run_folder(workspace: Path) -> None:
    code, output = run_as_nobody(workspace, "-m", "launch.local", "-n", "3", *SMALL, "run.dir=runs/a")
    assert code == 0, output
    assert len(read_records(workspace / "runs" / "a")) == 2
    assert len(select_entries("history", read_entries(offline_records(workspace / "runs" / "a")[-1]))) == 2
    assert [path for path in (workspace / "home").rglob("*") if path.is_file()] == []
    assert {path.stat().st_uid for path in (workspace / "runs").rglob("*")} == {NOBODY.pw_uid}


def test_a_folder_of_another_user_is_refused_in_one_line(workspace: Path) -> None:
    (workspace / "foreign").mkdir(mode=0o755)
    code, output = run_as_nobody(workspace, "-m", "fl_dist.main", *SMALL, "run.dir=foreign")
    assert code == 2
    assert [line for line in output.splitlines() if line.startswith("error: cannot use the run folder foreign")]
    assert "Traceback" not in output and list((workspace / "foreign").iterdir()) == []


def test_unreadable_data_is_a_one_line_error(workspace: Path) -> None:
    file = save_npz(workspace / "secret.npz")
    file.chmod(0o600)
    code, output = run_as_nobody(workspace, "-m", "fl_dist.main", *SMALL, *npz_arguments(file), "run.dir=run")
    assert code in (1, 2)
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert str(file) in error and "ermission denied" in error and "Traceback" not in output


def test_submitting_without_slurm_is_a_one_line_error(workspace: Path) -> None:
    code, output = run_as_nobody(workspace, "-m", "launch.submit", *SMALL, "run.dir=run")
    assert (code, "no sbatch on the PATH" in output, "Traceback" in output) == (2, True, False), output
