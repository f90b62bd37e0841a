"""The sections of the page; one that has nothing to show is left out."""

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from fl_dist.common.words import counted
from fl_dist.report import figures, tables
from fl_dist.report.figures import Figure, Final, Listed, Style
from fl_dist.report.gather import Group, Seen, finite, grid, mapping, number, numbers
from fl_dist.report.lines import FEWER, MOST, Known, Line, Points, over_seeds, places, points, thinned
from fl_dist.results.collect import COSTS
from fl_dist.results.table import NOT_REACHED, Figures, final
from fl_dist.results.table import figures as measured
from fl_dist.storage.metrics import Row
from fl_dist.tasks import Headline

UNFINISHED = "*"
"""How the notes of a table begin that say what its mark means."""
Part = dict[str, Any]
Section = dict[str, Any]
Values = dict[str, Callable[[Row], object]]
"""By name, how a row says it."""


class Panel(NamedTuple):
    """A column of a table: what is compared in one picture."""

    key: str
    title: str
    group: Group
    column: str

    def cells(self) -> Iterator[tuple[str, list[Seen]]]:
        for row in self.group.found.rows:
            if runs := self.group.at(row, self.column):
                yield row, runs

    @property
    def headline(self) -> Headline:
        known = [run.outcome for _, runs in self.cells() for run in runs]
        return next((outcome.headline for outcome in known if outcome.history), known[0].headline)


class Report:
    """All that the page shows: sections in words and tables, and the figures that they name."""

    def __init__(self, groups: Sequence[Group], known: Known) -> None:
        self.groups, self.known = groups, known
        self.figures: dict[str, Figure] = {}
        self.places: dict[str, dict[str, list[float]]] = {}
        """Of each line's rounds: where they lie on the other axes."""
        names = dict.fromkeys(row for group in groups for row in group.found.rows)
        self.styles = {name: figures.style(name, k) for k, name in enumerate(names)}
        self.runs = [run for group in groups for run in group.runs]
        self.tables = [measured(g.found, g.found.sweep.table, ["rounds"], g.published) for g in groups]
        made = [make(self) for make in SECTIONS]
        self.sections = [section for section in made if section is not None]

    @cached_property
    def panels(self) -> list[Panel]:
        several = len(self.groups) > 1
        return [
            Panel(f"{g}.{c}", ": ".join(filter(None, (group.found.name if several else "", column))), group, column)
            for g, group in enumerate(self.groups)
            for c, column in enumerate(group.found.columns)
        ]

    def spent(self, runs: Sequence[Seen]) -> dict[str, list[float]]:
        return self.known.of(runs, "places", partial(places, runs))

    def place(self, runs: Sequence[Seen]) -> str:
        """The name by which a line of these runs says where its rounds lie."""
        name = "+".join(str(self.number(run)) for run in runs)
        if found := self.spent(runs):
            self.places[name] = found
        return name

    def number(self, run: Seen) -> int:
        """What the run is called in the names of figures: its path is not for those whom the page is sent to."""
        return self._numbers[run.outcome.path]

    @cached_property
    def _numbers(self) -> dict[Path, int]:
        return {run.outcome.path: k for k, run in enumerate(self.runs)}

    def add(self, name: str, figure: Figure | None) -> list[str]:
        """The name by which a part may show the figure; nothing if there is none."""
        if figure is None:
            return []
        self.figures[name] = figure
        return [name]

    def lines(
        self, panel: Panel, name: str, value: Callable[[Seen], Points], most: int
    ) -> list[tuple[Style, str, Line]]:
        """Of each row of the panel the line that the name stands for, if it has one."""
        found = []
        for row, runs in panel.cells():
            line = self.known.of(runs, name, partial(_line, runs, value, most))
            if line is not None:
                found.append((self.styles[row], self.place(runs), line))
        return found

    def per_panel(self, name: str, make: Callable[[Panel], list[Part]]) -> list[Part]:
        """The parts of the panel that is chosen, if there are several."""
        made = [(panel, make(panel)) for panel in self.panels]
        return choice(name, "shown", [(panel.title or "all", parts) for panel, parts in made])

    def per_run(self, name: str, make: Callable[[Seen], list[Part]]) -> list[Part]:
        return choice(name, "run", [(run.name, make(run)) for run in self.runs])


