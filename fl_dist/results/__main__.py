"""Runs as a paper's table and curves, finished or not.

python -m fl_dist.results SWEEP.yaml [key.sub=value ...] or RUN ... [-o table.tex] [--curves curves.png]
"""

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial

from fl_dist.common import terminal
from fl_dist.common.terminal import parse_int_at_least
from fl_dist.metrics.costs import COSTS
from fl_dist.results.arguments import NUMBER_KEYS, SUFFIXES, add_run_arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    from fl_dist.results.command import results_command  # takes seconds

    return results_command(arguments)


def parser() -> argparse.ArgumentParser:
    parser = terminal.ArgumentParser(prog="python -m fl_dist.results", description=__doc__.splitlines()[0])
    add_run_arguments(parser)
    parser.add_argument(
        "--measure",
        choices=("mean", "last", "best"),
        help="of a run: the mean of its last rounds, its last or best round",
    )
    parser.add_argument("--final-window", type=partial(parse_int_at_least, 1), metavar="N", help="rounds of that mean")
    parser.add_argument(
        "--target",
        type=_parse_finite,
        action="append",
        metavar="X",
        help="also show what it took to reach X, such as 0.8 (may be repeated)",
    )
    parser.add_argument(
        "--cost", choices=tuple(COSTS), action="append", help="unit of that (default rounds; may be repeated)"
    )
    parser.add_argument(
        "--also",
        action="append",
        metavar="KEY",
        help="also show a number of metrics.jsonl, from the last round that has it (may be repeated): "
        + ", ".join(NUMBER_KEYS),
    )
    parser.add_argument(
        "--mean",
        type=_parse_mean,
        action="append",
        default=[],
        metavar="NAME=COLUMN,...",
        help="also show the mean of these columns, such as 'Average=Art*,Photo' (may be repeated)",
    )
    parser.add_argument(
        "--spread", choices=("seeds", "rounds"), help="what ± is over (default: seeds or, of one run, its last rounds)"
    )
    parser.add_argument(
        "--format", choices=tuple(SUFFIXES.values()), help="default: by the name of the output, or text"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help=f"{', '.join(SUFFIXES)} (default: the terminal)")
    parser.add_argument("--curves", metavar="FILE", help="also draw the learning curves: .png, .pdf or .svg")
    parser.add_argument("--against", choices=tuple(COSTS), default="rounds", help="what the curves are drawn over")
    parser.add_argument("--scatter", metavar="FILE", help="also draw each row's final score against --x")
    parser.add_argument(
        "--x", metavar="KEY", help=f"a number of metrics.jsonl, as for --also, or a total: {', '.join(COSTS)}"
    )
    parser.add_argument(
        "--surfaces", metavar="FILE", help="also draw the loss surfaces, planes and lines that the runs have measured"
    )
    parser.add_argument("--plot", metavar="FILE", help="also draw each row's final score over the values of --over")
    parser.add_argument("--over", metavar="KEY", help="a key of the configuration, such as algorithm.rho")
    parser.add_argument(
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
    terminal.prepare_terminal()
    sys.exit(main())
