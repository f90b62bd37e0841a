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
CLEARLY_FASTER = 0.95
"""A shared server is called faster if it would have taken at most this share of the time."""


def summarize(records: Sequence[RoundRecord], window: int, metric: PrimaryMetric, finished: bool) -> Summary:
    """Mean and sample deviation of the metric over the last `window` rounds, its last and best value; totals."""
    scores = [(r.round, r.test.get(metric.name)) for r in records]
    known = [(index, score) for index, score in scores if score is not None and math.isfinite(score)]
    return {
        "finished": finished,
        "rounds": records[-1].round if records else 0,
        "metric": metric.name,
        **(_scores(known, records[-1].round - window, metric) if known else {}),
        "bytes": sum(r.bytes_down + r.bytes_up for r in records),
        "seconds": sum(r.seconds.total for r in records),
        "seconds_of_diagnostics": sum(r.seconds.diagnostics or 0.0 for r in records),
        "dropped": sum(len(r.dropped) for r in records),
    }


def estimate_shared_server(records: Sequence[RoundRecord], all_may_evaluate: bool) -> Summary:
    """Of a dedicated server: its busy share of the time, and the seconds the run would have taken with a shared one.

    `all_may_evaluate`: whether all ranks may share the evaluation.
    """
    pairs = zip(records, [None, *records], strict=False)
    rounds = [(record, previous) for record, previous in pairs if _has_dedicated_server(record)]
    if not rounds:
        return {}
    busy = sum(r.seconds.server + r.seconds.checkpoint + _evaluation(previous)[0] for r, previous in rounds)
    saved = sum(r.seconds.total - _seconds_if_shared(r, previous, all_may_evaluate) for r, previous in rounds)
    return {
        "server_busy": min(1.0, busy / sum(record.seconds.total for record, _ in rounds)),
        "seconds_if_shared": sum(record.seconds.total for record in records) - saved,
    }


def _has_dedicated_server(record: RoundRecord) -> bool:
    return len(record.workers) > 1 and ("0" not in record.workers or record.workers["0"].busy is None)


def _evaluation(record: RoundRecord | None) -> tuple[float, bool]:
    """Its seconds, and whether rank 0 did it alone."""
    workers = () if record is None else record.workers.values()
    seconds = [worker.evaluate for worker in workers if worker.evaluate is not None]
    return max(seconds, default=0.0), len(seconds) == 1


def _seconds_if_shared(record: RoundRecord, previous: RoundRecord | None, all_may_evaluate: bool) -> float:
    """Seconds of the round with its clients divided among one rank more, as fast as the others are on average.

    A round lasts as long as its busiest rank, so the largest number of clients per rank counts, down to an even
    division of the work. Rank 0 then evaluates the previous model while nobody trains.
    """
    workers = [worker for worker in record.workers.values() if worker.busy is not None]
    clients, ranks, local = sum(worker.clients or 0 for worker in workers), len(workers) + 1, record.seconds.local
    shrink = math.ceil(clients / ranks) / max(1, math.ceil(clients / len(workers)))
    training = min(local, max(local * shrink, sum(worker.busy or 0.0 for worker in workers) / ranks))
    seconds, is_alone = _evaluation(previous)
    overlapped = seconds if is_alone else 0.0
    evaluation = overlapped / (ranks if all_may_evaluate else 1)
    return record.seconds.total - max(local, overlapped) + training + evaluation


def _scores(scores: list[tuple[int, float]], before: int, metric: PrimaryMetric) -> Summary:
    tail = [score for index, score in scores if index > before] or [scores[-1][1]]
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
    shared, seconds = summary["seconds_if_shared"], summary["seconds"]
    would = f"have taken about {format_duration(shared)} instead of {format_duration(seconds)}"
    if shared > CLEARLY_FASTER * seconds:
        would = f"not have been faster (about {format_duration(shared)})"
    busy = f"busy {100 * summary['server_busy']:.0f} % of the time"
    return f"server          {busy}; topology.server=shared would {would}"


def _score_lines(summary: Summary, metric: PrimaryMetric) -> list[str]:
    title = f"{f'final {metric.name}':<15}"
    if f"last_{metric.name}" not in summary:
        return [f"{title} never finite"]
    last, best = metric.format(summary[f"last_{metric.name}"]), metric.format(summary[f"best_{metric.name}"])
    final = f"{title} {_final(summary, metric)}"
    return [final, f"last / best     {last} / {best} in round {summary['best_round']}"]


def _final(summary: Summary, metric: PrimaryMetric) -> str:
    mean, std, rounds = (summary[f"final_{metric.name}_{key}"] for key in ("mean", "std", "rounds"))
    if rounds == 1:
        return f"{metric.format(mean)}   (the last evaluated round)"
    unit = " %" if metric.percent else ""
    both = f"{metric.format(mean).removesuffix(unit)} ± {metric.format(std).removesuffix(unit)}{unit}"
    return f"{both}   (mean ± std of {rounds} rounds)"
