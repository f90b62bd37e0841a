"""Pictures as plain data for plotly.js; colours of text and grid, fonts and margins are the page's."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from fl_dist.common.words import shortened
from fl_dist.drawing.base import COLOURS, SLIMMEST, widths
from fl_dist.report.gather import Seen, finite, grid, mapping, number, numbers
from fl_dist.report.lines import Line
from fl_dist.storage.metrics import Row

Figure = dict[str, Any]
Trace = dict[str, Any]
Numbers = Sequence[float | None]
DASHES = ("solid", "dash", "dot", "dashdot")
PHASES = ("broadcast", "local", "reduce", "server", "evaluate", "checkpoint")
REST, DIAGNOSTICS, TOTAL = "rest", "diagnostics", "total"
SHADES = ("#56B4E9", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#B8A800", "#9A9A9A")
BLACK, GREY = "#000000", "#808080"
BAND, SEED = 0.16, 0.55
"""How much of its row's colour a band and the dot of a seed have."""
RAMP = [[0, "rgba(0,114,178,0)"], [0.02, "rgba(0,114,178,0.12)"], [1, "rgba(0,114,178,1)"]]
"""From nothing to much, on light and on dark ground."""
IDLE = "rgba(128,128,128,0.25)"
LONGEST_LABEL = 30
"""Letters beside an axis; the whole name appears under the pointer."""
MOST_CLIENTS = 500
"""Clients that are drawn."""
RECENT = 40
"""Rounds of a timeline."""


def _faint(colour: str, share: float) -> str:
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share})"


DARK = {BLACK: "#e4e7ea"} | {_faint(BLACK, share): _faint("#e4e7ea", share) for share in (BAND, SEED)}
"""Colours that dark ground would hide, and those that it shows instead."""


class Style(NamedTuple):
    """How a row of the table is drawn everywhere."""

    name: str
    colour: str
    dash: str


def style(name: str, k: int) -> Style:
    return Style(name, COLOURS[k % len(COLOURS)], DASHES[k // len(COLOURS) % len(DASHES)])


def words(text: object, most: int = 200) -> str:
    """Text as plotly.js shows it: what looks like a tag is none."""
    return escape(shortened(text, most), quote=False)


def over_rounds(title: str, unit: str, lines: Sequence[tuple[Style, str, Line]], sparse: bool = False) -> Figure:
    """One line a style, with a band where it is of several seeds; the name says where its rounds lie on other axes."""
    data: list[Any] = []
    for look, place, line in lines:
        if line.seeds > 1:
            data.append(_band(look, place, line))
        data.append(_curve(look, place, line, sparse))
    return {"title": title, "data": data, "layout": {"yaxis": {"title": {"text": words(unit)}}}, "over": True}


def _curve(look: Style, place: str, line: Line, sparse: bool) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers" if sparse or len(line.rounds) < 3 else "lines",
        "x": line.rounds,
        "y": line.mean,
        "name": words(look.name),
        "legendgroup": look.name,
        "line": {"color": look.colour, "dash": look.dash, "width": 1.8},
        "marker": {"size": 5},
        "meta": {"place": place},
        "hovertemplate": "%{fullData.name}<br>%{x:.5~g}: <b>%{y:.5~g}</b><extra></extra>",
    }


def _band(look: Style, place: str, line: Line) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": line.rounds + line.rounds[::-1],
        "y": line.high + line.low[::-1],
        "legendgroup": look.name,
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": _faint(look.colour, BAND),
        "meta": {"place": place},
        "hoverinfo": "skip",
    }


class Final(NamedTuple):
    """A row of the comparison: the scores of its seeds, and what was published."""

    look: Style
    finished: list[float]
    unfinished: list[float]
    published: tuple[float, float | None] | None

    @property
    def counted(self) -> list[float]:
        """As in the table: the finished ones, or all if none is."""
        return self.finished or self.unfinished


def comparison(title: str, unit: str, rows: Sequence[Final], less: bool) -> Figure:
    """Sorted, the best on top; a dot a seed, a larger one for their mean, a diamond for what was published."""
    means = {row.look.name: sum(row.counted) / len(row.counted) for row in rows}
    ordered = sorted(rows, key=lambda row: means[row.look.name], reverse=less)
    names = [row.look.name for row in ordered]
    data = [_mean(row, means[row.look.name]) for row in ordered]
    data += [_seeds(row) for row in ordered if len(row.finished) + len(row.unfinished) > 1]
    if known := [(row.look.name, *row.published) for row in ordered if row.published]:
        data.append(_published(known))
    layout = {"xaxis": {"title": {"text": words(unit)}}, "yaxis": _named_axis(names), "hovermode": "closest"}
    return {"title": title, "data": data, "layout": layout, "height": 90 + 26 * len(rows)}


