"""Promise: an end that user code or a repeated signal brings about is named, quick and has the right exit code."""

import collections
import itertools
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.marks import timing
from tests.support.processes import NO_WANDB, ROOT, environment, run, run_ranks, start_process, torchrun
from tests.support.waiting import TIMEOUT_SECONDS, Hold, wait_for

pytestmark = timing
THIS = "tests.process.test_user_code_ends"
SETTINGS = (*NO_WANDB, "rounds=1000", "clients={total: 4, per_round: 4}", "local={epochs: 1, batch_size: 64}")
STRAGGLER_LIMIT_SECONDS = 30.0
"""torchrun alone would kill a rank that does not react after more than this."""


class Model(nn.Linear):
    """Does something else than computing on the rank that FAILING_RANK names."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(torch.Size(shape).numel(), outputs)

    def forward(self, x: Tensor) -> Tensor:
        if os.environ["RANK"] == os.environ["FAILING_RANK"]:
            self.fail()
        return super().forward(x.flatten(1))

    def fail(self) -> None:
        raise NotImplementedError


class Interrupts(Model):
    def fail(self) -> None:
        raise KeyboardInterrupt


class Raises(Model):
    def fail(self) -> None:
        raise ValueError("it does not like it")


class Leaves(Model):
    def fail(self) -> None:
        os._exit(0)


class HoldsInterpreterLock(Model):
    def fail(self) -> None:
        Path(os.environ["REACHED"]).touch()
        collections.deque(itertools.repeat(0), maxlen=0)  # an endless loop in C


def launch(ranks: int, model: str, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "launch.local", "-n", str(ranks), f"model={THIS}:{model}"]
    return [*command, *SETTINGS, f"run.dir={folder}"]


def test_an_interrupt_raised_by_user_code_is_an_error_of_its_rank(tmp_path: Path) -> None:
    settings = [*SETTINGS, f"model={THIS}:Interrupts", f"run.dir={tmp_path}"]
    codes, outputs = run_ranks(3, settings, FAILING_RANK="1")
    assert codes == [1, 1, 1]
    (error,) = [line for output in outputs for line in output.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: rank 1 on \S+ failed: .*something raised KeyboardInterrupt \(test_user_code_ends", error)
    assert "Traceback" not in "".join(outputs)


def test_a_failed_rank_does_not_return_to_the_script_that_runs_it(tmp_path: Path) -> None:
    """Its process group is of no use any more, and would keep the interpreter from ending."""
    keys = {"model": f"{THIS}:Raises", "rounds": 3, "clients": {"total": 4, "per_round": 4}}
    (tmp_path / "script.py").write_text(
        f"import fl_dist\nfl_dist.run({keys}, run={{'dir': {str(tmp_path / 'run')!r}}}, monitor={{'wandb': "
        "{'mode': 'disabled'}})\nprint('returned')\n"
    )
    command = [*torchrun(2), str(tmp_path / "script.py")]
    code, output = run(command, env=environment(FAILING_RANK="1"), cwd=ROOT)
    assert code == 1
    assert re.search(r"^error: rank 1 on \S+ failed: .*it does not like it", output, re.MULTILINE), output
    assert "returned" not in output


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_server_that_leaves_without_an_error_is_reported(ranks: int, tmp_path: Path) -> None:
    code, output = run(launch(ranks, "Leaves", tmp_path), env=environment(FAILING_RANK="0"), cwd=ROOT)
    assert code == 1
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert error == "error: rank 0 ended without an error, as after os._exit; start the same command to resume"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_holds_the_interpreter_lock_is_named_and_killed(rank: int, tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    env = environment(FAILING_RANK=str(rank), REACHED=str(reached))
    with start_process(launch(3, "HoldsInterpreterLock", tmp_path / "run"), env=env, cwd=ROOT) as process:
        wait_for(reached.exists, "the endless loop")
        start_time = time.monotonic()
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        assert time.monotonic() - start_time < STRAGGLER_LIMIT_SECONDS
    assert process.returncode == 1
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert re.match(rf"error: rank {rank} on \S+ was lost|error: rank {rank} on \S+, the server, was lost", error)


@pytest.mark.parametrize("command", [("fl_dist.main",), ("launch.local", "-n", "2")], ids=" ".join)
def test_a_signal_repeated_while_exiting_does_not_change_the_exit_code(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    again = "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))"
    (tmp_path / "sitecustomize.py").write_text(f"import atexit, os, signal\nif 'RANK' not in os.environ: {again}\n")
    hold = Hold(tmp_path / "hold")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    env = environment(PYTHONPATH=path, FL_DIST_FAULT=hold.at("broadcast:3"))
    words = [sys.executable, "-m", *command, *SETTINGS, f"run.dir={tmp_path / 'run'}"]
    with start_process(words, env=env, cwd=ROOT) as process:
        wait_for(lambda: hold.is_reached, "the third round")
        process.send_signal(signal.SIGTERM)
        hold.release()
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 75, output
