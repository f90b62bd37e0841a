"""Kill random ranks of real jobs at random moments, restart on other layouts, compare with the undisturbed run.

python -m tests.chaos 100 [--seed S]
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.jobs import QUIET, Rank, model_hash, results, run_ranks, started_ranks

ALGORITHMS = ("fedgmt", "scaffold", "fedsmoo", "fedgmt_v2", "fedgf", "fednsam_d", "fedlesam", "fedadam")
LAYOUTS = ((1, "dedicated"), (2, "dedicated"), (3, "dedicated"), (4, "dedicated"), (2, "shared"), (3, "shared"))
SETTINGS = (
    *QUIET,
    "rounds=25",
    "model={name: cnn, dropout: 0.2}",
    "partition={name: dirichlet, alpha: 0.3, variant: unbalanced}",
    "clients={total: 16, per_round: 6}",
    "local={epochs: 1, batch_size: 32, lr: 0.02, momentum: 0.0}",
    "comm.timeout=30",
)
PATIENCE = 15.0


@dataclass
class Score:
    kills: int = 0
    restarts: int = 0
    rounds_lost: int = 0
    runs: int = 0
    differences: int = 0
    slowest_end: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.restarts} restarts, {self.runs} runs finished, {self.rounds_lost} rounds lost, "
            f"survivors ended within {self.slowest_end:.1f} s, {self.differences} differences"
        )


def settings(algorithm: str, folder: Path) -> list[str]:
    return [*SETTINGS, f"algorithm.name={algorithm}", f"run.dir={folder}"]


def rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saved(folder: Path) -> int:
    path = folder / "checkpoint" / "latest"
    return int(path.read_text().rpartition("-")[2]) if path.exists() else 0


def attempt(algorithm: str, folder: Path, rng: random.Random, kill: bool, score: Score) -> None:
    """Start the job on some layout; with `kill`, end one rank at some moment and see that the others end too."""
    ranks, server = rng.choice(LAYOUTS)
    arguments = settings(algorithm, folder)
    arguments += [f"topology.server={server}"] if ranks > 1 else ["topology.server=shared"]
    with started_ranks(ranks, arguments) as processes:
        if kill:
            _strike(processes, folder, rng, score)
        for process in processes:
            process.communicate(timeout=240)
        if not kill:
            assert not any(p.returncode for p in processes), "an undisturbed attempt failed"


def _strike(processes: list[Rank], folder: Path, rng: random.Random, score: Score) -> None:
    at_start = rng.random() < 0.1
    before = rows(folder)
    while not at_start and rows(folder) <= before and all(p.poll() is None for p in processes):
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 2.0))
    victim = rng.choice(processes)
    if victim.poll() is not None:
        return
    os.kill(victim.pid, signal.SIGKILL)
    struck = time.monotonic()
    score.kills += 1
    reached = rows(folder)
    for process in processes:
        try:
            process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            # Ranks that wait for one that never came are ended by what launched them.
            if not at_start:
                score.differences += 1
                print(f"a survivor did not end within {PATIENCE} s")
            os.kill(process.pid, signal.SIGKILL)
    if not at_start:
        score.slowest_end = max(score.slowest_end, time.monotonic() - struck)
    if not (folder / "model.safetensors").exists():
        score.rounds_lost += max(0, reached - saved(folder))


def chaos(kills: int, seed: int, root: Path, talk: bool = False) -> Score:
    rng, score = random.Random(seed), Score()
    while score.kills < kills:
        algorithm = ALGORITHMS[score.runs % len(ALGORITHMS)]
        calm, wild = root / f"{score.runs}-calm", root / f"{score.runs}-wild"
        codes, outputs = run_ranks(1, [*settings(algorithm, calm), "topology.server=shared"], timeout=240)
        assert codes == [0], outputs
        while not (wild / "model.safetensors").exists():
            attempt(algorithm, wild, rng, score.kills < kills, score)
            score.restarts += 1
        score.restarts -= 1
        score.runs += 1
        same = model_hash(calm) == model_hash(wild) and results(calm) == results(wild)
        score.differences += not same
        if talk:
            print(f"{algorithm:10} {'same' if same else 'DIFFERENT'}   {score}", flush=True)
    return score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        score = chaos(given.kills, given.seed, Path(root), talk=True)
    print(score)
    return int(score.differences > 0)


if __name__ == "__main__":
    sys.exit(main())
