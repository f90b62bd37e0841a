"""Checks as a table for people, and as JSON for a bug report."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from fl_dist import __version__
from fl_dist.common.formatting import format_duration, pluralize
from fl_dist.doctor.checks import Check, Status

MIN_TEXT_WIDTH = 40


def table_lines(checks: Sequence[Check], seconds: float, columns: int) -> list[str]:
    """One row per check: status, name and what was measured; below it what to do, if something is to be done."""
    width = max(len(check.name) for check in checks)
    lines = [line for check in checks for line in _row(check, width, columns)]
    return [*lines, "", _summary_line(checks, seconds)]


def _row(check: Check, width: int, columns: int) -> list[str]:
    text_width = max(MIN_TEXT_WIDTH, columns - width - 11)
    texts = [check.measured, *([f"-> {check.advice}"] if check.advice else [])]
    pieces = [piece for text in texts for piece in textwrap.wrap(text, text_width, subsequent_indent="   ")]
    heads = [f"{check.status:<7}  {check.name:<{width}}", *[" " * (width + 9)] * len(pieces)]
    return [f"{head}  {piece}".rstrip() for head, piece in zip(heads, pieces, strict=False)]


def _summary_line(checks: Sequence[Check], seconds: float) -> str:
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    fields = [f"{count} {status}" for status, count in counts.items() if count]
    return f"{pluralize(len(checks), 'check')}: {', '.join(fields)}; {format_duration(seconds)}"


def to_json(checks: Sequence[Check], seconds: float) -> str:
    content: dict[str, Any] = {"fl_dist": __version__, "seconds": round(seconds, 1)}
    return json.dumps(content | {"checks": [check._asdict() for check in checks]}, indent=1) + "\n"


def exit_code(checks: Sequence[Check]) -> int:
    return int(any(check.status is Status.FAILED for check in checks))
