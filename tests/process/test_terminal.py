"""Programs work with any terminal or none; an interrupt prints no traceback."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from fl_dist.storage.folder_lock import LOCK
from tests.support.marks import examples, exhaustive
from tests.support.processes import NO_WANDB, environment, run
from tests.support.run_folder import read_records

SMALL = (*NO_WANDB, "rounds=1", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")


def run_in_shell(command: str, tmp_path: Path, **more: str) -> tuple[int, str]:
    command_line = [sys.executable, "-m", "fl_dist.main", *SMALL, "rounds=4", f"run.dir={tmp_path / 'run'}"]
    return run(["bash", "-c", command.replace("RUN", shlex.join(command_line))], env=environment(**more))


class TestTerminal:
    @pytest.mark.parametrize(
        "command",
        [
            pytest.param("RUN >&-", marks=exhaustive),
            pytest.param("RUN 2>&-", marks=exhaustive),
            "RUN <&- >&- 2>&-",
            "RUN > /dev/full 2> /dev/full",
            "RUN | head -1; exit ${PIPESTATUS[0]}",
            pytest.param("RUN seed=true > /dev/full 2> /dev/full; [ $? = 2 ] && RUN >/dev/null", marks=exhaustive),
        ],
    )
    def test_a_run_needs_no_terminal(self, command: str, tmp_path: Path) -> None:
        code, output = run_in_shell(command, tmp_path)
        assert code == 0, output
        assert "Traceback" not in output and "Exception ignored" not in output
        assert len(read_records(tmp_path / "run")) == 4
        assert (tmp_path / "run" / LOCK).read_text().count("\n") == 1

    @pytest.mark.parametrize(
        "locale", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}]
    )
    def test_a_terminal_without_unicode_gets_ascii(self, locale: dict[str, str], tmp_path: Path) -> None:
        code, output = run_in_shell("RUN", tmp_path, **locale)
        assert code == 0, output
        assert "fedgmt | digits | mlp" in output and "+-" in output
        assert output.isascii()

    def test_help_may_be_piped_to_head(self) -> None:
        command_line = shlex.join([sys.executable, "-m", "fl_dist.main", "--help"])
        code, output = run(["bash", "-c", f"{command_line} | head -1; exit ${{PIPESTATUS[0]}}"])
        assert code == 0 and output.count("\n") == 1

    @exhaustive
    def test_a_launcher_may_be_piped_to_head(self, tmp_path: Path) -> None:
        command_line = shlex.join([sys.executable, "-m", "launch.local", "-n", "2", *SMALL, f"run.dir={tmp_path}"])
        code, output = run(["bash", "-c", f"{command_line} | head -1; exit ${{PIPESTATUS[0]}}"])
        assert code == 0 and output.count("\n") == 1, output


@pytest.mark.parametrize("program", examples(["fl_dist.main", "launch.local", "launch.sweep"], ["fl_dist.main"]))
def test_an_interrupt_during_imports_prints_no_traceback(program: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'torch': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    env = environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}")
    code, output = run([sys.executable, "-m", program, "rounds=1"], env=env)
    assert (code, output) == (130, "")
