"""Disturb real jobs at random times, restart them on other layouts, compare the result with an undisturbed run.

python -m tests.support.chaos 200 [--seed S] [--kind KIND ...]

It kills and stops ranks, kills launchers and their agents, delays syncs to disk, fills the disk for seconds
(as root), starts a second job on the folder where every lock succeeds; between two attempts it flips a bit of a
checkpoint file or replaces a file by a symbolic link.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fl_dist.storage.checkpoint import MANIFEST, SERVER
from tests.support.launchers import find_rank_pids
from tests.support.processes import NO_WANDB, RankProcess, run_ranks, start_process, start_ranks
from tests.support.run_folder import count_records, model_hash, newest_saved_round, reproducible_records

ALGORITHMS = ("fedgmt", "scaffold", "fedsmoo", "fedgmt_v2", "fedgf", "fednsam_d", "fedlesam", "fedadam")
LAYOUTS = ((1, "dedicated"), (2, "dedicated"), (3, "dedicated"), (4, "dedicated"), (2, "shared"), (3, "shared"))
SETTINGS = (
    *NO_WANDB,
    "rounds=25",
    "model={name: cnn, dropout: 0.2}",
    "partition={name: dirichlet, alpha: 0.3, variant: unbalanced}",
    "clients={total: 16, per_round: 6}",
    "local={epochs: 1, batch_size: 32, lr: 0.02, momentum: 0.0}",
    "comm.timeout=6",
    "comm.rendezvous_timeout=12",  # a rank may be killed or stopped before the rendezvous
)
EXIT_TIMEOUT_SECONDS = 25.0
"""The time within which every process of a disturbed job must exit: `comm.timeout` and a margin for a busy machine."""
DISK_BYTES = 512 << 20


@dataclass
class ChaosReport:
    disturbances: Counter[str] = field(default_factory=Counter)
    """The number of disturbances by kind."""
    restarts: int = 0
    rounds_lost: int = 0
    runs: int = 0
    differences: int = 0
    losses: int = 0
    """Jobs that ended as if nothing had happened, without a model."""
    slowest_end: float = 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.disturbances.items()))
        return (
            f"{self.disturbances.total()} disturbances ({kinds}), {self.restarts} restarts, {self.runs} runs finished, "
            f"{self.rounds_lost} rounds repeated, all processes ended within {self.slowest_end:.1f} s, "
            f"{self.differences} differences, {self.losses} silent losses"
        )


def settings(algorithm: str, folder: Path) -> list[str]:
    return [*SETTINGS, f"algorithm.name={algorithm}", f"run.dir={folder}"]


class Job:
    """One attempt at a run on a random layout, with one disturbance."""

    def __init__(self, algorithm: str, folder: Path, rng: random.Random, report: ChaosReport) -> None:
        self.folder, self.rng, self.report = folder, rng, report
        self.ranks, server = rng.choice(LAYOUTS)
        self.arguments = settings(algorithm, folder)
        self.arguments.append(f"topology.server={server if self.ranks > 1 else 'shared'}")

    def run_undisturbed(self) -> None:
        codes, outputs = run_ranks(self.ranks, self.arguments, timeout=240)
        assert not any(codes), outputs

    def disturb(self, kind: str) -> None:
        self.report.disturbances[kind] += 1
        self.kind = kind
        getattr(self, kind)()
        if not (self.folder / "model.safetensors").exists():
            self.report.rounds_lost += max(0, count_records(self.folder) - newest_saved_round(self.folder))

    def kill(self, **env: str) -> None:
        with start_ranks(self.ranks, self.arguments, **env) as processes:
            self._wait_for_a_round(lambda: all(p.poll() is None for p in processes))
            self._signal(self.rng.choice(processes).pid, signal.SIGKILL)
            self._wait_for_all(processes)

    def stop(self) -> None:
        """Stop a rank with SIGSTOP; the others must end without it."""
        with start_ranks(self.ranks, self.arguments) as processes:
            self._wait_for_a_round(lambda: all(p.poll() is None for p in processes))
            victim = self.rng.choice(processes)
            self._signal(victim.pid, signal.SIGSTOP)
            self._wait_for_all([p for p in processes if p is not victim])

    def slow(self) -> None:
        """Delay a sync to disk beyond the timeout between ranks, and kill a rank during or after it."""
        rank, count = self.rng.randrange(self.ranks), self.rng.randint(1, 20)
        self.kill(FL_DIST_FAULT=f"sync:{count}@{rank}=sleep:8")

    def flip(self) -> None:
        """Kill a rank, then flip one bit in a checkpoint file; only if a second checkpoint is left to resume from."""
        self.kill()
        files = [p for p in sorted((self.folder / "checkpoint").glob("round-*/*")) if p.is_file() and p.stat().st_size]
        complete = [p for p in files if p.name == SERVER and (p.parent / MANIFEST).exists()]
        if len(complete) > 1 and not (self.folder / "model.safetensors").exists():
            file = self.rng.choice(files)
            data = bytearray(file.read_bytes())
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            file.write_bytes(data)

    def fill(self) -> None:
        """Fill the disk for some seconds, then kill a rank."""
        filler = self.folder.parent / "filler"
        with start_ranks(self.ranks, self.arguments) as processes:
            self._wait_for_a_round(lambda: all(p.poll() is None for p in processes))
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            time.sleep(self.rng.uniform(0.5, 4.0))
            filler.unlink()
            time.sleep(self.rng.uniform(0, 2.0))
            self._signal(self.rng.choice(processes).pid, signal.SIGKILL)
            self._wait_for_all(processes)

    def two_jobs(self) -> None:
        """Start a second job on the folder where every lock succeeds: the first has to end, then kill a rank."""
        no_locks = {"EVERY_LOCK_SUCCEEDS": "1"}
        with start_ranks(self.ranks, self.arguments, **no_locks) as first:
            self._wait_for_a_round(lambda: all(p.poll() is None for p in first))
            with start_ranks(self.ranks, self.arguments, **no_locks) as second:
                self._wait_for_all(first)
                self._signal(self.rng.choice(second).pid, signal.SIGKILL)
                self._wait_for_all(second)

    def link(self) -> None:
        """Kill a rank, then replace a file by a link: the next job has to refuse it and to leave its target alone."""
        self.kill()
        written = [self.folder / name for name in ("lock", "metrics.jsonl", "attempts.jsonl", "logs/rank0.log")]
        files = [file for file in written if file.exists()]
        if not files or (self.folder / "model.safetensors").exists():
            return
        file, target = self.rng.choice(files), self.folder.parent / "target"
        content = file.read_bytes()
        file.rename(target)
        file.symlink_to(target)
        codes, outputs = run_ranks(self.ranks, self.arguments)
        if codes != [2] * self.ranks or str(file) not in outputs[0] or target.read_bytes() != content:
            self.report.differences += 1
            print(f"a link in the place of {file} was not refused: exit codes {codes}\n{outputs[0]}")
        target.rename(file)

    def launcher(self) -> None:
        """Kill the launcher or its agent; every process it started must end."""
        command = [sys.executable, "-m", "launch.local", "-n", str(self.ranks), *self.arguments]
        with start_process(command) as process:
            self._wait_for_a_round(lambda: process.poll() is None)
            self._signal(self.rng.choice([process.pid, *child_pids(process.pid)]), signal.SIGKILL)
            start = time.monotonic()
            while find_rank_pids(self.folder) and time.monotonic() < start + EXIT_TIMEOUT_SECONDS:
                time.sleep(0.05)
            self._record_end(start, not find_rank_pids(self.folder))

    def _wait_for_a_round(self, is_running: Callable[[], bool]) -> None:
        """Wait for a random time after the next round is reported, or occasionally less."""
        before, deadline = count_records(self.folder), time.monotonic() + self.rng.choice([3.0, 1e6, 1e6, 1e6])
        while count_records(self.folder) <= before and is_running() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0, 2.0))

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _wait_for_all(self, processes: list[RankProcess]) -> None:
        start, all_ended = time.monotonic(), True
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0.1, start + EXIT_TIMEOUT_SECONDS - time.monotonic()))
            except subprocess.TimeoutExpired:
                all_ended = False
                print(f"{self.kind}: process {rank} of {len(processes)} still runs; its output:\n{process.output()}")
        self._record_end(start, all_ended)
        if processes and not any(p.returncode for p in processes) and not (self.folder / "model.safetensors").exists():
            self.report.losses += 1
            print(f"{self.kind}: the job ended with 0 and left no model; output of rank 0:\n{processes[0].output()}")

    def _record_end(self, start: float, all_ended: bool) -> None:
        self.report.slowest_end = max(self.report.slowest_end, time.monotonic() - start)
        if not all_ended:
            self.report.differences += 1
            print(f"a process of {self.folder.name} did not end within {EXIT_TIMEOUT_SECONDS:g} s")


def child_pids(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """Mount a small disk at this path; yield whether this user may."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