def _mean(row: Final, mean: float) -> Trace:
    spread = {
        "type": "data",
        "symmetric": False,
        "array": [max(row.counted) - mean],
        "arrayminus": [mean - min(row.counted)],
        "thickness": 1.5,
        "width": 0,
        "color": row.look.colour,
    }
    hollow = {"symbol": _symbol(not row.unfinished), "line": {"width": 2}}
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [mean],
        "y": [words(row.look.name)],
        "name": words(row.look.name),
        "legendgroup": row.look.name,
        "marker": {"size": 11, "color": row.look.colour} | (hollow if row.unfinished else {}),
        "error_x": spread,
        "text": ", not finished" if row.unfinished else "",
        "hovertemplate": "%{fullData.name}%{text}<br><b>%{x:.5~g}</b><extra></extra>",
    }


def _seeds(row: Final) -> Trace:
    values = [*row.finished, *row.unfinished]
    done = [k < len(row.finished) for k in range(len(values))]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": values,
        "y": [words(row.look.name)] * len(values),
        "name": words(row.look.name),
        "legendgroup": row.look.name,
        "marker": {"size": 5, "color": _faint(row.look.colour, SEED), "symbol": [_symbol(whole) for whole in done]},
        "text": ["" if whole else ", not finished" for whole in done],
        "hovertemplate": "%{fullData.name}, one seed%{text}<br>%{x:.5~g}<extra></extra>",
    }


def _symbol(finished: bool) -> str:
    return "circle" if finished else "circle-open"


def _published(known: Sequence[tuple[str, float, float | None]]) -> Trace:
    names, values, spreads = zip(*known, strict=True)
    error = {"type": "data", "array": [spread or 0 for spread in spreads], "thickness": 1, "width": 3, "color": GREY}
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(values),
        "y": [words(name) for name in names],
        "name": "published",
        "marker": {"symbol": "diamond-open", "size": 10, "line": {"width": 1.5}, "color": GREY},
        "error_x": error,
        "hovertemplate": "published<br>%{x:.5~g}<extra></extra>",
    }


def _named_axis(names: Sequence[str]) -> dict[str, Any]:
    """An axis of names, the last on top, each as long as there is room for it."""
    whole = [words(name) for name in names]
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": whole,
        "range": [-0.6, len(names) - 0.4],
        "tickvals": whole,
        "ticktext": [words(name, LONGEST_LABEL) for name in names],
    }


def phases(runs: Sequence[Seen]) -> Figure | None:
    """Mean seconds of a round by what they went to; a mark at the length of the round."""
    means = _means(runs)
    parts = {phase: shade for phase, shade in SHADE.items() if any(mean[phase] for mean in means.values())}
    if not means:
        return None
    mark = {
        "type": "scatter",
        "mode": "markers",
        "x": [mean[TOTAL] for mean in means.values()],
        "y": [words(name) for name in means],
        "name": "length of a round",
        "marker": {"symbol": "line-ns", "size": 14, "line": {"width": 2.5, "color": BLACK}},
        "hovertemplate": "%{y}<br>a round <b>%{x:.3~g} s</b><extra></extra>",
    }
    made = _stacked("", means, parts)
    return made | {"data": [*made["data"], mark], "keys": [*parts.items(), ("length of a round", BLACK)]}


def diagnosed(runs: Sequence[Seen]) -> Figure | None:
    """Mean seconds of diagnostics, which are no part of a round."""
    means = {name: mean for name, mean in _means(runs).items() if mean[DIAGNOSTICS]}
    return _stacked("diagnostics, beside the rounds", means, {DIAGNOSTICS: "#D55E00"}) if means else None


def _means(runs: Sequence[Seen]) -> dict[str, dict[str, float]]:
    return {run.name: mean for run in reversed(runs) if (mean := mean_seconds(run))}


def _stacked(title: str, means: Mapping[str, Mapping[str, float]], parts: Mapping[str, str]) -> Figure:
    """A bar a run, of parts with their colours."""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [mean[part] for mean in means.values()],
            "y": [words(name) for name in means],
            "name": part,
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}<br>{part} <b>%{{x:.3~g}} s</b><extra></extra>",
        }
        for part, colour in parts.items()
    ]
    layout = {"barmode": "stack", "xaxis": {"title": {"text": "seconds a round"}}, "yaxis": _named_axis([*means])}
    return {"title": title, "data": data, "layout": layout, "height": 100 + 24 * len(means)}


