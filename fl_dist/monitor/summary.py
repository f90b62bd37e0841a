"""A run in a few numbers: what its rows amount to."""

import math
import statistics
import textwrap
from typing import Any

from fl_dist.common.terminal import WIDE
from fl_dist.common.words import counted, duration, size
from fl_dist.tasks import Headline

Summary = dict[str, Any]


Row = dict[str, Any]
WORTH_A_CHANGE = 0.95
"""Of the time: what a shared server would have taken, if that is to be called faster."""


def summarise(rows: list[Row], last: int, headline: Headline, finished: bool) -> Summary:
    """The headline's metric as mean and sample deviation over the last rounds, last and best; totals."""
    metric = headline.name
    scores = [(r["round"], r.get(f"test_{metric}")) for r in rows]
    tested = [(index, score) for index, score in scores if score is not None and math.isfinite(score)]
    return {
        "finished": finished,
        "rounds": rows[-1]["round"] if rows else 0,
        "metric": metric,
        **(_scores(tested, rows[-1]["round"] - last, headline) if tested else {}),
        "bytes": sum(r["bytes_down"] + r["bytes_up"] for r in rows),
        "seconds": sum(r["seconds"]["total"] for r in rows),
        "seconds_of_diagnostics": sum(r["seconds"].get("diagnostics", 0.0) for r in rows),
        "dropped": sum(len(r["dropped"]) for r in rows),
    }


def server_worth(rows: list[Row], spreads: bool) -> Summary:
    """Of a server that only serves: its busy share of the time, and what the run would have taken if it had trained.

    `spreads`: whether ranks that all train may all evaluate.
    """
    rounds = [(row, before) for row, before in zip(rows, [{}, *rows], strict=False) if _only_serves(row)]
    if not rounds:
        return {}
    busy = sum(r["seconds"]["server"] + r["seconds"]["checkpoint"] + _evaluation(b)[0] for r, b in rounds)
    saved = sum(row["seconds"]["total"] - _if_shared(row, before, spreads) for row, before in rounds)
    return {
        "server_busy": min(1.0, busy / sum(row["seconds"]["total"] for row, _ in rounds)),
        "seconds_if_shared": sum(r["seconds"]["total"] for r in rows) - saved,
    }


def _only_serves(row: Row) -> bool:
    ranks = row.get("workers", {})
    return len(ranks) > 1 and "busy" not in ranks.get("0", {})


def _evaluation(row: Row) -> tuple[float, bool]:
    """Seconds, and whether that was rank 0 alone."""
    ranks = [did["evaluate"] for did in row.get("workers", {}).values() if "evaluate" in did]
    return max(ranks, default=0.0), len(ranks) == 1


def _if_shared(row: Row, before: Row, spreads: bool) -> float:
    """Seconds of the round with its clients' work over one rank more, as fast as the others are on average.

    A round lasts as long as its busiest rank, so a client more or less on each is what counts, if they are alike; no
    plan beats an even division. What rank 0 does alone is then done beside nothing: the evaluation of the round before.
    """
    seconds, workers = row["seconds"], [did for did in row["workers"].values() if "busy" in did]
    clients, ranks, local = sum(did["clients"] for did in workers), len(workers) + 1, seconds["local"]
    pieces = math.ceil(clients / ranks) / max(1, math.ceil(clients / len(workers)))
    trained = min(local, max(local * pieces, sum(did["busy"] for did in workers) / ranks))
    evaluated, alone = _evaluation(before)
    beside = evaluated if alone else 0.0
    return float(seconds["total"] - max(local, beside) + trained + beside / (ranks if spreads else 1))


def _scores(tested: list[tuple[int, float]], before: int, headline: Headline) -> Summary:
    metric = headline.name
    tail = [score for index, score in tested if index > before] or [tested[-1][1]]
    best = (max if headline.best == "max" else min)(tested, key=lambda pair: pair[1])
    return {
        f"final_{metric}_mean": statistics.fmean(tail),
        f"final_{metric}_std": statistics.stdev(tail) if len(tail) > 1 else 0.0,
        f"final_{metric}_rounds": len(tail),
        f"last_{metric}": tested[-1][1],
        f"best_{metric}": best[1],
        "best_round": best[0],
    }


def summary_lines(summary: Summary, headline: Headline, folder: str, columns: int = WIDE) -> list[str]:
    """A finished run's last words, on a terminal of so many columns."""
    dropped = summary["dropped"]
    lines = [
        "",
        *_score_lines(summary, headline),
        f"sent            {size(summary['bytes'])} to and from clients",
        f"time            {_time(summary)}",
        *textwrap.wrap(_server(summary), columns, subsequent_indent=" " * 16),
        f"files           {folder}/",
    ]
    return lines if not dropped else [*lines, f"dropped         {counted(dropped, 'client')} failed and were left out"]


def _time(summary: Summary) -> str:
    """Of the rounds; diagnostics are no part of them."""
    apart = summary["seconds_of_diagnostics"]
    return duration(summary["seconds"]) + (f" and {duration(apart)} of diagnostics" if apart else "")


def _server(summary: Summary) -> str:
    if "server_busy" not in summary:
        return ""
    shared, seconds = summary["seconds_if_shared"], summary["seconds"]
    would = f"have taken about {duration(shared)} instead of {duration(seconds)}"
    if shared > WORTH_A_CHANGE * seconds:
        would = f"not have been faster (about {duration(shared)})"
    busy = f"busy {100 * summary['server_busy']:.0f} % of the time"
    return f"server          {busy}; topology.server=shared would {would}"


def _score_lines(summary: Summary, headline: Headline) -> list[str]:
    metric = headline.name
    if f"last_{metric}" not in summary:
        return [f"{f'final {metric}':<15} never finite"]
    last, best = headline.shown(summary[f"last_{metric}"]), headline.shown(summary[f"best_{metric}"])
    return [
        f"{f'final {metric}':<15} {_final(summary, headline)}",
        f"last / best     {last} / {best} in round {summary['best_round']}",
    ]


def _final(summary: Summary, headline: Headline) -> str:
    metric = headline.name
    mean, std, n = (summary[f"final_{metric}_{what}"] for what in ("mean", "std", "rounds"))
    if n == 1:
        return f"{headline.shown(mean)}   (the last evaluated round)"
    unit = " %" if headline.percent else ""
    both = f"{headline.shown(mean).removesuffix(unit)} ± {headline.shown(std).removesuffix(unit)}{unit}"
    return f"{both}   (mean ± std of {n} rounds)"
