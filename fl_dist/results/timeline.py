"""When each worker was busy: one lane per worker, one bar per round."""

from collections.abc import Sequence
from pathlib import Path

from fl_dist.metrics.record import RoundRecord
from fl_dist.plots.base import COLOURS, new_figure
from fl_dist.results.collect import RunResult

MAX_ROUNDS = 30
"""Rounds that are drawn, the last ones."""


def draw(runs: Sequence[RunResult], file: Path) -> bool:
    """False: no run has recorded its workers, and no file is written."""
    records = {run.name: [record for record in run.records if record.workers][-MAX_ROUNDS:] for run in runs}
    records = {run: of_run for run, of_run in records.items() if of_run}
    if not records:
        return False
    lanes = [len(training_ranks(of_run)) for of_run in records.values()]
    figure = new_figure(file, (9.0, sum(0.7 + 0.28 * n for n in lanes) + 0.3))
    panels = figure.subplots(len(records), 1, squeeze=False, height_ratios=lanes)
    for panel, (run, of_run) in zip(panels[:, 0], records.items(), strict=True):
        ranks, end = training_ranks(of_run), 0.0
        for record in of_run:
            start = end + record.seconds.broadcast
            for lane, rank in enumerate(ranks):
                busy = record.workers[rank].busy or 0.0 if rank in record.workers else 0.0
                panel.barh(lane, busy, left=start, height=0.7, color=COLOURS[0], edgecolor="white", linewidth=0.4)
            end += record.seconds.total
            panel.axvline(end, color="black", alpha=0.15, linewidth=0.5)
        panel.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks], fontsize=7)
        panel.set(xlim=(0, end), ylim=(len(ranks) - 0.4, -0.6))
        panel.set_title(f"{run}, rounds {of_run[0].round} to {of_run[-1].round}", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("seconds; bars are local training, white is waiting")
    figure.savefig(file)
    return True


def training_ranks(records: Sequence[RoundRecord]) -> list[str]:
    """The ranks that trained in any of these rounds, in order."""
    busy = {rank for record in records for rank, worker in record.workers.items() if worker.busy is not None}
    return sorted(busy, key=lambda rank: (len(rank), rank))
