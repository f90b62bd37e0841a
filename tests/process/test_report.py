"""The report of a real run, and a server that Ctrl-C ends."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_runs import pretend, row
from tests.support.marks import timing
from tests.support.processes import environment, started
from tests.support.report_pages import ALL, data, traces, train_with_diagnostics
from tests.support.waiting import PATIENCE


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_with_diagnostics(tmp_path_factory.mktemp("real") / "run")


class TestPage:
    def test_a_real_run(self, here: Path, real: Path) -> None:
        shown = data(real)
        assert "1 run: 1 finished" in shown["told"]
        assert [section["id"] for section in shown["sections"]] == ALL
        assert {*traces(shown, "times/0")["busy"]["y"]} == {"worker 1", "worker 2"}
        pretended, found = row(2), json.loads((real / "metrics.jsonl").read_text().splitlines()[-1])
        assert {*pretended} == {*found} and {*pretended["norms"]} == {*found["norms"]}
        assert {*pretended["seconds"]} == {*found["seconds"]} and {*pretended["spread"]} == {*found["spread"]}
        assert {rank: {*told} for rank, told in pretended["workers"].items()} == {
            rank: {*told} for rank, told in found["workers"].items()
        }


class TestServer:
    @timing
    def test_ctrl_c_ends_it_in_one_line(self, here: Path) -> None:
        pretend(here / "a")
        command = [sys.executable, "-m", "fl_dist.report", "a", "--serve"]
        with started(command, cwd=here, env=environment(), stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            said = process.stdout.readline()
            found = re.fullmatch(r"the report is at http://127\.0\.0\.1:(\d+)/ until Ctrl-C\n", said)
            assert found, said
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0
            assert (process.stdout.read(), process.stderr.read()) == ("ended\n", "")
            process.stderr.close()