def _line(runs: Sequence[Seen], value: Callable[[Seen], Points], most: int) -> Line | None:
    return over_seeds([value(run) for run in runs], most)


def section(name: str, title: str, note: str, parts: Sequence[Part], over: bool = False) -> Section | None:
    """With `over`, its curves can be drawn over something else than rounds."""
    if not parts:
        return None
    return {"id": name, "title": title, "note": note, "parts": list(parts), "over": over}


def html(text: str) -> list[Part]:
    return [{"html": text}] if text else []


def heading(text: str) -> list[Part]:
    return html(f"<h3>{tables.text(text)}</h3>" if text else "")


def charts(names: Sequence[str], kind: str = "") -> list[Part]:
    return [{"charts": list(names), "kind": kind}] if names else []


def choice(name: str, label: str, options: Iterable[tuple[str, list[Part]]]) -> list[Part]:
    """One of several, if there are several with anything to show."""
    known = [(option, parts) for option, parts in options if parts]
    if len(known) < 2:
        return [part for _, parts in known for part in parts]
    return [{"choice": name, "label": label, "options": [{"label": o, "parts": parts} for o, parts in known]}]


def summary(report: Report) -> Section | None:
    unread = {path: told for group in report.groups for path, told in group.found.unread.items()}
    parts = html(tables.troubles(report.runs, unread))
    for group, made in zip(report.groups, report.tables, strict=True):
        parts += heading(group.found.name) if len(report.groups) > 1 else []
        parts += html(tables.runs(group.runs))
        if len(group.runs) > 1:
            parts += html(tables.figures(made) + tables.notes(made.notes))
    return section("summary", "Summary", "", parts)


def curves(report: Report) -> Section | None:
    parts: list[Part] = []
    for panel in report.panels:
        names = []
        for key, title, unit, scale in _scores(panel):
            lines = report.lines(panel, f"{key}*{scale:g}", partial(points, value=_get(key), scale=scale), MOST)
            if lines:
                names += report.add(f"curves/{panel.key}/{key}", figures.over_rounds(title, unit, lines))
        parts += [*heading(panel.title), *charts(names)] if names else []
    note = "A line is the mean over seeds, a band their range."
    return section("curves", "Learning curves", note, parts, over=True)


def _get(key: str) -> Callable[[Row], object]:
    return operator.methodcaller("get", key)


def _scores(panel: Panel) -> list[tuple[str, str, str, float]]:
    """Key, title, unit and scale of what is measured each round, the most important first."""
    headline = panel.headline
    name = f"test_{headline.name}"
    unit = "%" if headline.percent else ""
    shown = [(name, f"test {headline.name}", unit, 100.0 if headline.percent else 1.0)]
    rows = [run.rows[-1] for _, runs in panel.cells() for run in runs if run.rows]
    rest = dict.fromkeys(["test_loss", "train_loss", *(key for row in rows for key in row if key.startswith("test_"))])
    return shown + [(key, key.replace("_", " "), "", 1.0) for key in rest if key != name]


def compared(report: Report) -> Section | None:
    parts: list[Part] = []
    names: list[str] = []
    for panel in report.panels:
        if rows := _finals(report, panel):
            headline = panel.headline
            unit = f"{headline.name}{' (%)' if headline.percent else ''}"
            figure = figures.comparison(panel.title, unit, rows, headline.best == "min")
            names += report.add(f"compared/{panel.key}", figure)
    parts += charts(names)
    for group in report.groups:
        parts += _targets(report, group)
    note = "The large dot is the mean over seeds, with their range; a diamond is the published number."
    note += " Hollow dots are not finished, or not with all seeds."
    return section("compared", "Comparison", note, parts)


def _finals(report: Report, panel: Panel) -> list[Final]:
    table, found = panel.group.found.sweep.table, []
    published = _published(report.tables[[*report.groups].index(panel.group)], panel.column)
    scale = 100 if panel.headline.percent else 1
    for row, runs in panel.cells():
        scores = [(run, score) for run in runs if (score := final(run.outcome, table)) is not None]
        finished, other = (
            [round(scale * s, 6) for run, s in scores if run.outcome.finished == f] for f in (True, False)
        )
        if scores:
            found.append(Final(report.styles[row], finished, other, published.get(row)))
    return found


