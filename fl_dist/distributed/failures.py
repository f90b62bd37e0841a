"""Why a job ends, as all ranks are told."""

import errno
import json
from collections.abc import Sequence
from typing import NamedTuple

from fl_dist.common.errors import FlDistError

TRANSIENT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors of disks and networks that may be gone a minute later."""


class RankLostError(FlDistError, RuntimeError):
    """The ranks of the job did not find each other. The message names those that are missing."""

    def __init__(self, message: str, code: int = 1, ranks: Sequence[int] = (), is_transient: bool = True) -> None:
        super().__init__(message)
        self.code, self.ranks, self.is_transient = code, ranks, is_transient


class Failure(NamedTuple):
    """Why the job ends; ranks exchange it as JSON."""

    message: str
    code: int = 1
    is_transient: bool = True
    ranks: tuple[int, ...] = ()
    """The lost ranks, if any."""

    @classmethod
    def parse(cls, text: str) -> "Failure":
        message, code, is_transient, ranks = json.loads(text)
        return cls(message, code, is_transient, tuple(ranks))


def is_transient(error: Exception) -> bool:
    """Whether a restart may help: a process, a machine or a connection failed, not the run itself."""
    if isinstance(error, RankLostError):
        return error.is_transient
    cause = error.__cause__ if isinstance(error, FlDistError) and error.__cause__ else error  # such as a callback's
    return isinstance(cause, OSError) and cause.errno in TRANSIENT_ERRNOS
