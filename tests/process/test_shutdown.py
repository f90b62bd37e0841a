"""Promise: nothing hangs and nothing is left behind. When one process ends, all end quickly and report why."""

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fl_dist.callbacks.always_on.console import STARTING
from fl_dist.distributed.failures import RankLostError, is_transient
from fl_dist.distributed.process_group import hostname
from tests.support.checkpoints import replace_by_file
from tests.support.marks import examples, exhaustive, timing
from tests.support.processes import (
    NO_WANDB,
    ROOT,
    RankProcess,
    environment,
    listening_addresses,
    pause_processes,
    start_process,
    torchrun,
)
from tests.support.run_folder import count_records, newest_saved_round
from tests.support.waiting import TIMEOUT_SECONDS, free_port, wait_for

pytestmark = timing
SETTINGS = (
    *NO_WANDB,
    "rounds=100000",
    "model={name: mlp, hidden: [16]}",
    "clients={total: 8, per_round: 3}",
    "local={epochs: 1, batch_size: 32, lr: 0.05, momentum: 0.0}",
)


def read_proc(pid: int, file: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").split("\0")
    return []


class ProcessTree:
    """A command and all its descendants, identified by a variable of their environment."""

    def __init__(self, command: Sequence[str], folder: Path, mark: str) -> None:
        self.run, self.temporary, self.mark = folder / "run", folder / "tmp", f"PROCESS_TREE={mark}"
        self.temporary.mkdir()
        settings = [] if "launch.sweep" in command else [*SETTINGS, f"run.dir={self.run}"]
        # A file: a pipe would stay open until the last process ends.
        self._output = folder / "output"
        env = environment(TMPDIR=str(self.temporary), PROCESS_TREE=mark)
        with open(self._output, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, *settings],
                env=env,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def members(self) -> list[int]:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if self.mark in read_proc(pid, "environ")]

    def rank(self, number: int) -> int | None:
        """The process id of a rank, once it has started."""
        words = (f"RANK={number}", f"SUBMITIT_LOCAL_GLOBALID={number}")
        return next((p for p in self.members() if set(words) & set(read_proc(p, "environ"))), None)

    def agent(self) -> int:
        """The launcher's child process that is torchrun."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return next(int(pid) for task in tasks for pid in task.read_text().split())

    def wait_for_a_round(self) -> "ProcessTree":
        wait_for(lambda: count_records(self.run) > 1 and newest_saved_round(self.run) > 0, "the first checkpoint")
        return self

    def wait(self, seconds: float = TIMEOUT_SECONDS) -> int:
        return self.process.wait(seconds)

    def wait_for_all(self, seconds: float = TIMEOUT_SECONDS) -> None:
        self.process.wait(seconds)
        wait_for(lambda: not self.members(), "the end of all processes", seconds)

    def output(self) -> str:
        return self._output.read_text()

    def errors(self) -> list[str]:
        return [line for line in self.output().splitlines() if line.startswith("error: ")]

    def kill(self) -> None:
        while pids := self.members():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.02)
        self.process.wait()


@contextlib.contextmanager
def start_tree(folder: Path, *command: str) -> Iterator[ProcessTree]:
    tree = ProcessTree(command, folder, uuid.uuid4().hex)
    try:
        yield tree
    finally:
        tree.kill()


@contextlib.contextmanager
def start_rank(size: int, number: int, port: int, *arguments: str) -> Iterator[RankProcess]:
    """Start a single rank of a job."""
    job_env = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    rank = RankProcess([arguments], environment(**job_env, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)))
    try:
        yield rank
    finally:
        rank.kill()


def handles_signal(rank: RankProcess, number: int = signal.SIGTERM) -> bool:
    """Whether the process has installed a handler for the signal."""
    caught = [line.split()[1] for line in read_proc(rank.pid, "status")[0].splitlines() if line.startswith("SigCgt")]
    return bool(int(caught[0], 16) >> (number - 1) & 1) and rank.poll() is None


def require_pid(pid: int | None) -> int:
    assert pid
    return pid


def is_listening(port: int) -> bool:
    address = f"0100007F:{port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return any(line.split()[1] == address and line.split()[3] == "0A" for line in lines)


def test_a_server_that_is_stopped_at_the_rendezvous_is_named(tmp_path: Path) -> None:
    port, settings = free_port(), (*SETTINGS, "comm.rendezvous_timeout=3", f"run.dir={tmp_path}")
    with start_rank(2, 0, port, *SETTINGS, f"run.dir={tmp_path}") as server:
        wait_for(lambda: is_listening(port), "rank 0")
        os.kill(server.pid, signal.SIGSTOP)
        with start_rank(2, 1, port, *settings) as worker:
            output, _ = worker.communicate()
    assert worker.returncode == 1
    assert "error: rank 0 of 2 did not connect within 3 s (comm.rendezvous_timeout)\n" in output


@pytest.mark.parametrize("number", examples([signal.SIGKILL, signal.SIGUSR1], [signal.SIGKILL]))
def test_ranks_save_and_end_when_torchrun_dies(number: int, tmp_path: Path) -> None:
    with start_tree(tmp_path, *torchrun(2)[2:], "-m", "fl_dist.main") as job:
        job.wait_for_a_round().process.send_signal(number)
        job.wait_for_all()
    assert "interrupted after round" in job.output()
    assert newest_saved_round(job.run) == count_records(job.run)


@exhaustive
def test_a_single_process_outlives_its_shell(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fl_dist.main", *SETTINGS, f"run.dir={tmp_path}", "rounds=20"]
    with start_process(
        ["sh", "-c", 'nohup "$@" > /dev/null 2>&1 & read -r _', "shell", *command], stdin=subprocess.PIPE
    ) as shell:
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists(), "a round")
        shell.communicate("\n", timeout=TIMEOUT_SECONDS)
        wait_for(lambda: (tmp_path / "model.safetensors").exists(), "the end of the run")


def test_a_rank_whose_parent_has_died_ends_at_once() -> None:
    code = "from fl_dist.distributed.signals import end_with_parent as end; end(); end(parent=1); print('alive')"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True)
    assert (result.returncode, result.stdout) == (-signal.SIGTERM, b"")


@exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_that_loses_torchrun_says_so(number: int, tmp_path: Path) -> None:
    with start_tree(tmp_path, "launch.local", "-n", "2") as job:
        os.kill(job.wait_for_a_round().agent(), number)
        assert job.wait() == 1
        assert job.members() == [], "the launcher ended before its ranks"
    name = signal.Signals(number).name
    assert job.errors() == [f"error: torchrun was ended by {name}; start the same command to resume"]
    assert "Traceback" not in job.output()
    assert list(job.temporary.iterdir()) == []


def test_a_signal_ends_a_local_submission(tmp_path: Path) -> None:
    with start_tree(tmp_path, "launch.submit", "--local", "--tasks-per-node", "2") as job:
        job.wait_for_a_round()
        os.killpg(job.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
        assert job.wait() == 75
        assert job.members() == []
    assert job.output().endswith("interrupted; start the same command to resume\n")
    assert newest_saved_round(job.run) == count_records(job.run)


@exhaustive
def test_a_signal_to_the_launcher_alone_is_enough(tmp_path: Path) -> None:
    with start_tree(tmp_path, "launch.submit", "--local", "--tasks-per-node", "2") as job:
        wait_for(lambda: job.rank(1), "rank 1")
        job.process.terminate()
        assert job.wait() == 75
        job.wait_for_all()


@exhaustive
def test_a_local_submission_that_loses_a_rank_fails_and_names_it(tmp_path: Path) -> None:
    with start_tree(tmp_path, "launch.submit", "--local", "--tasks-per-node", "2") as job:
        os.kill(require_pid(job.wait_for_a_round().rank(1)), signal.SIGKILL)
        assert job.wait() == 1
        job.wait_for_all()
    assert "rank 1 on " in job.errors()[-1] and "Traceback" not in job.output()


@exhaustive
def test_nothing_outlives_a_local_submission(tmp_path: Path) -> None:
    with start_tree(tmp_path, "launch.submit", "--local", "--tasks-per-node", "2") as job:
        job.wait_for_a_round().process.kill()
        job.wait_for_all()
    assert newest_saved_round(job.run) == count_records(job.run)


@exhaustive
def test_nothing_outlives_a_local_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    settings = ", ".join(word.replace("=", ": ", 1) for word in SETTINGS)
    sweep.write_text(
        f"dir: {tmp_path}/runs\nresources: {{tasks_per_node: 2}}\nset: {{{settings}}}\ngrid: {{seed: [1]}}"
    )
    with start_tree(tmp_path, "launch.sweep", str(sweep), "--local") as job:
        wait_for(lambda: count_records(tmp_path / "runs" / "seed1") > 1, "a round")
        job.process.kill()
        job.wait_for_all()


@exhaustive
@pytest.mark.parametrize(("number", "missing"), [(0, 1), (1, 0)])
def test_an_interrupted_rendezvous_ends_at_once(number: int, missing: int, tmp_path: Path) -> None:
    with start_rank(2, number, free_port(), *SETTINGS, f"run.dir={tmp_path / 'run'}") as rank:
        wait_for(lambda: handles_signal(rank), "the signal handler")
        os.kill(rank.pid, signal.SIGINT)
        start_time = time.monotonic()
        output, _ = rank.communicate()
        assert time.monotonic() - start_time < 16  # without the signal it would wait for minutes
    assert rank.returncode == 75
    assert output.splitlines()[-1] == f"error: interrupted while waiting for rank {missing} of 2; nothing had begun"
    assert not (tmp_path / "run").exists()


@exhaustive
def test_ranks_name_the_missing_ranks_and_time_out(tmp_path: Path) -> None:
    port, settings = free_port(), (*SETTINGS, "comm.rendezvous_timeout=16", f"run.dir={tmp_path}")
    with start_rank(4, 0, port, *settings) as server, start_rank(4, 2, port, *settings) as worker:
        output, _ = server.communicate()
        assert worker.wait() == 1
    assert server.returncode == 1
    *waiting, error = output.splitlines()[1:]
    assert waiting and all(re.fullmatch(r"waiting for ranks 1, 3 of 4 \(\d+ s\)", line) for line in waiting)
    message = "ranks 1, 3 of 4 did not connect within 16 s (comm.rendezvous_timeout)"
    assert error in (
        f"error: {message}",
        f"error: rank 2 on {hostname()} failed: {message}",
    )  # whichever rank times out first


@exhaustive
@pytest.mark.parametrize("launcher", ["launch.local", "torchrun"])
def test_a_rank_that_dies_before_the_rendezvous_ends_the_others(launcher: str, tmp_path: Path) -> None:
    command = [*torchrun(3)[2:], "-m", "fl_dist.main"] if launcher == "torchrun" else ["launch.local", "-n", "3"]
    with start_tree(tmp_path, *command) as job:
        wait_for(lambda: job.rank(2), "rank 2")
        os.kill(require_pid(job.rank(2)), signal.SIGKILL)
        start_time = time.monotonic()
        assert job.wait() == 1
        job.wait_for_all()
        assert time.monotonic() - start_time < 30
    if launcher == "launch.local":
        assert job.errors()[-1] == "error: rank 2 was ended by SIGKILL; start the same command to resume"


@exhaustive
def test_a_run_that_could_not_be_saved_is_not_called_resumable(tmp_path: Path) -> None:
    with start_tree(tmp_path, "launch.local", "-n", "2") as job:
        wait_for(lambda: newest_saved_round(job.run) > 0, "a checkpoint")
        with pause_processes([require_pid(job.rank(0)), require_pid(job.rank(1))]):
            replace_by_file(job.run / "checkpoint")
        job.process.terminate()
        assert job.wait() == 1
    assert "interrupted, and the run could not be saved" in job.errors()[0]
    assert list(job.temporary.iterdir()) == []


@exhaustive
def test_a_permanent_error_is_not_restarted(tmp_path: Path) -> None:
    with start_tree(tmp_path, "launch.local", "-n", "2", "--max-restarts", "3", "data={name: npz, path: /none}") as job:
        assert job.wait() == 1
    assert job.output().count(STARTING) == 1
    assert [line[:37] for line in job.errors()] == ["error: data file /none does not exist"]


def test_only_transient_errors_are_worth_a_restart() -> None:
    transient = [RankLostError("rank 1 was lost"), OSError(errno.EIO, "disk"), OSError(errno.ESTALE, "network disk")]
    permanent = [
        OSError(errno.ENOENT, "no data"),
        ValueError("diverged"),
        MemoryError(),
    ]
    assert all(map(is_transient, transient)) and not any(map(is_transient, permanent))


@exhaustive
def test_a_job_on_one_node_listens_on_loopback_only_and_leaves_no_files(tmp_path: Path) -> None:
    with start_tree(tmp_path, "launch.local", "-n", "2", "--max-restarts", "1") as job:
        job.wait_for_a_round()
        assert listening_addresses(job.members()) == {"0100007F"}
        first = require_pid(job.rank(1))
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: job.rank(1) not in (first, None), "the restart")
        rounds = count_records(job.run)
        wait_for(lambda: count_records(job.run) > rounds, "a round of the second attempt")
        assert listening_addresses(job.members()) == {"0100007F"}
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 75
    assert list(job.temporary.iterdir()) == []
