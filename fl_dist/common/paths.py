"""Paths as users write them: with ~ and with $VARIABLES."""

import os
import re
from pathlib import Path

from fl_dist.common.errors import UserError
from fl_dist.common.formatting import shorten

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def expand_path(text: str | Path) -> Path:
    """The path with the home folder and variables filled in; UserError names a variable that is not set."""
    path = os.path.expandvars(os.path.expanduser(text))
    if "\0" in path:
        raise UserError(f"the path {shorten(text)} holds a NUL character, which no file name can")
    if unset := _VARIABLE.search(path):
        raise UserError(f"the path {shorten(text)} names {shorten(unset[0])}, which is not set in the environment")
    return Path(path)
