"""Charts as plain data for plotly.js; the page sets fonts, margins, and the colours of text and grid."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from fl_dist.common.formatting import shorten
from fl_dist.metrics.record import PHASES, RoundRecord, WorkerRecord
from fl_dist.plots.base import COLOURS, MAX_ASPECT, line_widths
from fl_dist.report.run_reader import RunSnapshot, mapping_or_empty, number_grid, number_list, rounded_number
from fl_dist.report.series import Line

Figure = dict[str, Any]
Trace = dict[str, Any]
Numbers = Sequence[float | None]
DASHES = ("solid", "dash", "dot", "dashdot")
REST, DIAGNOSTICS, TOTAL = "rest", "diagnostics", "total"
_SHADES = ("#56B4E9", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#B8A800")
PHASE_COLOURS = {phase: _SHADES[k % len(_SHADES)] for k, phase in enumerate(PHASES)} | {REST: "#9A9A9A"}
PATH_COLOURS = ("#E4572E", "#F28EC0", "#B0B0B0", "#FF9F1C")
"""Visible on the colours of a surface, and on light and dark backgrounds."""
BLACK, GREY = "#000000", "#808080"
BAND_OPACITY, SEED_OPACITY = 0.16, 0.55
COUNT_COLOURS = [[0, "rgba(0,114,178,0)"], [0.02, "rgba(0,114,178,0.12)"], [1, "rgba(0,114,178,1)"]]
"""Visible on light and dark backgrounds."""
IDLE_COLOUR = "rgba(128,128,128,0.25)"
MAX_LABEL = 30
"""Characters of a label beside an axis; the whole name appears under the pointer."""
MAX_CLIENTS = 500
"""Clients that are drawn."""
MAX_ROUNDS = 40
"""Rounds of a timeline."""


def _with_opacity(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


DARK_COLOURS = {BLACK: "#e4e7ea"} | {
    _with_opacity(BLACK, opacity): _with_opacity("#e4e7ea", opacity) for opacity in (BAND_OPACITY, SEED_OPACITY)
}
"""Colours that a dark background would hide, and their replacements."""


class Style(NamedTuple):
    """How a row of the table is drawn in all charts."""

    name: str
    colour: str
    dash: str


def make_style(name: str, k: int) -> Style:
    return Style(name, COLOURS[k % len(COLOURS)], DASHES[k // len(COLOURS) % len(DASHES)])


def label(text: object, limit: int = 200) -> str:
    """Text for plotly.js, without markup."""
    return escape(shorten(text, limit), quote=False)


def _trace(kind: str, x: Sequence[object], y: Sequence[object], name: object, hover: str, **more: Any) -> Trace:
    position = {"type": kind, "x": [*x], "y": [*y], "name": label(name)}
    return position | {"hovertemplate": f"{hover}<extra></extra>"} | more


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": label(title)}} | more


def _category_axis(names: Sequence[str]) -> dict[str, Any]:
    """An axis of names, the last on top."""
    labels = [label(name) for name in names]
    order = {"type": "category", "categoryorder": "array", "categoryarray": labels, "range": [-0.6, len(names) - 0.4]}
    return order | {"tickvals": labels, "ticktext": [label(name, MAX_LABEL) for name in names]}


class Curve(NamedTuple):
    style: Style
    axes: str
    """Key of the costs at its rounds, for other axes than rounds."""
    line: Line


def line_chart(title: str, unit: str, curves: Sequence[Curve], markers: bool = False) -> Figure:
    """Curves over rounds, with a band where there are several seeds."""
    data: list[Trace] = []
    for curve in curves:
        data += [_band(curve)] if curve.line.seeds > 1 else []
        data.append(_mean_curve(curve, markers))
    return {"title": title, "data": data, "layout": {"yaxis": _axis(unit)}, "overRounds": True}


def _mean_curve(curve: Curve, markers: bool) -> Trace:
    style, axes, line = curve
    mode = "lines+markers" if markers or len(line.rounds) < 3 else "lines"
    stroke = {"color": style.colour, "dash": style.dash, "width": 1.8}
    more = {"mode": mode, "line": stroke, "marker": {"size": 5}, "legendgroup": style.name, "meta": {"axes": axes}}
    hover = "%{fullData.name}<br>%{x:.5~g}: <b>%{y:.5~g}</b>"
    return _trace("scatter", line.rounds, line.mean, style.name, hover, **more)


def _band(curve: Curve) -> Trace:
    style, axes, line = curve
    outline = {"x": line.rounds + line.rounds[::-1], "y": line.high + line.low[::-1]}
    fill = {"line": {"width": 0}, "fill": "toself", "fillcolor": _with_opacity(style.colour, BAND_OPACITY)}
    group = {"legendgroup": style.name, "meta": {"axes": axes}, "hoverinfo": "skip"}
    return {"type": "scatter", "mode": "lines"} | outline | fill | group


class RowScores(NamedTuple):
    """A row of the comparison: the scores of its seeds, and the published one."""

    style: Style
    finished: list[float]
    unfinished: list[float]
    published: tuple[float, float | None] | None

    @property
    def counted(self) -> list[float]:
        """As in the table: the finished ones, or all if none is."""
        return self.finished or self.unfinished

    @property
    def mean(self) -> float:
        return sum(self.counted) / len(self.counted)


def comparison(title: str, unit: str, rows: Sequence[RowScores], minimize: bool) -> Figure:
    """Sorted, the best on top; a dot per seed, a larger one for their mean, a diamond for the published score."""
    ordered = sorted(rows, key=lambda row: row.mean, reverse=minimize)
    data = [_mean_dot(row) for row in ordered]
    data += [_seed_dots(row) for row in ordered if len(row.finished) + len(row.unfinished) > 1]
    if published := [(row.style.name, *row.published) for row in ordered if row.published]:
        data.append(_published_dots(published))
    names = [row.style.name for row in ordered]
    layout = {"xaxis": _axis(unit), "yaxis": _category_axis(names), "hovermode": "closest"}
    return {"title": title, "data": data, "layout": layout, "height": 90 + 26 * len(rows)}


def _mean_dot(row: RowScores) -> Trace:
    name, colour, mean = row.style.name, row.style.colour, row.mean
    spread = {"array": [max(row.counted) - mean], "arrayminus": [mean - min(row.counted)], "symmetric": False}
    error = {"type": "data", "thickness": 1.5, "width": 0, "color": colour} | spread
    hollow = {"symbol": _symbol(not row.unfinished), "line": {"width": 2}} if row.unfinished else {}
    more = {"mode": "markers", "legendgroup": name, "marker": {"size": 11, "color": colour} | hollow, "error_x": error}
    text = ", not finished" if row.unfinished else ""
    hover = "%{fullData.name}%{text}<br><b>%{x:.5~g}</b>"
    return _trace("scatter", [mean], [label(name)], name, hover, text=text, **more)


def _seed_dots(row: RowScores) -> Trace:
    name, values = row.style.name, [*row.finished, *row.unfinished]
    finished = [k < len(row.finished) for k in range(len(values))]
    marker = {"size": 5, "color": _with_opacity(row.style.colour, SEED_OPACITY), "symbol": [*map(_symbol, finished)]}
    text = ["" if done else ", not finished" for done in finished]
    more = {"mode": "markers", "legendgroup": name, "marker": marker, "text": text}
    hover = "%{fullData.name}, one seed%{text}<br>%{x:.5~g}"
    return _trace("scatter", values, [label(name)] * len(values), name, hover, **more)


def _symbol(finished: bool) -> str:
    return "circle" if finished else "circle-open"


def _published_dots(scores: Sequence[tuple[str, float, float | None]]) -> Trace:
    names, values, spreads = zip(*scores, strict=True)
    error = {"type": "data", "array": [spread or 0 for spread in spreads], "thickness": 1, "width": 3, "color": GREY}
    marker = {"symbol": "diamond-open", "size": 10, "line": {"width": 1.5}, "color": GREY}
    more = {"mode": "markers", "marker": marker, "error_x": error}
    return _trace("scatter", values, [label(name) for name in names], "published", "published<br>%{x:.5~g}", **more)


def phase_seconds(runs: Sequence[RunSnapshot]) -> Figure | None:
    """Mean seconds of a round by phase; a mark at the length of the round."""
    means = _mean_seconds_by_run(runs)
    phases = {phase: colour for phase, colour in PHASE_COLOURS.items() if any(mean[phase] for mean in means.values())}
    if not means:
        return None
    figure, name = _stacked_bars("", means, phases), "length of a round"
    x, y = [mean[TOTAL] for mean in means.values()], [label(run) for run in means]
    marker = {"symbol": "line-ns", "size": 14, "line": {"width": 2.5, "color": BLACK}}
    hover = "%{y}<br>a round <b>%{x:.3~g} s</b>"
    mark = _trace("scatter", x, y, name, hover, mode="markers", marker=marker)
    return figure | {"data": [*figure["data"], mark], "keys": [*phases.items(), (name, BLACK)]}


def diagnostics_seconds(runs: Sequence[RunSnapshot]) -> Figure | None:
    """Mean seconds of diagnostics, which are not part of a round."""
    means = {name: mean for name, mean in _mean_seconds_by_run(runs).items() if mean[DIAGNOSTICS]}
    return _stacked_bars("diagnostics, beside the rounds", means, {DIAGNOSTICS: "#D55E00"}) if means else None


def _mean_seconds_by_run(runs: Sequence[RunSnapshot]) -> dict[str, dict[str, float]]:
    return {run.name: mean_seconds(run.records) for run in reversed(runs) if run.records}


def _stacked_bars(title: str, means: Mapping[str, Mapping[str, float]], parts: Mapping[str, str]) -> Figure:
    """One bar per run, of parts with their colours."""
    data, labels = [], [label(run) for run in means]
    for part, colour in parts.items():
        hover, more = f"%{{y}}<br>{part} <b>%{{x:.3~g}} s</b>", {"orientation": "h", "marker": {"color": colour}}
        data.append(_trace("bar", [mean[part] for mean in means.values()], labels, part, hover, **more))
    layout = {"barmode": "stack", "xaxis": _axis("seconds per round"), "yaxis": _category_axis([*means])}
    return {"title": title, "data": data, "layout": layout, "height": 100 + 24 * len(means)}


def mean_seconds(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Per round, by phase; the rest is what no phase accounts for. Diagnostics are not part of the round."""
    keys = (*PHASES, DIAGNOSTICS, TOTAL)
    sums: dict[str, float] = {key: sum(getattr(r.seconds, key) or 0 for r in records) for key in keys}
    sums[REST] = max(0.0, sums[TOTAL] - sum(sums[phase] for phase in PHASES))
    return {key: float(f"{value / len(records):.4g}") for key, value in sums.items()}


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
    lanes = _category_axis([f"worker {rank}" for rank in reversed(ranks)])
    return {
        "title": f"rounds {records[0].round:,} to {records[-1].round:,}",
        "data": [_bars(rounds, "idle", IDLE_COLOUR), _bars(busy, "busy", COLOURS[0])],
        "layout": {"barmode": "overlay", "bargap": 0.3, "yaxis": lanes, "xaxis": _axis("seconds")},
        "height": 90 + 30 * len(ranks),
        "keys": [("busy", COLOURS[0]), ("idle", IDLE_COLOUR)],
    }


