"""A failure reports its root cause, and nothing else."""

import os
import re
import sys
import threading
from pathlib import Path

import pytest

from fl_dist.main import main
from launch.run_status import failure_reason
from tests.support.marks import exhaustive
from tests.support.processes import NO_WANDB, run, run_ranks

SMALL = (*NO_WANDB, "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")


class TestRootCause:
    DIVERGING = (*SMALL[1:], "rounds=3", "local.lr=1e8", "algorithm.name=fedavg")

    @pytest.mark.parametrize("attempt", [0, *(pytest.param(k, marks=exhaustive) for k in range(1, 8))])
    def test_a_diverging_run_says_so_with_advice(self, attempt: int, tmp_path: Path) -> None:
        """And nothing else, in whatever order threads and tensors end."""
        codes, outputs = run_ranks(3, [*self.DIVERGING, f"run.dir={tmp_path}"], FULL_INTERPRETER_EXIT="1")
        assert codes == [1, 1, 1]
        assert not re.search("Traceback|terminate|Fatal", "".join(outputs))
        (error,) = [line for line in outputs[0].splitlines() if line.startswith("error: ")]
        assert "lower local.lr or set local.clip" in error
        assert "training diverge" in error

    def test_no_thread_outlives_a_failed_run(self, tmp_path: Path) -> None:
        """A thread that frees a tensor at interpreter exit aborts the process."""
        before = set(threading.enumerate())
        offline = [*self.DIVERGING, "monitor.wandb.mode=offline", f"run.dir={tmp_path}"]
        assert main(offline) == 1
        assert set(threading.enumerate()) <= before

    def test_the_first_error_of_the_last_attempt_is_the_reason(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        attempts = ["starting x", "error: old", "starting x", "error: cause", "error: rank 0 was ended by SIGABRT"]
        log.write_text("\n".join(attempts))
        assert failure_reason(log) == "cause"
        log.write_text("job 3 on n1\nsrun: error: later\nerror: unknown key a\n")
        assert failure_reason(log) == "unknown key a"
        log.write_text("\n".join(attempts[:2] + ["starting x", "round 1/3"]))
        assert failure_reason(log) is None

    @exhaustive
    def test_a_rank_that_dies_after_its_error_adds_nothing(self, tmp_path: Path) -> None:
        abort = "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGABRT))"
        (tmp_path / "sitecustomize.py").write_text(f"import os\nif os.environ.get('RANK') == '0':\n    {abort}\n")
        command = [
            sys.executable,
            "-m",
            "launch.local",
            "-n",
            "2",
            *self.DIVERGING,
            *NO_WANDB,
            f"run.dir={tmp_path}/run",
        ]
        env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
        code, output = run(command, env=env)
        assert code == 1
        assert output.count("error: ") == 1, output
        assert "SIGABRT" not in output
