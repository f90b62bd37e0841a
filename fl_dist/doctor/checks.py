"""What a check says, and what ranks report to it."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from fl_dist.common.formatting import shorten

MAX_ERROR_LENGTH = 300


class Status(StrEnum):
    OK = "ok"
    SLOW = "slow"
    WARNING = "warning"
    FAILED = "failed"


class Check(NamedTuple):
    name: str
    status: Status
    measured: str
    advice: str = ""


class Report(NamedTuple):
    """What one rank measured of one subject; `error` instead if it could not."""

    rank: int
    host: str
    values: dict[str, Any]

    @property
    def label(self) -> str:
        return f"rank {self.rank} on {self.host}"


def find_error(name: str, reports: Sequence[Report], advice: str) -> Check | None:
    """A failed check if a rank could not measure."""
    failed = [report for report in reports if "error" in report.values]
    if not failed:
        return None
    others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    error = shorten(failed[0].values["error"], MAX_ERROR_LENGTH)
    return Check(name, Status.FAILED, f"{failed[0].label}: {error}{others}", advice)


def find_difference(reports: Sequence[Report], keys: Sequence[str]) -> str:
    """The first value that differs from rank 0's, as text; empty if all are alike."""
    for report in reports[1:]:
        for key in keys:
            first, other = reports[0].values.get(key), report.values.get(key)
            if first != other:
                return f"{key} is {other} for {report.label}, but {first} for {reports[0].label}"
    return ""
