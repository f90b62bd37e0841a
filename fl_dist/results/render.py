"""A table as text, Markdown, LaTeX or CSV."""

import csv
import io
from collections.abc import Callable
from itertools import groupby

from fl_dist.results.table import FAILED, NO_RUN, NOT_REACHED, Figures, Measure, Number


def text(figures: Figures) -> str:
    heads = _heads(figures)
    lines = [["", *(column for column, _ in heads)]]
    if any(measure for _, measure in heads):
        lines.append(["", *(measure for _, measure in heads)])
    lines += [
        [row, *(shown(n, m, figures) for n, (_, m) in zip(numbers, figures.columns, strict=True))]
        for row, numbers in figures.rows
    ]
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    table = ["  ".join(_placed(cell, widths[k], k) for k, cell in enumerate(line)).rstrip() for line in lines]
    return "\n".join([*table, "", *figures.notes])


def _placed(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)


def markdown(figures: Figures) -> str:
    heads = [_marked(column) + (f"<br>{measure}" if measure else "") for column, measure in _heads(figures)]
    lines = [["", *heads], ["---", *["---:"] * len(heads)]]
    for k, (row, numbers) in enumerate(figures.rows):
        cells = [_marked(shown(n, m, figures)) for n, (_, m) in zip(numbers, figures.columns, strict=True)]
        lines.append([_marked(row), *(f"**{cell}**" if k in figures.best(c) else cell for c, cell in enumerate(cells))])
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*table, "", _marked("; ".join(figures.notes))])


def _marked(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{c}" if c in "\\|*`<[" else c for c in text)


def latex(figures: Figures) -> str:
    """For the package booktabs."""
    heads = _heads(figures)
    spans = [(column, len(list(group))) for column, group in groupby(column for column, _ in heads)]
    top = " & ".join(
        _escaped(column) if width == 1 else rf"\multicolumn{{{width}}}{{c}}{{{_escaped(column)}}}"
        for column, width in spans
    )
    lines = [rf"\begin{{tabular}}{{l{'r' * len(heads)}}}", r"\toprule", rf" & {top} \\"]
    if any(measure for _, measure in heads):
        lines.append(rf" & {' & '.join(_escaped(measure) for _, measure in heads)} \\")
    lines.append(r"\midrule")
    for k, (row, numbers) in enumerate(figures.rows):
        cells = []
        for c, (number, (_, measure)) in enumerate(zip(numbers, figures.columns, strict=True)):
            cell = _escaped(shown(number, measure, figures))
            cells.append(rf"\textbf{{{cell}}}" if k in figures.best(c) else cell)
        lines.append(rf"{_escaped(row)} & {' & '.join(cells)} \\")
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in figures.notes)]
    return "\n".join(lines)


def long_csv(figures: Figures) -> str:
    """One line a number."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["sweep", "row", "column", "measure", "value", "std", "finished", "runs", "published", "published_std"]
    )
    for row, numbers in figures.rows:
        for number, (column, measure) in zip(numbers, figures.columns, strict=True):
            published = number.published or ("", "")
            value, spread = (_plain(v, measure, figures) for v in (number.value, number.spread))
            value = "x" if number.value is None and number.begun and measure.cost else value
            writer.writerow(
                [figures.name, row, column, measure.name, value, spread, number.runs, number.of, *published]
            )
    return out.getvalue().rstrip("\n")


FORMATS: dict[str, Callable[[Figures], str]] = {"text": text, "markdown": markdown, "latex": latex, "csv": long_csv}
SUFFIXES = {".txt": "text", ".md": "markdown", ".tex": "latex", ".csv": "csv"}


def shown(number: Number, measure: Measure, figures: Figures) -> str:
    """A cell: ours, and in brackets what was published."""
    if number.value is None:
        ours = NOT_REACHED if number.begun and measure.cost else NO_RUN
    else:
        ours = _figure(number.value, measure, figures)
        if number.spread is not None:
            ours += f" ± {_figure(number.spread, measure, figures)}"
    if number.begun and number.runs < number.of:
        ours += "*"
    if number.published is None:
        return ours
    value, std = number.published
    if value == "x":
        value = NOT_REACHED if measure.cost else FAILED
    return f"{ours} ({value} ± {std})" if std else f"{ours} ({value})"


def _figure(value: float, measure: Measure, figures: Figures) -> str:
    if measure.cost in ("rounds", "passes"):
        return f"{value:,.0f}"
    if measure.cost:
        return f"{value:.3g}"
    if measure.also:
        return f"{100 * value:.2f}" if measure.also.percent else f"{value:.4g}"
    return figures.headline.shown(value).removesuffix(" %")


def _plain(value: float | None, measure: Measure, figures: Figures) -> str:
    """A number for another program: percent as in the table, all its digits."""
    if value is None:
        return ""
    percent = measure.also.percent if measure.also else figures.headline.percent and not measure.cost
    return repr(100 * value if percent else value)


def _heads(figures: Figures) -> list[tuple[str, str]]:
    """Of each column the label and, where there are several kinds of numbers, which it holds."""
    several = any(measure.cost or measure.also for _, measure in figures.columns)
    return [(column or figures.headline.name, measure.head if several else "") for column, measure in figures.columns]


LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "±": r"$\pm$"}
LATEX |= {
    NOT_REACHED: r"$\times$",
    NO_RUN: "--",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
}


def _escaped(text: str) -> str:
    return "".join(LATEX.get(c, c) for c in text)
