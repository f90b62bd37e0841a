"""What a user sees: the console, metrics.jsonl, and a W&B mirror that cannot hurt."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fl_dist.common.words import duration, size
from fl_dist.config import Wandb
from fl_dist.main import main
from fl_dist.monitor.console import Console
from fl_dist.monitor.mirror import resolve
from fl_dist.monitor.summary import summarise
from fl_dist.tasks.classification import Classification
from tests.jobs import environment, metrics, run

SMALL = ("rounds=3", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")
KEYS = ("round", "test_loss", "test_accuracy", "train_loss", "clients", "bytes_down", "bytes_up", "seconds")
PARTS = {"broadcast", "local", "reduce", "server", "evaluate", "checkpoint", "total"}


def test_the_console_has_a_line_a_round_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, f"run.dir={tmp_path}", "monitor.wandb.mode=disabled"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(0) == f"starting {tmp_path}"
    assert lines[0].startswith("fedgmt · digits · mlp with 650 parameters · 2 of 4 clients a round · one process")
    pattern = r"round 2/3   accuracy [ \d.]+ %   test loss [\d.]+   train loss [\d.]+ +[\d.]+ s \([ \d]+% outside .*\)"
    assert re.match(pattern, lines[2])
    assert [line.split("  ")[0] for line in lines[5:]] == ["final accuracy", "last / best", "sent", "time", "files"]


def test_metrics_have_the_promised_keys(tmp_path: Path) -> None:
    assert main([*SMALL, f"run.dir={tmp_path}", "monitor.wandb.mode=disabled", "evaluate.every=2"]) == 0
    rows = metrics(tmp_path)
    assert [r["round"] for r in rows] == [1, 2, 3]
    assert all(key in row for row in rows for key in KEYS)
    assert all(set(row["seconds"]) == PARTS for row in rows)
    assert [r["test_accuracy"] is None for r in rows] == [True, False, False]
    # FedGMT: two vectors down, one up, for two clients of 650 parameters of 4 bytes.
    assert (rows[0]["bytes_down"], rows[0]["bytes_up"]) == (2 * 2 * 650 * 4, 2 * 650 * 4)


def test_final_accuracy_is_mean_and_sample_deviation_of_the_last_rounds() -> None:
    row = {"bytes_down": 1, "bytes_up": 2, "seconds": {"total": 1.5}, "dropped": []}
    rows = [row | {"round": k, "test_accuracy": a} for k, a in enumerate([0.9, 0.5, None, 0.7], 1)]
    summary = summarise(rows, 3, Classification.headline, finished=True)
    assert summary["final_accuracy_mean"] == pytest.approx(0.6)
    assert summary["final_accuracy_std"] == pytest.approx(0.02**0.5)
    assert (summary["best_accuracy"], summary["best_round"], summary["last_accuracy"]) == (0.9, 1, 0.7)
    assert (summary["bytes"], summary["seconds"]) == (12, 6.0)


def test_sizes_and_times_read_well() -> None:
    assert [size(n) for n in (12, 1530, 2_000_000)] == ["12 B", "1.53 kB", "2 MB"]
    assert [duration(s) for s in (3.21, 61, 7261)] == ["3.2 s", "1 min 01 s", "2 h 01 min"]


def test_auto_is_online_only_with_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert resolve(Wandb()) == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert resolve(Wandb()) == "online"
    assert resolve(Wandb(mode="disabled")) == "disabled"


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
    shown = subprocess.run(
        [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(runs[0].parent)],
        capture_output=True,
        text=True,
        env=environment(HOME=str(home)),
    )
    assert shown.returncode == 0, shown.stderr
    assert "test_accuracy" in shown.stdout


@pytest.mark.thorough
def test_a_mirror_that_cannot_connect_does_not_stop_training(tmp_path: Path) -> None:
    env = environment(HOME=str(tmp_path), WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    command = [sys.executable, "-m", "fl_dist.main", *SMALL, f"run.dir={tmp_path / 'run'}"]
    code, output = run([*command, "monitor.wandb.mode=online"], env=env, timeout=200)
    assert code == 0, output
    assert len(metrics(tmp_path / "run")) == 3
    assert "W&B" in output
    assert "0" * 40 not in output


def test_the_resolved_config_is_saved(tmp_path: Path) -> None:
    assert main([*SMALL, f"run.dir={tmp_path}", "monitor.wandb.mode=disabled"]) == 0
    text = (tmp_path / "config.yaml").read_text()
    assert "ema_decay: 0.95" in text
    assert "weight_decay: 1.0e-05" in text


def test_a_row_is_on_disk_before_its_line_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Console, "row", lambda self, row: seen.append((row["round"], metrics(tmp_path)[-1]["round"])))
    assert main([*SMALL, f"run.dir={tmp_path}", "monitor.wandb.mode=disabled"]) == 0
    assert seen == [(1, 1), (2, 2), (3, 3)]
