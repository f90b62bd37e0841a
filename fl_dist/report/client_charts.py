"""Clients: their data, and how they differ over rounds."""

from collections.abc import Iterator, Mapping
from typing import Any

from fl_dist.common.formatting import pluralize
from fl_dist.plots.base import COLOURS
from fl_dist.report import tables
from fl_dist.report.builder import Part, ReportBuilder, Section, charts, choice, heading, html, section
from fl_dist.report.figures import Figure, line_chart, make_axis, make_trace
from fl_dist.report.run_reader import RunSnapshot
from fl_dist.report.series import MAX_POINTS_SMALL, Line, Points, downsample, points

COUNT_COLOURS = [[0, "rgba(0,114,178,0)"], [0.02, "rgba(0,114,178,0.12)"], [1, "rgba(0,114,178,1)"]]
"""Visible on light and dark backgrounds."""
MAX_CLIENTS = 500
"""Clients that are drawn."""


def clients(builder: ReportBuilder) -> Section | None:
    data = choice("clients/data", "run", _partitions(builder))
    spread = builder.per_run("clients/run", lambda run: _client_spread(builder, run))
    parts = [*(heading("Data of each client") + data if data else [])]
    parts += [*(heading("Over rounds") + spread if spread else [])]
    return section("clients", "Clients", parts)


def _partitions(builder: ReportBuilder) -> Iterator[tuple[str, list[Part]]]:
    """Each partition of the data once, with the runs that have it."""
    by_partition: dict[str, list[RunSnapshot]] = {}
    for run in builder.runs:
        if run.clients:
            by_partition.setdefault(repr(run.clients), []).append(run)
    for k, runs in enumerate(by_partition.values()):
        sizes, known = runs[0].clients["sizes"], [size for size in runs[0].clients["sizes"] if size is not None]
        note = f"{pluralize(len(sizes), 'client')} with {min(known):,} to {max(known):,} rows"
        note += f"; the first {MAX_CLIENTS} are drawn" if len(sizes) > MAX_CLIENTS else ""
        names = builder.add_figure(f"clients/{k}", client_data(runs[0].clients))
        others = f" and {pluralize(len(runs) - 1, 'other')}" if len(runs) > 1 else ""
        yield f"{runs[0].name}{others}", [*html(tables.notes([note])), *charts(names, "wide")]


def client_data(clients: Mapping[str, Any]) -> Figure:
    """How many rows each client has and, where it is known, of which classes."""
    sizes, classes = clients["sizes"][:MAX_CLIENTS], (clients["classes"] or [])[:MAX_CLIENTS]
    hover = "client %{x}<br><b>%{y:,}</b> rows"
    bars = make_trace("bar", range(len(sizes)), sizes, "rows", hover, marker={"color": COLOURS[0]})
    if not classes:
        layout: dict[str, Any] = {"xaxis": make_axis("client"), "yaxis": make_axis("rows")}
        return {"title": "", "data": [bars], "layout": layout, "height": 280}
    heatmap = {
        "type": "heatmap",
        "z": [list(line) for line in zip(*classes, strict=True)],
        "zmin": 0,
        "yaxis": "y2",
        "colorscale": COUNT_COLOURS,
        "colorbar": make_axis("rows", thickness=10, len=0.7, y=0.35),
        "hovertemplate": "client %{x}, class %{y}<br><b>%{z:,}</b> rows<extra></extra>",
    }
    tick = max(1, -(-len(classes[0]) // 12))
    layout = {
        "xaxis": make_axis("client", anchor="y2", showgrid=False),
        "yaxis": make_axis("rows", domain=[0.76, 1]),
        "yaxis2": make_axis("class", domain=[0, 0.7], anchor="x", dtick=tick, showgrid=False),
    }
    return {"title": "", "data": [bars, heatmap], "layout": layout, "height": 430}


def _client_spread(builder: ReportBuilder, run: RunSnapshot) -> list[Part]:
    """How far the clients of a round differ in loss and in the norm of their updates."""

    def spread(name: str) -> Points:
        return points(run, lambda record: getattr(record.spread, name, None))

    loss, number = points(run, lambda record: record.train_loss), builder.number(run)
    title = "loss: mean, minimum and maximum"
    names = _range_chart(builder, run, f"clients/loss/{number}", title, loss, spread("loss_min"), spread("loss_max"))
    mean, std = spread("norm_mean"), spread("norm_std")
    low, high = ({k: mean[k] + sign * std[k] for k in mean if k in std} for sign in (-1, 1))
    title = "norm of updates: mean ± standard deviation"
    names += _range_chart(builder, run, f"clients/norm/{number}", title, mean, low, high)
    return charts(names)


def _range_chart(
    builder: ReportBuilder, run: RunSnapshot, name: str, title: str, mean: Points, low: Points, high: Points
) -> list[str]:
    common = sorted(mean.keys() & low.keys() & high.keys())
    if not common:
        return []
    line = Line(common, [mean[k] for k in common], [low[k] for k in common], [high[k] for k in common], 2)
    curve = builder.curve(run.result.row, [run], downsample(line, MAX_POINTS_SMALL))
    return builder.add_figure(name, line_chart(title, "", [curve]))
