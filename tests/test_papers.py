"""The papers' tables and figures: every sweep is valid, fits the published numbers, and its small version runs."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

import fl_dist
from fl_dist.config.sweeps import COLUMN, ROW, Cell, Sweep, read
from tests.jobs import ROOT

FOLDER = ROOT / "configs" / "paper"
SMALL = "-small"
PAPERS = ("fedsam", "fednsam", "fedlesam", "fedgf", "fedgmt")
DIAGNOSTICS = {"lpf", "lambda_max", "flatness_discrepancy", "sharpness", "train_mean", "seconds_a_round"}


@pytest.fixture(scope="module")
def sweeps() -> dict[str, tuple[Sweep, list[Cell]]]:
    """Reading validates every run of every sweep, as --dry-run does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return {file.stem: read(str(file)) for file in sorted(FOLDER.glob("*.yaml"))}


@pytest.fixture(scope="module")
def published() -> list[dict[str, str]]:
    with open(FOLDER / "published.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_sweep_has_a_small_version(sweeps: dict[str, tuple[Sweep, list[Cell]]]) -> None:
    big, small = (
        {n.removesuffix(SMALL) for n in sweeps if n.endswith(SMALL) == is_small} for is_small in (False, True)
    )
    assert big == small and len(big) >= 40
    assert {name.partition("_")[0] for name in big} == set(PAPERS)
    for name in small:
        _, cells = sweeps[name + SMALL]
        assert len(cells) <= 12 and all(cell.config.data["name"] == "digits" for cell in cells)


def test_a_table_has_rows_and_columns(sweeps: dict[str, tuple[Sweep, list[Cell]]]) -> None:
    for name, (sweep, cells) in sweeps.items():
        assert {ROW, COLUMN} <= cells[0].at.keys(), name
        assert all(0 < target < 1 for column in sweep.columns for target in sweep.table.targets_of(column)), name
        if isinstance(sweep.table.targets, dict) and not name.endswith(SMALL):
            assert sweep.table.targets.keys() <= set(sweep.columns), name


def test_published_numbers_have_their_place(
    sweeps: dict[str, tuple[Sweep, list[Cell]]], published: list[dict[str, str]]
) -> None:
    assert len(published) > 1400
    for line in published:
        sweep, _ = sweeps[line["sweep"]]
        assert line["row"] in sweep.rows and line["column"] in sweep.columns, line
        kind, at, target = line["measure"].partition("@")
        assert line["value"] == "x" or float(line["value"]) >= 0, line
        assert not line["std"] or float(line["std"]) >= 0, line
        if at:
            assert kind in ("rounds", "minutes", "gigabytes") and 0 < float(target) < 1, line
        else:
            assert kind == sweep.table.measure or kind in DIAGNOSTICS, line
    double = Counter((line["sweep"], line["row"], line["column"], line["measure"]) for line in published)
    assert set(double.values()) == {1}


@pytest.mark.parametrize(
    ("sweep", "row", "column", "value"),
    [
        ("fedsam_table1", "MoFedSAM", "CIFAR-10", "83.92"),
        ("fednsam_table2", "FedNSAM", "CIFAR100 ResNet-18", "66.04"),
        ("fedlesam_table2", "FedLESAM-S", "CIFAR10 Dir(0.6) 100", "84.94"),
        ("fedgf_table1_cifar10_dir0", "FedGF", "5 clients", "78.41"),
        ("fedgmt_table2", "FedGMT", "Dir(0.1)", "79.17"),
    ],
)
def test_headline_numbers(sweep: str, row: str, column: str, value: str, published: list[dict[str, str]]) -> None:
    found = [p for p in published if (p["sweep"], p["row"], p["column"]) == (sweep, row, column)]
    assert value in [line["value"] for line in found], [p for p in published if (p["sweep"], p["row"]) == (sweep, row)]


def test_every_sweep_is_in_the_document(sweeps: dict[str, tuple[Sweep, list[Cell]]]) -> None:
    text = (ROOT / "docs" / "papers.md").read_text()
    for name in sweeps:
        paper, _, what = name.removesuffix(SMALL).partition("_")
        assert paper in text and f"_{what.partition('_')[0]}" in text, name


@pytest.mark.thorough
def test_every_run_of_every_small_version_trains(
    sweeps: dict[str, tuple[Sweep, list[Cell]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of each, and each only once: many tables share runs."""
    monkeypatch.chdir(ROOT)
    done = set()
    for name, (_, cells) in sweeps.items():
        for cell in cells if name.endswith(SMALL) else []:
            config = cell.config.model_dump(exclude={"run", "monitor"}) | {"rounds": 1}
            told = json.dumps(config, sort_keys=True)
            if told in done:
                continue
            done.add(told)
            config |= {"run": {"dir": str(tmp_path / str(len(done)))}, "checkpoint": {"every": 0}}
            run = fl_dist.run(config | {"monitor": {"wandb": {"mode": "disabled"}}}, quiet=True)
            assert run.finished and run.history[0]["test_accuracy"] is not None, (name, cell.name)
