"""Plain data of files, whatever it holds, as numbers that a chart can show."""

from typing import Any

MAX_NUMBER = 1e300
"""Larger numbers count as infinite: no chart can show them."""


def mapping_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def finite_or_none(value: Any) -> float | None:
    """The value, if it is a number that a chart can show."""
    return value if type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER else None


def rounded_number(value: Any) -> float | None:
    """The same with as many digits as a chart shows."""
    number = finite_or_none(value)
    return float(f"{number:.6g}") if isinstance(number, float) else number


def number_list(value: Any) -> list[float | None]:
    """A list of numbers, None where they are not finite; empty if it is none."""
    numbers = [rounded_number(entry) for entry in value] if isinstance(value, list) else []
    return numbers if any(number is not None for number in numbers) else []


def number_grid(value: Any) -> list[list[float | None]]:
    """Equally long lists of numbers; empty if it is none."""
    if not isinstance(value, list) or not all(isinstance(line, list) for line in value):
        return []
    grid = [[rounded_number(entry) for entry in line] for line in value]
    return grid if grid and grid[0] and len({len(line) for line in grid}) == 1 else []