KINDS = ("kill", "kill", "stop", "slow", "flip", "fill", "launcher", "two_jobs", "link")


def chaos(disturbances: int, seed: int, root: Path, verbose: bool = False, kinds: Sequence[str] = KINDS) -> ChaosReport:
    rng, report = random.Random(seed), ChaosReport()
    while report.disturbances.total() < disturbances:
        algorithm = ALGORITHMS[report.runs % len(ALGORITHMS)]
        reference = root / f"{report.runs}-reference"
        codes, outputs = run_ranks(1, [*settings(algorithm, reference), "topology.server=shared"], timeout=240)
        assert codes == [0], outputs
        with small_disk(root / f"{report.runs}-disk") as is_mounted:
            possible = [k for k in kinds if is_mounted or k != "fill"]
            disturbed = root / f"{report.runs}-disk" / "disturbed"
            while not (disturbed / "model.safetensors").exists():
                job = Job(algorithm, disturbed, rng, report)
                job.disturb(
                    rng.choice(possible)
                ) if report.disturbances.total() < disturbances else job.run_undisturbed()
                report.restarts += 1
            same = model_hash(reference) == model_hash(disturbed) and (
                reproducible_records(reference) == reproducible_records(disturbed)
            )
        report.restarts -= 1
        report.runs += 1
        report.differences += not same
        if verbose:
            print(f"{algorithm:10} {'same' if same else 'DIFFERENT'}   {report}", flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("disturbances", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=dict.fromkeys(KINDS), help="only these (may be repeated)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        report = chaos(options.disturbances, options.seed, Path(root), verbose=True, kinds=options.kind or KINDS)
    print(report)
    return int(report.differences + report.losses > 0)


if __name__ == "__main__":
    sys.exit(main())
