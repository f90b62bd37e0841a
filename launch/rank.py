"""One rank as torchrun starts it: `fl_dist.main`, with its exit code written to a file.

torchrun takes every exit code but 0 for a failure to be retried. A run that was interrupted, is misconfigured or
reported an error of its own must not be restarted: its code goes to the file, and torchrun sees a rank that succeeded.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType

from fl_dist.common import terminal
from fl_dist.distributed.rank_exit import call_before_exit
from fl_dist.distributed.signals import EXIT_BAD_CONFIG, EXIT_REQUEUE, HANDLED_SIGNALS, end_with_parent
from launch.node import NO_RESTART_CODES, Node, find_node


class FirstErrorHandler(logging.Handler):
    """Context: records the first error that fl_dist logged, and whether a restart may fix it."""

    message: str | None = None
    is_transient = False
    lost_ranks: Sequence[int] = ()

    def __enter__(self) -> "FirstErrorHandler":
        self.setLevel(logging.ERROR)
        logging.getLogger("fl_dist").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fl_dist").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if self.message is None:
            self.message = record.getMessage().splitlines()[0]
            self.is_transient = getattr(record, "is_transient", False)
            self.lost_ranks = getattr(record, "ranks", ())


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(EXIT_REQUEUE)


def run_main(arguments: list[str]) -> int:
    """The exit code of main. A signal before main installs its handlers ends the rank at once."""
    try:
        for number in HANDLED_SIGNALS:
            signal.signal(number, _exit_on_signal)
        from fl_dist.main import main  # seconds of imports, in which signals may arrive

        return main(arguments)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1
    finally:
        for number in HANDLED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def run_rank() -> int:
    node, rank = find_node(), int(os.environ["LOCAL_RANK"])
    end_with_parent()
    node.register(rank)
    with FirstErrorHandler() as error:
        finish = partial(_finish, node, rank, error)
        with call_before_exit(finish):  # a rank of a job that fails does not return
            code = EXIT_REQUEUE if node.is_stopping else run_main(sys.argv[1:])
    return finish(code)


def _finish(node: Node, rank: int, error: FirstErrorHandler, code: int) -> int:
    """Record the exit code of main; the returned one is for torchrun."""
    # The launcher reports a rank that has ended; a suspended server is reported by nobody but rank 1.
    if os.environ["RANK"] == os.environ["LOCAL_RANK"] == "1" and 0 in error.lost_ranks and node.is_rank_alive(0):
        terminal.print_error(f"{error.message}; start the same command to resume")
    is_fatal = code == EXIT_BAD_CONFIG or (code not in NO_RESTART_CODES and not error.is_transient)
    node.record_exit(rank, code, is_fatal)
    # After a fatal error of the server, the other ranks may only have noticed that it was gone.
    return 0 if code in NO_RESTART_CODES or node.has_fatal_error else code


if __name__ == "__main__":
    terminal.run_program(run_rank)
