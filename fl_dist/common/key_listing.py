"""Every key of a configuration as text, for `--help`: building it from the code imports torch, which takes seconds.

`python -m fl_dist.config.help` writes it; a test compares it with the code.
"""

import re
from pathlib import Path

KEY_LISTING = Path(__file__).parents[1] / "config" / "keys.txt"
_DIAGNOSTIC = re.compile(r"diagnostics\.(\w+)   (.+)")


def read_key_listing() -> list[str]:
    """The lines of `help_lines`, without names of builders."""
    return KEY_LISTING.read_text(encoding="utf-8").splitlines()


def list_diagnostics() -> dict[str, str]:
    """The name of every diagnostic, and what it measures."""
    matches = (_DIAGNOSTIC.fullmatch(line) for line in read_key_listing())
    return {match[1]: match[2] for match in matches if match is not None}
