"""Optional requirements of tests.

A test whose requirement is missing is skipped with the reason; it fails if FL_DIST_REQUIRE names the requirement:
FL_DIST_REQUIRE=slurm,browser,root,data
"""

import os
from pathlib import Path
from typing import NoReturn

import pytest

REQUIREMENTS = ("slurm", "browser", "root", "data")


def required_names() -> list[str]:
    """The requirements that must not be skipped."""
    names = [name for name in os.environ.get("FL_DIST_REQUIRE", "").split(",") if name]
    if unknown := sorted(set(names) - set(REQUIREMENTS)):
        raise pytest.UsageError(f"FL_DIST_REQUIRE names {', '.join(unknown)}; known are {', '.join(REQUIREMENTS)}")
    return names


def skip_or_fail(name: str, reason: str) -> NoReturn:
    """Skip the test, or fail it if the requirement must be met."""
    assert name in REQUIREMENTS
    if name in required_names():
        pytest.fail(f"FL_DIST_REQUIRE names {name}, but {reason}")
    pytest.skip(reason)


def published_path(name: str) -> Path:
    """A published file or folder below FL_DIST_DATA."""
    if not (folder := os.environ.get("FL_DIST_DATA")):
        skip_or_fail("data", "FL_DIST_DATA does not say where published files are")
    if not (path := Path(folder, name)).exists():
        pytest.fail(f"{name} is not in FL_DIST_DATA, {folder}")
    return path
