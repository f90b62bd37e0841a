"""Rank 0's words on the terminal: one line a round, a progress bar if someone watches."""

import contextlib
import logging
import statistics
import sys
import threading
from collections import deque
from typing import Any

from tqdm import tqdm

from fl_dist.common.terminal import fitted, width
from fl_dist.common.words import duration, size
from fl_dist.tasks import Headline

STARTING = "starting"
"""First word of an attempt's output, by which launchers tell it from the attempts before."""


RECENT = 20
"""Rounds whose mean length says how long the rest will take."""


class Bar(tqdm):
    """With a lock of its own: tqdm's is shared with forked processes, and stays locked when one of them is killed."""

    monitor_interval = 0
    """No thread that watches over slow bars."""


Bar.set_lock(threading.RLock())


class Console:
    def __init__(self, rounds: int, done: int, headline: Headline) -> None:
        self.rounds, self.width, self.headline = rounds, len(str(rounds)), headline
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._bar = Bar(
            total=rounds, initial=done, unit="round", leave=False, disable=not sys.stderr.isatty(), dynamic_ncols=True
        )

    def say(self, text: str = "") -> None:
        Bar.write(text, file=sys.stdout)
        sys.stdout.flush()

    def row(self, row: dict[str, Any]) -> None:
        self._seconds.append(row["seconds"]["total"] + row["seconds"].get("diagnostics", 0.0))
        self.say(fitted(self.fields(row), width()))
        self._bar.update()

    def fields(self, row: dict[str, Any]) -> list[str]:
        """What is worth seeing of a round, the most important first: a narrow terminal shows less of it."""
        total, local = row["seconds"]["total"], row["seconds"]["local"]
        score, loss = self._tested(row)
        diagnosed = row["seconds"].get("diagnostics")
        return [
            f"round {row['round']:>{self.width}}/{self.rounds}",
            score,
            f"{self._left(row['round']):>15}",
            *([f"dropped {len(row['dropped'])}"] if row["dropped"] else []),
            loss,
            f"train loss {row['train_loss']:.4f}",
            f"{total:6.2f} s ({min(1.0, local / total):4.0%} local)",
            f"{size(row['bytes_down'] + row['bytes_up']):>7} sent",
            *([f"{duration(diagnosed)} of diagnostics"] if diagnosed else []),
        ]

    def _left(self, done: int) -> str:
        seconds = (self.rounds - done) * statistics.fmean(self._seconds)
        return f"{duration(seconds)} left" if seconds else ""

    def _tested(self, row: dict[str, Any]) -> tuple[str, str]:
        name, score = self.headline.name, row.get(f"test_{self.headline.name}")
        if score is None:
            return " " * (len(name) + 8), " " * 16
        return f"{name} {self.headline.shown(score):>7}", f"test loss {row['test_loss']:.4f}"

    def close(self) -> None:
        self._bar.close()


class Warnings(logging.Handler):
    """Records of the log as lines above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
            Bar.write(self.format(record), file=sys.stderr)