SHADE = dict(zip((*PHASES, REST), SHADES, strict=True))


def mean_seconds(run: Seen) -> dict[str, float]:
    """By phase; the rest is what the round took beside all of them. Diagnostics are no part of the round."""
    told = [mapping(row.get("seconds")) for row in run.rows]
    keys = (*PHASES, DIAGNOSTICS, TOTAL)
    sums = {key: sum(finite(seconds.get(key)) or 0 for seconds in told) for key in keys}
    sums[REST] = max(0.0, sums[TOTAL] - sum(sums[phase] for phase in PHASES))
    return {key: float(f"{value / len(told):.4g}") for key, value in sums.items()} if told else {}


class Bar(NamedTuple):
    """Of a timeline."""

    lane: str
    start: float
    seconds: float
    round: int
    note: str


def timeline(run: Seen) -> Figure | None:
    """Each worker a lane, each of the last rounds a bar of its busy seconds within the round."""
    rows = [row for row in run.rows[-RECENT:] if _busy(row)]
    ranks = sorted({rank for row in rows for rank in _busy(row)}, key=lambda rank: (len(rank), rank))
    if not rows:
        return None
    whole, busy, now = list[Bar](), list[Bar](), 0.0
    for row in rows:
        total, begin = float(row["seconds"]["total"]), now + (finite(row["seconds"].get("broadcast")) or 0.0)
        for rank in ranks:
            seconds, many = _busy(row).get(rank, 0.0), mapping(row["workers"].get(rank)).get("clients", "?")
            note = f"{seconds / total:.0%} busy, {many} clients" if total else ""
            whole.append(Bar(f"worker {rank}", now, total, row["round"], note))
            busy.append(Bar(f"worker {rank}", begin, seconds, row["round"], note))
        now += total
    lanes = _named_axis([f"worker {rank}" for rank in reversed(ranks)])
    return {
        "title": f"rounds {rows[0]['round']:,} to {rows[-1]['round']:,}",
        "data": [_bars(whole, "idle", IDLE), _bars(busy, "busy", COLOURS[0])],
        "layout": {"barmode": "overlay", "bargap": 0.3, "yaxis": lanes, "xaxis": {"title": {"text": "seconds"}}},
        "height": 90 + 30 * len(ranks),
        "keys": [("busy", COLOURS[0]), ("idle", IDLE)],
    }


def _busy(row: Row) -> dict[str, float]:
    """Seconds of local training by rank; a server that only serves has none."""
    told = {rank: number(mapping(did).get("busy")) for rank, did in mapping(row.get("workers")).items()}
    return {rank: seconds for rank, seconds in told.items() if seconds is not None}


def _bars(bars: Sequence[Bar], name: str, colour: str) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "x": [round(bar.seconds, 3) for bar in bars],
        "y": [words(bar.lane) for bar in bars],
        "base": [round(bar.start, 3) for bar in bars],
        "name": name,
        "marker": {"color": colour, "line": {"width": 1, "color": "rgba(128,128,128,0.6)"}},
        "customdata": [[bar.round, words(bar.note)] for bar in bars],
        "hovertemplate": "%{y}, round %{customdata[0]}<br>%{customdata[1]}<extra></extra>",
    }


def clients(told: Mapping[str, Any]) -> Figure:
    """How many rows each client has and, where it is known, of which classes."""
    sizes, classes = told["sizes"][:MOST_CLIENTS], (told["classes"] or [])[:MOST_CLIENTS]
    bars = {
        "type": "bar",
        "x": [*range(len(sizes))],
        "y": sizes,
        "name": "rows",
        "marker": {"color": COLOURS[0]},
        "hovertemplate": "client %{x}<br><b>%{y:,}</b> rows<extra></extra>",
    }
    rows = {"title": {"text": "rows"}}
    if not classes:
        layout: dict[str, Any] = {"xaxis": {"title": {"text": "client"}}, "yaxis": rows}
        return {"title": "", "data": [bars], "layout": layout, "height": 280}
    picture = {
        "type": "heatmap",
        "z": [list(line) for line in zip(*classes, strict=True)],
        "zmin": 0,
        "yaxis": "y2",
        "colorscale": RAMP,
        "colorbar": {"title": {"text": "rows"}, "thickness": 10, "len": 0.7, "y": 0.35},
        "hovertemplate": "client %{x}, class %{y}<br><b>%{z:,}</b> rows<extra></extra>",
    }
    below = {"domain": [0, 0.7], "anchor": "x", "dtick": _step(len(classes[0])), "showgrid": False}
    layout = {
        "xaxis": {"title": {"text": "client"}, "anchor": "y2", "showgrid": False},
        "yaxis": rows | {"domain": [0.76, 1]},
        "yaxis2": {"title": {"text": "class"}} | below,
    }
    return {"title": "", "data": [bars, picture], "layout": layout, "height": 430}


