"""Errors that end a run: in one line, in the log, as an exit code, and as the message to all ranks."""

import errno
import logging
from collections.abc import Sequence
from typing import NamedTuple

from fl_dist.common.errors import ConfigError, FlDistError, describe_error, error_location, error_message
from fl_dist.common.terminal import print_error
from fl_dist.distributed import hardware_errors
from fl_dist.distributed.rank_exit import exit_rank
from fl_dist.distributed.rank_info import RankInfo, is_rank0
from fl_dist.distributed.signals import EXIT_BAD_CONFIG

log = logging.getLogger(__name__)
SELF_EXPLANATORY = (FlDistError, ValueError, OSError)
"""Errors whose message is understood without their class."""
TRANSIENT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors of disks and networks that may be gone a minute later."""


class RankLostError(FlDistError, RuntimeError):
    """The ranks of the job did not find each other. The message names those that are missing."""

    def __init__(self, message: str, code: int = 1, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.code, self.ranks = code, ranks


class Failure(NamedTuple):
    """Why the job ends; ranks exchange it as JSON."""

    message: str
    code: int = 1
    is_transient: bool = True
    ranks: Sequence[int] = ()
    """The lost ranks, if any."""


def is_transient(error: Exception) -> bool:
    """Whether a restart may help: a process, a machine or a connection failed, not the run itself."""
    cause = error.__cause__ if isinstance(error, FlDistError) and error.__cause__ else error  # such as a callback's
    return isinstance(error, RankLostError) or (isinstance(cause, OSError) and cause.errno in TRANSIENT_ERRNOS)


def exit_code(error: Exception) -> int:
    return EXIT_BAD_CONFIG if isinstance(error, ConfigError) else error.code if isinstance(error, RankLostError) else 1


def needs_traceback(error: BaseException) -> bool:
    """Whether the root cause was not foreseen, or lies in the user's code: then the message is not enough."""
    while isinstance(error, FlDistError) and not isinstance(error, RankLostError) and error.__cause__ is not None:
        error = error.__cause__
    is_foreseen = isinstance(error, FlDistError) and not error_location(error)
    return not is_foreseen and not hardware_errors.is_out_of_memory(error)


def error_line(error: BaseException) -> str:
    """An error in one line, with its notes."""
    is_clear = isinstance(error, SELF_EXPLANATORY)
    line = f"{error_message(error)}{error_location(error)}" if is_clear else describe_error(error)
    return "; ".join([hardware_errors.describe_hardware_error(error) or line, *getattr(error, "__notes__", [])])


def log_error(error: Exception) -> None:
    """Write an error to the log, with its traceback if that is needed."""
    extra = {"is_transient": is_transient(error), "ranks": error.ranks if isinstance(error, RankLostError) else ()}
    log.error("%s", error_line(error), exc_info=error if needs_traceback(error) else None, extra=extra)


def exit_error(caught: SystemExit | KeyboardInterrupt) -> Exception:
    """User code that calls sys.exit must not end a run as if it had finished. A signal raises neither in a run."""
    what = f"called sys.exit({caught.code!r})" if isinstance(caught, SystemExit) else "raised KeyboardInterrupt"
    error = RuntimeError(f"something {what}{error_location(caught)}")
    error.__cause__ = caught
    return error


def end_failed_run(error: Exception, rank_info: RankInfo | None, code: int, with_traceback: bool) -> int:
    """Rank 0 prints the error. A rank of a job leaves at once; one process alone returns the exit code."""
    if is_rank0(rank_info):
        print_error(error_line(error), error if with_traceback else None)
    if rank_info is not None:
        exit_rank(code)
    return code
