"""The documents say what the program says."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT, environment


@pytest.mark.parametrize("document", ["README.md", "docs/algorithms.md"])
def test_the_table_of_algorithms_is_the_programs(document: str) -> None:
    command = [sys.executable, "-m", "fl_dist.algorithms", "--markdown"]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True).stdout
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 29
    assert "\n".join(rows) in (ROOT / document).read_text()


def test_every_linked_file_exists() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in document.read_text().split("](")[1:]:
            name = target.split(")")[0].split("#")[0]
            if name and "://" not in name:
                assert (document.parent / Path(name)).exists(), f"{document.name} links to {name}"
