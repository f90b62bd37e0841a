"""Runs as a paper's table and curves, finished or not.

python -m fl_dist.results SWEEP.yaml [key.sub=value ...] or RUN ... [-o table.tex] [--curves curves.png]
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare_terminal()  # here, for the imports below take seconds

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fl_dist.common.errors import ConfigError, FlDistError
from fl_dist.common.formatting import suggest
from fl_dist.common.paths import expand_path
from fl_dist.common.terminal import parse_int_at_least
from fl_dist.config.sweeps import ExtraColumn, TableSettings
from fl_dist.metrics.record import COSTS, list_keys
from fl_dist.plots.base import check_plot_file
from fl_dist.results import curves, figures
from fl_dist.results.archive import check_archive_name, opened_archive, write_archive
from fl_dist.results.arguments import add_run_arguments, expand_arguments
from fl_dist.results.collect import Collection, collect
from fl_dist.results.render import FORMATS, SUFFIXES
from fl_dist.results.table import build_table, columns_of_mean

KEYS = [info.key for info in list_keys() if info.key != "dropped"]
"""Keys of numbers in `metrics.jsonl`."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        with terminal.warnings_in_one_line(), opened_archive(arguments.source) as folder:
            _show(arguments, collect(expand_arguments(arguments.runs), arguments.only, folder=folder))
    except (FlDistError, OSError) as e:
        terminal.print_error(e, e if arguments.traceback else None)
        return 2
    return 0


def _show(arguments: argparse.Namespace, collection: Collection) -> None:
    archive_file = _archive_path(arguments.archive)
    render = FORMATS[_output_format(arguments)]
    curves_file, surfaces_file = _plot_path(arguments.curves), _plot_path(arguments.surfaces)
    scatter_file, over_file = _plot_path(arguments.scatter), _plot_path(arguments.plot)
    _check_figures(arguments, collection)
    lines = figures.lines_over(collection, arguments.over) if over_file else []
    settings, published = _table_settings(arguments, collection), collection.published_file(arguments.published)
    table = build_table(collection, settings, arguments.cost or ["rounds"], published)
    _write(render(table), arguments.output)
    if curves_file and not curves.draw(collection, curves_file, arguments.against):
        print("no run has a score yet: no curves were drawn", file=sys.stderr)
    if scatter_file and not figures.draw_scatter(collection, scatter_file, arguments.x, settings):
        print(f"no run has a score and {arguments.x} yet: no scatter plot was drawn", file=sys.stderr)
    if over_file and not figures.draw_over(lines, over_file, arguments.over, settings):
        print("no run has a score yet: no plot was drawn", file=sys.stderr)
    if surfaces_file and not figures.draw_surfaces(collection, surfaces_file):
        print("no run has measured a surface, a plane or a line yet: none was drawn", file=sys.stderr)
    if archive_file and not write_archive(collection, archive_file):
        print("no run has a record yet: no archive was written", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    parser = terminal.ArgumentParser(prog="python -m fl_dist.results", description=__doc__.splitlines()[0])
    add_run_arguments(parser)
    parser.add_argument("--measure", choices=("mean", "last", "best"), help="of a run: mean of its last rounds, ...")
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
        + ", ".join(KEYS),
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
    parser.add_argument("--format", choices=tuple(FORMATS), help="default: by the name of the output, or text")
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
        "--archive", metavar="FILE", help="also write the records of the runs, without models, to a .tar.xz for --from"
    )
    terminal.add_traceback_option(parser)
    return parser


def _check_figures(arguments: argparse.Namespace, collection: Collection) -> None:
    if (arguments.scatter is None) != (arguments.x is None):
        raise ConfigError("a scatter plot needs both --scatter FILE and --x KEY")
    if (arguments.plot is None) != (arguments.over is None):
        raise ConfigError("a plot over a setting needs both --plot FILE and --over KEY")
    if arguments.archive and collection.published is None:
        raise ConfigError("an archive has the runs of a sweep; name its file instead of folders")
    if arguments.x and arguments.x not in COSTS:
        _extra_column(arguments.x, collection, COSTS)


def _plot_path(name: str | None) -> Path | None:
    if name is None:
        return None
    check_plot_file(file := expand_path(name))
    return file


def _archive_path(name: str | None) -> Path | None:
    if name is None:
        return None
    check_archive_name(file := expand_path(name))
    return file


def _parse_finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"must be a number, not {text}")
    return value


def _parse_mean(text: str) -> tuple[str, list[str]]:
    name, _, columns = text.partition("=")
    if not name or not all(patterns := columns.split(",")):
        raise argparse.ArgumentTypeError(f"must be NAME=COLUMN,..., not {text!r}")
    return name, patterns


def _table_settings(arguments: argparse.Namespace, collection: Collection) -> TableSettings:
    table = collection.sweep.table
    changes = {"measure": arguments.measure, "final_window": arguments.final_window, "targets": arguments.target}
    changes |= {"spread": arguments.spread, "means": table.means | dict(arguments.mean)}
    for name, patterns in arguments.mean:
        if not columns_of_mean(collection, patterns):
            raise ConfigError(f"no mean {name}: a column of it is missing; valid: {', '.join(collection.columns)}")
    if arguments.also:
        changes["extra_columns"] = table.extra_columns | {
            key: _extra_column(key, collection) for key in arguments.also if key
        }
    return table.model_copy(update={key: value for key, value in changes.items() if value is not None})


def _extra_column(key: str, collection: Collection, also_valid: Iterable[str] = ()) -> ExtraColumn:
    """ConfigError if there are records, but none has the key and it is not a declared one."""
    runs = [run for run in collection.runs if run.records]
    if runs and key not in KEYS and not any(run.numbers(key) for run in runs):
        present = {name for run in runs for row in run.rows for name in _number_keys(row)}
        declared = {name for name in KEYS if "<" not in name}
        raise ConfigError(f"no run has {key} in its metrics.jsonl; {suggest(key, present | declared | {*also_valid})}")
    return ExtraColumn(key=key)


def _number_keys(value: Any, prefix: str = "") -> Iterator[str]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _number_keys(inner, f"{prefix}{name}.")
        elif inner is None or isinstance(inner, int | float):
            yield f"{prefix}{name}"


def _output_format(arguments: argparse.Namespace) -> str:
    if arguments.format:
        return str(arguments.format)
    if not arguments.output:
        return "text"
    suffix = Path(arguments.output).suffix
    if suffix not in SUFFIXES:
        raise ConfigError(f"{arguments.output}: choose a --format, or let the name end in {', '.join(SUFFIXES)}")
    return SUFFIXES[suffix]


def _write(text: str, output: str | None) -> None:
    if output is None:
        print(text)
        return
    file = expand_path(output)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
