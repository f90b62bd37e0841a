"""Where the time of rounds goes: by phase, by diagnostic, by worker."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fl_dist.metrics.record import PHASES, RoundRecord, WorkerRecord
from fl_dist.plots.base import COLOURS
from fl_dist.report import tables
from fl_dist.report.builder import ReportBuilder, Section, charts, heading, html, section
from fl_dist.report.figures import BLACK, Figure, Trace, escape_label, make_axis, make_category_axis, make_trace
from fl_dist.report.numbers import rounded_number
from fl_dist.report.run_reader import RunSnapshot

REST, DIAGNOSTICS, TOTAL = "rest", "diagnostics", "total"
_SHADES = ("#56B4E9", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#B8A800")
PHASE_COLOURS = {phase: _SHADES[k % len(_SHADES)] for k, phase in enumerate(PHASES)} | {REST: "#9A9A9A"}
IDLE_COLOUR = "rgba(128,128,128,0.25)"
MAX_ROUNDS = 40
"""Rounds of a timeline."""


def times(builder: ReportBuilder) -> Section | None:
    parts = charts(builder.add_figure("times/phases", phase_seconds(builder.runs)), "wide")
    parts += charts(builder.add_figure("times/diagnostics", diagnostics_seconds(builder.runs)), "wide")
    if parts:
        note = "Bars are means over rounds. What the server does while workers train (evaluation, checkpoints) may "
        note += "reach beyond the mark, which is the length of a round."
        parts = html(tables.notes([note])) + parts
    timelines = builder.per_run(
        "times/run",
        lambda run: charts(builder.add_figure(f"times/{builder.number(run)}", timeline(run)), "wide"),
    )
    parts += [*heading("Workers"), *timelines] if timelines else []
    return section("times", "Time", parts)


def phase_seconds(runs: Sequence[RunSnapshot]) -> Figure | None:
    """Mean seconds of a round by phase; a mark at the length of the round."""
    means = _mean_seconds_by_run(runs)
    phases = {phase: colour for phase, colour in PHASE_COLOURS.items() if any(mean[phase] for mean in means.values())}
    if not means:
        return None
    figure, name = _stacked_bars("", means, phases), "length of a round"
    x, y = [mean[TOTAL] for mean in means.values()], [escape_label(run) for run in means]
    marker = {"symbol": "line-ns", "size": 14, "line": {"width": 2.5, "color": BLACK}}
    hover = "%{y}<br>a round <b>%{x:.3~g} s</b>"
    mark = make_trace("scatter", x, y, name, hover, mode="markers", marker=marker)
    return figure | {"data": [*figure["data"], mark], "keys": [*phases.items(), (name, BLACK)]}


def diagnostics_seconds(runs: Sequence[RunSnapshot]) -> Figure | None:
    """Mean seconds of diagnostics, which are not part of a round."""
    means = {name: mean for name, mean in _mean_seconds_by_run(runs).items() if mean[DIAGNOSTICS]}
    return _stacked_bars("diagnostics, beside the rounds", means, {DIAGNOSTICS: "#D55E00"}) if means else None


def _mean_seconds_by_run(runs: Sequence[RunSnapshot]) -> dict[str, dict[str, float]]:
    return {run.name: mean_seconds(run.records) for run in reversed(runs) if run.records}


def _stacked_bars(title: str, means: Mapping[str, Mapping[str, float]], parts: Mapping[str, str]) -> Figure:
    """One bar per run, of parts with their colours."""
    data, labels = [], [escape_label(run) for run in means]
    for part, colour in parts.items():
        hover, more = f"%{{y}}<br>{part} <b>%{{x:.3~g}} s</b>", {"orientation": "h", "marker": {"color": colour}}
        data.append(make_trace("bar", [mean[part] for mean in means.values()], labels, part, hover, **more))
    layout = {"barmode": "stack", "xaxis": make_axis("seconds per round"), "yaxis": make_category_axis([*means])}
    return {"title": title, "data": data, "layout": layout, "height": 100 + 24 * len(means)}


def mean_seconds(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Per round, by phase; the rest is what no phase accounts for. Diagnostics are not part of the round."""
    keys = (*PHASES, DIAGNOSTICS, TOTAL)
    sums: dict[str, float] = {key: sum(getattr(r.seconds, key) or 0 for r in records) for key in keys}
    sums[REST] = max(0.0, sums[TOTAL] - sum(sums[phase] for phase in PHASES))
    return {key: float(f"{value / len(records):.4g}") for key, value in sums.items()}


def timeline(run: RunSnapshot) -> Figure | None:
    """One lane per worker, and per round a bar of its busy seconds within the round."""
    records = [record for record in run.records[-MAX_ROUNDS:] if training_ranks([record])]
    ranks = training_ranks(records)
    if not records:
        return None
    rounds, busy, now = list[Bar](), list[Bar](), 0.0
    for record in records:
        total = record.seconds.total
        for rank in ranks:
            worker = record.workers.get(rank, WorkerRecord())
            seconds = rounded_number(worker.busy) or 0.0
            clients = "?" if worker.clients is None else worker.clients
            note = f"{seconds / total:.0%} busy, {clients} clients" if total else ""
            rounds.append(Bar(f"worker {rank}", now, total, record.round, note))
            busy.append(Bar(f"worker {rank}", now + record.seconds.broadcast, seconds, record.round, note))
        now += total
    lanes = make_category_axis([f"worker {rank}" for rank in reversed(ranks)])
    return {
        "title": f"rounds {records[0].round:,} to {records[-1].round:,}",
        "data": [_bars(rounds, "idle", IDLE_COLOUR), _bars(busy, "busy", COLOURS[0])],
        "layout": {"barmode": "overlay", "bargap": 0.3, "yaxis": lanes, "xaxis": make_axis("seconds")},
        "height": 90 + 30 * len(ranks),
        "keys": [("busy", COLOURS[0]), ("idle", IDLE_COLOUR)],
    }


def training_ranks(records: Sequence[RoundRecord]) -> list[str]:
    """The ranks that trained in any of these rounds, in order."""
    busy = {rank for record in records for rank, worker in record.workers.items() if worker.busy is not None}
    return sorted(busy, key=lambda rank: (len(rank), rank))


class Bar(NamedTuple):
    """Of a timeline."""

    lane: str
    start: float
    seconds: float
    round: int
    note: str


def _bars(bars: Sequence[Bar], name: str, colour: str) -> Trace:
    x, y = [round(bar.seconds, 3) for bar in bars], [escape_label(bar.lane) for bar in bars]
    place = {"orientation": "h", "base": [round(bar.start, 3) for bar in bars]}
    marker = {"color": colour, "line": {"width": 1, "color": "rgba(128,128,128,0.6)"}}
    notes = [[bar.round, escape_label(bar.note)] for bar in bars]
    hover = "%{y}, round %{customdata[0]}<br>%{customdata[1]}"
    return make_trace("bar", x, y, name, hover, marker=marker, customdata=notes, **place)
