"""`python -m fl_dist.results` prints the same as its main."""

import sys
from pathlib import Path

import pytest

from fl_dist.results.__main__ import main
from tests.support.cli import make_invoker
from tests.support.processes import environment, run
from tests.support.sample_runs import write_run


def test_the_command_prints_the_same_as_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_run(tmp_path / name)
    code, output = run([sys.executable, "-m", "fl_dist.results", "a", "b"], cwd=tmp_path, env=environment())
    result = make_invoker(main)("a", "b")
    assert (code, result.code, result.err) == (0, 0, "")
    assert output == result.out and len(result.lines) > 2
