"""Monitoring: the console, metrics.jsonl, plots."""

import logging
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tqdm import tqdm

from fl_dist.callbacks.always_on.console import Console, Warnings
from fl_dist.callbacks.always_on.wandb import resolve_mode
from fl_dist.common.formatting import format_bytes, format_duration
from fl_dist.common.terminal import fit_fields
from fl_dist.main import main
from fl_dist.metrics.record import RoundRecord
from fl_dist.metrics.wandb_process import Plots
from fl_dist.plots import surfaces
from fl_dist.plots.base import distinct_names
from fl_dist.tasks.classification import Classification
from tests.support.run_folder import read_records

SMALL = ("rounds=3", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")
KEYS = ("round", "test_loss", "test_accuracy", "train_loss", "clients", "bytes_down", "bytes_up", "seconds")
PHASES = {"broadcast", "local", "reduce", "server", "evaluate", "checkpoint", "total"}


def test_the_console_prints_a_line_per_round_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, f"run.dir={tmp_path}", "monitor.wandb.mode=disabled"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(0) == f"starting {tmp_path}"
    assert lines[0].startswith("fedgmt · digits · mlp with 650 parameters · 2 of 4 clients per round · one process")
    pattern = r"round 2/3   accuracy [ \d.]+ % +[\d.]+ s left   test loss [\d.]+   train loss [\d.]+"
    pattern += r" +[\d.]+ s \([ \d]+% local\) +[\d.]+ kB sent$"
    assert re.match(pattern, lines[2])
    expected = ["final accuracy", "", "last / best", "sent", "time", "files"]  # a run of few rounds has a hint
    assert [line.split("  ")[0] for line in lines[5:]] == expected


def test_the_number_of_clients_is_a_mean_if_each_is_drawn_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clients = "clients={total: 4, per_round: 2, sampling: bernoulli}"
    assert main([*SMALL, clients, "rounds=1", f"run.dir={tmp_path}", "monitor.wandb.mode=disabled"]) == 0
    assert " · 2 of 4 clients per round on average · " in capsys.readouterr().out


def test_records_have_the_documented_keys(tmp_path: Path) -> None:
    assert main([*SMALL, f"run.dir={tmp_path}", "monitor.wandb.mode=disabled", "evaluate.every=2"]) == 0
    records = read_records(tmp_path)
    assert [r["round"] for r in records] == [1, 2, 3]
    assert all(key in record for record in records for key in KEYS)
    assert all(set(record["seconds"]) == PHASES for record in records)
    assert [r["test_accuracy"] is None for r in records] == [True, False, False]
    # FedGMT: two vectors down, one up, for two clients of 650 parameters of 4 bytes.
    assert (records[0]["bytes_down"], records[0]["bytes_up"]) == (2 * 2 * 650 * 4, 2 * 650 * 4)


def test_sizes_and_durations_are_formatted() -> None:
    assert [format_bytes(n) for n in (12, 1530, 2_000_000)] == ["12 B", "1.53 kB", "2 MB"]
    assert [format_duration(s) for s in (3.21, 61, 7261)] == ["3.2 s", "1 min 01 s", "2 h 01 min"]


def test_auto_is_online_only_with_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert resolve_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert resolve_mode("auto") == "online"
    assert resolve_mode("disabled") == "disabled"


def test_the_resolved_config_is_saved(tmp_path: Path) -> None:
    assert main([*SMALL, f"run.dir={tmp_path}", "monitor.wandb.mode=disabled"]) == 0
    text = (tmp_path / "config.yaml").read_text()
    assert "ema_decay: 0.95" in text
    assert "weight_decay: 1.0e-05" in text


def test_a_record_is_on_disk_before_its_line_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []

    def append_rounds(self: Console, record: RoundRecord, context: Any) -> None:
        rounds.append((record.round, read_records(tmp_path)[-1]["round"]))

    monkeypatch.setattr(Console, "on_round_end", append_rounds)
    assert main([*SMALL, f"run.dir={tmp_path}", "monitor.wandb.mode=disabled"]) == 0
    assert rounds == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    "values",
    [
        {"radii": [0.1, 0.2], "mine": [1.0, 2.0]},
        {"radii": [0.1, 0.2], "random": "x", "gradient": 3},
        {"paths": {"a": {"x": [0.0], "y": [0.0]}}},
        {"paths": {"a": 1}, "x": [0, 1], "y": [0, 1], "client_loss": [[1, 2], [3, 4]], "global_loss": [[1, 2], [3, 4]]},
        {"x": [0, 1], "y": [0, 1], "loss": [[None, None], [None, None]]},
        {"x": [0, 1], "y": [0, 1], "loss": [[1.0, 2.0]]},
        {"x": "wide", "y": None, "loss": {}},
    ],
)
@pytest.mark.filterwarnings("error")
def test_invalid_values_do_not_break_plots(tmp_path: Path, values: dict[str, Any]) -> None:
    assert not surfaces.draw({"run": [values]}, tmp_path / "none.png")
    complete = {"x": [0, 1], "y": [0, 1], "loss": [[1.0, None], [2.0, 3.0]]}
    assert surfaces.draw({"run": [complete, values]}, tmp_path / "surface.png")
    assert Plots(tmp_path).draw(make_record(diagnostics={"mine": values})) == {}


