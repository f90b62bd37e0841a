"""What some tests need and a machine may lack.

A test without it is skipped with the reason, and fails where FL_DIST_REQUIRE names it:
FL_DIST_REQUIRE=slurm,browser,root,data
"""

import os
from pathlib import Path
from typing import NoReturn

import pytest

KNOWN = ("slurm", "browser", "root", "data")


def required() -> list[str]:
    """What must not be skipped here."""
    names = [name for name in os.environ.get("FL_DIST_REQUIRE", "").split(",") if name]
    if unknown := sorted(set(names) - set(KNOWN)):
        raise pytest.UsageError(f"FL_DIST_REQUIRE names {', '.join(unknown)}; known are {', '.join(KNOWN)}")
    return names


def lacking(name: str, reason: str) -> NoReturn:
    """Skip the test, or let it fail where the requirement has to be met."""
    assert name in KNOWN
    if name in required():
        pytest.fail(f"FL_DIST_REQUIRE names {name}, but {reason}")
    pytest.skip(reason)


def published(name: str) -> Path:
    """A published file or folder, from the folder that FL_DIST_DATA names."""
    if not (folder := os.environ.get("FL_DIST_DATA")):
        lacking("data", "FL_DIST_DATA does not say where published files are")
    if not (found := Path(folder, name)).exists():
        pytest.fail(f"{name} is not in FL_DIST_DATA, {folder}")
    return found
