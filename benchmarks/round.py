"""The time of a round relative to plain PyTorch: one Markdown table, measured in one run.

    python -m benchmarks.round [--case cnn|protocol|alone|all] [--method fedgmt] [--repeats N] [--seconds S]

One server and two workers with one thread each; for the last row one process alone. The workloads of a row take turns,
plain steps in processes of their own; milliseconds and ratios are medians over the turns. benchmarks/baseline.py is
what rounds are compared with.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import common
from benchmarks.baseline import GlooRounds, PlainSteps
from fl_dist.distributed.process_group import ProcessGroup

WORKERS = 2
IMAGES = "images.npz"
METHODS = {"fedavg": "FedAvg", "fedsam": "FedSAM", "fedgmt": "FedGMT"}
HEADER = ("case", "measured, ms", "compared with, ms", "ratio", "limit", "verdict")
ROUND, FULL_ROUND, STEPS, GLOO = "round", "round with evaluation and a save", "plain steps", "minimal gloo"
CNN_LIMITS = (ROUND, STEPS, 0.92), (FULL_ROUND, STEPS, 0.97)
PROTOCOL_LIMITS = (ROUND, GLOO, 1.2), (FULL_ROUND, GLOO, 1.56), (FULL_ROUND, ROUND, 1.3)
CNN = ("model=cnn", "clients.total=100", "clients.per_round=10", "partition=iid", "local.epochs=1")
MLP = (
    *("data=digits", "model=mlp", "model.hidden=[32]", "clients.total=100", "clients.per_round=10"),
    *("partition=iid", "local.epochs=1", "local.batch_size=full"),
)


@dataclass(frozen=True)
class Case:
    """Workloads that take turns, and the limits of their ratios."""

    kind: str
    title: str
    overrides: tuple[str, ...]
    limits: tuple[tuple[str, str, float], ...]
    """Measured workload, workload that it is compared with, largest ratio."""
    ranks: int = 1 + WORKERS
    rounds: int = 1
    """Per turn."""
    repeats: int = 7
    has_images: bool = False
    """Whether it trains on images of noise, in the shape and number of CIFAR-10's."""

    def workloads(self, folder: Path, group: ProcessGroup) -> dict[str, common.Workload]:
        overrides = [*self.overrides, *(("data=npz", f"data.path={folder / IMAGES}") if self.has_images else ())]
        names = {name for limit in self.limits for name in limit[:2]}
        rounds = common.Rounds([*overrides, *common.TRAINING_ONLY], folder / f"{self.title}-training", group)
        workloads: dict[str, common.Workload] = {ROUND: rounds}
        if FULL_ROUND in names:
            overrides += ["checkpoint.every=1", "evaluate.every=1"]
            workloads[FULL_ROUND] = common.Rounds(overrides, folder / f"{self.title}-full", group)
        if STEPS in names:
            workloads[STEPS] = PlainSteps(rounds)
        if GLOO in names:
            workloads[GLOO] = GlooRounds(rounds)
        return workloads


def select_cases(kind: str, method: str) -> list[Case]:
    cases = [
        Case("cnn", f"{name}, CNN", (*CNN, f"algorithm={key}"), CNN_LIMITS, has_images=True)
        for key, name in METHODS.items()
        if method in ("", key)
    ]
    key = method or "fedavg"
    title, overrides = f"{METHODS[key]}, MLP 64-32-10", (*MLP, f"algorithm={key}")
    cases.append(Case("protocol", title, overrides, PROTOCOL_LIMITS, rounds=20, repeats=45))
    title, limits = f"{title}, one process", ((ROUND, STEPS, 1.4),)
    cases.append(Case("alone", title, overrides, limits, ranks=1, rounds=20, repeats=45))
    return [case for case in cases if kind in ("all", case.kind)]


def measure(case: Case, group: ProcessGroup, folder: Path, repeats: int | None, max_seconds: float | None) -> None:
    """Print the rows of a case."""
    workloads, repeats = case.workloads(folder, group), repeats or case.repeats
    turn_seconds = sum(case.rounds * common.time_rounds(workload, case.rounds) for workload in workloads.values())
    if max_seconds is not None:
        # All ranks must repeat equally often.
        affordable = str(max(1, min(repeats, int(max_seconds / turn_seconds)))) if group.rank == 0 else None
        repeats = int(group.store.broadcast_text(f"repeats of {case.title}", affordable))
    seconds = common.time_in_turns(workloads, repeats, case.rounds)
    if group.rank != 0:
        return
    for name, other, limit in case.limits:
        print(ratio_row(f"{case.title}: {name} ÷ {other}", seconds[name], seconds[other], limit), flush=True)
    if isinstance(full := workloads.get(FULL_ROUND), common.Rounds):
        print(f"{case.title}: {full.saves_per_round:.2f} saves per round", file=sys.stderr, flush=True)


def ratio_row(title: str, seconds: Sequence[float], other: Sequence[float], limit: float) -> str:
    """The median of the turns' ratios: a slow minute slows both workloads of a turn and cancels out."""
    ratio = statistics.median(a / b for a, b in zip(seconds, other, strict=True))
    verdict, times = "holds" if ratio <= limit else "OVER", [f"{common.median_ms(s):.1f}" for s in (seconds, other)]
    return common.table_row(title, *times, f"{ratio:.3f}", f"≤ {limit:.2f}", verdict)


def run_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    group = common.connect_rank()
    for case in select_cases(arguments.case, arguments.method):
        if case.ranks == group.size:
            measure(case, group, arguments.folder, arguments.repeats, arguments.seconds)
    group.close()


def start(cases: Sequence[Case], argv: Sequence[str]) -> int:
    print(common.table_header(*HEADER), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if any(case.has_images for case in cases):
            common.write_random_data(Path(folder) / IMAGES, 50_000, 2_000, (3, 32, 32))
        sizes = dict.fromkeys(case.ranks for case in cases)
        return max(common.run_ranks("benchmarks.round", [*argv, "--folder", folder], ranks) for ranks in sizes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="all", choices=["cnn", "protocol", "alone", "all"])
    parser.add_argument("--method", default="", choices=["", *METHODS], help="only this one")
    parser.add_argument("--repeats", type=int, help="turns of each workload (default 7 of the CNN, 45 of the MLP)")
    parser.add_argument("--seconds", type=float, help="limit per case: reduces the repeats, to at least one")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(argv)
    if arguments.folder is None:
        return start(select_cases(arguments.case, arguments.method), argv)
    run_rank(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
