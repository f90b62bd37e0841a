"""What a round costs beside plain PyTorch: one Markdown table, measured in one run.

    python -m benchmarks.round [--case cnn|protocol|alone|all] [--method fedgmt] [--repeats N] [--seconds S]

One server and two workers with one thread each; for the last row one process alone. The sides of a row take turns,
plain steps in processes of their own; milliseconds and ratios are medians over the turns. benchmarks/bare.py is what
rounds are compared with.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.bare import Apart, Gloo
from benchmarks.ranks import QUIET, Engine, Side, head, join, launch, line, median, noise, timed, turns
from fl_dist.machine.comm import Comm

WORKERS = 2
IMAGES = "images.npz"
METHODS = {"fedavg": "FedAvg", "fedsam": "FedSAM", "fedgmt": "FedGMT"}
HEAD = ("case", "measured, ms", "compared with, ms", "ratio", "limit", "verdict")
ENGINE, BUSY, STEPS, GLOO = "round", "round with evaluation and a save", "plain steps", "minimal gloo"
OF_CNN = (ENGINE, STEPS, 0.92), (BUSY, STEPS, 0.97)
LOUD = ("checkpoint.every=1", "evaluate.every=1")
CNN = ("model=cnn", "clients.total=100", "clients.per_round=10", "partition=iid", "local.epochs=1")
MLP = (
    *("data=digits", "model=mlp", "model.hidden=[32]", "clients.total=100", "clients.per_round=10"),
    *("partition=iid", "local.epochs=1", "local.batch_size=full"),
)


@dataclass(frozen=True)
class Case:
    """Sides that take turns, and the ratios that are limited."""

    kind: str
    what: str
    words: tuple[str, ...]
    limits: tuple[tuple[str, str, float], ...]
    """Measured side, side that it is compared with, largest ratio."""
    ranks: int = 1 + WORKERS
    rounds: int = 1
    """Of a side before it is another's turn."""
    repeats: int = 7
    """Turns of each side."""
    images: bool = False
    """Whether it trains on images of noise, in the shape and number of CIFAR-10's."""

    def sides(self, folder: Path, comm: Comm) -> dict[str, Side]:
        words = [*self.words, *(("data=npz", f"data.path={folder / IMAGES}") if self.images else ())]
        named = {side for limit in self.limits for side in limit[:2]}
        engine = Engine([*words, *QUIET], folder / f"{self.what}-quiet", comm)
        sides: dict[str, Side] = {ENGINE: engine}
        if BUSY in named:
            sides[BUSY] = Engine([*words, *LOUD], folder / f"{self.what}-loud", comm)
        if STEPS in named:
            sides[STEPS] = Apart(engine)
        if GLOO in named:
            sides[GLOO] = Gloo(engine)
        return sides


def cases(kind: str, method: str) -> list[Case]:
    chosen = [
        Case("cnn", f"{name}, CNN", (*CNN, f"algorithm={key}"), OF_CNN, images=True)
        for key, name in METHODS.items()
        if method in ("", key)
    ]
    key = method or "fedavg"
    what, words = f"{METHODS[key]}, MLP 64-32-10", (*MLP, f"algorithm={key}")
    chosen.append(
        Case(
            "protocol",
            what,
            words,
            ((ENGINE, GLOO, 1.1), (BUSY, GLOO, 1.43), (BUSY, ENGINE, 1.3)),
            rounds=20,
            repeats=45,
        )
    )
    chosen.append(Case("alone", f"{what}, one process", words, ((ENGINE, STEPS, 1.4),), ranks=1, rounds=20, repeats=45))
    return [case for case in chosen if kind in ("all", case.kind)]


def measure(case: Case, comm: Comm, folder: Path, repeats: int | None, seconds: float | None) -> None:
    """Print the rows of a case."""
    sides, repeats = case.sides(folder, comm), repeats or case.repeats
    first = sum(case.rounds * timed(side, case.rounds) for side in sides.values())
    if seconds is not None:
        # All ranks have to do as many.
        most = str(max(1, min(repeats, int(seconds / first)))) if comm.rank == 0 else None
        repeats = int(comm.share(f"repeats of {case.what}", most))
    taken = turns(sides, repeats, case.rounds)
    for measured, compared, limit in case.limits if comm.rank == 0 else ():
        print(row(f"{case.what}: {measured} ÷ {compared}", taken[measured], taken[compared], limit), flush=True)
    if comm.rank == 0 and isinstance(busy := sides.get(BUSY), Engine):
        print(f"{case.what}: {busy.saves:.2f} saves a round", file=sys.stderr, flush=True)


def row(what: str, ours: Sequence[float], theirs: Sequence[float], limit: float) -> str:
    """The ratio is the median of the turns': what a turn's sides share, such as a slow minute, is not in it."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    verdict = "holds" if ratio <= limit else "OVER"
    return line(what, f"{median(ours):.1f}", f"{median(theirs):.1f}", f"{ratio:.3f}", f"≤ {limit:.2f}", verdict)


def rank_main(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    comm = join()
    for case in cases(given.case, given.method):
        if case.ranks == comm.size:
            measure(case, comm, given.folder, given.repeats, given.seconds)
    comm.close()


def start(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    print(head(*HEAD), flush=True)
    chosen = cases(given.case, given.method)
    with tempfile.TemporaryDirectory() as folder:
        if any(case.images for case in chosen):
            noise(Path(folder) / IMAGES, 50_000, 2_000, (3, 32, 32))
        sizes = dict.fromkeys(case.ranks for case in chosen)
        return max(launch("benchmarks.round", [*arguments, "--folder", folder], ranks) for ranks in sizes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="all", choices=["cnn", "protocol", "alone", "all"])
    parser.add_argument("--method", default="", choices=["", *METHODS], help="only this one")
    parser.add_argument("--repeats", type=int, help="turns of each side (default 7 of the CNN, 45 of the MLP)")
    parser.add_argument("--seconds", type=float, help="of a case at most: fewer repeats, but one")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = sys.argv[1:] if argv is None else list(argv)
    given = parser.parse_args(arguments)
    if given.folder is None:
        return start(given, arguments)
    rank_main(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
