"""What `fl-dist results` does: collect runs, write their table, draw figures."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fl_dist.common import terminal
from fl_dist.common.errors import ConfigError
from fl_dist.common.files import write_output
from fl_dist.common.formatting import suggest
from fl_dist.common.paths import expand_path
from fl_dist.config.sweep_file import ExtraColumn, TableSettings
from fl_dist.metrics.costs import COSTS
from fl_dist.plots.base import check_plot_file
from fl_dist.results import curves, figures
from fl_dist.results.archive import check_archive_name, open_archives, write_archive
from fl_dist.results.arguments import NUMBER_KEYS, SUFFIXES, expand_arguments
from fl_dist.results.collect import Collection, collect
from fl_dist.results.render import FORMATS
from fl_dist.results.table import build_table, columns_of_mean, is_whole_mean


def results_command(arguments: argparse.Namespace) -> int:
    with terminal.warnings_in_one_line(), open_archives(arguments.sources) as archives:
        words, own_first = expand_arguments(arguments.runs), arguments.archive is not None
        _show(arguments, collect(words, arguments.only, archives=archives, own_first=own_first))
    return 0


def _show(arguments: argparse.Namespace, collection: Collection) -> None:
    archive_file = _output_path(arguments.archive, check_archive_name)
    render = FORMATS[_output_format(arguments)]
    curves_file, surfaces_file = _output_path(arguments.curves), _output_path(arguments.surfaces)
    scatter_file, over_file = _output_path(arguments.scatter), _output_path(arguments.plot)
    _check_figures(arguments, collection)
    lines = figures.lines_over(collection, arguments.over) if over_file else []
    settings, published = _table_settings(arguments, collection), collection.published_file(arguments.published)
    table = build_table(collection, settings, arguments.cost or ["rounds"], published)
    if arguments.output is None:
        print(render(table))
    else:
        write_output(expand_path(arguments.output), f"{render(table)}\n")
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


def _check_figures(arguments: argparse.Namespace, collection: Collection) -> None:
    if (arguments.scatter is None) != (arguments.x is None):
        raise ConfigError("a scatter plot needs both --scatter FILE and --x KEY")
    if (arguments.plot is None) != (arguments.over is None):
        raise ConfigError("a plot over a setting needs both --plot FILE and --over KEY")
    if arguments.archive and collection.published is None:
        raise ConfigError("an archive has the runs of a sweep; name its file instead of folders")
    if arguments.x and arguments.x not in COSTS:
        _extra_column(arguments.x, collection, COSTS)


def _output_path(name: str | None, check: Callable[[Path], None] = check_plot_file) -> Path | None:
    if name is None:
        return None
    check(file := expand_path(name))
    return file


def _table_settings(arguments: argparse.Namespace, collection: Collection) -> TableSettings:
    table = collection.sweep.table
    changes = {"measure": arguments.measure, "final_window": arguments.final_window, "targets": arguments.target}
    means = {name: patterns for name, patterns in table.means.items() if is_whole_mean(collection, patterns)}
    changes |= {"spread": arguments.spread, "means": means | dict(arguments.mean)}
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
    if runs and key not in NUMBER_KEYS and not any(run.numbers(key) for run in runs):
        present = {name for run in runs for row in run.rows for name in _number_keys(row)}
        declared = {name for name in NUMBER_KEYS if "<" not in name}
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
