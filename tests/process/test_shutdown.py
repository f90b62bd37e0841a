"""Promise: nothing hangs and nothing is left behind. Whatever ends, the rest ends too, soon, and says why."""

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

from fl_dist.machine.comm import host
from fl_dist.machine.meeting import Lost, passes
from fl_dist.monitor.console import STARTING
from tests.support.checkpoints import replaced_by_a_file
from tests.support.marks import examples, exhaustive, timing
from tests.support.processes import QUIET, ROOT, Rank, environment, listening, started, stopped, torchrun
from tests.support.run_folder import rows, saved
from tests.support.waiting import PATIENCE, free_port, wait_for

pytestmark = timing
SETTINGS = (
    *QUIET,
    "rounds=100000",
    "model={name: mlp, hidden: [16]}",
    "clients={total: 8, per_round: 3}",
    "local={epochs: 1, batch_size: 32, lr: 0.05, momentum: 0.0}",
)


def read(pid: int, file: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").split("\0")
    return []


class Family:
    """A command, and every process that came of it, known by a variable of their environment."""

    def __init__(self, command: Sequence[str], folder: Path, mark: str) -> None:
        self.run, self.temporary, self.mark = folder / "run", folder / "tmp", f"FAMILY={mark}"
        self.temporary.mkdir()
        own = [] if "launch.sweep" in command else [*SETTINGS, f"run.dir={self.run}"]
        # A file: a pipe would stay open as long as the last of them.
        self._output = folder / "output"
        env = environment(TMPDIR=str(self.temporary), FAMILY=mark)
        with open(self._output, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, *own],
                env=env,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def members(self) -> list[int]:
        found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in found if self.mark in read(pid, "environ")]

    def rank(self, number: int) -> int | None:
        """The process of a rank, once it is one."""
        words = (f"RANK={number}", f"SUBMITIT_LOCAL_GLOBALID={number}")
        return next((p for p in self.members() if set(words) & set(read(p, "environ"))), None)

    def agent(self) -> int:
        """The child of the launcher that is torchrun."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return next(int(pid) for task in tasks for pid in task.read_text().split())

    def after_a_round(self) -> "Family":
        wait_for(lambda: rows(self.run) > 1 and saved(self.run) > 0, "the first save")
        return self

    def code(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def ended(self, seconds: float = PATIENCE) -> None:
        self.process.wait(seconds)
        wait_for(lambda: not self.members(), "the end of all processes", seconds)

    def output(self) -> str:
        return self._output.read_text()

    def errors(self) -> list[str]:
        return [line for line in self.output().splitlines() if line.startswith("error: ")]

    def kill(self) -> None:
        while found := self.members():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.02)
        self.process.wait()


@contextlib.contextmanager
def family(folder: Path, *command: str) -> Iterator[Family]:
    made = Family(command, folder, uuid.uuid4().hex)
    try:
        yield made
    finally:
        made.kill()


@contextlib.contextmanager
def rank_of(size: int, number: int, port: int, *arguments: str) -> Iterator[Rank]:
    """One rank by itself."""
    place = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    rank = Rank([arguments], environment(**place, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)))
    try:
        yield rank
    finally:
        rank.end()


def hears(rank: Rank, number: int = signal.SIGTERM) -> bool:
    """Whether the process has taken the signal for itself."""
    caught = [line.split()[1] for line in read(rank.pid, "status")[0].splitlines() if line.startswith("SigCgt")]
    return bool(int(caught[0], 16) >> (number - 1) & 1) and rank.poll() is None


def there(pid: int | None) -> int:
    assert pid
    return pid


def listens(port: int) -> bool:
    wanted = f"0100007F:{port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return any(line.split()[1] == wanted and line.split()[3] == "0A" for line in lines)


def test_a_server_that_is_stopped_at_the_meeting_is_named(tmp_path: Path) -> None:
    port, settings = free_port(), (*SETTINGS, "comm.meeting=3", f"run.dir={tmp_path}")
    with rank_of(2, 0, port, *SETTINGS, f"run.dir={tmp_path}") as server:
        wait_for(lambda: listens(port), "rank 0")
        os.kill(server.pid, signal.SIGSTOP)
        with rank_of(2, 1, port, *settings) as worker:
            output, _ = worker.communicate()
    assert worker.returncode == 1
    assert "error: rank 0 of 2 did not come within 3 s (comm.meeting)\n" in output


@pytest.mark.parametrize("number", examples([signal.SIGKILL, signal.SIGUSR1], [signal.SIGKILL]))
def test_ranks_save_and_end_when_torchrun_dies(number: int, tmp_path: Path) -> None:
    with family(tmp_path, *torchrun(2)[2:], "-m", "fl_dist.main") as job:
        job.after_a_round().process.send_signal(number)
        job.ended()
    assert "interrupted after round" in job.output()
    assert saved(job.run) == rows(job.run)


@exhaustive
def test_a_process_alone_outlives_its_shell(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "fl_dist.main", *SETTINGS, f"run.dir={tmp_path}", "rounds=20"]
    with started(
        ["sh", "-c", 'nohup "$@" > /dev/null 2>&1 & read -r _', "shell", *line], stdin=subprocess.PIPE
    ) as shell:
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists(), "a round")
        shell.communicate("\n", timeout=PATIENCE)
        wait_for(lambda: (tmp_path / "model.safetensors").exists(), "the end of the run")


def test_a_rank_whose_parent_is_dead_already_ends_at_once() -> None:
    code = "from fl_dist.machine.signals import end_with_parent as end; end(); end(parent=1); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, b"")


@exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_that_loses_torchrun_says_so(number: int, tmp_path: Path) -> None:
    with family(tmp_path, "launch.local", "-n", "2") as job:
        os.kill(job.after_a_round().agent(), number)
        assert job.code() == 1
        assert job.members() == [], "the launcher ended before its ranks"
    name = signal.Signals(number).name
    assert job.errors() == [f"error: torchrun was ended by {name}; start the same command to resume"]
    assert "Traceback" not in job.output()
    assert list(job.temporary.iterdir()) == []


def test_a_signal_ends_a_local_submission(tmp_path: Path) -> None:
    with family(tmp_path, "launch.submit", "--local", "--tasks-per-node", "2") as job:
        job.after_a_round()
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
        assert job.code() == 75
        assert job.members() == []
    assert job.output().endswith("interrupted; start the same command to resume\n")
    assert saved(job.run) == rows(job.run)


@exhaustive
def test_a_signal_to_the_launcher_alone_is_enough(tmp_path: Path) -> None:
    with family(tmp_path, "launch.submit", "--local", "--tasks-per-node", "2") as job:
        wait_for(lambda: job.rank(1), "rank 1")
        job.process.terminate()
        assert job.code() == 75
        job.ended()


@exhaustive
def test_a_local_submission_that_loses_a_rank_fails_and_names_it(tmp_path: Path) -> None:
    with family(tmp_path, "launch.submit", "--local", "--tasks-per-node", "2") as job:
        os.kill(there(job.after_a_round().rank(1)), signal.SIGKILL)
        assert job.code() == 1
        job.ended()
    assert "rank 1 on " in job.errors()[-1] and "Traceback" not in job.output()


@exhaustive
def test_nothing_outlives_a_local_submission(tmp_path: Path) -> None:
    with family(tmp_path, "launch.submit", "--local", "--tasks-per-node", "2") as job:
        job.after_a_round().process.kill()
        job.ended()
    assert saved(job.run) == rows(job.run)


@exhaustive
def test_nothing_outlives_a_local_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    settings = ", ".join(word.replace("=", ": ", 1) for word in SETTINGS)
    sweep.write_text(
        f"dir: {tmp_path}/runs\nresources: {{tasks_per_node: 2}}\nset: {{{settings}}}\ngrid: {{seed: [1]}}"
    )
    with family(tmp_path, "launch.sweep", str(sweep), "--local") as job:
        wait_for(lambda: rows(tmp_path / "runs" / "seed1") > 1, "a round")
        job.process.kill()
        job.ended()


@exhaustive
@pytest.mark.parametrize(("number", "missing"), [(0, 1), (1, 0)])
def test_an_interrupted_meeting_ends_at_once(number: int, missing: int, tmp_path: Path) -> None:
    with rank_of(2, number, free_port(), *SETTINGS, f"run.dir={tmp_path / 'run'}") as rank:
        wait_for(lambda: hears(rank), "listening")
        os.kill(rank.pid, signal.SIGINT)
        began = time.monotonic()
        output, _ = rank.communicate()
        assert time.monotonic() - began < 16  # with nothing to wait for it would go on for minutes
    assert rank.returncode == 75
    assert output.splitlines()[-1] == f"error: interrupted while waiting for rank {missing} of 2; nothing had begun"
    assert not (tmp_path / "run").exists()


@exhaustive
def test_ranks_say_for_whom_they_wait_and_give_up(tmp_path: Path) -> None:
    port, settings = free_port(), (*SETTINGS, "comm.meeting=16", f"run.dir={tmp_path}")
    with rank_of(4, 0, port, *settings) as server, rank_of(4, 2, port, *settings) as worker:
        output, _ = server.communicate()
        assert worker.wait() == 1
    assert server.returncode == 1
    *waiting, error = output.splitlines()[1:]
    assert waiting and all(re.fullmatch(r"waiting for ranks 1, 3 of 4 \(\d+ s\)", line) for line in waiting)
    gone = "ranks 1, 3 of 4 did not come within 16 s (comm.meeting)"
    assert error in (f"error: {gone}", f"error: rank 2 on {host()} failed: {gone}")  # whoever gives up first


@exhaustive
@pytest.mark.parametrize("launcher", ["launch.local", "torchrun"])
def test_a_rank_that_dies_before_it_comes_ends_the_rest(launcher: str, tmp_path: Path) -> None:
    line = [*torchrun(3)[2:], "-m", "fl_dist.main"] if launcher == "torchrun" else ["launch.local", "-n", "3"]
    with family(tmp_path, *line) as job:
        wait_for(lambda: job.rank(2), "rank 2")
        os.kill(there(job.rank(2)), signal.SIGKILL)
        began = time.monotonic()
        assert job.code() == 1
        job.ended()
        assert time.monotonic() - began < 30
    if launcher == "launch.local":
        assert job.errors()[-1] == "error: rank 2 was ended by SIGKILL; start the same command to resume"


@exhaustive
def test_a_run_that_could_not_be_saved_is_not_called_resumable(tmp_path: Path) -> None:
    with family(tmp_path, "launch.local", "-n", "2") as job:
        wait_for(lambda: saved(job.run) > 0, "a save")
        with stopped([there(job.rank(0)), there(job.rank(1))]):
            replaced_by_a_file(job.run / "checkpoint")
        job.process.terminate()
        assert job.code() == 1
    assert "interrupted, and the run could not be saved" in job.errors()[0]
    assert list(job.temporary.iterdir()) == []


@exhaustive
def test_what_a_restart_cannot_mend_is_not_restarted(tmp_path: Path) -> None:
    with family(tmp_path, "launch.local", "-n", "2", "--max-restarts", "3", "data={name: npz, path: /none}") as job:
        assert job.code() == 1
    assert job.output().count(STARTING) == 1
    assert [line[:37] for line in job.errors()] == ["error: data file /none does not exist"]


def test_machines_are_worth_a_restart_and_mistakes_are_not() -> None:
    worth = [Lost("rank 1 was lost"), OSError(errno.EIO, "disk"), OSError(errno.ESTALE, "network disk")]
    vain = [Lost("no data", passes=False), OSError(errno.ENOENT, "no data"), ValueError("diverged"), MemoryError()]
    assert all(map(passes, worth)) and not any(map(passes, vain))


@exhaustive
def test_one_node_listens_on_loopback_only_and_leaves_nothing(tmp_path: Path) -> None:
    with family(tmp_path, "launch.local", "-n", "2", "--max-restarts", "1") as job:
        job.after_a_round()
        assert listening(job.members()) == {"0100007F"}
        first = there(job.rank(1))
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: job.rank(1) not in (first, None), "the restart")
        reached = rows(job.run)
        wait_for(lambda: rows(job.run) > reached, "a round of the second attempt")
        assert listening(job.members()) == {"0100007F"}
        job.process.send_signal(signal.SIGINT)
        assert job.code() == 75
    assert list(job.temporary.iterdir()) == []
