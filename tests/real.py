"""Published files that a machine may have, in the folder that FL_DIST_DATA names."""

import os
from pathlib import Path

import pytest


def real(name: str) -> Path:
    """A file or folder there; who says where they are wants them tested."""
    if not (folder := os.environ.get("FL_DIST_DATA")):
        pytest.skip("FL_DIST_DATA does not say where published files are")
    if not (found := Path(folder, name)).exists():
        pytest.fail(f"{name} is not in FL_DIST_DATA, {folder}")
    return found
