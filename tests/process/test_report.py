"""The report of a real run; Ctrl-C ends the report server."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import timing
from tests.support.processes import environment, start_process
from tests.support.report_pages import ALL_SECTIONS, render_data, traces, train_with_diagnostics
from tests.support.sample_runs import round_record, write_run
from tests.support.waiting import TIMEOUT_SECONDS


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_with_diagnostics(tmp_path_factory.mktemp("real") / "run")


class TestPage:
    def test_the_report_of_a_real_run_has_all_sections(self, working_folder: Path, real_run: Path) -> None:
        data = render_data(real_run)
        assert "1 run: 1 finished" in data["runCounts"]
        assert [section["id"] for section in data["sections"]] == ALL_SECTIONS
        assert {*traces(data, "times/0")["busy"]["y"]} == {"worker 1", "worker 2"}
        sample, actual = round_record(2), json.loads((real_run / "metrics.jsonl").read_text().splitlines()[-1])
        assert {*sample} == {*actual} and {*sample["norms"]} == {*actual["norms"]}
        assert {*sample["seconds"]} == {*actual["seconds"]} and {*sample["spread"]} == {*actual["spread"]}
        assert {rank: {*worker} for rank, worker in sample["workers"].items()} == {
            rank: {*worker} for rank, worker in actual["workers"].items()
        }


class TestServer:
    @timing
    def test_ctrl_c_ends_the_server_with_one_line(self, working_folder: Path) -> None:
        write_run(working_folder / "a")
        command = [sys.executable, "-m", "fl_dist.report", "a", "--serve"]
        with start_process(command, cwd=working_folder, env=environment(), stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            match = re.fullmatch(r"the report is at http://127\.0\.0\.1:(\d+)/ until Ctrl-C\n", line)
            assert match, line
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_SECONDS) == 0
            assert (process.stdout.read(), process.stderr.read()) == ("ended\n", "")
            process.stderr.close()
