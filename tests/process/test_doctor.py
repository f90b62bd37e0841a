"""`fl-dist doctor` with real ranks: a healthy machine passes, planted faults are named, nothing is left behind."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fl_dist.doctor.checks import Status
from fl_dist.doctor.examine import FOLDER_PREFIX
from fl_dist.doctor.jobs import prepare_children, run_child, write_result
from tests.support.marks import exhaustive, timing
from tests.support.processes import ROOT, environment, run, start_process, torchrun
from tests.support.waiting import wait_for

SMALL = ("model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")
TIMEOUT_SECONDS = 400.0
HEALTHY = (Status.OK, Status.SLOW)
"""This machine may be slow and busy."""
DOCTOR = (sys.executable, "-m", "launch.doctor")
MODELS = """
import os, signal
from torch import nn

class Drifting(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.Linear(64, outputs)

    def forward(self, x):
        return self.layer(x.flatten(1)) * (1 + 1e-3 * int(os.environ.get("RANK", "0")))

class Crashing(Drifting):
    def forward(self, x):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture(autouse=True)
def _working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models.py").write_text(MODELS)


def examine(*arguments: str, command: tuple[str, ...] = DOCTOR) -> tuple[int, dict[str, Any], str]:
    """Exit code, the checks by name, and the output."""
    env = environment(TMPDIR=os.getcwd())
    code, output = run([*command, *arguments, "--json", "doctor.json"], timeout=TIMEOUT_SECONDS, env=env)
    file = Path("doctor.json")
    checks = json.loads(file.read_text())["checks"] if file.exists() else []
    assert list(Path().glob(f"{FOLDER_PREFIX}*")) == []
    return code, {check["name"]: check for check in checks}, output


def unhealthy(checks: dict[str, Any]) -> list[str]:
    return [name for name, check in checks.items() if check["status"] not in HEALTHY]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_healthy_machine_passes_every_check(ranks: int) -> None:
    code, checks, output = examine(*SMALL, "-n", str(ranks))
    assert (code, unhealthy(checks)) == (0, []), output
    assert {"versions", "devices", "reduce", "lock", "data", "memory", "same bits", "killed worker"} <= checks.keys()
    sizes = {1: "one process, twice each", 3: "one process, 2 ranks, 3 ranks, twice each"}
    assert checks["same bits"]["measured"].startswith(sizes[ranks])
    if ranks == 3:
        assert checks["killed worker"]["measured"].startswith("rank 2 was named, all ended ")
    assert output.splitlines()[-1].startswith(f"{len(checks)} checks: ")
    assert not Path("runs").exists()


def test_other_bits_on_one_rank_are_found_under_torchrun() -> None:
    command = (*torchrun(2), "-m", "launch.doctor")
    code, checks, output = examine(*SMALL, "model=my_models:Drifting", command=command)
    assert (code, unhealthy(checks)) == (1, ["same bits"]), output
    assert checks["same bits"]["measured"].startswith("models differ: one process: ")
    assert "ranks compute differently" in checks["same bits"]["advice"]


def test_a_missing_data_file_is_one_failed_check() -> None:
    code, checks, output = examine(*SMALL, "data={name: npz, path: none.npz}", "-n", "2")
    assert (code, unhealthy(checks)) == (1, ["data"]), output
    assert "rank 0 on " in checks["data"]["measured"] and "none.npz does not exist" in checks["data"]["measured"]
    assert "same bits" not in checks


@exhaustive
def test_a_run_folder_below_a_file_is_a_failed_check(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, checks, output = examine(*SMALL, f"run.dir={tmp_path}/file/run", "-n", "1")
    assert (code, unhealthy(checks)) == (1, ["run folder"]), output
    assert "Not a directory" in checks["run folder"]["measured"]


@exhaustive
def test_a_device_that_is_missing_is_one_failed_check() -> None:
    code, checks, output = examine(*SMALL, "topology.device=cuda", "-n", "1")
    assert (code, unhealthy(checks)) == (1, ["devices"]), output
    assert "no GPU is visible" in checks["devices"]["measured"]


@exhaustive
def test_a_crash_is_a_failed_check() -> None:
    code, checks, output = examine(*SMALL, "model=my_models:Crashing", "-n", "1")
    assert code == 1, output
    assert "the process was ended by SIGSEGV" in checks["model"]["measured"]
    assert checks["reduce"]["status"] == Status.OK  # measured before


def test_a_bad_configuration_is_one_line() -> None:
    code, _, output = examine("local.lrr=1")
    assert (code, output) == (2, "error: unknown key local.lrr (set on the command line); did you mean 'lr'?\n")


@timing
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_nothing_is_left(number: signal.Signals, tmp_path: Path) -> None:
    with start_process([*DOCTOR, *SMALL, "-n", "2"], env=environment(TMPDIR=str(tmp_path))) as process:
        wait_for(lambda: list(tmp_path.glob(f"{FOLDER_PREFIX}*")), "the folder of the doctor")
        process.send_signal(number)
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130 and "Traceback" not in output
    assert [path.name for path in tmp_path.iterdir()] == ["my_models.py"]


class TestChildren:
    @pytest.fixture(autouse=True)
    def _server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(ROOT))
        prepare_children()

    def test_results_of_a_child_that_is_killed_are_kept(self) -> None:
        outcome = run_child(write_and_die, {"data": {"rows": 3}}, {"RANK": "1"}, TIMEOUT_SECONDS)
        assert (outcome.code, outcome.result, outcome.output) == (-signal.SIGKILL, {"data": {"rows": 3}}, "rank 1\n")

    def test_a_child_that_hangs_is_ended(self) -> None:
        outcome = run_child(hang, None, {}, 0.5)
        assert outcome.code is None and "did not end within" in outcome.problem


def write_and_die(file: Path, values: dict[str, Any]) -> int:
    write_result(file, values)
    print("rank", os.environ["RANK"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def hang(file: Path, argument: None) -> int:
    signal.pause()
    return 0
