"""Runs from Python: interrupted, or called by every rank of a program; the `fl-dist` command."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fl_dist
from tests.support.marks import exhaustive
from tests.support.processes import environment, run
from tests.support.run_folder import model_hash
from tests.support.waiting import free_port

SMALL: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": "cnn", "norm": "batch"},
    "clients": {"total": 5, "per_round": 2},
    "local": {"epochs": 1},
    "algorithm": "scaffold",
    "monitor": {"wandb": {"mode": "disabled"}},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> fl_dist.Run:
    return fl_dist.run(SMALL, run={"dir": tmp_path_factory.mktemp("runs") / "finished"}, quiet=True)


def test_an_interrupted_run_loads_its_checkpoint_and_resumes(finished: fl_dist.Run, tmp_path: Path) -> None:
    """A signal in the second round, as Ctrl-C in a notebook sends it."""
    program = (
        "import os, signal, sys, fl_dist, tests.process.test_runs as t\n"
        "from fl_dist.callbacks.always_on.console import Console\n"
        "on_round_end = Console.on_round_end\n"
        "stop = lambda record: os.kill(os.getpid(), signal.SIGINT) if record.round == 1 else None\n"
        "Console.on_round_end = lambda self, record, context: (on_round_end(self, record, context), stop(record))\n"
        "run = fl_dist.run(t.SMALL, run={'dir': sys.argv[1]}, quiet=True)\n"
        "print(run, run.evaluate() == {k: run.history[-1]['test_' + k] for k in ('loss', 'accuracy')})\n"
    )
    code, output = run([sys.executable, "-c", program, str(tmp_path / "run")])
    assert code == 0, output
    assert "unfinished, 2 of 3 rounds) True" in output or "unfinished, 1 of 3 rounds) True" in output, output
    unfinished = fl_dist.load(tmp_path / "run")
    assert not unfinished.summary["finished"] and not unfinished.finished
    resumed = fl_dist.run(SMALL, run={"dir": tmp_path / "run"}, quiet=True)
    assert model_hash(resumed.path) == model_hash(finished.path)


def test_every_rank_of_a_program_may_call_run(finished: fl_dist.Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys, fl_dist, tests.process.test_runs as t\n"
        "run = fl_dist.run(t.SMALL, run={'dir': sys.argv[1]})\n"
        "print('last', run.summary['rounds'])\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    code, output = run([*torchrun, str(tmp_path / "program.py"), str(tmp_path / "run")])
    assert code == 0, output
    assert output.count("round 3/3") == 1
    assert model_hash(tmp_path / "run") == model_hash(finished.path)


@exhaustive
@pytest.mark.parametrize("command", [["fl-dist"], [sys.executable, "-m", "fl_dist"]])
def test_one_command_has_all_subcommands(command: list[str], tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"

    def run_subcommand(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = environment(PATH=path)
        return subprocess.run([*command, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True)

    assert run_subcommand("--version").stdout == f"fl_dist {fl_dist.__version__}\n"
    assert [line.split()[0] for line in run_subcommand("--help").stdout.splitlines()[4:-2]] == [
        *(
            "doctor",
            "run",
            "local",
            "submit",
            "sweep",
            "status",
            "results",
            "diagnose",
            "report",
            "data",
            "sync",
            "algorithms",
        )
    ]
    wrong = run_subcommand("statsu")
    assert (wrong.returncode, wrong.stderr) == (2, "error: unknown command 'statsu'; did you mean 'status'?\n")
    assert run_subcommand("status").stderr == "error: no run in runs; a run folder contains a config.yaml\n"
    module = "fl-dist sweep" if command == ["fl-dist"] else "python -m launch.sweep"
    assert f"usage: {module} " in run_subcommand("sweep", "--help").stdout
