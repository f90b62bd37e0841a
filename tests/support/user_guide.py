"""docs/yours.md as a reader follows it: its files, its commands, and the package installed beside the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT, environment
from tests.support.snippets import Snippet, snippets

GUIDE = ROOT / "docs" / "yours.md"


def blocks(language: str) -> list[Snippet]:
    return [s for s in snippets(language) if s.document == GUIDE]


def file_of(snippet: Snippet) -> str | None:
    """The name on the line before a block, if it is to be a file."""
    before = GUIDE.read_text().splitlines()[snippet.line - 3]
    found = re.fullmatch(r"`([\w.]+)`:", before)
    return found[1] if found else None


def write_files(folder: Path) -> None:
    for snippet in [*blocks("python"), *blocks("yaml")]:
        if name := file_of(snippet):
            (folder / name).write_text(snippet.text)


def install(source: Path, target: Path) -> None:
    """The package as `pip install .` leaves it; `source` becomes a copy of what it is built from."""
    for name in ("fl_dist", "launch"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    made = subprocess.run([*pip, "--target", str(target), str(source)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def variables(installed: Path) -> dict[str, str]:
    """An environment in which the installed package is the only one."""
    path = os.pathsep.join([str(installed / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return environment(PATH=path, PYTHONPATH=str(installed), WANDB_MODE="disabled")
