"""Follow a guide of the docs: write its files and install the package into a separate folder."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import ROOT, environment
from tests.support.snippets import Snippet, snippets
from tests.support.waiting import TIMEOUT_SECONDS

TUTORIALS = ROOT / "docs" / "tutorials"
GUIDE = (TUTORIALS / "model.md", TUTORIALS / "data.md", TUTORIALS / "method.md")
"""In the order in which a reader follows them, in one folder."""
CALLBACKS = (TUTORIALS / "callback.md",)
NEW_ALGORITHM = (TUTORIALS / "algorithm.md",)
PYTHON = (ROOT / "docs" / "how-to" / "python.md",)
PROCESS_PER_CLIENT = (ROOT / "docs" / "how-to" / "process-per-client.md",)
TEXT = (ROOT / "docs" / "how-to" / "text.md",)
LANGUAGE_MODELS = (ROOT / "docs" / "how-to" / "language-models.md", TUTORIALS / "language-model.md")
OPTIMIZERS = (ROOT / "docs" / "how-to" / "optimizers.md",)


def guide_snippets(language: str, guide: Sequence[Path] = GUIDE) -> list[Snippet]:
    return [s for page in guide for s in snippets(language) if s.document == page]


def needs_user_files(snippet: Snippet) -> bool:
    """Whether the block needs files of the reader; these documents have their own tests."""
    own = (*GUIDE, *CALLBACKS, *NEW_ALGORITHM, *PYTHON, *PROCESS_PER_CLIENT, *TEXT, *OPTIMIZERS, *LANGUAGE_MODELS)
    return snippet.document in own


def snippet_file_name(snippet: Snippet) -> str | None:
    """The file name on the line before a code block, if there is one."""
    line = snippet.document.read_text().splitlines()[snippet.line - 3]
    match = re.fullmatch(r"`([\w.]+)`:", line)
    return match[1] if match else None


def write_files(folder: Path, guide: Sequence[Path] = GUIDE) -> None:
    for snippet in [*guide_snippets("python", guide), *guide_snippets("yaml", guide)]:
        if name := snippet_file_name(snippet):
            (folder / name).write_text(snippet.text)


def follow_guide(folder: Path, installed: Path, guide: Sequence[Path] = GUIDE) -> None:
    """Write the guide's files into the folder and run its commands there."""
    write_files(folder, guide)
    for command in [command for snippet in guide_snippets("sh", guide) for command in snippet.commands()]:
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=installed_environment(installed),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}{result.stderr[-3000:]}"


def install_package(source: Path, target: Path) -> None:
    """Install as `pip install .` does; `source` becomes a copy of the sources."""
    for name in ("fl_dist", "launch"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    result = subprocess.run([*pip, "--target", str(target), str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def installed_environment(installed: Path) -> dict[str, str]:
    """An environment in which only the installed package is importable."""
    path = os.pathsep.join([str(installed / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return environment(PATH=path, PYTHONPATH=str(installed), WANDB_MODE="disabled")
