"""Runs as a paper's table and curves, finished or not.

python -m fl_dist.results SWEEP.yaml [key.sub=value ...] or RUN ... [-o table.tex] [--curves curves.png]
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial

from fl_dist.common import terminal
from fl_dist.common.terminal import parse_int_at_least
from fl_dist.metrics.costs import COSTS
from fl_dist.results.arguments import NUMBER_KEYS, SUFFIXES, add_run_arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    from fl_dist.results.command import results_command  # takes seconds

    return terminal.call_command(results_command, arguments)


def parser() -> argparse.ArgumentParser:
    parser = terminal.ArgumentParser(prog="python -m fl_dist.results", description=__doc__.splitlines()[0])
    add_run_arguments(parser)
    add = parser.add_argument
    add(
        "--measure",
        choices=("mean", "last", "best"),
        help="of a run: the mean of its last rounds, its last or best round",
    )
    add("--final-window", type=partial(parse_int_at_least, 1), metavar="N", help="rounds of that mean")
    add(
        "--target",
        type=_parse_finite,
        action="append",
        metavar="X",
        help="also show what it took to reach X, such as 0.8 (may be repeated)",
    )
    add("--cost", choices=tuple(COSTS), action="append", help="unit of that (default rounds; may be repeated)")
    add(
        "--also",
        action="append",
        metavar="KEY",
        help="also show a number of metrics.jsonl, from the last round that has it (may be repeated): "
        + ", ".join(NUMBER_KEYS),
    )
    add(
        "--mean",
        type=_parse_mean,
        action="append",
        default=[],
        metavar="NAME=COLUMN,...",
        help="also show the mean of these columns, such as 'Average=Art*,Photo' (may be repeated)",
    )
    add("--spread", choices=("seeds", "rounds"), help="what ± is over (default: seeds or, of one run, its last rounds)")
    add("--format", choices=tuple(SUFFIXES.values()), help="default: by the name of the output, or text")
    add("-o", "--output", metavar="FILE", help=f"{', '.join(SUFFIXES)} (default: the terminal)")
    add("--curves", metavar="FILE", help="also draw the learning curves: .png, .pdf or .svg")
    add("--against", choices=tuple(COSTS), default="rounds", help="what the curves are drawn over")
    add("--scatter", metavar="FILE", help="also draw each row's final score against --x")
    add("--x", metavar="KEY", help=f"a number of metrics.jsonl, as for --also, or a total: {', '.join(COSTS)}")
    add("--surfaces", metavar="FILE", help="also draw the loss surfaces, planes and lines that the runs have measured")
    add("--plot", metavar="FILE", help="also draw each row's final score over the values of --over")
    add("--over", metavar="KEY", help="a key of the configuration, such as algorithm.rho")
    add(
        "--archive",
        metavar="FILE",
        help="also write the records of the runs, without models, to a .tar.xz for --from; with --from, runs that have "
        "records in their own folders are read there, and only the others from the archives",
    )
    terminal.add_traceback_option(parser)
    return parser


def _parse_finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"must be a number, not {text}")
    return value


def _parse_mean(text: str) -> tuple[str, list[str]]:
    name, _, columns = text.partition("=")
    if not name or not all(patterns := columns.split(",")):
        raise argparse.ArgumentTypeError(f"must be NAME=COLUMN,..., not {text!r}")
    return name, patterns


if __name__ == "__main__":
    terminal.run_program(main)