def _bars(bars: Sequence[Bar], name: str, colour: str) -> Trace:
    x, y = [round(bar.seconds, 3) for bar in bars], [label(bar.lane) for bar in bars]
    place = {"orientation": "h", "base": [round(bar.start, 3) for bar in bars]}
    marker = {"color": colour, "line": {"width": 1, "color": "rgba(128,128,128,0.6)"}}
    notes = [[bar.round, label(bar.note)] for bar in bars]
    hover = "%{y}, round %{customdata[0]}<br>%{customdata[1]}"
    return _trace("bar", x, y, name, hover, marker=marker, customdata=notes, **place)


def client_data(clients: Mapping[str, Any]) -> Figure:
    """How many rows each client has and, where it is known, of which classes."""
    sizes, classes = clients["sizes"][:MAX_CLIENTS], (clients["classes"] or [])[:MAX_CLIENTS]
    hover = "client %{x}<br><b>%{y:,}</b> rows"
    bars = _trace("bar", range(len(sizes)), sizes, "rows", hover, marker={"color": COLOURS[0]})
    if not classes:
        layout: dict[str, Any] = {"xaxis": _axis("client"), "yaxis": _axis("rows")}
        return {"title": "", "data": [bars], "layout": layout, "height": 280}
    heatmap = {
        "type": "heatmap",
        "z": [list(line) for line in zip(*classes, strict=True)],
        "zmin": 0,
        "yaxis": "y2",
        "colorscale": COUNT_COLOURS,
        "colorbar": _axis("rows", thickness=10, len=0.7, y=0.35),
        "hovertemplate": "client %{x}, class %{y}<br><b>%{z:,}</b> rows<extra></extra>",
    }
    tick = max(1, -(-len(classes[0]) // 12))
    layout = {
        "xaxis": _axis("client", anchor="y2", showgrid=False),
        "yaxis": _axis("rows", domain=[0.76, 1]),
        "yaxis2": _axis("class", domain=[0, 0.7], anchor="x", dtick=tick, showgrid=False),
    }
    return {"title": "", "data": [bars, heatmap], "layout": layout, "height": 430}


class RunList(NamedTuple):
    """A list that a run measured, and the positions of its numbers."""

    style: Style
    run: str
    round: int
    x: Numbers
    y: Numbers


def list_chart(title: str, lists: Sequence[RunList], axis: str, joined: bool = True) -> Figure:
    data, hover = [], "%{fullData.name}<br>%{text}<br>%{x:.5~g}: <b>%{y:.5~g}</b>"
    for (name, colour, dash), run, index, x, y in lists:
        line, marker = {"color": colour, "dash": dash, "width": 1.6}, {"size": 4 if joined else 8, "color": colour}
        more = {"mode": "lines+markers" if joined else "markers", "line": line, "marker": marker, "legendgroup": name}
        data.append(_trace("scatter", x, y, name, hover, text=label(f"{run}, round {index}"), **more))
    return {"title": title, "data": data, "layout": {"xaxis": _axis(axis)}}


def contour(title: str, values: Mapping[str, Any], name: str, span: tuple[float, float]) -> Figure:
    """A surface from above, with the paths across it."""
    surface, paths = _surface_trace("contour", values, name), mapping_or_empty(values.get("paths"))
    surface |= {"zmin": span[0], "zmax": span[1], "ncontours": 24, "line": {"width": 0.5}}
    surface["hovertemplate"] = "%{x:.3~g}, %{y:.3~g}<br><b>%{z:.5~g}</b><extra></extra>"
    keys = [(shorten(path), PATH_COLOURS[k % len(PATH_COLOURS)]) for k, path in enumerate(paths)]
    layout = _scaled_layout(surface["x"], surface["y"])
    return {"title": title, "data": [surface, *_paths(paths)], "layout": layout, "height": 340, "keys": keys}


def surface(title: str, values: Mapping[str, Any], name: str, span: tuple[float, float]) -> Figure:
    """A surface in 3d."""
    trace = _surface_trace("surface", values, name) | {"cmin": span[0], "cmax": span[1]}
    layout = {"scene": {"zaxis": _axis(name, range=list(span))}}
    return {"title": title, "data": [trace], "layout": layout, "height": 360}


def _surface_trace(kind: str, values: Mapping[str, Any], name: str) -> Trace:
    x, y, z = number_list(values.get("x")), number_list(values.get("y")), number_grid(values[name])
    colours = {"colorscale": "Viridis", "colorbar": {"thickness": 10, "outlinewidth": 0}}
    return {"type": kind, "x": x, "y": y, "z": z} | colours


def _scaled_layout(x: Numbers, y: Numbers) -> dict[str, Any]:
    """To scale, unless that would make a strip."""
    width, height = (max(known) - min(known) for known in ([v for v in axis if v is not None] for axis in (x, y)))
    if max(width, height) > MAX_ASPECT * min(width, height):
        return {}
    return {"yaxis": {"scaleanchor": "x", "constrain": "domain"}, "xaxis": {"constrain": "domain"}}


def _paths(paths: Mapping[str, Any]) -> list[Trace]:
    """Each path is thinner than those below it, so that none hides another."""
    traces = []
    for k, ((name, value), width) in enumerate(zip(paths.items(), line_widths(len(paths), 2.0, 9.0), strict=True)):
        path, colour = mapping_or_empty(value), PATH_COLOURS[k % len(PATH_COLOURS)]
        rest, x, y = rounded_number(path.get("rest")), number_list(path.get("x")), number_list(path.get("y"))
        text = "" if rest is None else f", {rest:.3g} off the plane"
        line, marker = {"color": colour, "width": width}, {"size": 2 + width, "color": colour}
        more = {"mode": "lines+markers", "line": line, "marker": marker, "text": text}
        traces.append(_trace("scatter", x, y, name, "%{fullData.name}%{text}", **more))
    return traces
