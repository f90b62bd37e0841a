"""The terminal of rank 0: one line per round, and a progress bar if someone watches."""

import contextlib
import logging
import os
import statistics
import sys
import threading
from collections import deque

from tqdm import tqdm

from fl_dist.callbacks.base import Callback, RunContext
from fl_dist.common.formatting import format_bytes, format_duration
from fl_dist.common.terminal import fit_fields, terminal_width
from fl_dist.metrics.record import RoundRecord
from fl_dist.metrics.summary import Summary, summary_lines

STARTING = "starting"
"""First word of an attempt's output, by which launchers tell it from earlier attempts."""
RECENT_ROUNDS = 20
"""Rounds whose mean duration says how long the rest will take."""


class Bar(tqdm):  # type: ignore[type-arg]  # it takes none at run time
    """With a lock of its own: tqdm's is shared with forked processes, and stays locked when one of them is killed."""

    monitor_interval = 0
    """No thread that watches over slow bars."""


Bar.set_lock(threading.RLock())


def write_line(text: str = "") -> None:
    """A line above the progress bar."""
    Bar.write(text, file=sys.stdout)
    sys.stdout.flush()


def round_bar(total: int, initial: int) -> Bar:
    """Only on a terminal."""
    is_hidden = not sys.stderr.isatty()
    return Bar(total=total, initial=initial, unit="round", leave=False, disable=is_hidden, dynamic_ncols=True)


class Console(Callback):
    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)
        self._bar = Bar(disable=True)

    def on_run_begin(self, context: RunContext) -> None:
        self._bar = round_bar(context.config.rounds, context.rounds_done)

    def on_round_end(self, record: RoundRecord, context: RunContext) -> None:
        self._seconds.append(record.seconds.total + (record.seconds.diagnostics or 0.0))
        write_line(fit_fields(self.fields(record, context), terminal_width()))
        self._bar.update()

    def on_run_end(self, summary: Summary, context: RunContext) -> None:
        self._bar.close()
        if summary["finished"]:
            folder, width = os.fspath(context.folder), terminal_width()
            for line in summary_lines(summary, context.primary_metric, folder, width):
                write_line(line)

    def close(self) -> None:
        self._bar.close()

    def fields(self, record: RoundRecord, context: RunContext) -> list[str]:
        """The most important first: a narrow terminal shows fewer."""
        rounds, seconds, train_loss = context.config.rounds, record.seconds, record.train_loss
        score, loss = self._test_fields(record, context)
        return [
            f"round {record.round:>{len(str(rounds))}}/{rounds}",
            score,
            f"{self._time_left(rounds - record.round):>15}",
            *([f"dropped {len(record.dropped)}"] if record.dropped else []),
            loss,
            *([f"train loss {train_loss:.4f}"] if train_loss is not None else []),
            f"{seconds.total:6.2f} s ({min(1.0, seconds.local / seconds.total):4.0%} local)",
            f"{format_bytes(record.bytes_down + record.bytes_up):>7} sent",
            *([f"{format_duration(seconds.diagnostics)} of diagnostics"] if seconds.diagnostics else []),
        ]

    def _time_left(self, rounds: int) -> str:
        seconds = rounds * statistics.fmean(self._seconds)
        return f"{format_duration(seconds)} left" if seconds else ""

    def _test_fields(self, record: RoundRecord, context: RunContext) -> tuple[str, str]:
        metric = context.primary_metric
        score = record.test.get(metric.name)
        if score is None:
            return " " * (len(metric.name) + 8), " " * 16
        return f"{metric.name} {metric.format(score):>7}", f"test loss {record.test['loss']:.4f}"


class Warnings(logging.Handler):
    """Log records as lines above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
            Bar.write(self.format(record), file=sys.stderr)
