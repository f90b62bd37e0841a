"""Disturb real jobs at random moments, restart them on other layouts, compare with the undisturbed run.

python -m tests.support.chaos 200 [--seed S]

Ranks are killed and stopped, launchers and their agents killed, syncs to disk delayed, the disk is full for seconds
(as root), and between two attempts a bit of a checkpoint file is flipped.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fl_dist.storage.checkpoint import MANIFEST, SERVER, newest_round
from tests.support.launchers import ranks as ranks_of
from tests.support.processes import QUIET, Rank, run_ranks, started, started_ranks
from tests.support.run_folder import model_hash, results

ALGORITHMS = ("fedgmt", "scaffold", "fedsmoo", "fedgmt_v2", "fedgf", "fednsam_d", "fedlesam", "fedadam")
LAYOUTS = ((1, "dedicated"), (2, "dedicated"), (3, "dedicated"), (4, "dedicated"), (2, "shared"), (3, "shared"))
SETTINGS = (
    *QUIET,
    "rounds=25",
    "model={name: cnn, dropout: 0.2}",
    "partition={name: dirichlet, alpha: 0.3, variant: unbalanced}",
    "clients={total: 16, per_round: 6}",
    "local={epochs: 1, batch_size: 32, lr: 0.02, momentum: 0.0}",
    "comm.timeout=6",
    "comm.meeting=12",  # a rank may be killed or stopped before it has met the others
)
PATIENCE = 25.0
"""Seconds within which every process of a disturbed job has to end: the time-out and what a busy machine adds."""
DISK = 512 << 20


@dataclass
class Score:
    done: Counter[str] = field(default_factory=Counter)
    """Disturbances by kind."""
    restarts: int = 0
    rounds_lost: int = 0
    runs: int = 0
    differences: int = 0
    slowest_end: float = 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.done.items()))
        return (
            f"{self.done.total()} disturbances ({kinds}), {self.restarts} restarts, {self.runs} runs finished, "
            f"{self.rounds_lost} rounds done again, all ended within {self.slowest_end:.1f} s, "
            f"{self.differences} differences"
        )


def settings(algorithm: str, folder: Path) -> list[str]:
    return [*SETTINGS, f"algorithm.name={algorithm}", f"run.dir={folder}"]


def rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saved(folder: Path) -> int:
    return newest_round(folder / "checkpoint")


class Job:
    """One attempt at a run on some layout, and what is done to it."""

    def __init__(self, algorithm: str, folder: Path, rng: random.Random, score: Score) -> None:
        self.folder, self.rng, self.score = folder, rng, score
        self.ranks, server = rng.choice(LAYOUTS)
        self.arguments = settings(algorithm, folder)
        self.arguments.append(f"topology.server={server if self.ranks > 1 else 'shared'}")

    def undisturbed(self) -> None:
        codes, outputs = run_ranks(self.ranks, self.arguments, timeout=240)
        assert not any(codes), outputs

    def disturbed(self, kind: str) -> None:
        self.score.done[kind] += 1
        self.kind = kind
        getattr(self, kind)()
        if not (self.folder / "model.safetensors").exists():
            self.score.rounds_lost += max(0, rows(self.folder) - saved(self.folder))

    def kill(self, **env: str) -> None:
        with started_ranks(self.ranks, self.arguments, **env) as processes:
            self._after_a_round(lambda: all(p.poll() is None for p in processes))
            self._signal(self.rng.choice(processes).pid, signal.SIGKILL)
            self._all_end(processes)

    def stop(self) -> None:
        """A stopped process answers nobody; the others have to end without it."""
        with started_ranks(self.ranks, self.arguments) as processes:
            self._after_a_round(lambda: all(p.poll() is None for p in processes))
            victim = self.rng.choice(processes)
            self._signal(victim.pid, signal.SIGSTOP)
            self._all_end([p for p in processes if p is not victim])

    def slow(self) -> None:
        """A sync to disk that takes longer than ranks may be silent, and a kill while it lasts or after."""
        rank, count = self.rng.randrange(self.ranks), self.rng.randint(1, 20)
        self.kill(FL_DIST_FAULT=f"sync:{count}@{rank}=sleep:8")

    def flip(self) -> None:
        """A kill, and then one wrong bit in one file of the checkpoints; of a single save nothing would be left."""
        self.kill()
        files = [p for p in sorted((self.folder / "checkpoint").glob("round-*/*")) if p.is_file() and p.stat().st_size]
        saves = [p for p in files if p.name == SERVER and (p.parent / MANIFEST).exists()]
        if len(saves) > 1 and not (self.folder / "model.safetensors").exists():
            file = self.rng.choice(files)
            data = bytearray(file.read_bytes())
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            file.write_bytes(data)

    def fill(self) -> None:
        """A disk that is full for some seconds, and then a kill."""
        filler = self.folder.parent / "filler"
        with started_ranks(self.ranks, self.arguments) as processes:
            self._after_a_round(lambda: all(p.poll() is None for p in processes))
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            time.sleep(self.rng.uniform(0.5, 4.0))
            filler.unlink()
            time.sleep(self.rng.uniform(0, 2.0))
            self._signal(self.rng.choice(processes).pid, signal.SIGKILL)
            self._all_end(processes)

    def launcher(self) -> None:
        """The launcher or its agent is killed: nothing that it started may go on."""
        command = [sys.executable, "-m", "launch.local", "-n", str(self.ranks), *self.arguments]
        with started(command) as process:
            self._after_a_round(lambda: process.poll() is None)
            self._signal(self.rng.choice([process.pid, *children(process.pid)]), signal.SIGKILL)
            struck = time.monotonic()
            while ranks_of(self.folder) and time.monotonic() < struck + PATIENCE:
                time.sleep(0.05)
            self._note_end(struck, not ranks_of(self.folder))

    def _after_a_round(self, going: Callable[[], bool]) -> None:
        """Some time after a round was reported, or now and then before."""
        before, early = rows(self.folder), time.monotonic() + self.rng.choice([3.0, 1e6, 1e6, 1e6])
        while rows(self.folder) <= before and going() and time.monotonic() < early:
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0, 2.0))

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _all_end(self, processes: list[Rank]) -> None:
        struck, ended = time.monotonic(), True
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0.1, struck + PATIENCE - time.monotonic()))
            except subprocess.TimeoutExpired:
                ended = False
                print(f"{self.kind}: process {rank} of {len(processes)} lives; it said\n{process.output()}")
        self._note_end(struck, ended)

    def _note_end(self, struck: float, ended: bool) -> None:
        self.score.slowest_end = max(self.score.slowest_end, time.monotonic() - struck)
        if not ended:
            self.score.differences += 1
            print(f"a process of {self.folder.name} did not end within {PATIENCE:g} s")


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextlib.contextmanager
def disk(path: Path) -> Iterator[bool]:
    """A small disk at this place, if this user may mount one."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def chaos(disturbances: int, seed: int, root: Path, talk: bool = False) -> Score:
    rng, score = random.Random(seed), Score()
    while score.done.total() < disturbances:
        algorithm = ALGORITHMS[score.runs % len(ALGORITHMS)]
        calm = root / f"{score.runs}-calm"
        codes, outputs = run_ranks(1, [*settings(algorithm, calm), "topology.server=shared"], timeout=240)
        assert codes == [0], outputs
        with disk(root / f"{score.runs}-disk") as small:
            kinds = [k for k in KINDS if small or k != "fill"]
            wild = root / f"{score.runs}-disk" / "wild"
            while not (wild / "model.safetensors").exists():
                job = Job(algorithm, wild, rng, score)
                job.disturbed(rng.choice(kinds)) if score.done.total() < disturbances else job.undisturbed()
                score.restarts += 1
            same = model_hash(calm) == model_hash(wild) and results(calm) == results(wild)
        score.restarts -= 1
        score.runs += 1
        score.differences += not same
        if talk:
            print(f"{algorithm:10} {'same' if same else 'DIFFERENT'}   {score}", flush=True)
    return score


KINDS = ("kill", "kill", "stop", "slow", "flip", "fill", "launcher")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("disturbances", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        score = chaos(given.disturbances, given.seed, Path(root), talk=True)
    print(score)
    return int(score.differences > 0)


if __name__ == "__main__":
    sys.exit(main())
