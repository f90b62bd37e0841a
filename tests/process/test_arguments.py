"""Ranks agree on the arguments and log their versions and data; --help imports nothing slow."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fl_dist
from fl_dist.__main__ import COMMANDS
from tests.support.processes import NO_WANDB, ROOT, environment, run_ranks

SMALL = (*NO_WANDB, "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")
SLOW_PACKAGES = ("matplotlib", "numpy", "plotly", "safetensors", "scipy", "submitit", "torch", "wandb")
PROGRAMS = sorted({"fl_dist.metrics", *(module.removesuffix(".__main__") for module, _ in COMMANDS.values())})

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


class TestFolder:
    """Without run.dir, the folder's name says what differs from the file."""

    @pytest.fixture(autouse=True)
    def _working_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_ranks_of_torchrun_agree_on_the_folder(self, tmp_path: Path) -> None:
        codes, outputs = run_ranks(2, [*SMALL, "rounds=1", "seed=5"])
        assert codes == [0, 0], outputs
        (folder,) = Path("runs").iterdir()
        assert sorted(p.name for p in (folder / "logs").glob("rank*")) == ["rank0.log", "rank1.log"]


class TestHints:
    def test_counts_of_one_are_singular(self, tmp_path: Path) -> None:
        codes, outputs = run_ranks(2, [*SMALL, "rounds=1", "evaluate.final_window=1", f"run.dir={tmp_path}"])
        assert codes == [0, 0], outputs
        assert "server + 1 worker on" in outputs[0]
        assert "(the last evaluated round)" in outputs[0]
        assert "±" not in outputs[0]


def test_every_rank_logs_its_versions_rank_and_data(tmp_path: Path) -> None:
    codes, outputs = run_ranks(3, [*SMALL, "rounds=1", f"run.dir={tmp_path}"])
    assert codes == [0, 0, 0], outputs
    for rank in range(3):
        text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        for expected in ("fl_dist ", "torch ", f"rank {rank} of 3 on ", "4 clients by dirichlet: ", "INFO finished"):
            assert expected in text, text


def test_a_dry_run_needs_no_slurm(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    env = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-m", "launch.submit", "rounds=1", "--nodes", "2", "--dry-run"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "#SBATCH --nodes=2\n" in result.stdout


class TestHelp:
    """Of every command, and the version, without an import that takes seconds."""

    @pytest.fixture
    def run_python(self, tmp_path: Path) -> RunPython:
        for package in SLOW_PACKAGES:
            (tmp_path / f"{package}.py").write_text(f"raise ImportError('imported {package}')\n")
        env = environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", COLUMNS="120")

        def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([sys.executable, *arguments], env=env, cwd=tmp_path, capture_output=True, text=True)

        return run_python

    @pytest.mark.parametrize("package", SLOW_PACKAGES)
    def test_the_test_would_notice_an_import(self, package: str, run_python: RunPython) -> None:
        result = run_python("-c", f"import {package}")
        assert result.returncode == 1 and result.stderr.endswith(f"ImportError: imported {package}\n")

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_of_a_program(self, program: str, run_python: RunPython) -> None:
        result = run_python("-m", program, "--help")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(f"usage: python -m {program} ")

    @pytest.mark.parametrize("command", COMMANDS)
    def test_of_a_subcommand(self, command: str, run_python: RunPython) -> None:
        result = run_python("-m", "fl_dist", command, "--help")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(f"usage: python -m {COMMANDS[command][0].removesuffix('.__main__')} ")

    def test_a_rank_can_be_ended_before_slow_imports(self, run_python: RunPython) -> None:
        result = run_python("-c", "import launch.rank")
        assert (result.returncode, result.stderr) == (0, "")

    def test_of_the_one_command_and_its_version(self, run_python: RunPython) -> None:
        result = run_python("-m", "fl_dist", "--help")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith("usage: fl-dist COMMAND ")
        assert run_python("-m", "fl_dist", "--version").stdout == f"fl_dist {fl_dist.__version__}\n"

    def test_a_mistake_in_the_arguments_is_found_before_slow_imports(self, run_python: RunPython) -> None:
        result = run_python("-m", "launch.local", "--ranks", "0")
        expected = "error: argument -n/--ranks: must be a whole number, at least 1, not '0'; see python -m launch.local"
        assert (result.returncode, result.stderr) == (2, f"{expected} --help\n")
