"""Runs as a paper's table and curves, finished or not.

python -m fl_dist.results SWEEP.yaml [key.sub=value ...] or RUN ... [-o table.tex] [--curves curves.png]
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare()  # here, for the imports below take seconds

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fl_dist.common.paths import expand
from fl_dist.common.terminal import at_least
from fl_dist.config.sweeps import Also, Table
from fl_dist.drawing import timeline
from fl_dist.drawing.base import check
from fl_dist.results.arguments import add_runs, expanded
from fl_dist.results.collect import COSTS, Collection, collect
from fl_dist.results.curves import draw
from fl_dist.results.render import FORMATS, SUFFIXES
from fl_dist.results.table import figures


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        found = collect(expanded(arguments.runs), arguments.only)
        kind = _kind(arguments)
        curves, lanes = _picture(arguments.curves), _picture(arguments.timeline)
        table = figures(found, _table(arguments, found), arguments.cost or ["rounds"], _published(arguments, found))
        _write(FORMATS[kind](table), arguments.output)
        if curves and not draw(found, curves, arguments.against):
            print("no run has a score yet: no curves were drawn", file=sys.stderr)
        if lanes and not timeline.draw({o.name: o.history for o in found.outcomes}, lanes):
            print("no run tells of its workers: no timeline was drawn", file=sys.stderr)
    except (ValueError, OSError) as e:
        terminal.complain(e, e if arguments.traceback else None)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(prog="python -m fl_dist.results", description=__doc__.splitlines()[0])
    add_runs(parser)
    parser.add_argument("--measure", choices=("mean", "last", "best"), help="of a run: mean of its last rounds, ...")
    parser.add_argument("--last", type=partial(at_least, 1), metavar="N", help="rounds of that mean")
    parser.add_argument(
        "--target",
        type=_finite,
        action="append",
        metavar="X",
        help="also what it took to reach X, such as 0.8 (may be repeated)",
    )
    parser.add_argument(
        "--cost", choices=tuple(COSTS), action="append", help="in what that is told (default rounds; may be repeated)"
    )
    parser.add_argument(
        "--also",
        action="append",
        metavar="KEY",
        help="also a number of the rows, such as diagnostics.lpf.lpf, of the last round that has it (may be repeated)",
    )
    parser.add_argument(
        "--spread", choices=("seeds", "rounds"), help="what ± is over (default: seeds or, of one run, its last rounds)"
    )
    parser.add_argument("--format", choices=tuple(FORMATS), help="default: by the name of the output, or text")
    parser.add_argument("-o", "--output", metavar="FILE", help=f"{', '.join(SUFFIXES)} (default: the terminal)")
    parser.add_argument("--curves", metavar="FILE", help="also draw the learning curves: .png, .pdf or .svg")
    parser.add_argument("--timeline", metavar="FILE", help="also draw who worked when, in the last rounds of each run")
    parser.add_argument("--against", choices=tuple(COSTS), default="rounds", help="what the curves are drawn over")
    terminal.add_traceback(parser)
    return parser


def _picture(named: str | None) -> Path | None:
    if named is None:
        return None
    check(file := expand(named))
    return file


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"must be a number, not {text}")
    return value


def _table(arguments: argparse.Namespace, found: Collection) -> Table:
    table = found.sweep.table
    given = {"measure": arguments.measure, "last": arguments.last, "targets": arguments.target}
    given |= {"spread": arguments.spread, "also": arguments.also and table.also | _also(arguments.also)}
    return table.model_copy(update={key: value for key, value in given.items() if value is not None})


def _also(keys: Sequence[str]) -> dict[str, Also]:
    return {key: Also(key=key) for key in keys if key}


def _published(arguments: argparse.Namespace, found: Collection) -> Path | None:
    if arguments.published:
        return expand(arguments.published)
    return found.published if found.published and found.published.exists() else None


def _kind(arguments: argparse.Namespace) -> str:
    if arguments.format:
        return str(arguments.format)
    if not arguments.output:
        return "text"
    suffix = Path(arguments.output).suffix
    if suffix not in SUFFIXES:
        raise ValueError(f"{arguments.output}: say the --format, or let the name end in {', '.join(SUFFIXES)}")
    return SUFFIXES[suffix]


def _write(text: str, output: str | None) -> None:
    if output is None:
        print(text)
        return
    file = expand(output)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
