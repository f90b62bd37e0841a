"""Rank 0's words on the terminal: one line a round, a progress bar if someone watches, a closing summary."""

import statistics
import sys
from typing import Any

from tqdm import tqdm

from fl_dist.common.words import counted, duration, size

STARTING = "starting"
"""First word of an attempt's output, by which launchers tell it from the attempts before."""


class Console:
    def __init__(self, rounds: int, done: int) -> None:
        self.rounds, self.width = rounds, len(str(rounds))
        tqdm.monitor_interval = 0  # no thread that watches over slow bars
        self._bar = tqdm(
            total=rounds, initial=done, unit="round", leave=False, disable=not sys.stderr.isatty(), dynamic_ncols=True
        )

    def say(self, text: str = "") -> None:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def row(self, row: dict[str, Any]) -> None:
        self.say(self.line(row))
        self._bar.update()

    def line(self, row: dict[str, Any]) -> str:
        total, local = row["seconds"]["total"], row["seconds"]["local"]
        tested = (
            f"accuracy {100 * row['test_accuracy']:5.2f} %   test loss {row['test_loss']:.4f}"
            if row["test_accuracy"] is not None
            else " " * 36
        )
        dropped = f"   dropped {len(row['dropped'])}" if row["dropped"] else ""
        return (
            f"round {row['round']:>{self.width}}/{self.rounds}   {tested}   train loss {row['train_loss']:.4f}"
            f"   {total:6.2f} s ({max(0.0, 1 - local / total):3.0%} outside local training)"
            f"   {size(row['bytes_down'] + row['bytes_up'])}{dropped}"
        )

    def close(self) -> None:
        self._bar.close()


def summarise(rows: list[dict[str, Any]], last: int) -> dict[str, Any]:
    """Final accuracy as mean and sample deviation over the last rounds, last, best, and totals."""
    tested = [r for r in rows if r["test_accuracy"] is not None]
    tail = [r["test_accuracy"] for r in tested if r["round"] > rows[-1]["round"] - last]
    best = max(tested, key=lambda r: r["test_accuracy"])
    return {
        "final_accuracy_mean": statistics.fmean(tail),
        "final_accuracy_std": statistics.stdev(tail) if len(tail) > 1 else 0.0,
        "final_accuracy_rounds": len(tail),
        "last_accuracy": tested[-1]["test_accuracy"],
        "best_accuracy": best["test_accuracy"],
        "best_round": best["round"],
        "bytes": sum(r["bytes_down"] + r["bytes_up"] for r in rows),
        "seconds": sum(r["seconds"]["total"] for r in rows),
    }


def summary_lines(summary: dict[str, Any], folder: str, dropped: int) -> list[str]:
    lines = [
        "",
        f"final accuracy  {_final(summary)}",
        f"last / best     {100 * summary['last_accuracy']:.2f} % / {100 * summary['best_accuracy']:.2f} %"
        f" in round {summary['best_round']}",
        f"sent            {size(summary['bytes'])} to and from clients",
        f"time            {duration(summary['seconds'])}",
        f"files           {folder}/  (config.yaml, metrics.jsonl, model.safetensors, logs/, checkpoint/)",
    ]
    return lines if not dropped else [*lines, f"dropped         {counted(dropped, 'client')} failed and were left out"]


def _final(summary: dict[str, Any]) -> str:
    mean, n = f"{100 * summary['final_accuracy_mean']:.2f}", summary["final_accuracy_rounds"]
    if n == 1:
        return f"{mean} %   (the last evaluated round)"
    return f"{mean} ± {100 * summary['final_accuracy_std']:.2f} %   (mean ± deviation of the last {n} evaluated rounds)"
