"""An error in a user's code is one line with every launcher, and a traceback in the log of its rank."""

import itertools
import sys
from pathlib import Path

import pytest

from tests.support.marks import exhaustive
from tests.support.processes import NO_WANDB, ROOT, run, run_ranks

SMALL = (
    *NO_WANDB,
    "rounds=2",
    "model={name: mlp, hidden: [4]}",
    "clients={total: 4, per_round: 2}",
    "local={epochs: 1, batch_size: 64}",
)
PARTS = """
import torch
from fl_dist.algorithms.core import Part, Upload

class UserPart(Part):
"""
module_numbers = itertools.count()


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a user module in the working folder that no test has imported yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return f"user_code{next(module_numbers)}"


def test_an_error_in_a_part_names_its_line_and_the_log_of_its_rank_has_the_traceback(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(f"{PARTS}    def begin(self, s, i, r, full):\n        i.a = s.b + undefined\n")
    arguments = [*SMALL, f"algorithm={{parts: [{name}:UserPart]}}", f"run.dir={tmp_path}/run"]
    codes, outputs = run_ranks(2, arguments, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert codes == [1, 1], outputs
    (line,) = [line for line in outputs[0].splitlines() if line.startswith("error")]
    assert "rank 1 on" in line and "client" in line
    assert f"AttributeError: there is no variable 'b' here, only x ({name}.py, line 7)" in line
    assert line.endswith(f"the traceback is in {tmp_path}/run/logs/rank1.log")
    assert "Traceback" not in outputs[0] + outputs[1]
    log = (tmp_path / "run" / "logs" / "rank1.log").read_text()
    assert "Traceback" in log and "i.a = s.b + undefined" in log


@exhaustive
@pytest.mark.parametrize("launcher", ["fl_dist.main", "launch.local", "launch.submit"])
def test_every_launcher_shows_the_traceback_on_request(launcher: str, name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("import nothing_of_that_name\n")
    command = [sys.executable, "-m", launcher, *SMALL, f"model={name}:net", "run.dir=run"]
    code, output = run(command, cwd=tmp_path)
    expected = (
        f"importing {name} failed: ModuleNotFoundError: No module named 'nothing_of_that_name' ({name}.py, line 1)"
    )
    assert code == 2 and expected in output and "Traceback" not in output
    assert output.rstrip().endswith("its traceback is in run/logs/import.log")
    assert "import nothing_of_that_name" in (tmp_path / "run" / "logs" / "import.log").read_text()
    code, output = run([*command, "--traceback"], cwd=tmp_path)
    assert code == 2 and "Traceback" in output and expected in output.splitlines()[-1]


@exhaustive
def test_a_sweep_imports_modules_beside_its_file(name: str, tmp_path: Path) -> None:
    """Although it starts in another folder and has no base."""
    (tmp_path / "sweep").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sweep" / f"{name}.py").write_text(
        "from torch import nn\ndef net(shape, outputs, *, bias: bool = True):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs, bias=bias))\n"
    )
    (tmp_path / "sweep" / "two.yaml").write_text(
        f"set: {{rounds: 1, model.name: '{name}:net', monitor.wandb.mode: disabled}}\n"
        "grid: {model.bias: [true, false]}\nresources: {tasks_per_node: 2}\n"
    )
    command = [sys.executable, "-m", "launch.sweep", "../sweep/two.yaml", "--local", "-j", "2"]
    code, output = run(command, cwd=tmp_path / "elsewhere")
    assert code == 0, output
    assert len(list((tmp_path / "elsewhere" / "runs" / "two").glob("*/model.safetensors"))) == 2