def _published(made: Figures, column: str) -> dict[str, tuple[float, float | None]]:
    at = next(k for k, (name, measure) in enumerate(made.columns) if name == column and not measure.cost)
    known = {row: cells[at].published for row, cells in made.rows}
    told = {row: pair for row, pair in known.items() if pair and pair[0] != "x"}
    return {row: (float(value), float(std) if std else None) for row, (value, std) in told.items()}


def _targets(report: Report, group: Group) -> list[Part]:
    """What it took to reach the sweep's targets or, if it has none, one that half of the runs reached."""
    own = group.found.sweep.table
    table = own if own.targets else own.model_copy(update={"targets": _reached(group)})
    known = [cost for cost in COSTS if all(cost in report.spent([run]) for run in group.runs if run.rows)]
    made = measured(group.found, table, known, None)
    if not any(measure.cost for _, measure in made.columns) or not any(run.rows for run in group.runs):
        return []
    notes = [note for note in made.notes if note.startswith((NOT_REACHED, UNFINISHED))]
    return [*heading("Cost to targets"), *html(tables.figures(made, costs=True) + tables.notes(notes))]


def _reached(group: Group) -> list[float]:
    best = [max(score for _, score in run.outcome.scores) for run in group.runs if run.outcome.scores]
    if not best or not all(run.outcome.headline.percent for run in group.runs):
        return []
    target = math.floor(20 * statistics.median_high(best)) / 20
    return [target] if target > 0 else []


def times(report: Report) -> Section | None:
    parts = charts(report.add("times/phases", figures.phases(report.runs)), "wide")
    parts += charts(report.add("times/diagnostics", figures.diagnosed(report.runs)), "wide")
    if parts:
        note = (
            "Bars are means over rounds. What the server does while workers train (evaluation, checkpoints) may reach"
        )
        parts = html(f'<p class="note">{note} beyond the mark, which is the length of a round.</p>') + parts
    lanes = report.per_run(
        "times/run",
        lambda run: charts(report.add(f"times/{report.number(run)}", figures.timeline(run)), "wide"),
    )
    parts += [*heading("Workers"), *lanes] if lanes else []
    return section("times", "Time", "", parts)


def clients(report: Report) -> Section | None:
    who = choice("clients/who", "run", _divisions(report))
    spread = report.per_run("clients/run", lambda run: _spread(report, run))
    parts = [*(heading("Who has what") + who if who else []), *(heading("Over rounds") + spread if spread else [])]
    return section("clients", "Clients", "", parts)


def _divisions(report: Report) -> Iterator[tuple[str, list[Part]]]:
    """Each division of the data once, with the runs that have it."""
    having: dict[str, list[Seen]] = {}
    for run in report.runs:
        if run.clients:
            having.setdefault(repr(run.clients), []).append(run)
    for k, runs in enumerate(having.values()):
        told, more = runs[0].clients, f" and {counted(len(runs) - 1, 'other')}" if len(runs) > 1 else ""
        sizes = [size for size in told["sizes"] if size is not None]
        many = f"{counted(len(told['sizes']), 'client')} with {min(sizes):,} to {max(sizes):,} rows"
        cut = f"; the first {figures.MOST_CLIENTS} are drawn" if len(told["sizes"]) > figures.MOST_CLIENTS else ""
        names = report.add(f"clients/{k}", figures.clients(told))
        yield f"{runs[0].name}{more}", [*html(tables.notes([f"{many}{cut}"])), *charts(names, "wide")]


def _spread(report: Report, run: Seen) -> list[Part]:
    """How far the clients of a round differ in loss and in the length of their updates."""

    def told(key: str) -> Points:
        return points(run, lambda row: mapping(row.get("spread")).get(key))

    look, place, names = report.styles[run.outcome.row], report.place([run]), list[str]()
    which = report.number(run)
    loss, low, high = points(run, _get("train_loss")), told("loss_min"), told("loss_max")
    names += _range(report, f"clients/loss/{which}", "loss: mean, least and most", look, place, loss, low, high)
    mean, std = told("norm_mean"), told("norm_std")
    low, high = ({k: mean[k] + sign * std[k] for k in mean if k in std} for sign in (-1, 1))
    title = "length of updates: mean ± deviation"
    names += _range(report, f"clients/norm/{which}", title, look, place, mean, low, high)
    return charts(names)


