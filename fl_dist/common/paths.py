"""Paths as users write them: with ~ and with $VARIABLES."""

import os
import re
from pathlib import Path

from fl_dist.common.words import shortened

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def expand(text: str | Path) -> Path:
    """The path with the home folder and variables filled in; ValueError names a variable that is not set."""
    path = os.path.expandvars(os.path.expanduser(text))
    if "\0" in path:
        raise ValueError(f"the path {shortened(text)} holds a NUL character, which no file's name can")
    if unset := _VARIABLE.search(path):
        raise ValueError(f"the path {shortened(text)} names {shortened(unset[0])}, which is not set in the environment")
    return Path(path)