def _step(count: int) -> int:
    return max(1, -(-count // 12))


class Listed(NamedTuple):
    """The list of one run, and the places of its numbers."""

    look: Style
    run: str
    round: int
    x: Numbers
    y: Numbers


def listed(title: str, lines: Sequence[Listed], axis: str, joined: bool = True) -> Figure:
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers" if joined else "markers",
            "x": list(line.x),
            "y": list(line.y),
            "name": words(line.look.name),
            "legendgroup": line.look.name,
            "line": {"color": line.look.colour, "dash": line.look.dash, "width": 1.6},
            "marker": {"size": 4 if joined else 8, "color": line.look.colour},
            "text": words(f"{line.run}, round {line.round}"),
            "hovertemplate": "%{fullData.name}<br>%{text}<br>%{x:.5~g}: <b>%{y:.5~g}</b><extra></extra>",
        }
        for line in lines
    ]
    return {"title": title, "data": data, "layout": {"xaxis": {"title": {"text": words(axis)}}}}


Span = tuple[float, float]


def contour(title: str, values: Mapping[str, Any], name: str, span: Span) -> Figure:
    """A surface from above, with the paths that run across it."""
    x, y = numbers(values.get("x")), numbers(values.get("y"))
    shown = {
        "type": "contour",
        "x": x,
        "y": y,
        "z": grid(values[name]),
        "zmin": span[0],
        "zmax": span[1],
        "colorscale": "Viridis",
        "colorbar": COLOUR_BAR,
        "ncontours": 24,
        "line": {"width": 0.5},
        "hovertemplate": "%{x:.3~g}, %{y:.3~g}<br><b>%{z:.5~g}</b><extra></extra>",
    }
    paths = mapping(values.get("paths"))
    keys = [(shortened(name), PATHS[k % len(PATHS)]) for k, name in enumerate(paths)]
    return {"title": title, "data": [shown, *_paths(paths)], "layout": _true(x, y), "height": 340, "keys": keys}


def _true(x: Numbers, y: Numbers) -> dict[str, Any]:
    """True to scale, unless that would make a strip."""
    wide, high = (max(known) - min(known) for known in ([v for v in axis if v is not None] for axis in (x, y)))
    if max(wide, high) > SLIMMEST * min(wide, high):
        return {}
    return {"yaxis": {"scaleanchor": "x", "constrain": "domain"}, "xaxis": {"constrain": "domain"}}


def surface(title: str, values: Mapping[str, Any], name: str, span: Span) -> Figure:
    """The same in space."""
    shown = {
        "type": "surface",
        "x": numbers(values.get("x")),
        "y": numbers(values.get("y")),
        "z": grid(values[name]),
        "cmin": span[0],
        "cmax": span[1],
        "colorscale": "Viridis",
        "colorbar": COLOUR_BAR,
    }
    depth = {"zaxis": {"title": {"text": words(name)}, "range": list(span)}}
    return {"title": title, "data": [shown], "layout": {"scene": depth}, "height": 360}


COLOUR_BAR = {"thickness": 10, "outlinewidth": 0}


def _paths(told: Mapping[str, Any]) -> list[Trace]:
    """Each thinner than those below it, so that none hides another."""
    found = []
    for k, ((name, path), width) in enumerate(zip(told.items(), widths(len(told), 2.0, 9.0), strict=True)):
        rest, colour = number(mapping(path).get("rest")), PATHS[k % len(PATHS)]
        found.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": numbers(mapping(path).get("x")),
                "y": numbers(mapping(path).get("y")),
                "name": words(name),
                "line": {"color": colour, "width": width},
                "marker": {"size": 2 + width, "color": colour},
                "text": "" if rest is None else f", {rest:.3g} beside the plane",
                "hovertemplate": "%{fullData.name}%{text}<extra></extra>",
            }
        )
    return found


PATHS = ("#E4572E", "#F28EC0", "#B0B0B0", "#FF9F1C")
"""Visible on the colours of a surface, and on light and dark ground."""