def _range(
    report: Report, name: str, title: str, look: Style, place: str, mean: Points, low: Points, high: Points
) -> list[str]:
    common = sorted(mean.keys() & low.keys() & high.keys())
    if not common:
        return []
    line = Line(common, [mean[k] for k in common], [low[k] for k in common], [high[k] for k in common], 2)
    return report.add(name, figures.over_rounds(title, "", [(look, place, thinned(line, FEWER))]))


def values(report: Report) -> Section | None:
    """Whatever else the rows say in numbers."""
    parts = report.per_panel("values/panel", lambda panel: _values(report, panel))
    return section("values", "Norms and methods", "", parts, over=True)


def _values(report: Report, panel: Panel) -> list[Part]:
    parts: list[Part] = []
    for group, title in GROUPS.items():
        cells = (report.known.of(runs, f"keys/{group}", partial(_keys, runs, group)) for _, runs in panel.cells())
        keys = dict.fromkeys(key for found in cells for key in found)
        parts += _multiples(report, panel, title, {key: partial(_within, group, key) for key in keys})
    parts += _multiples(report, panel, "Memory of the rank that uses most", MEMORY)
    return parts + _multiples(report, panel, "Round", ROUND)


def _keys(runs: Sequence[Seen], group: str) -> list[str]:
    return [*dict.fromkeys(key for run in runs for row in run.rows for key in mapping(row.get(group)))]


def _multiples(report: Report, panel: Panel, title: str, values: Values) -> list[Part]:
    """A small picture of each value that is known; those that are always the same are told in words."""
    names, same = list[str](), list[str]()
    for name, value in values.items():
        lines = report.lines(panel, f"{title}/{name}", partial(points, value=value), FEWER)
        found = {y for _, _, line in lines for y in (*line.low, *line.high)}
        if len(found) > 1:
            names += report.add(f"values/{panel.key}/{title}/{name}", figures.over_rounds(name, "", lines))
        same += [f"{name} {y:,.0f}" if y == int(y) else f"{name} {y:.6g}" for y in found if len(found) == 1]
    told = html(tables.notes([f"Always the same: {', '.join(same)}"])) if same else []
    return [*heading(title), *charts(names, "small"), *told] if names or same else []


def _within(group: str, key: str, row: Row) -> object:
    return mapping(row.get(group)).get(key)


def _of_workers(key: str, summed: Callable[[list[float]], float], row: Row) -> float | None:
    found = (finite(mapping(told).get(key)) for told in mapping(row.get("workers")).values())
    known = [value for value in found if value is not None]
    return summed(known) if known else None


GROUPS = {
    "method": "Method",
    "norms": "Norms",
    "spread": "Spread over the clients of a round",
    "seconds": "Seconds of a round",
}
MEMORY: Values = {
    "memory (GB)": partial(_of_workers, "memory", lambda sizes: max(sizes) / 1e9),
    "memory of its device (GB)": partial(_of_workers, "device_memory", lambda sizes: max(sizes) / 1e9),
}
ROUND: Values = {
    "learning rate": _get("lr"),
    "clients": _get("clients"),
    "dropped clients": lambda row: len(row["dropped"]),
    "bytes down": _get("bytes_down"),
    "bytes up": _get("bytes_up"),
    "messages": _get("messages"),
    "forward passes": _get("forwards"),
    "backward passes": _get("backwards"),
    "busy share of workers": partial(_of_workers, "share", statistics.fmean),
}


def diagnostics(report: Report) -> Section | None:
    parts = report.per_panel("diagnostics/panel", lambda panel: _diagnostics(report, panel))
    return section("diagnostics", "Diagnostics", "", parts, over=True)


def _diagnostics(report: Report, panel: Panel) -> list[Part]:
    labels = dict.fromkeys(label for _, runs in panel.cells() for run in runs for label in run.diagnosed)
    parts: list[Part] = []
    for label in labels:
        found = [*_curves_of(report, panel, label), *_lists_of(report, panel, label), *_planes_of(report, panel, label)]
        parts += [*heading(label), *found] if found else []
    return parts


