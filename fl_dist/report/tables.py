"""Tables of the page; everything that comes from files is escaped."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fl_dist.common.formatting import format_bytes, format_duration, pluralize, shorten
from fl_dist.common.yaml_reader import to_yaml
from fl_dist.metrics.summary import Summary, format_final_score, summarize
from fl_dist.report.numbers import finite_or_none, mapping_or_empty
from fl_dist.report.run_reader import RunSnapshot
from fl_dist.results.cells import NO_RUN
from fl_dist.results.collect import settings_of
from fl_dist.results.render import format_rows
from fl_dist.results.table import ResultsTable
from fl_dist.tasks import PrimaryMetric


def html_table(headers: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Of cells that are HTML already; the first of each row is its name."""
    top = "".join(f'<th scope="col">{header}</th>' for header in headers)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    return f'<div class="box" tabindex="0"><table class="{kind}"><tr>{top}</tr>{body}</table></div>'


def text(value: object, limit: int = 300) -> str:
    return escape(shorten(value, limit))


def notes(lines: Iterable[str]) -> str:
    return "".join(f'<p class="note">{text(line, 2000)}</p>' for line in lines)


def format_time(seconds: object) -> str:
    """Date and time of day, in the time zone of this machine."""
    known = finite_or_none(seconds)
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(known)) if known is not None else NO_RUN
    except (OverflowError, ValueError, OSError):
        return NO_RUN


def run_table(runs: Sequence[RunSnapshot]) -> str:
    """A line per run: its state, score and cost, and what it trains."""
    headers = ["run", "state", "rounds", "score", "best (round)", "time", "sent", "last change"]
    table = html_table([*headers, "algorithm", "data", "model"], [_run_row(run) for run in runs], "wide")
    return table + notes(
        ["score: mean ± standard deviation over the last rounds; * not finished; time: of rounds + of diagnostics"]
    )


def _run_row(run: RunSnapshot) -> list[str]:
    result = run.result
    state = f'<span class="state {run.state.replace(" ", "-")}">{run.state}</span>'
    progress = f'<progress max="{result.rounds}" value="{result.last_round}"></progress>'
    first = [text(run.name), state, f"{result.last_round:,} / {result.rounds:,}{progress}"]
    names = [text(name) for name in _names(run.config)]
    if not run.records:
        return [*first, *[NO_RUN] * 5, *names]
    summary = summarize(run.records, result.final_window, result.primary_metric, result.finished)
    diagnostics = summary["seconds_of_diagnostics"]
    duration = format_duration(summary["seconds"]) + (f" + {format_duration(diagnostics)}" if diagnostics else "")
    costs = [duration, format_bytes(summary["bytes"]), format_time(run.last_change)]
    return [*first, *_scores(summary, result.primary_metric), *costs, *names]


def _scores(summary: Summary, metric: PrimaryMetric) -> tuple[str, str]:
    name = metric.name
    if f"last_{name}" not in summary:
        return NO_RUN, NO_RUN
    final = f"{format_final_score(summary, metric)}{'' if summary['finished'] else '*'}"
    suffix = "" if name == "accuracy" else f'<span class="note"> {text(name)}</span>'
    return f"<b>{final}</b>{suffix}", f"{metric.format(summary[f'best_{name}'])} ({summary['best_round']:,})"


def _names(config: dict[str, Any]) -> list[str]:
    """Of algorithm, data and model."""
    if not config:
        return [NO_RUN] * 3
    algorithm, data, partition, model = (
        mapping_or_empty(config.get(section)) for section in ("algorithm", "data", "partition", "model")
    )
    chain = [algorithm["name"]] if algorithm.get("name") else _part_names(algorithm.get("parts"))
    chain += _part_names(algorithm.get("with"))
    names = ", ".join(str(section["name"]) for section in (data, partition) if section.get("name"))
    alpha = f" {partition['alpha']}" if "alpha" in partition else ""
    return [" + ".join(map(str, chain)) or NO_RUN, f"{names}{alpha}", str(model.get("name", "–"))]


def _part_names(chain: Any) -> list[str]:
    return [name for part in chain for name in mapping_or_empty(part)] if isinstance(chain, list) else []


def results_table(table: ResultsTable, only_costs: bool = False) -> str:
    """A paper's table, the best of each column in bold; or only its costs to reach the targets."""
    columns = [k for k, (_, measure) in enumerate(table.columns) if not only_costs or measure.cost]
    headers = [(column, measure.head) for column, measure in (table.columns[k] for k in columns)]
    rows = []
    for row, cells in format_rows(table):
        visible = [(text(cells[k][0]), cells[k][1]) for k in columns]
        rows.append([text(row), *(f"<b>{cell}</b>" if best else cell for cell, best in visible)])
    return html_table(
        ["", *("<br>".join(text(part) for part in header if part) for header in headers)], rows, "numbers"
    )


def problem_list(runs: Sequence[RunSnapshot], unreadable: Mapping[Path, str]) -> str:
    problems = [(run.name, problem) for run in runs for problem in run.problems]
    problems += [(str(path), f"left out: {problem}") for path, problem in unreadable.items()]
    lines = "".join(f"<li>{text(name)}: {text(problem, 500)}</li>" for name, problem in problems)
    return f'<ul class="problems">{lines}</ul>' if lines else ""


def settings_table(runs: Sequence[RunSnapshot]) -> str:
    """The keys in which the runs differ, except those that change no result."""
    configs = [(run, settings_of(run.config)) for run in runs if run.config]
    keys = dict.fromkeys(key for _, config in configs for key in config)
    differing = [key for key in keys if len({repr(config.get(key, "–")) for _, config in configs}) > 1]
    if not differing:
        return notes(["All settings are the same."] if len(configs) > 1 else [])
    rows = [[text(run.name), *(text(config.get(key, "–")) for key in differing)] for run, config in configs]
    return html_table(["run", *(text(key) for key in differing)], rows)


def config_list(runs: Sequence[RunSnapshot]) -> str:
    """Every configuration, folded."""
    return "".join(
        f"<details><summary>{text(run.name)}</summary><pre>{escape(to_yaml(_without_paths(run.config)))}</pre></details>"
        for run in runs
        if run.config
    )


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Without the folders of the run and of the data, which mean nothing to readers of the page."""
    rest = {key: value for key, value in config.items() if key != "run"}
    if isinstance(rest.get("data"), dict):
        rest["data"] = {key: value for key, value in rest["data"].items() if key != "root"}
    return rest


def attempts_table(runs: Sequence[RunSnapshot]) -> str:
    """When each run was started or resumed, and on what."""
    headers = ["run", "began", "after round", "ranks", "device", "hosts", "job", "versions"]
    rows = [[text(run.name), *_attempt_row(attempt)] for run in runs for attempt in run.attempts]
    return html_table(headers, rows, "wide") if rows else ""


def _attempt_row(attempt: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in mapping_or_empty(attempt.get("versions")).items())
    after, ranks, device, job = (
        NO_RUN if attempt.get(key) is None else text(attempt[key]) for key in ("round", "ranks", "device", "slurm_job")
    )
    began, hosts = format_time(attempt.get("time")), _hosts(attempt.get("hosts"))
    return [began, after, ranks, device, hosts, job, text(versions)]


def _hosts(hosts: Any) -> str:
    """Each host once, with the number of its ranks."""
    if not isinstance(hosts, list):
        return NO_RUN
    ranks = Counter(str(host) for host in hosts)
    return text(", ".join(f"{host} ({pluralize(count, 'rank')})" for host, count in ranks.items()), 1000)
