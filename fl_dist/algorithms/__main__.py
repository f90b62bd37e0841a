"""The table of all algorithms, read off their chains.

python -m fl_dist.algorithms [--markdown]
python -m fl_dist.algorithms --memory --parameters 86M   what each needs of the GPUs
"""

import argparse
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fl_dist.algorithms import algorithms, papers, parts
from fl_dist.algorithms.memory import SIZE, needs
from fl_dist.common import terminal
from fl_dist.common.words import size
from fl_dist.core import Algorithm, Round, Vars

HEAD = ("algorithm", "paper", "parts", "passes a step", "down", "up", "client memory")
LEGEND = (
    "F, B: forward and backward passes of a local step. down, up: model-sized messages of a client and round. "
    "client memory: model-sized vectors, what is received and what is kept between rounds."
)
REPORTS = ("reported each round", "by the part", "meaning")
MEMORY = ("algorithm", "worker", "rank 0")
MEMORY_LEGEND = (
    "The most that a GPU holds at a time, {unit}; rank 0 is a dedicated server. In float32, with the exact reduce and "
    "with local momentum, which is 4 of a worker's. More: activations, rows, 16 MB in which sums are converted, 4 "
    "bytes a frozen parameter; 8 a sum if clients are very unequal, and for dual variables if not all are of one size."
)
LETTERS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}


class Probe:
    """A chain set up on a stand-in model, as far as the first local step."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm, x = algorithm, torch.zeros(SIZE)
        r = Round(0, 1.0, 1, 1, first=lambda: x, weights=lambda: x > 0, channels=1, steps=1, samples=1)
        self.round, self.received = r, algorithm.publish(algorithm.server_init(x), r)
        self.kept = algorithm.client_init(self.received, r)
        self.full_passes = self.backwards = 0

    def begin(self) -> "Probe":
        self.algorithm.begin(self.received, self.kept, self.round, self._full)
        return self

    def step(self) -> "Probe":
        self.algorithm.oracle(self._gradient, self.received, self.kept, self.round)(self.received.x.clone())
        return self

    def _full(self) -> Tensor:
        self.full_passes += 1
        return torch.zeros(SIZE)

    def _gradient(self, w: Tensor) -> Tensor:
        self.backwards += 1
        return torch.zeros(SIZE)


def row(name: str) -> tuple[str, ...]:
    """An algorithm with its default settings: the cells under HEAD."""
    algorithm = algorithms.build(name, {})
    probe = Probe(algorithm)
    down = _vectors(probe.received)
    up = 1 + sum(upload.message and not upload.scalar for upload in algorithm.uploads.values())
    memory = down + _vectors(probe.kept)
    return name, papers[name], algorithm.describe(), _passes(algorithm), str(down), str(up), str(memory)


def reports() -> Iterable[tuple[str, ...]]:
    """What the parts report: the cells under REPORTS."""
    for name in parts:
        for report, meaning in parts.build(name, {}).reports.items():
            yield report, name, meaning


def _vectors(variables: Vars) -> int:
    return sum(tensor.shape == (SIZE,) for tensor in vars(variables).values())


def _passes(algorithm: Algorithm) -> str:
    forwards, backwards = algorithm.passes
    text = f"{forwards}F {backwards}B"
    probe = Probe(algorithm).begin()
    text += " + full pass a round" if probe.full_passes else ""
    # A published number steers the local step; at 1 it may save passes.
    numbers = [name for name in algorithm.published if getattr(probe.received, name).dim() == 0]
    for name in numbers:
        steered = Probe(algorithm)
        setattr(steered.received, name, torch.ones(()))
        saved = backwards - steered.begin().step().backwards
        text += f" ({forwards - saved}F {backwards - saved}B at {name} = 1)" if saved else ""
    return text


def memory(parameters: int) -> tuple[list[tuple[str, ...]], str]:
    """The cells under MEMORY, and what they mean; 0: in bytes a parameter."""
    unit = f"of a model with {parameters:,} parameters" if parameters else "in bytes a parameter"
    found = [(name, *needs(algorithms.build(name, {}))) for name in algorithms]
    rows = [(name, *(size(parameters * n) if parameters else str(n) for n in both)) for name, *both in found]
    return [MEMORY, *rows], MEMORY_LEGEND.format(unit=unit)


def number(text: str) -> int:
    """Such as 86M."""
    digits, letter = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
    if letter not in LETTERS or not digits.replace(".", "", 1).isdigit() or not float(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters; such as 1825162, 86M or 1.5B")
    return round(float(digits) * LETTERS[letter])


def plain(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def markdown(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    head, *body = rows
    for cells in (head, ["---"] * len(head), *body):
        yield f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fl_dist.algorithms", description="The table of all algorithms.")
    parser.add_argument("--markdown", action="store_true", help="as a Markdown table")
    parser.add_argument("--memory", action="store_true", help="what each needs of the GPUs, in bytes a parameter")
    parser.add_argument("--parameters", type=number, default=0, metavar="N", help="with --memory: of such a model")
    given = parser.parse_args(argv)
    if given.parameters and not given.memory:
        parser.error("--parameters goes with --memory")
    write = markdown if given.markdown else plain
    if given.memory:
        rows, legend = memory(given.parameters)
        print("\n".join([*write(rows), "", legend]))
        return
    rows = [HEAD, *map(row, algorithms)]
    print("\n".join([*write(rows), "", LEGEND, "", *write([REPORTS, *reports()])]))


if __name__ == "__main__":
    terminal.prepare()
    main()
