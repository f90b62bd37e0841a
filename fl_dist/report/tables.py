"""Tables of the page; everything that comes from files is escaped."""

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fl_dist.common.reading import as_yaml
from fl_dist.common.words import counted, duration, shortened, size
from fl_dist.config import LAYOUT
from fl_dist.config.loading import leaves
from fl_dist.monitor.summary import summarise
from fl_dist.report.gather import NEW, Seen, finite, mapping
from fl_dist.results.render import shown
from fl_dist.results.table import NO_RUN, Figures
from fl_dist.tasks import Headline

_PLACES = tuple(f"{key}." for key in LAYOUT)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Of cells that are HTML already; the first of each row is its name."""
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    return f'<div class="box" tabindex="0"><table class="{kind}"><tr>{top}</tr>{body}</table></div>'


def text(value: object, most: int = 300) -> str:
    return escape(shortened(value, most))


def notes(lines: Iterable[str]) -> str:
    return "".join(f'<p class="note">{text(line, 2000)}</p>' for line in lines)


def moment(seconds: object) -> str:
    """A time of day and date, where the page is made."""
    known = finite(seconds)
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(known)) if known is not None else NO_RUN
    except (OverflowError, ValueError, OSError):
        return NO_RUN


def runs(seen: Sequence[Seen]) -> str:
    """A line for each run: what it is, how far, how good, at what cost."""
    heads = ["run", "state", "rounds", "score", "best (round)", "time", "sent", "last change"]
    made = table([*heads, "algorithm", "data", "model"], [_run(run) for run in seen], "wide")
    return made + notes(
        ["score: mean ± deviation over the last rounds; * not finished; time: of rounds + of diagnostics"]
    )


def _run(run: Seen) -> list[str]:
    outcome = run.outcome
    state = f'<span class="state {run.state.replace(" ", "-")}">{run.state}</span>'
    chosen = [text(word) for word in _chosen(run.config)]
    rounds = f'{outcome.done:,} / {outcome.rounds:,}<progress max="{outcome.rounds}" value="{outcome.done}"></progress>'
    if run.state == NEW or not run.rows:
        return [text(run.name), state, rounds, *[NO_RUN] * 5, *chosen]
    amounts = summarise(run.rows, outcome.last, outcome.headline, outcome.finished)
    apart = amounts["seconds_of_diagnostics"]
    spent = duration(amounts["seconds"]) + (f" + {duration(apart)}" if apart else "")
    costs = [spent, size(amounts["bytes"]), moment(run.changed)]
    return [text(run.name), state, rounds, *_scores(amounts, outcome.headline), *costs, *chosen]


def _scores(amounts: dict[str, Any], headline: Headline) -> tuple[str, str]:
    name = headline.name
    if f"last_{name}" not in amounts:
        return NO_RUN, NO_RUN
    mean, std, best = (amounts[key] for key in (f"final_{name}_mean", f"final_{name}_std", f"best_{name}"))
    unit = " %" if headline.percent else ""
    spread = f" ± {headline.shown(std).removesuffix(unit)}" if amounts[f"final_{name}_rounds"] > 1 else ""
    final = f"{headline.shown(mean).removesuffix(unit)}{spread}{unit}{'' if amounts['finished'] else '*'}"
    of = "" if name == "accuracy" else f'<span class="note"> {text(name)}</span>'
    return f"<b>{final}</b>{of}", f"{headline.shown(best)} ({amounts['best_round']:,})"


def _chosen(config: dict[str, Any]) -> list[str]:
    """Algorithm, data and model."""
    if not config:
        return [NO_RUN] * 3
    algorithm, partition = mapping(config.get("algorithm")), mapping(config.get("partition"))
    parts = algorithm.get("parts")
    chain = " + ".join(name for part in parts for name in mapping(part)) if isinstance(parts, list) else "–"
    data = [mapping(config.get("data")).get("name"), partition.get("name")]
    alpha = f" {partition['alpha']}" if "alpha" in partition else ""
    named = ", ".join(str(name) for name in data if name)
    return [str(algorithm.get("name") or chain), f"{named}{alpha}", str(mapping(config.get("model")).get("name", "–"))]


def figures(made: Figures, costs: bool = False) -> str:
    """A paper's table, the best of each column in bold; or only what it took to reach the targets."""
    chosen = [k for k, (_, measure) in enumerate(made.columns) if not costs or measure.cost]
    heads = ["", *(_head(*made.columns[k]) for k in chosen)]
    best = {k: made.best(k) for k in chosen}
    lines = []
    for r, (row, cells) in enumerate(made.rows):
        told = {k: text(shown(cells[k], made.columns[k][1], made)) for k in chosen}
        lines.append([text(row), *(f"<b>{told[k]}</b>" if r in best[k] else told[k] for k in chosen)])
    return table(heads, lines, "numbers")


