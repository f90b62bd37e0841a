"""Numbers, inputs and errors as people read them."""

import difflib
from collections.abc import Iterable

LONGEST = 2000
"""Characters of a message, whatever it repeats."""
LONGEST_WORD = 100
"""Letters in which a misspelt word is compared with others: each costs time."""


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def shortened(value: object, most: int = 100) -> str:
    """Something that a user wrote, as a piece of a message: its beginning, if it is long, and in one line."""
    text = str(value)
    cut = text if len(text) <= most else f"{text[: most - 3]}..."
    return "".join(c if c.isprintable() else "?" for c in cut)


def message(error: BaseException | str) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {shortened(error.filename)}" if error.filename else "")
    return shortened(" ".join(str(error).split()) or type(error).__name__, LONGEST)


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint for a misspelt word: the nearest valid one, or all of them."""
    valid = sorted(valid)
    close = difflib.get_close_matches(word[:LONGEST_WORD], valid, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid) or 'none'}"
