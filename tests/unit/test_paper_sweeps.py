"""The papers' tables and figures: every sweep is valid, matches the published numbers, and its small version runs."""

import csv
import json
import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import fl_dist
from fl_dist.config import Config
from fl_dist.config.sweep_file import Sweep
from fl_dist.config.sweeps import COLUMN, ROW, SweepRun, read_sweep
from fl_dist.metrics.costs import COSTS
from fl_dist.results.run_result import RunResult
from tests.support.processes import ROOT

FOLDER = ROOT / "configs" / "paper"
SMALL = "-small"
PAPERS = ("fedsam", "fednsam", "fedlesam", "fedgf", "fedgmt")


@pytest.fixture(scope="module")
def sweeps() -> dict[str, tuple[Sweep, list[SweepRun]]]:
    """Reading validates every run of every sweep, as --dry-run does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return {file.stem: read_sweep(str(file)) for file in sorted(FOLDER.glob("*.yaml"))}


@pytest.fixture(scope="module")
def published() -> list[dict[str, str]]:
    with open(FOLDER / "published.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_sweep_has_a_small_version(sweeps: dict[str, tuple[Sweep, list[SweepRun]]]) -> None:
    big, small = (
        {n.removesuffix(SMALL) for n in sweeps if n.endswith(SMALL) == is_small} for is_small in (False, True)
    )
    assert big == small and len(big) >= 40
    assert {name.partition("_")[0] for name in big} == set(PAPERS)
    for name in small:
        _, cells = sweeps[name + SMALL]
        assert len(cells) <= 12 and all(cell.config.data["name"] == "digits" for cell in cells)


def test_a_table_has_rows_and_columns(sweeps: dict[str, tuple[Sweep, list[SweepRun]]]) -> None:
    for name, (sweep, cells) in sweeps.items():
        assert {ROW, COLUMN} <= cells[0].labels.keys(), name
        assert all(0 < target < 1 for column in sweep.columns for target in sweep.table.targets_of(column)), name
        if isinstance(sweep.table.targets, dict) and not name.endswith(SMALL):
            assert sweep.table.targets.keys() <= set(sweep.columns), name


def test_published_numbers_belong_to_a_cell(
    sweeps: dict[str, tuple[Sweep, list[SweepRun]]], published: list[dict[str, str]]
) -> None:
    assert len(published) > 1400
    for line in published:
        sweep, _ = sweeps[line["sweep"]]
        assert line["row"] in sweep.rows and line["column"] in {*sweep.columns, *sweep.table.means}, line
        kind, at, target = line["measure"].partition("@")
        assert line["value"] == "x" or float(line["value"]) >= 0, line
        assert not line["std"] or float(line["std"]) >= 0, line
        if at:
            assert kind in COSTS and float(target) in sweep.table.targets_of(line["column"]), line
        elif kind != sweep.table.measure:
            columns = sweep.table.extra_columns[kind].columns
            assert columns is None or line["column"] in columns, line
    counts = Counter((line["sweep"], line["row"], line["column"], line["measure"]) for line in published)
    assert set(counts.values()) == {1}


def test_extra_columns_are_measured_in_the_last_round(
    sweeps: dict[str, tuple[Sweep, list[SweepRun]]], published: list[dict[str, str]]
) -> None:
    """In the columns for which it was published, or else in some; seconds are in every record."""
    published_cells = {(line["sweep"], line["measure"], line["column"]) for line in published}
    for name, (sweep, cells) in sweeps.items():
        for measure, column_info in sweep.table.extra_columns.items():
            section, _, rest = column_info.key.partition(".")
            assert section in ("diagnostics", "seconds", "spread"), (name, measure)
            label = rest.partition(".")[0]
            columns = {column for s, m, column in published_cells if (s, m) == (name, measure)}
            selected = [cell for cell in cells if cell.labels[COLUMN] in columns] or cells
            measured = [cell for cell in selected if is_measured(section, label, cell.config)]
            assert measured and (len(measured) == len(selected) or not columns), (name, measure)
            for cell in measured if section == "diagnostics" else []:
                assert cell.rounds % cell.config.diagnostics[label]["every"] == 0, (name, cell.name)


def is_measured(section: str, label: str, config: Config) -> bool:
    if section == "spread":
        return not label.startswith("validation_") or config.clients.validation > 0
    return section == "seconds" or label in config.diagnostics


def test_small_versions_have_the_same_extra_columns(sweeps: dict[str, tuple[Sweep, list[SweepRun]]]) -> None:
    for name, (sweep, _) in sweeps.items():
        if not name.endswith(SMALL):
            assert sweep.table.extra_columns.keys() == sweeps[name + SMALL][0].table.extra_columns.keys(), name


def test_published_deviations_are_explained(
    sweeps: dict[str, tuple[Sweep, list[SweepRun]]], published: list[dict[str, str]]
) -> None:
    for name in {line["sweep"] for line in published if line["std"]}:
        assert sweeps[name][0].table.published_spread, name


def test_a_small_version_measures_its_extra_columns(
    sweeps: dict[str, tuple[Sweep, list[SweepRun]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of each kind of table with extra columns: every value is measured."""
    monkeypatch.chdir(ROOT)
    for name in ("fedsam_table1", "fednsam_table4", "fedlesam_table2", "fedgf_table9", "fedgmt_table2"):
        sweep, cells = sweeps[name + SMALL]
        cell = next(cell for cell in cells if cell.labels[ROW] == "FedSAM")
        config = cell.config.model_dump(exclude={"run", "monitor"}) | {"run": {"dir": str(tmp_path / name)}}
        fl_dist.run(config | {"monitor": {"wandb": {"mode": "disabled"}}}, quiet=True)
        results = RunResult(name, ROW, COLUMN, tmp_path / name, cell.rounds, 1)
        for measure, column_info in sweep.table.extra_columns.items():
            assert (numbers := results.numbers(column_info.key)) and numbers[-1] is not None, (name, measure)