def _head(column: str, measure: Any) -> str:
    return f"{text(column)}<br>{text(measure.head)}" if column else text(measure.head)


def troubles(seen: Sequence[Seen], unread: Mapping[Path, str]) -> str:
    found = [(run.name, told) for run in seen for told in run.troubles]
    found += [(str(path), f"left out: {told}") for path, told in unread.items()]
    lines = "".join(f"<li>{text(name)}: {text(told, 500)}</li>" for name, told in found)
    return f'<ul class="troubles">{lines}</ul>' if found else ""


def differences(seen: Sequence[Seen]) -> str:
    """The keys in which the runs differ; what only says where a run lies is no difference."""
    known = [(run, _plain(run.config)) for run in seen if run.config]
    keys = dict.fromkeys(key for _, config in known for key in config)
    differing = [key for key in keys if len({repr(config.get(key, "–")) for _, config in known}) > 1]
    if not differing:
        return notes(["All settings are the same." if len(known) > 1 else ""][: len(known) - 1])
    rows = [[text(run.name), *(text(config.get(key, "–")) for key in differing)] for run, config in known]
    return table(["run", *(text(key) for key in differing)], rows)


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in leaves(config) if not f"{key}.".startswith(_PLACES)}


def configs(seen: Sequence[Seen]) -> str:
    """Every configuration, folded."""
    return "".join(
        f"<details><summary>{text(run.name)}</summary><pre>{escape(as_yaml(_placeless(run.config)))}</pre></details>"
        for run in seen
        if run.config
    )


def _placeless(config: dict[str, Any]) -> dict[str, Any]:
    """Without the folders of the run and of the data, which mean nothing where the page is read."""
    kept = {key: value for key, value in config.items() if key != "run"}
    if isinstance(kept.get("data"), dict):
        kept["data"] = {key: value for key, value in kept["data"].items() if key != "root"}
    return kept


def attempts(seen: Sequence[Seen]) -> str:
    """When each run was started or resumed, and on what."""
    heads = ["run", "began", "after round", "ranks", "device", "hosts", "job", "versions"]
    rows = [[text(run.name), *_attempt(told)] for run in seen for told in run.attempts]
    return table(heads, rows, "wide") if rows else ""


def _attempt(told: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in mapping(told.get("versions")).items())
    plain = [_or_none(told.get(key)) for key in ("round", "ranks", "device")]
    return [
        moment(told.get("time")),
        *plain,
        _hosts(told.get("hosts")),
        _or_none(told.get("slurm_job")),
        text(versions),
    ]


def _or_none(value: Any) -> str:
    return NO_RUN if value is None else text(value)


def _hosts(value: Any) -> str:
    """Each host once, with the number of its ranks."""
    if not isinstance(value, list):
        return NO_RUN
    ranks = {str(host): sum(str(other) == str(host) for other in value) for host in value}
    return text(", ".join(f"{host} ({counted(count, 'rank')})" for host, count in ranks.items()), 1000)
