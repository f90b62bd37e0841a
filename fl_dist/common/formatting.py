"""Numbers, and what users wrote, as people read them."""

import difflib
from collections.abc import Callable, Iterable, Sequence

MAX_COMPARED_LENGTH = 100
"""Letters of a misspelt word that are compared with the valid ones: each costs time."""


def pluralize(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def align_columns(rows: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.ljust) -> list[str]:
    """The lines of a table; `align`: of all columns but the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ([row[0].ljust(widths[0]), *map(align, row[1:], widths[1:])] for row in rows)
    return ["  ".join(cells).rstrip() for cells in aligned]


def shorten(value: object, max_length: int = 100) -> str:
    """Text of a user as a piece of a message: one line, cut if it is long."""
    text = str(value)
    text = text if len(text) <= max_length else f"{text[: max_length - 3]}..."
    return "".join(c if c.isprintable() else "?" for c in text)


def suggest(word: str, valid: Iterable[str]) -> str:
    """A hint for a misspelt word: the nearest valid one, or all of them."""
    valid = sorted(valid)
    close = difflib.get_close_matches(word[:MAX_COMPARED_LENGTH], valid, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid) or 'none'}"
