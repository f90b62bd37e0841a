"""The offline record of W&B, complete whatever ends it; a terminal that hears soon what happens."""

import contextlib
import fcntl
import json
import logging
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from fl_dist.config import load
from fl_dist.monitor.follower import NOT_MEANT
from fl_dist.monitor.mirror import WandbMirror, open_mirror
from fl_dist.tasks.classification import Classification
from tests.support.fake_runs import append, pretend, row
from tests.support.marks import exhaustive, timing
from tests.support.processes import ROOT, environment, run, started
from tests.support.run_folder import metrics
from tests.support.waiting import PATIENCE, wait_for
from tests.support.wandb_records import entries, of, records

SMALL = ("rounds=3", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")


def test_offline_mirror_holds_every_round_and_writes_only_below_the_run(tmp_path: Path) -> None:
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
    rows = of("history", entries(runs[0].parent, HOME=str(home)))
    assert [row["item"]["1_test/accuracy"] for row in rows] == [r["test_accuracy"] for r in metrics(tmp_path / "run")]


@exhaustive
@timing
def test_a_mirror_that_cannot_connect_does_not_stop_training(tmp_path: Path) -> None:
    env = environment(HOME=str(tmp_path), WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    command = [sys.executable, "-m", "fl_dist.main", *SMALL, f"run.dir={tmp_path / 'run'}"]
    code, output = run([*command, "monitor.wandb.mode=online"], env=env)
    assert code == 0, output
    assert len(metrics(tmp_path / "run")) == 3
    assert "W&B" in output
    assert "0" * 40 not in output


DIAGNOSED = (
    *("diagnostics={sharpness: {every: 1}, clients: {every: 3}, surface: {every: 3, points: 2}}", "algorithm=scaffold"),
    *("monitor.wandb.group=some", "monitor.wandb.job_type=SCAFFOLD"),
)


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of three ranks, and what its offline record holds: names of numbers, and the configuration."""
    folder = tmp_path_factory.mktemp("mirrored") / "run"
    settings = [*SMALL, *DIAGNOSED, "evaluate.where=workers", f"run.dir={folder}"]
    code, output = run([sys.executable, "-m", "launch.local", "-n", "3", *settings])
    assert code == 0, output
    (record,) = records(folder)
    found = entries(record)
    return folder, {"text": json.dumps(found, separators=(",", ":")), "entries": found}


def test_the_offline_record_holds_every_documented_name(mirrored: tuple[Path, dict[str, Any]]) -> None:
    names = documented(columns=3)
    filled = {
        *(name.replace("<rank>", "1") for name in names if "<" not in name.replace("<rank>", "")),
        *("3_diagnostics/sharpness/sharpness", "3_diagnostics/sharpness/gradient_norm", "3_diagnostics/surface"),
        *("3_diagnostics/clients/classes/0", "3_diagnostics/clients/classes/9"),
        *("4_method/control_norm", "5_clients/classes", "8_seconds/diagnostics", "9_workers/0/memory"),
    }
    assert len(filled) > 35
    recorded = mirrored[1]["text"].replace("._type", "")  # of pictures
    assert [name for name in sorted(filled) if f'"{name}"' not in recorded] == []


def documented(columns: int) -> set[str]:
    """Names in the last column but one of the tables of so many."""
    lines = [line.split("|") for line in (ROOT / "docs" / "monitoring.md").read_text().splitlines() if "| `" in line]
    return {name for line in lines if len(line) == columns + 2 for name in re.findall(r"`([^`]+)`", line[columns - 1])}


def test_the_summary_has_the_documented_names(mirrored: tuple[Path, dict[str, Any]]) -> None:
    names = {name.replace("<metric>", "accuracy") for name in documented(columns=2)}
    assert json.loads((mirrored[0] / "summary.json").read_text()).keys() == names
    assert [name for name in sorted(names) if f'"{name}"' not in mirrored[1]["text"]] == []


def test_the_record_has_hosts_versions_and_pictures(mirrored: tuple[Path, dict[str, Any]]) -> None:
    folder, record = mirrored
    (attempt,) = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    assert (attempt["round"], attempt["ranks"], len(attempt["hosts"])) == (0, 3, 3)
    assert {"fl_dist", "torch", "python"} <= attempt["versions"].keys()
    assert f'"hosts":{json.dumps(attempt["hosts"], separators=(",", ":"))}' in record["text"]
    sizes = json.loads((folder / "clients.json").read_text())
    assert [sum(row) for row in sizes["classes"]] == sizes["sizes"]
    assert sorted(p.name for p in (folder / "wandb" / "pictures").iterdir()) == ["clients.png", "surface-3.png"]


def test_the_record_has_its_group_and_statistics_of_rank_0(mirrored: tuple[Path, dict[str, Any]]) -> None:
    folder, record = mirrored
    (told,) = of("run", record["entries"])
    assert (told["run_group"], told["job_type"]) == ("some", "SCAFFOLD")
    assert (told["run_id"], told["resume"]) == ((folder / "wandb" / "id").read_text(), True)
    resident = of("stats", record["entries"])[0]["item"]["proc.memory.rssMB"] * 2**20
    rank_0 = [row["workers"]["0"]["memory"] for row in metrics(folder)]
    assert 0.6 * min(rank_0) < resident < 2 * max(rank_0), "that of W&B's own process is a third"


ORDER = {"mode": "offline", "project": "p", "entity": None, "group": None, "job_type": None, "tags": [], "config": {}}
ORDER |= {"about": {}, "headline": {"name": "accuracy", "best": "max"}}


@timing
def test_the_record_is_complete_after_the_signals_of_a_cancelled_job(tmp_path: Path) -> None:
    """They end W&B's own process, which ignores nothing."""
    folder = pretend(tmp_path / "run", rounds=9, done=4, rich=False)
    command = [sys.executable, "-m", "fl_dist.monitor.follower", str(folder)]
    with started(command, stdin=subprocess.PIPE) as mirror:
        assert mirror.stdin is not None and mirror.stdout is not None
        mirror.stdin.write(json.dumps(ORDER) + "\n")
        mirror.stdin.flush()
        wait_for(lambda: any(file.stat().st_size for file in folder.glob("wandb/*/*.wandb")), "a record")
        children = Path(f"/proc/{mirror.pid}/task/{mirror.pid}/children").read_text().split()
        assert children
        for child in children:
            os.kill(int(child), signal.SIGTERM)
        mirror.send_signal(signal.SIGTERM)
        append(folder, row(5))
        mirror.stdin.write(json.dumps({"summary": {}, "code": 0}) + "\n")
        mirror.stdin.close()
        assert mirror.wait(PATIENCE) == 0
        assert "Traceback" not in mirror.stdout.read()
    found = entries(records(folder)[-1])
    assert [entry["item"]["round"] for entry in of("history", found)] == [1, 2, 3, 4, 5]
    assert found[-1]["type"] == "exit"
    assert of("run", found)[0]["run_id"] == (folder / "wandb" / "id").read_text()


@timing
def test_a_mirror_that_is_just_starting_is_not_ended_by_the_signal_of_a_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("fl_dist"), "propagate", True)
    folder = pretend(tmp_path / "run", rounds=3, done=2, rich=False)
    (folder / "logs").mkdir(exist_ok=True)
    config = load(None, ["monitor.wandb.mode=offline"])
    mirror = open_mirror(config, folder, Classification().headline)
    assert isinstance(mirror, WandbMirror) and mirror._process is not None
    for number in NOT_MEANT:
        mirror._process.send_signal(number)
    mirror.close({})
    assert caplog.text == ""
    assert len(of("history", entries(records(folder)[-1]))) == 2
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(NOT_MEANT)


def test_rows_tell_of_clients_norms_and_workers(mirrored: tuple[Path, dict[str, Any]]) -> None:
    row = metrics(mirrored[0])[-1]
    assert row["messages"] == 2 * 2 + 2 * 2  # SCAFFOLD: two vectors down and two up, for two clients
    spread, norms = row["spread"], row["norms"]
    assert spread["loss_min"] <= row["train_loss"] <= spread["loss_max"]
    squares = spread["norm_mean"] ** 2 + spread["norm_std"] ** 2
    assert norms["drift"] ** 2 + norms["update"] ** 2 == pytest.approx(squares, rel=0.05)  # clients of about one size
    assert sorted(row["workers"]) == ["0", "1", "2"]
    assert "busy" not in row["workers"]["0"]
    assert sum(row["workers"][rank]["clients"] for rank in "12") == 2  # who is faster may have both
    assert all(1e6 < told["memory"] < 1e12 for told in row["workers"].values())


@timing
@pytest.mark.parametrize("program", ["fl_dist.main", "launch.local"])
def test_a_terminal_hears_something_before_torch_is_imported(program: str, tmp_path: Path) -> None:
    """Which takes seconds, here for ever."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    ours, theirs = os.openpty()
    env = environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    with started([sys.executable, "-m", program], stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        assert process.wait(PATIENCE) == 1
        said = os.read(ours, 4096).decode()
        os.close(ours)
    assert re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", said).split() == ["starting", "...", "torch", "was", "imported"]


def test_a_start_fits_the_terminal(tmp_path: Path) -> None:
    """In a terminal of 60 columns no line wraps."""
    command = [sys.executable, "-m", "fl_dist.main", *SMALL, f"run.dir={tmp_path / 'r'}", "monitor.wandb.mode=disabled"]
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    env = {k: v for k, v in environment().items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    said = b""
    try:
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(ours, 4096):
                said += piece
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        os.close(ours)
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", said.decode())
    lines = [line for whole in text.split("\r\n") for line in whole.split("\r") if line.strip()]
    assert lines[0] == "starting ..."
    assert [line for line in lines if len(line) > 60 and str(tmp_path) not in line] == []
    assert any(line.startswith("round 3/3   accuracy") for line in lines)
