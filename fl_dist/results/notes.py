"""The notes below a table: what its numbers and signs mean, and which runs are not finished."""

from collections.abc import Sequence

from fl_dist.common.formatting import pluralize
from fl_dist.config.sweep_file import TableSettings
from fl_dist.results.cells import FAILED, NOT_REACHED, Measure, Number
from fl_dist.results.collect import Collection
from fl_dist.tasks import PrimaryMetric

MAX_NAMES = 5
"""Unfinished runs that are named below a table."""


def table_notes(
    collection: Collection,
    table: TableSettings,
    metric: PrimaryMetric,
    columns: Sequence[tuple[str, Measure]],
    rows: Sequence[tuple[str, list[Number]]],
) -> list[str]:
    cells = [(number, measure) for _, row in rows for number, (_, measure) in zip(row, columns, strict=True)]
    numbers = [number for number, _ in cells]
    notes = [_describe_metric(collection, table, metric, numbers), *_published_notes(table, cells)]
    if any(_is_missed(number, measure) for number, measure in cells):
        notes.append(f"{NOT_REACHED} not reached")
    unfinished = [run for run in collection.runs if not run.finished]
    if unfinished:
        if any(number.is_partial for number in numbers):
            notes.append("* not all runs of this cell are finished")
        names = [f"{run.name} ({run.last_round} of {run.rounds} rounds)" for run in unfinished[:MAX_NAMES]]
        more = [f"{len(unfinished) - MAX_NAMES:,} more"] if len(unfinished) > MAX_NAMES else []
        count = f"{len(unfinished):,} of {pluralize(len(collection.runs), 'run')}"
        notes.append(f"not finished: {count}: {', '.join([*names, *more])}")
    return notes


def _describe_metric(
    collection: Collection, table: TableSettings, metric: PrimaryMetric, numbers: Sequence[Number]
) -> str:
    """What the metric is, and what ± is over."""
    seeds = max(len(collection.cell(row, column)) for row in collection.rows for column in collection.columns)
    windows = sorted({min(table.final_window or run.final_window, run.rounds) for run in collection.runs})
    span = f"the last {pluralize(windows[0], 'round')}" if len(windows) == 1 else "the last rounds"
    over = {"mean": f"mean of {span}", "last": "last round", "best": "best round"}[table.measure]
    description = f"{metric.name}{' in %' if metric.percent else ''}: {over}"
    spread = {number.spread_over for number in numbers if number.spread is not None}
    if not spread:
        return description
    kinds = {"seeds": f"{seeds} seeds", "rounds": span}
    mean = ", the mean of those of the seeds" if table.spread == "rounds" and seeds > 1 else ""
    deviation = " or, of one run, over ".join(kinds[kind] for kind in kinds if kind in spread)
    return f"{description}; ± standard deviation over {deviation}{mean}"


def _published_notes(table: TableSettings, cells: Sequence[tuple[Number, Measure]]) -> list[str]:
    published = [(*number.published, measure) for number, measure in cells if number.published]
    if not published:
        return []
    spread = table.published_spread if any(std for _, std, _ in published) else None
    notes = [f"in brackets: as published{f' (± {spread})' if spread else ''}"]
    if any(value == "x" and measure.cost is None for value, _, measure in published):
        notes.append(f"{FAILED}: training failed there")
    return notes


def _is_missed(number: Number, measure: Measure) -> bool:
    """Whether its cell has the sign of a target that was not reached."""
    published = number.published is not None and number.published[0] == "x"
    return measure.cost is not None and (number.has_scores and number.value is None or published)
