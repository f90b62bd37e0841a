"""Paths as users write them: with ~ and with $VARIABLES."""

import os
import re
from pathlib import Path

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def expand(text: str | Path) -> Path:
    """The path with the home folder and variables filled in; ValueError names a variable that is not set."""
    path = os.path.expandvars(os.path.expanduser(text))
    if unset := _VARIABLE.search(path):
        raise ValueError(f"the path {text} names {unset[0]}, which is not set in the environment")
    return Path(path)
