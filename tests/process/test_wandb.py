"""The offline record of W&B is complete however a job ends; the terminal shows progress early."""

import contextlib
import fcntl
import json
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fl_dist.callbacks.always_on.wandb import WandbMirror
from fl_dist.config import load
from fl_dist.metrics.keys import list_keys
from fl_dist.metrics.summary import MEANINGS
from fl_dist.metrics.wandb_process import FINISH_SECONDS, IGNORED_SIGNALS
from fl_dist.tasks.classification import Classification
from tests.support.checkpoints import replace_by_file
from tests.support.marks import exhaustive, timing
from tests.support.processes import ROOT, environment, pause_processes, run, start_process, start_ranks
from tests.support.run_folder import newest_saved_round, read_records
from tests.support.sample_runs import append_records, round_record, write_run
from tests.support.waiting import TIMEOUT_SECONDS, wait_for
from tests.support.wandb_records import offline_records, read_entries, select_entries

SMALL = ("rounds=3", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")


def test_the_offline_record_holds_every_round_and_lies_below_the_run(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    command = [sys.executable, "-m", "fl_dist.main", *SMALL, f"run.dir={tmp_path / 'run'}"]
    code, output = run(command, env=environment(HOME=str(home)))
    assert code == 0, output
    assert not [p for p in home.rglob("*") if p.is_file()]
    runs = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 1
    identity = (tmp_path / "run" / "wandb" / "id").read_text()
    assert identity in runs[0].name
    history = select_entries("history", read_entries(runs[0].parent, HOME=str(home)))
    assert [record["item"]["1_test/accuracy"] for record in history] == [
        r["test_accuracy"] for r in read_records(tmp_path / "run")
    ]


@exhaustive
@timing
def test_training_continues_if_wandb_cannot_connect(tmp_path: Path) -> None:
    env = environment(HOME=str(tmp_path), WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    command = [sys.executable, "-m", "fl_dist.main", *SMALL, f"run.dir={tmp_path / 'run'}"]
    code, output = run([*command, "monitor.wandb.mode=online"], env=env)
    assert code == 0, output
    assert len(read_records(tmp_path / "run")) == 3
    assert "W&B" in output
    assert "0" * 40 not in output


@pytest.fixture
def silent_server() -> Iterator[dict[str, str]]:
    """The variables of a W&B server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}


@timing
@pytest.mark.parametrize("can_save", [True, False])
def test_a_silent_wandb_server_neither_delays_nor_hides_how_a_run_ends(
    can_save: bool, silent_server: dict[str, str], tmp_path: Path
) -> None:
    """The grace period, shorter than W&B's own limit, is that of the round and of its save."""
    folder = tmp_path / "run"
    settings = [*SMALL, "rounds=100000", "checkpoint.grace=6", "monitor.wandb.mode=online", f"run.dir={folder}"]
    with start_ranks(1, settings, HOME=str(tmp_path), **silent_server) as (process,):
        wait_for(lambda: newest_saved_round(folder), "a checkpoint")
        if not can_save:
            with pause_processes([process.pid]):
                replace_by_file(folder / "checkpoint")
        os.kill(process.pid, signal.SIGTERM)
        start_time = time.monotonic()
        output = process.communicate()[0]
    assert process.returncode == (75 if can_save else 1), output
    assert time.monotonic() - start_time < 2 * FINISH_SECONDS["online"]
    assert ("interrupted after round" if can_save else "interrupted, and the run could not be saved") in output
    assert "within checkpoint.grace" not in output and "W&B" in output


DIAGNOSTICS = (
    *("diagnostics={sharpness: {every: 1}, clients: {every: 3}, surface: {every: 3, points: 2}}", "algorithm=scaffold"),
    *("monitor.wandb.group=some", "monitor.wandb.job_type=SCAFFOLD"),
)


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of three ranks, and the contents of its offline record: its text and its entries."""
    folder = tmp_path_factory.mktemp("offline") / "run"
    settings = [*SMALL, *DIAGNOSTICS, "evaluate.where=workers", "clients.validation=0.2", f"run.dir={folder}"]
    code, output = run([sys.executable, "-m", "launch.local", "-n", "3", *settings])
    assert code == 0, output
    (record,) = offline_records(folder)
    entries = read_entries(record)
    return folder, {"text": json.dumps(entries, separators=(",", ":")), "entries": entries}


def test_the_offline_record_holds_every_documented_name(offline_run: tuple[Path, dict[str, Any]]) -> None:
    names = {info.dashboard.replace("<rank>", "1") for info in list_keys() if info.dashboard}
    expected = {
        *(name for name in names - {"9_workers/1/device_memory"} if "<" not in name),  # there is no GPU
        *("round", "1_test/loss", "1_test/accuracy"),
        *("3_diagnostics/sharpness/sharpness", "3_diagnostics/sharpness/gradient_norm", "3_diagnostics/surface"),
        *("3_diagnostics/clients/classes/0", "3_diagnostics/clients/classes/9"),
        *("4_method/control_norm", "5_clients/classes", "8_seconds/diagnostics", "9_workers/0/memory"),
    }
    assert len(expected) > 35
    text = offline_run[1]["text"].replace("._type", "")  # the suffix of images
    assert [name for name in sorted(expected) if f'"{name}"' not in text] == []


STOPPED = "stopped"
"""In the summary only if a callback ended the run, as in tests/unit/test_callbacks.py."""


def test_the_summary_has_the_documented_names(offline_run: tuple[Path, dict[str, Any]]) -> None:
    names = {name.replace("<metric>", "accuracy") for name in MEANINGS}
    assert STOPPED in names
    names.remove(STOPPED)
    assert json.loads((offline_run[0] / "summary.json").read_text()).keys() == names
    assert [name for name in sorted(names) if f'"{name}"' not in offline_run[1]["text"]] == []


def test_the_record_has_hosts_versions_and_images(offline_run: tuple[Path, dict[str, Any]]) -> None:
    folder, record = offline_run
    (attempt,) = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    assert (attempt["round"], attempt["ranks"], len(attempt["hosts"])) == (0, 3, 3)
    assert {"fl_dist", "torch", "python"} <= attempt["versions"].keys()
    assert f'"hosts":{json.dumps(attempt["hosts"], separators=(",", ":"))}' in record["text"]
    sizes = json.loads((folder / "clients.json").read_text())
    assert [sum(record) for record in sizes["classes"]] == sizes["sizes"]
    assert sorted(p.name for p in (folder / "wandb" / "pictures").iterdir()) == ["clients.png", "surface-3.png"]


def test_the_record_has_its_group_and_the_memory_of_rank_0(offline_run: tuple[Path, dict[str, Any]]) -> None:
    folder, record = offline_run
    (entry,) = select_entries("run", record["entries"])
    assert (entry["run_group"], entry["job_type"]) == ("some", "SCAFFOLD")
    assert (entry["run_id"], entry["resume"]) == ((folder / "wandb" / "id").read_text(), True)
    resident = select_entries("stats", record["entries"])[0]["item"]["proc.memory.rssMB"] * 2**20
    rank_0 = [record["workers"]["0"]["memory"] for record in read_records(folder)]
    assert 0.6 * min(rank_0) < resident < 2 * max(rank_0), "the memory of rank 0, not of W&B's own process"


INIT_MESSAGE = {
    "mode": "offline",
    "project": "p",
    "entity": None,
    "group": None,
    "job_type": None,
    "tags": [],
    "config": {},
}
INIT_MESSAGE |= {"about": {}, "primary_metric": {"name": "accuracy", "best": "max"}}


@timing
def test_the_record_is_complete_after_the_signals_of_a_cancelled_job(tmp_path: Path) -> None:
    """The signals end W&B's own process, which does not ignore them."""
    folder = write_run(tmp_path / "run", rounds=9, done=4, detailed=False)
    command = [sys.executable, "-m", "fl_dist.metrics.wandb_process", str(folder)]
    with start_process(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(INIT_MESSAGE) + "\n")
        process.stdin.flush()
        wait_for(lambda: any(file.stat().st_size for file in folder.glob("wandb/*/*.wandb")), "a record")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        for child in children:
            os.kill(int(child), signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        append_records(folder, round_record(5))
        process.stdin.write(json.dumps({"summary": {}, "code": 0}) + "\n")
        process.stdin.close()
        assert process.wait(TIMEOUT_SECONDS) == 0
        assert "Traceback" not in process.stdout.read()
    entries = read_entries(offline_records(folder)[-1])
    assert [entry["item"]["round"] for entry in select_entries("history", entries)] == [1, 2, 3, 4, 5]
    assert entries[-1]["type"] == "exit"
    assert select_entries("run", entries)[0]["run_id"] == (folder / "wandb" / "id").read_text()


@timing
def test_signals_during_its_start_do_not_end_the_wandb_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("fl_dist"), "propagate", True)
    folder = write_run(tmp_path / "run", rounds=3, done=2, detailed=False)
    (folder / "logs").mkdir(exist_ok=True)
    config = load(None, ["monitor.wandb.mode=offline"])
    context = mock.Mock(config=config, folder=folder, primary_metric=Classification().primary_metric)
    callback = WandbMirror()
    callback.on_run_begin(context)
    assert callback._process is not None
    for number in IGNORED_SIGNALS:
        callback._process.send_signal(number)
    callback.on_run_end({"finished": False}, context)
    assert caplog.text == ""
    assert len(select_entries("history", read_entries(offline_records(folder)[-1]))) == 2
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(IGNORED_SIGNALS)


def test_records_hold_client_norm_and_worker_statistics(offline_run: tuple[Path, dict[str, Any]]) -> None:
    record = read_records(offline_run[0])[-1]
    assert record["messages"] == 2 * 2 + 2 * 2  # SCAFFOLD: two vectors down and two up, for two clients
    spread, norms = record["spread"], record["norms"]
    assert spread["loss_min"] <= record["train_loss"] <= spread["loss_max"]
    squares = spread["norm_mean"] ** 2 + spread["norm_std"] ** 2
    assert norms["drift"] ** 2 + norms["update"] ** 2 == pytest.approx(squares, rel=0.05)  # clients of similar size
    assert sorted(record["workers"]) == ["0", "1", "2"]
    assert "busy" not in record["workers"]["0"]
    assert sum(record["workers"][rank]["clients"] for rank in "12") == 2  # the faster worker may train both
    assert all(1e6 < worker["memory"] < 1e12 for worker in record["workers"].values())


@timing
@pytest.mark.parametrize("program", ["fl_dist.main", "launch.local"])
def test_the_terminal_shows_a_line_before_torch_is_imported(program: str, tmp_path: Path) -> None:
    """Importing torch takes seconds; here it fails."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    master, slave = os.openpty()
    env = environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    with start_process([sys.executable, "-m", program], stdin=slave, stdout=slave, stderr=slave, env=env) as process:
        os.close(slave)
        assert process.wait(TIMEOUT_SECONDS) == 1
        output = os.read(master, 4096).decode()
        os.close(master)
    assert re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output).split() == ["starting", "...", "torch", "was", "imported"]


def test_no_line_wraps_in_a_narrow_terminal(tmp_path: Path) -> None:
    """In a terminal of 60 columns no line wraps."""
    command = [sys.executable, "-m", "fl_dist.main", *SMALL, f"run.dir={tmp_path / 'r'}", "monitor.wandb.mode=disabled"]
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    env = {k: v for k, v in environment().items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    output = b""
    try:
        with contextlib.suppress(OSError):  # the terminal is closed
            while piece := os.read(master, 4096):
                output += piece
        assert process.wait(TIMEOUT_SECONDS) == 0
    finally:
        process.kill()
        os.close(master)
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output.decode())
    lines = [line for block in text.split("\r\n") for line in block.split("\r") if line.strip()]
    assert lines[0] == "starting ..."
    assert [line for line in lines if len(line) > 60 and str(tmp_path) not in line] == []
    assert any(line.startswith("round 3/3   accuracy") for line in lines)
