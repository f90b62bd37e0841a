"""A table as text, Markdown, LaTeX or CSV."""

import csv
import io
import math
from collections.abc import Callable, Iterator
from itertools import groupby

from fl_dist.common.formatting import align_columns
from fl_dist.results.cells import FAILED, NO_RUN, NOT_REACHED, Measure, Number
from fl_dist.results.table import ResultsTable

MAX_DECIMALS = 6
"""Of a number with a deviation; smaller ones are written with an exponent."""


def render_text(table: ResultsTable) -> str:
    headers = _headers(table)
    lines = [["", *(column for column, _ in headers)]]
    if any(measure for _, measure in headers):
        lines.append(["", *(measure for _, measure in headers)])
    lines += [[row, *(cell for cell, _ in cells)] for row, cells in format_rows(table)]
    return "\n".join([*align_columns(lines, str.rjust), "", *table.notes])


def render_markdown(table: ResultsTable) -> str:
    headers = [_escape_markdown(column) + (f"<br>{measure}" if measure else "") for column, measure in _headers(table)]
    lines = [["", *headers], ["---", *["---:"] * len(headers)]]
    for row, cells in format_rows(table):
        bold = [f"**{_escape_markdown(cell)}**" if best else _escape_markdown(cell) for cell, best in cells]
        lines.append([_escape_markdown(row), *bold])
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*rows, "", _escape_markdown("; ".join(table.notes))])


def _escape_markdown(text: str) -> str:
    """Text that Markdown shows verbatim."""
    return "".join(f"\\{c}" if c in "\\|*`<[" else c for c in text)


def render_latex(table: ResultsTable) -> str:
    """For the package booktabs."""
    headers = _headers(table)
    spans = [(column, len(list(group))) for column, group in groupby(column for column, _ in headers)]
    top = " & ".join(
        _escape_latex(column) if width == 1 else rf"\multicolumn{{{width}}}{{c}}{{{_escape_latex(column)}}}"
        for column, width in spans
    )
    lines = [rf"\begin{{tabular}}{{l{'r' * len(headers)}}}", r"\toprule", rf" & {top} \\"]
    if any(measure for _, measure in headers):
        lines.append(rf" & {' & '.join(_escape_latex(measure) for _, measure in headers)} \\")
    lines.append(r"\midrule")
    for row, cells in format_rows(table):
        bold = [rf"\textbf{{{_escape_latex(cell)}}}" if best else _escape_latex(cell) for cell, best in cells]
        lines.append(rf"{_escape_latex(row)} & {' & '.join(bold)} \\")
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in table.notes)]
    return "\n".join(lines)


def render_csv(table: ResultsTable) -> str:
    """One line per number."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["sweep", "row", "column", "measure", "value", "std", "finished", "runs", "published", "published_std"]
    )
    for row, numbers in table.rows:
        for number, (column, measure) in zip(numbers, table.columns, strict=True):
            published = number.published or ("", "")
            value, spread = (_to_csv(v, measure, table) for v in (number.value, number.spread))
            value = "x" if number.value is None and number.has_scores and measure.cost else value
            writer.writerow(
                [table.name, row, column, measure.name, value, spread, number.finished, number.runs, *published]
            )
    return out.getvalue().rstrip("\n")


FORMATS: dict[str, Callable[[ResultsTable], str]] = {
    "text": render_text,
    "markdown": render_markdown,
    "latex": render_latex,
    "csv": render_csv,
}


def format_rows(table: ResultsTable) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """The label of each row, and its cells: as text, and whether they are the best of their column."""
    best = [table.best(column) for column in range(len(table.columns))]
    for k, (row, numbers) in enumerate(table.rows):
        cells = zip(numbers, table.columns, best, strict=True)
        yield row, [(_format_cell(number, measure, table), k in rows) for number, (_, measure), rows in cells]


def _format_cell(number: Number, measure: Measure, table: ResultsTable) -> str:
    """A cell: our number, and the published one in brackets."""
    if number.value is None:
        ours = NOT_REACHED if number.has_scores and measure.cost else NO_RUN
    else:
        ours = _format_number(number.value, number.spread, measure, table)
    if number.is_partial:
        ours += "*"
    if number.published is None:
        return ours
    value, std = number.published
    if value == "x":
        value = NOT_REACHED if measure.cost else FAILED
    return f"{ours} ({value} ± {std})" if std else f"{ours} ({value})"


def _format_number(value: float, spread: float | None, measure: Measure, table: ResultsTable) -> str:
    format_ = _formatter(spread, measure, table)
    return format_(value) if spread is None else f"{format_(value)} ± {format_(spread)}"


def _formatter(spread: float | None, measure: Measure, table: ResultsTable) -> Callable[[float], str]:
    """For both numbers; where the unit does not say how many digits, the deviation has two."""
    if measure.cost in ("rounds", "passes"):
        return "{:,.0f}".format
    if measure.is_score:
        return lambda number: table.primary_metric.format(number).removesuffix(" %")
    if measure.extra and measure.extra.percent:
        return lambda number: f"{100 * number:.2f}"
    if not spread or abs(math.log10(spread)) > MAX_DECIMALS:
        return f"{{:.{3 if measure.cost else 4}g}}".format
    return f"{{:,.{max(0, 1 - math.floor(math.log10(spread)))}f}}".format


def _to_csv(value: float | None, measure: Measure, table: ResultsTable) -> str:
    """All digits of a number, in percent where the table is."""
    if value is None:
        return ""
    percent = measure.extra.percent if measure.extra else table.primary_metric.percent and not measure.cost
    return repr(100 * value if percent else value)


def _headers(table: ResultsTable) -> list[tuple[str, str]]:
    """The label of each column and, if there are several kinds of numbers, its kind; of a single column only that."""
    several = not all(measure.is_score for _, measure in table.columns)
    if several and len({column for column, _ in table.columns}) == 1:
        return [(measure.head, "") for _, measure in table.columns]
    return [(column or table.primary_metric.name, measure.head if several else "") for column, measure in table.columns]


LATEX_ESCAPES = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "±": r"$\pm$"}
LATEX_ESCAPES |= {
    NOT_REACHED: r"$\times$",
    NO_RUN: "--",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
}


def _escape_latex(text: str) -> str:
    return "".join(LATEX_ESCAPES.get(c, c) for c in text)