def make_record(**fields: Any) -> RoundRecord:
    minimal = {"round": 1, "bytes_down": 1, "bytes_up": 1, "dropped": [], "seconds": {"total": 1.0}}
    return RoundRecord.from_json(minimal | fields)


def test_lists_become_indexed_scalars() -> None:
    values = {
        "spectrum": {"eigenvalues": [3.0, 2.0]},
        "along": {name: [1.0] for name in ("radii", "random", "gradient")},
    }
    scalars = make_record(diagnostics=values | {"many": {"values": [1.0] * 101}}).scalars()
    assert {name: value for name, value in scalars.items() if name.startswith("3_")} == {
        "3_diagnostics/spectrum/eigenvalues/0": 3.0,
        "3_diagnostics/spectrum/eigenvalues/1": 2.0,
    }


def test_trajectories_of_a_plot_are_not_scalars() -> None:
    loss = [[1.0, 2.0], [3.0, 4.0]]
    path = {"x": [0.0, 1.0], "y": [0.0, 1.0], "rest": 0.5}
    plane = {"x": [0.0, 1.0], "y": [0.0, 1.0], "client": 3, "client_loss": loss, "global_loss": loss}
    scalars = make_record(diagnostics={"plane": plane | {"paths": {"FedAvg": path, "FedSAM": path}}}).scalars()
    assert [name for name in scalars if name.startswith("3_")] == [
        "3_diagnostics/plane/client",
        "3_diagnostics/plane/paths/FedAvg/rest",
        "3_diagnostics/plane/paths/FedSAM/rest",
    ]


def test_runs_with_the_same_name_get_distinct_labels() -> None:
    assert distinct_names(["a/run", "b/run", "b/other"]) == ["a/run", "b/run", "other"]
    assert distinct_names(["/x/a/run", "/y/a/run", "run"]) == ["x/a/run", "y/a/run", "run"]
    assert distinct_names(["run", "run"]) == ["run", "run"]


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 118, 200])
def test_round_lines_fit_the_terminal(columns: int) -> None:
    values = {"round": 7, "test_loss": 1.5, "test_accuracy": 0.6, "train_loss": 0.1, "dropped": [1]}
    values |= {"bytes_down": 10**9, "bytes_up": 10**9, "seconds": {"total": 12.5, "local": 10.0}}
    context = mock.Mock(config=mock.Mock(rounds=1000), primary_metric=Classification.primary_metric)
    console = Console()
    console._seconds.append(12.5)
    line = fit_fields(console.fields(make_record(**values), context), columns)
    assert len(line) <= columns
    assert line.startswith("round    7/1000   accuracy 60.00 %")
    assert ("3 h 26 min left" in line) == (columns >= 60)


def test_a_warning_is_printed_above_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar, warnings = tqdm(total=2, file=sys.stderr, ncols=60), Warnings()
    warnings.setFormatter(logging.Formatter("warning: %(message)s"))
    warnings.emit(logging.makeLogRecord({"msg": "a checkpoint failed"}))
    bar.close()
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert "warning: a checkpoint failed" in lines
