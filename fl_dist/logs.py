"""Where the log goes during a run: warnings to the terminal of rank 0, everything to a file of each rank."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from fl_dist.callbacks.always_on.console import Warnings
from fl_dist.common.terminal import handle_log
from fl_dist.distributed.rank_info import RankInfo, is_rank0
from fl_dist.storage.run_folder import RunFolder


class RankLogHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """A full disk must not fill the terminal with tracebacks."""


class OneLineFormatter(logging.Formatter):
    def formatException(self, ei: object) -> str:  # noqa: N802 (logging's name)
        """Tracebacks are only in the log."""
        return ""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).rstrip("\n")


@contextlib.contextmanager
def show_warnings(rank_info: RankInfo | None) -> Iterator[None]:
    """Within it, rank 0 prints warnings; an error ends the program, which prints it."""
    handler = Warnings() if is_rank0(rank_info) else logging.NullHandler()
    handler.setFormatter(OneLineFormatter("warning: %(message)s"))
    handler.addFilter(lambda record: record.levelno == logging.WARNING)
    with handle_log("fl_dist", handler):
        yield


@contextlib.contextmanager
def write_log(folder: RunFolder, rank: int) -> Iterator[Path]:
    """The log file of this rank, in a folder that the run has locked."""
    file = folder.logs / f"rank{rank}.log"
    handler = RankLogHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    with handle_log("fl_dist", handler):
        yield file
