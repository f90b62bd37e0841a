"""What a user sees: the console, metrics.jsonl, the summary."""

import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from fl_dist.common.terminal import fitted
from fl_dist.common.words import duration, size
from fl_dist.config import Wandb
from fl_dist.drawing import surfaces
from fl_dist.drawing.base import told_apart
from fl_dist.main import main
from fl_dist.monitor.console import Console, Warnings
from fl_dist.monitor.follower import Pictures, named
from fl_dist.monitor.mirror import resolve
from fl_dist.monitor.summary import server_worth, summarise, summary_lines
from fl_dist.tasks.classification import Classification
from tests.support.run_folder import metrics

SMALL = ("rounds=3", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")
KEYS = ("round", "test_loss", "test_accuracy", "train_loss", "clients", "bytes_down", "bytes_up", "seconds")
PARTS = {"broadcast", "local", "reduce", "server", "evaluate", "checkpoint", "total"}


def test_the_console_has_a_line_a_round_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, f"run.dir={tmp_path}", "monitor.wandb.mode=disabled"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(0) == f"starting {tmp_path}"
    assert lines[0].startswith("fedgmt · digits · mlp with 650 parameters · 2 of 4 clients a round · one process")
    pattern = r"round 2/3   accuracy [ \d.]+ % +[\d.]+ s left   test loss [\d.]+   train loss [\d.]+"
    pattern += r" +[\d.]+ s \([ \d]+% local\) +[\d.]+ kB sent$"
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
    rows[0] |= {"seconds": {"total": 1.5, "diagnostics": 70.0}}
    summary = summarise(rows, 3, Classification.headline, finished=True)
    assert "time            6.0 s and 1 min 10 s of diagnostics" in summary_lines(summary, Classification.headline, "")


def served(total: float, busy: dict[int, tuple[float, int]], evaluate: float = 0.0, by: int = 1) -> dict[str, Any]:
    """A row with busy seconds and clients of each worker, and an evaluation by rank 0 or more."""
    ranks: dict[str, dict[str, float]] = {"0": {"memory": 1}}
    ranks |= {str(rank): {"busy": seconds, "clients": clients} for rank, (seconds, clients) in busy.items()}
    for rank in range(by if evaluate else 0):
        ranks[str(rank)]["evaluate"] = evaluate
    local = max(seconds for seconds, _ in busy.values())
    return {"seconds": {"total": total, "local": local, "server": 0.1, "checkpoint": 0.1}, "workers": ranks}


TWO = {1: (4.0, 2), 2: (4.0, 2)}


@pytest.mark.parametrize(
    ("rows", "spreads", "busy", "shared"),
    [
        # 4 clients of 2 s over 2 workers take 4 s, over 3 as well; 8 take 8 s, and 6 s.
        ([served(5, TWO)], True, 0.2 / 5, 5),
        ([served(9, {1: (8.0, 4), 2: (8.0, 4)})], True, 0.2 / 9, 7),
        # One worker: half.
        ([served(9, {1: (8.0, 4)})], True, 0.2 / 9, 5),
        # Unequal clients: no faster than an even division of 12 s, no slower than before.
        ([served(9, {1: (8.0, 1), 2: (4.0, 3)})], True, 0.2 / 9, 9),
        ([served(7, {1: (6.0, 3), 2: (6.0, 1)})], True, 0.2 / 7, 7),
        ([served(7, {1: (6.0, 4), 2: (6.0, 5)})], True, 0.2 / 7, 5),
        # The evaluation of round 1 was beside round 2: then 1 s by 3 ranks, or 3 s by one.
        ([served(5, TWO, 3.0), served(5, TWO)], True, 3.4 / 10, 11),
        ([served(5, TWO, 3.0), served(5, TWO)], False, 3.4 / 10, 13),
        # It was longer than the training beside it.
        ([served(5, TWO, 9.0), served(10, TWO)], True, 9.4 / 15, 13),
        # All ranks had evaluated: nothing changes.
        ([served(5, TWO, 1.0, by=3), served(6, TWO)], True, 1.4 / 11, 11),
        # The run began with a server that trains.
        ([served(5, {0: (4.0, 2), 1: (4.0, 2)}), served(9, {1: (8.0, 4)})], True, 0.2 / 9, 10),
    ],
)
def test_what_a_dedicated_server_was_worth(
    rows: list[dict[str, Any]], spreads: bool, busy: float, shared: float
) -> None:
    worth = server_worth(rows, spreads)
    assert worth == {"server_busy": pytest.approx(busy), "seconds_if_shared": pytest.approx(shared)}


def test_a_server_that_trains_or_is_alone_is_not_judged() -> None:
    assert server_worth([served(5, {0: (4.0, 2)}), served(5, {0: (4.0, 2), 1: (4.0, 2)})], True) == {}
    assert server_worth([{"seconds": {"total": 1.0}}], True) == {}


def test_the_summary_says_what_a_shared_server_would_have_taken() -> None:
    rest = {"round": 1, "bytes_down": 1, "bytes_up": 2, "dropped": []}
    told = []
    for only in (served(90, {1: (80.0, 4)}), served(5, TWO)):
        summary = summarise([only | rest], 3, Classification.headline, finished=True)
        summary |= server_worth([only | rest], spreads=True)
        told += [line for line in summary_lines(summary, Classification.headline, "") if line.startswith("server")]
    assert told == [
        "server          busy 0 % of the time; "
        "topology.server=shared would have taken about 50.0 s instead of 1 min 30 s",
        "server          busy 4 % of the time; topology.server=shared would not have been faster (about 5.0 s)",
    ]


@pytest.mark.parametrize(("columns", "needed"), [(60, 3), (80, 2), (120, 1)])
def test_the_summary_fits_the_terminal(columns: int, needed: int) -> None:
    rows = [served(36000, {1: (35000.0, 4)}) | {"round": 1, "bytes_down": 1, "bytes_up": 2, "dropped": []}]
    summary = summarise(rows, 3, Classification.headline, finished=True) | server_worth(rows, spreads=True)
    lines = summary_lines(summary, Classification.headline, "runs/my", columns)
    assert max(map(len, lines)) <= columns
    first = next(k for k, line in enumerate(lines) if line.startswith("server"))
    told = lines[first : lines.index("files           runs/my/")]
    assert len(told) == needed
    assert all(line.startswith(" " * 16) for line in told[1:])
    assert " ".join(line.strip() for line in told) in summary_lines(summary, Classification.headline, "")


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
def test_values_of_any_kind_do_not_stop_pictures(tmp_path: Path, values: dict[str, Any]) -> None:
    assert not surfaces.draw({"run": [{"values": values}]}, tmp_path / "none.png")
    whole = {"x": [0, 1], "y": [0, 1], "loss": [[1.0, None], [2.0, 3.0]]}
    assert surfaces.draw({"run": [{"values": whole}, {"values": values}]}, tmp_path / "surface.png")
    assert Pictures(tmp_path).of({"round": 1, "diagnostics": {"mine": values}}) == {}


def test_lists_are_numbers_by_their_places() -> None:
    told = {"spectrum": {"eigenvalues": [3.0, 2.0]}, "along": {name: [1.0] for name in ("radii", "random", "gradient")}}
    found = named({"round": 1, "diagnostics": told | {"many": {"values": [1.0] * 101}}})
    assert {name: value for name, value in found.items() if name.startswith("3_")} == {
        "3_diagnostics/spectrum/eigenvalues/0": 3.0,
        "3_diagnostics/spectrum/eigenvalues/1": 2.0,
    }


def test_the_paths_of_a_picture_are_no_numbers() -> None:
    loss = [[1.0, 2.0], [3.0, 4.0]]
    path = {"x": [0.0, 1.0], "y": [0.0, 1.0], "rest": 0.5}
    plane = {"x": [0.0, 1.0], "y": [0.0, 1.0], "client": 3, "client_loss": loss, "global_loss": loss}
    found = named({"round": 1, "diagnostics": {"plane": plane | {"paths": {"FedAvg": path, "FedSAM": path}}}})
    assert [name for name in found if name.startswith("3_")] == [
        "3_diagnostics/plane/client",
        "3_diagnostics/plane/paths/FedAvg/rest",
        "3_diagnostics/plane/paths/FedSAM/rest",
    ]


def test_runs_of_one_name_are_told_apart() -> None:
    assert told_apart(["a/run", "b/run", "b/other"]) == ["a/run", "b/run", "other"]
    assert told_apart(["/x/a/run", "/y/a/run", "run"]) == ["x/a/run", "y/a/run", "run"]
    assert told_apart(["run", "run"]) == ["run", "run"]


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 118, 200])
def test_a_line_fits_the_terminal(columns: int) -> None:
    row = {"round": 7, "test_loss": 1.5, "test_accuracy": 0.6, "train_loss": 0.1, "dropped": [1], "bytes_down": 10**9}
    row |= {"bytes_up": 10**9, "seconds": {"total": 12.5, "local": 10.0}}
    console = Console(1000, 0, Classification.headline)
    console._seconds.append(12.5)
    line = fitted(console.fields(row), columns)
    console.close()
    assert len(line) <= columns
    assert line.startswith("round    7/1000   accuracy 60.00 %")
    assert ("3 h 26 min left" in line) == (columns >= 60)


def test_a_warning_stands_above_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar, warnings = tqdm(total=2, file=sys.stderr, ncols=60), Warnings()
    warnings.setFormatter(logging.Formatter("warning: %(message)s"))
    warnings.emit(logging.makeLogRecord({"msg": "a save failed"}))
    bar.close()
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert "warning: a save failed" in lines
