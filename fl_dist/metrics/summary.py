"""A run in a few numbers."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from fl_dist.common.formatting import format_bytes, format_duration, pluralize
from fl_dist.common.terminal import UNLIMITED_WIDTH
from fl_dist.metrics.record import RoundRecord
from fl_dist.tasks import PrimaryMetric

Summary = dict[str, Any]
Scores = list[tuple[int, float]]
"""Rounds with their primary metric."""
MOSTLY_IDLE = 0.5
"""A dedicated server that is busy for a smaller share of the time could train too."""
MEANINGS = {
    "finished": "whether the run is complete",
    "rounds": "rounds so far",
    "metric": "the primary metric of the task",
    "final_<metric>_mean": "its mean over the evaluated rounds among the last `evaluate.final_window`",
    "final_<metric>_std": "its sample standard deviation over the same rounds",
    "final_<metric>_rounds": "the number of these rounds",
    "last_<metric>": "the metric of the last evaluated round",
    "best_<metric>": "the metric of the best round",
    "best_round": "the number of that round",
    "bytes": "bytes to and from clients, over all rounds",
    "seconds": "seconds of all rounds, without diagnostics",
    "seconds_of_diagnostics": "seconds of all diagnostics",
    "dropped": "clients that failed and were left out, over all rounds",
    "stopped": "the reason, only if a callback ended the run",
    "server_busy": "share of the time in which a dedicated server evaluated, saved or computed its step; only if "
    "`topology.server` is `dedicated` on more than one rank in the last attempt",
}
"""Every key of `summary.json`."""


def summarize(records: Sequence[RoundRecord], window: int, metric: PrimaryMetric, finished: bool) -> Summary:
    """Mean and sample deviation of the metric over the last `window` rounds, its last and best value; totals."""
    scores = finite_scores(records, metric)
    return {
        "finished": finished,
        "rounds": records[-1].round if records else 0,
        "metric": metric.name,
        **(_summarize_scores(scores, records[-1].round - window, metric) if scores else {}),
        "bytes": sum(r.bytes_down + r.bytes_up for r in records),
        "seconds": sum(r.seconds.total for r in records),
        "seconds_of_diagnostics": sum(r.seconds.diagnostics or 0.0 for r in records),
        "dropped": sum(len(r.dropped) for r in records),
    }


def finite_scores(records: Sequence[RoundRecord], metric: PrimaryMetric) -> Scores:
    """Of the rounds that were evaluated."""
    scores = [(record.round, record.test.get(metric.name)) for record in records]
    return [(index, score) for index, score in scores if score is not None and math.isfinite(score)]


def last_scores(scores: Scores, after: int) -> list[float]:
    """Those after a round; the last one if there are none."""
    return [score for index, score in scores if index > after] or [scores[-1][1]]


def server_load(records: Sequence[RoundRecord]) -> Summary:
    """Of a server that is dedicated now: the share of the time in which it evaluated, saved or computed its step."""
    if not records or not _has_dedicated_server(records[-1]):
        return {}
    pairs = zip(records, [None, *records], strict=False)
    rounds = [(record, previous) for record, previous in pairs if _has_dedicated_server(record)]
    busy = sum(r.seconds.server + r.seconds.checkpoint + _evaluation_seconds(previous) for r, previous in rounds)
    return {"server_busy": min(1.0, busy / sum(record.seconds.total for record, _ in rounds))}


def _has_dedicated_server(record: RoundRecord) -> bool:
    return len(record.workers) > 1 and ("0" not in record.workers or record.workers["0"].busy is None)


def _evaluation_seconds(record: RoundRecord | None) -> float:
    workers = () if record is None else record.workers.values()
    return max((worker.evaluate for worker in workers if worker.evaluate is not None), default=0.0)


def _summarize_scores(scores: Scores, after: int, metric: PrimaryMetric) -> Summary:
    tail = last_scores(scores, after)
    best = (max if metric.best == "max" else min)(scores, key=lambda pair: pair[1])
    return {
        f"final_{metric.name}_mean": statistics.fmean(tail),
        f"final_{metric.name}_std": statistics.stdev(tail) if len(tail) > 1 else 0.0,
        f"final_{metric.name}_rounds": len(tail),
        f"last_{metric.name}": scores[-1][1],
        f"best_{metric.name}": best[1],
        "best_round": best[0],
    }


def summary_lines(summary: Summary, metric: PrimaryMetric, folder: str, columns: int = UNLIMITED_WIDTH) -> list[str]:
    """What the console prints at the end of a run, on a terminal of so many columns."""
    lines = ["", *_score_lines(summary, metric)]
    if "stopped" in summary:
        lines.append(f"stopped         after round {summary['rounds']}: {summary['stopped']}")
    lines += [
        f"sent            {format_bytes(summary['bytes'])} to and from clients",
        f"time            {_time(summary)}",
    ]
    lines += textwrap.wrap(_server(summary), columns, subsequent_indent=" " * 16)
    lines += [f"files           {folder}/"]
    if summary["dropped"]:
        lines.append(f"dropped         {pluralize(summary['dropped'], 'client')} failed and were left out")
    return lines


def _time(summary: Summary) -> str:
    diagnostics = summary["seconds_of_diagnostics"]
    more = f" and {format_duration(diagnostics)} of diagnostics" if diagnostics else ""
    return format_duration(summary["seconds"]) + more


def _server(summary: Summary) -> str:
    if "server_busy" not in summary:
        return ""
    hint = "; topology.server=shared would let it train too" if summary["server_busy"] < MOSTLY_IDLE else ""
    return f"server          busy {100 * summary['server_busy']:.0f} % of the time{hint}"


def _score_lines(summary: Summary, metric: PrimaryMetric) -> list[str]:
    title = f"{f'final {metric.name}':<15}"
    if f"last_{metric.name}" not in summary:
        return [f"{title} never finite"]
    last, best = metric.format(summary[f"last_{metric.name}"]), metric.format(summary[f"best_{metric.name}"])
    lines = [f"{title} {_final(summary, metric)}"]
    if 1 < summary[f"final_{metric.name}_rounds"] > summary["rounds"] / 2:  # the first, much lower ones too
        lines.append(f"{'':15} evaluate.final_window sets how many")
    return [*lines, f"last / best     {last} / {best} in round {summary['best_round']}"]


def _final(summary: Summary, metric: PrimaryMetric) -> str:
    rounds = summary[f"final_{metric.name}_rounds"]
    about = "the last evaluated round" if rounds == 1 else f"mean ± std of {rounds} rounds"
    return f"{format_final_score(summary, metric)}   ({about})"


def format_final_score(summary: Summary, metric: PrimaryMetric) -> str:
    """The mean over the last rounds and, of several, their deviation."""
    mean, std, rounds = (summary[f"final_{metric.name}_{key}"] for key in ("mean", "std", "rounds"))
    unit = " %" if metric.percent else ""
    spread = f" ± {metric.format(std).removesuffix(unit)}" if rounds > 1 else ""
    return f"{metric.format(mean).removesuffix(unit)}{spread}{unit}"
