"""Numbers as published, to show beside ours."""

import csv
import math
from pathlib import Path

from fl_dist.common.errors import ConfigError
from fl_dist.common.formatting import shorten

PUBLISHED = ("sweep", "row", "column", "measure", "value", "std")
Published = dict[tuple[str, str, str], tuple[str, str]]


def read_published(file: Path, sweep: str) -> Published:
    """Value and deviation by row, column and measure."""
    try:
        with open(file, encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            rows, head = list(reader), reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise ConfigError(f"cannot read the published numbers in {file}: {e}") from None
    if set(head) != set(PUBLISHED):
        raise ConfigError(f"{file} has another header: its first line has to be {','.join(PUBLISHED)}")
    for number, row in enumerate(rows, 2):
        if set(row) != set(PUBLISHED) or None in row.values():
            raise ConfigError(f"{file}, line {number} has to have the fields {', '.join(PUBLISHED)}")
        for key in ("value", "std"):
            if not _is_number(row[key], key):
                raise ConfigError(f"{file}, line {number}: {key} is {shorten(repr(row[key]))}, not a number")
    own = [row for row in rows if row["sweep"] == sweep]
    return {(row["row"], row["column"], row["measure"]): (row["value"], row["std"]) for row in own}


def _is_number(text: str, key: str) -> bool:
    """Or x for a target that was not reached or training that failed; a deviation may be empty."""
    if text == ("x" if key == "value" else ""):
        return True
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
