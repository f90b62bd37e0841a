"""Rank 0's words on the terminal: one line a round, a progress bar if someone watches."""

import sys
from typing import Any

from tqdm import tqdm

from fl_dist.common.words import size
from fl_dist.tasks import Headline

STARTING = "starting"
"""First word of an attempt's output, by which launchers tell it from the attempts before."""


class Console:
    def __init__(self, rounds: int, done: int, headline: Headline) -> None:
        self.rounds, self.width, self.headline = rounds, len(str(rounds)), headline
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
        score = row.get(f"test_{self.headline.name}")
        tested = (
            f"{self.headline.name} {self.headline.shown(score):>7}   test loss {row['test_loss']:.4f}"
            if score is not None
            else " " * (len(self.headline.name) + 27)
        )
        dropped = f"   dropped {len(row['dropped'])}" if row["dropped"] else ""
        return (
            f"round {row['round']:>{self.width}}/{self.rounds}   {tested}   train loss {row['train_loss']:.4f}"
            f"   {total:6.2f} s ({max(0.0, 1 - local / total):3.0%} outside local training)"
            f"   {size(row['bytes_down'] + row['bytes_up'])}{dropped}"
        )

    def close(self) -> None:
        self._bar.close()
