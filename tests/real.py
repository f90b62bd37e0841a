"""Published files that a machine may have: where FL_DIST_DATA says, or in shared/data beside the project."""

import os
from pathlib import Path

import pytest

from tests.jobs import ROOT

FOLDER = Path(os.environ.get("FL_DIST_DATA") or ROOT.parent / "shared" / "data")


def real(name: str) -> Path:
    """A file or folder there; without it, the test is skipped."""
    if not (found := FOLDER / name).exists():
        pytest.skip(f"{name} is not in {FOLDER}; FL_DIST_DATA says where published files are")
    return found
