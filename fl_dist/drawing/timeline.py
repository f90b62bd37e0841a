"""Who worked when: a lane a worker, a bar a round."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_dist.drawing.base import COLOURS, blank

ROUNDS = 30
"""As many of the last rounds are drawn."""


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> bool:
    """Rows of each run by its name; False: none tells of its workers, and there is no picture."""
    told = {run: [row for row in rows if row.get("workers")][-ROUNDS:] for run, rows in runs.items()}
    told = {run: rows for run, rows in told.items() if rows}
    if not told:
        return False
    lanes = [len(_workers(rows)) for rows in told.values()]
    figure = blank(file, (9.0, sum(0.7 + 0.28 * n for n in lanes) + 0.3))
    panels = figure.subplots(len(told), 1, squeeze=False, height_ratios=lanes)
    for panel, (run, rows) in zip(panels[:, 0], told.items(), strict=True):
        workers, ends = _workers(rows), 0.0
        for row in rows:
            seconds = row["seconds"]
            begin = ends + seconds.get("broadcast", 0.0)
            for lane, worker in enumerate(workers):
                busy = row["workers"].get(worker, {}).get("busy", 0.0)
                panel.barh(lane, busy, left=begin, height=0.7, color=COLOURS[0], edgecolor="white", linewidth=0.4)
            ends += seconds["total"]
            panel.axvline(ends, color="black", alpha=0.15, linewidth=0.5)
        panel.set_yticks(range(len(workers)), [f"rank {worker}" for worker in workers], fontsize=7)
        panel.set(xlim=(0, ends), ylim=(len(workers) - 0.4, -0.6))
        panel.set_title(f"{run}, rounds {rows[0]['round']} to {rows[-1]['round']}", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("seconds; a bar is local training, what is white is waiting")
    figure.savefig(file)
    return True


def _workers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ranks that trained, in order."""
    return sorted({worker for row in rows for worker, of in row["workers"].items() if "busy" in of}, key=int)
