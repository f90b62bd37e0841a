"""A run in a few numbers: what its rows amount to."""

import math
import statistics
from typing import Any

from fl_dist.common.words import counted, duration, size
from fl_dist.tasks import Headline

Summary = dict[str, Any]


def summarise(rows: list[dict[str, Any]], last: int, headline: Headline, finished: bool) -> Summary:
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
        "dropped": sum(len(r["dropped"]) for r in rows),
    }


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


def summary_lines(summary: Summary, headline: Headline, folder: str) -> list[str]:
    """A finished run's last words."""
    dropped = summary["dropped"]
    lines = [
        "",
        *_score_lines(summary, headline),
        f"sent            {size(summary['bytes'])} to and from clients",
        f"time            {duration(summary['seconds'])}",
        f"files           {folder}/  (config.yaml, metrics.jsonl, summary.json, model.safetensors, logs/, checkpoint/)",
    ]
    return lines if not dropped else [*lines, f"dropped         {counted(dropped, 'client')} failed and were left out"]


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
    return f"{both}   (mean ± deviation of the last {n} evaluated rounds)"