def _names_of(panel: Panel, label: str, fits: Callable[[Any], object]) -> list[str]:
    """The values of a diagnostic that are of one kind, in any run and round."""
    found = (values for _, runs in panel.cells() for run in runs for values in run.diagnosed.get(label, {}).values())
    return [*dict.fromkeys(name for values in found for name, value in values.items() if fits(value))]


def _curves_of(report: Report, panel: Panel, label: str) -> list[Part]:
    names = []
    for name in _names_of(panel, label, lambda value: number(value) is not None):
        lines = report.lines(panel, f"diagnostics/{label}/{name}", partial(_over, label, name), FEWER)
        figure = figures.over_rounds(name, "", lines, sparse=True)
        names += report.add(f"diagnostics/{panel.key}/{label}/{name}", figure)
    return charts(names, "small")


def _over(label: str, name: str, run: Seen) -> Points:
    found = {index: number(values.get(name)) for index, values in run.diagnosed.get(label, {}).items()}
    return {index: value for index, value in found.items() if value is not None}


def _last(panel: Panel, label: str, name: str) -> Iterator[tuple[str, Seen, int, dict[str, Any]]]:
    """Of each run the last values that have this one."""
    for row, runs in panel.cells():
        for run in runs:
            having = {index: values for index, values in run.diagnosed.get(label, {}).items() if values.get(name)}
            if having:
                yield row, run, max(having), having[max(having)]


def _lists_of(report: Report, panel: Panel, label: str) -> list[Part]:
    """The last list of each run, over the radii that go with it or over its own places."""
    parts = []
    for name in _names_of(panel, label, numbers):
        if name in ("radii", "x", "y"):
            continue
        found: dict[str, list[Listed]] = {}
        for row, run, index, values in _last(panel, label, name):
            y = numbers(values[name])
            axis, x = _axis_of(name, values, len(y))
            found.setdefault(axis, []).append(Listed(report.styles[row], run.name, index, x, y))
        for axis, lines in found.items():
            figure = figures.listed(f"{name}, last", lines, axis, joined=axis != CLASS)
            parts += report.add(f"diagnostics/{panel.key}/{label}/{name}/{axis}", figure)
    return charts(parts)


def _axis_of(name: str, values: dict[str, Any], count: int) -> tuple[str, Sequence[float | None]]:
    """Over what a list is drawn, and where its numbers lie there."""
    radii = numbers(values.get("radii"))
    if len(radii) == count:
        return "radius", radii
    return (CLASS if name == "classes" else "place in the list"), range(count)


CLASS = "class"


def _planes_of(report: Report, panel: Panel, label: str) -> list[Part]:
    """Every run's last surface from above, and the chosen one in space; one scale of colours for all."""
    parts: list[Part] = []
    for name in _names_of(panel, label, grid):
        found = [
            entry for entry in _last(panel, label, name) if numbers(entry[3].get("x")) and numbers(entry[3].get("y"))
        ]
        flat = [z for *_, values in found for line in grid(values[name]) for z in line if z is not None]
        if not flat:
            continue
        span, names, solids = (min(flat), max(flat)), list[str](), []
        for k, (_, run, index, values) in enumerate(found):
            title, key = f"{name}: {run.name}, round {index}", f"diagnostics/{panel.key}/{label}/{name}/{k}"
            names += report.add(key, figures.contour(title, values, name, span))
            solids.append((run.name, charts(report.add(f"{key}/3d", figures.surface(title, values, name, span)))))
        parts += charts(names)
        parts += choice(f"diagnostics/{panel.key}/{label}/{name}", "in space", solids)
    return parts


def settings(report: Report) -> Section | None:
    folded = tables.configs(report.runs)
    return section("settings", "Configurations", "", html(tables.differences(report.runs) + folded if folded else ""))


def attempts(report: Report) -> Section | None:
    return section("attempts", "Attempts", "", html(tables.attempts(report.runs)))


SECTIONS: tuple[Callable[[Report], Section | None], ...] = (
    *(summary, curves, compared, times, clients, values, diagnostics, settings, attempts),
)