@pytest.mark.parametrize(
    ("sweep", "row", "column", "value"),
    [
        ("fedsam_table1", "MoFedSAM", "CIFAR-10", "83.92"),
        ("fednsam_table2", "FedNSAM", "CIFAR100 ResNet-18", "66.04"),
        ("fedlesam_table2", "FedLESAM-S", "CIFAR10 Dir(0.6) 100", "84.94"),
        ("fedlesam_table2", "FedAvg", "CIFAR10 Dir(0.1) 100", "224"),  # gigabytes to 68 %: printed are 56 of parameters
        ("fedgf_table1_cifar10_dir0", "FedGF", "5 clients", "78.41"),
        ("fedgmt_table2", "FedGMT", "Dir(0.1)", "79.17"),
    ],
)
def test_selected_published_values_are_correct(
    sweep: str, row: str, column: str, value: str, published: list[dict[str, str]]
) -> None:
    results = [p for p in published if (p["sweep"], p["row"], p["column"]) == (sweep, row, column)]
    assert value in [line["value"] for line in results], [
        p for p in published if (p["sweep"], p["row"]) == (sweep, row)
    ]


def test_published_means_are_those_of_the_published_columns(
    sweeps: dict[str, tuple[Sweep, list[SweepRun]]], published: list[dict[str, str]]
) -> None:
    """FedLESAM's Table 4, in the rows of which all columns could be read."""
    values = {(p["sweep"], p["row"], p["column"]): float(p["value"]) for p in published if p["measure"] == "last"}
    compared = 0
    for name in ("fedlesam_table2", "fedlesam_table3"):
        sweep, _ = sweeps[name]
        for mean, (pattern,) in sweep.table.means.items():
            averaged = [column for column in sweep.columns if fnmatchcase(column, pattern)]
            rows = [row for row in sweep.rows if (name, row, mean) in values]
            assert len(rows) == 6
            for row in rows:
                cells = [values[name, row, column] for column in averaged if (name, row, column) in values]
                if len(cells) == len(averaged):
                    assert values[name, row, mean] == pytest.approx(sum(cells) / len(cells), abs=0.006)
                    compared += 1
    assert compared == 4


def test_numbers_that_the_document_marks_are_those_of_the_file(published: list[dict[str, str]]) -> None:
    """Minutes of CINIC-10 that were pieced together from broken text."""
    text = (ROOT / "docs" / "papers.md").read_text()
    marked = re.findall(r"^\| ([\w-]+) \| (\d+\.\d+) \| (\d+\.\d+) \|$", text, re.M)
    minutes = {
        (p["row"], p["column"]): p["value"]
        for p in published
        if p["sweep"] == "fedgmt_table2_cinic10" and p["measure"].startswith("minutes@") and p["value"] != "x"
    }
    columns = ("Path(2)", "Dir(0.1)")
    assert {(row, c): value for row, *values in marked for c, value in zip(columns, values, strict=True)} == minutes


def test_every_sweep_is_in_the_document(sweeps: dict[str, tuple[Sweep, list[SweepRun]]]) -> None:
    for name in sweeps:
        paper, _, what = name.removesuffix(SMALL).partition("_")
        assert any(fnmatchcase(f"{paper}_{what}", pattern) for pattern in documented_patterns(paper)), name


def test_every_file_of_pretrained_weights_is_in_the_document(sweeps: dict[str, tuple[Sweep, list[SweepRun]]]) -> None:
    part = (ROOT / "docs" / "papers.md").read_text().split("## Pretrained weights")[1].split("\n## ")[0]
    used = {cell.config.model.get("pretrained") for _, cells in sweeps.values() for cell in cells} - {None}
    documented_patterns = {
        f"data/weights/{name}.safetensors" for name in re.findall(r"^\| `(\S+)\.safetensors` \|", part, re.M)
    }
    assert used == documented_patterns and len(used) == 4


def documented_patterns(paper: str) -> list[str]:
    """The patterns of sweeps in the paper's part of the document's table; `_table4` abbreviates the paper's own."""
    text = (ROOT / "docs" / "papers.md").read_text()
    (part,) = [part for part in text.split("\n| **")[1:] if part.lower().startswith(f"{paper}**")]
    cells = [line.split("|")[1] for line in part.split("\n\n")[0].splitlines()[1:]]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [re.sub(r"<\w+>", "*", paper + name if name.startswith("_") else name) for name in names]


@pytest.mark.exhaustive
def test_every_run_of_every_small_version_trains(
    sweeps: dict[str, tuple[Sweep, list[SweepRun]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of each, and each only once, as many tables share runs."""
    monkeypatch.chdir(ROOT)
    done = set()
    for name, (_, cells) in sweeps.items():
        for cell in cells if name.endswith(SMALL) else []:
            config = cell.config.model_dump(exclude={"run", "monitor"}) | {"rounds": 1}
            key = json.dumps(config, sort_keys=True)
            if key in done:
                continue
            done.add(key)
            config |= {"run": {"dir": str(tmp_path / str(len(done)))}, "checkpoint": {"every": 0}}
            run = fl_dist.run(config | {"monitor": {"wandb": {"mode": "disabled"}}}, quiet=True)
            assert run.finished and run.history[0]["test_accuracy"] is not None, (name, cell.name)
