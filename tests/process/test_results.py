"""The command that makes tables says the same as its main."""

import sys
from pathlib import Path

import pytest

from fl_dist.results.__main__ import main
from tests.support.fake_runs import pretend
from tests.support.processes import environment, run
from tests.support.programs import asker


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        pretend(tmp_path / name)
    code, output = run([sys.executable, "-m", "fl_dist.results", "a", "b"], cwd=tmp_path, env=environment())
    said = asker(main)("a", "b")
    assert (code, said.code, said.err) == (0, 0, "")
    assert output == said.out and len(said.lines) > 2
