"""Tables and curves of runs: values against hand-computed ones, every format read back, errors in one line."""

import csv
import functools
import io
import json
import os
import re
import shutil
import statistics
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from fl_dist.main import main as train
from fl_dist.metrics.keys import list_keys
from fl_dist.report.__main__ import main as report
from fl_dist.results.__main__ import main, parser
from fl_dist.results.collect import collect
from fl_dist.results.figures import Point, line_points, lines_over, scatter_points
from fl_dist.results.panels import scale_x
from launch import run_status
from tests.support.cli import CliResult, make_invoker
from tests.support.processes import NO_WANDB

Accuracies = Sequence[float | None]
COSTS = ("rounds", "gigabytes", "passes", "minutes", "local_minutes")
SWEEP = """
rows:
  Fed A: {algorithm: {name: fedavg}}
  Fed_B&%: {algorithm: {name: fedsam}}
columns:
  Dir(0.1): {partition: {name: dirichlet, alpha: 0.1}}
  IID: {partition: iid}
grid: {seed: [0, 1, 2]}
set: {model: mlp, rounds: 5}
dir: out
table: {measure: mean, final_window: 3}
"""
RISING = (0.2, 0.5, 0.7, 0.8, 0.9)
invoke = make_invoker(main)


def invoke_ok(*arguments: str | Path) -> CliResult:
    result = invoke(*arguments)
    assert (result.code, result.err) == (0, ""), result.err
    return result


def error_line(*arguments: str | Path) -> str:
    result = invoke(*arguments)
    assert result.code == 2 and result.out == "" and result.err.startswith("error: "), result
    assert result.err.count("\n") == 1 and len(result.err) < 400, result.err
    return result.err


def csv_values(*arguments: str | Path) -> dict[tuple[str, str, str], dict[str, str]]:
    """The CSV lines by row, column and measure."""
    lines = list(csv.DictReader(io.StringIO(invoke_ok(*arguments, "--format", "csv").out)))
    assert len({(line["row"], line["column"], line["measure"]) for line in lines}) == len(lines)
    return {(line["row"], line["column"], line["measure"]): line for line in lines}


def cells(*arguments: str | Path) -> dict[str, list[str]]:
    """The rows of the text table: label and cells."""
    table = invoke_ok(*arguments).out.split("\n\n")[0].splitlines()
    return {parts[0]: parts[1:] for parts in (re.split(r"  +", line.rstrip()) for line in table if line[:1] != " ")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    small = ["model=mlp", "rounds=2", "clients={total: 4, per_round: 2}", "local.epochs=1", "partition=iid"]
    with redirect_stdout(io.StringIO()):
        assert train([*small, *NO_WANDB, "algorithm=fedavg", f"run.dir={folder}"]) == 0
    return folder


WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteRun:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return lambda *arguments, **more: write_sample_run(trained, *arguments, **more)


def write_sample_run(
    trained: Path,
    folder: str | Path,
    accuracies: Accuracies,
    rounds: int | None = None,
    config: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write a run with these accuracies; it is finished if it has all its rounds."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    content = read_config(trained) | {"rounds": rounds or len(accuracies), "run": {"dir": str(folder)}}
    for key, value in (config or {}).items():
        section, _, name = key.partition(".")
        content[section] = content[section] | {name: value} if name else value
    (folder / "config.yaml").write_text(yaml.dump(content, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))
    shutil.copy(trained / "run.json", folder)
    if len(accuracies) == content["rounds"]:
        shutil.copy(trained / "model.safetensors", folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(accuracies, **more)))
    return folder


@functools.cache
def read_config(trained: Path) -> dict[str, Any]:
    return yaml.safe_load((trained / "config.yaml").read_text())


def metrics(accuracies: Accuracies, scale: int = 1) -> Iterator[dict[str, Any]]:
    for k, accuracy in enumerate(accuracies, 1):
        loss = None if accuracy is None else 1 - accuracy
        yield {
            **{"round": k, "test_loss": loss, "test_accuracy": accuracy, "train_loss": 1.5 / k, "clients": 2},
            **{"dropped": [], "bytes_down": 10**8 * scale + k, "bytes_up": 10**7 * k, "forwards": 20 * k * scale},
            **{"backwards": 3 + k, "lr": 0.1, "method": {}, "seconds": {"local": 7.0 * k, "total": 30.0 * k * scale}},
        }


def write_all_runs(write_run: WriteRun, **more: Any) -> dict[tuple[str, str], list[list[float]]]:
    """Write all runs of the sweep with random accuracies."""
    rng = np.random.default_rng(3)
    runs: dict[tuple[str, str], list[list[float]]] = {}
    for row, r in (("Fed A", "Fed_A"), ("Fed_B&%", "Fed_B__")):
        for column, c in (("Dir(0.1)", "Dir_0.1_"), ("IID", "IID")):
            runs[row, column] = []
            for seed in range(3):
                accuracies = [round(float(x), 4) for x in rng.uniform(0.1, 0.95, 5)]
                write_run(f"out/{r}-{c}-seed{seed}", accuracies, **more)
                runs[row, column].append(accuracies)
    return runs


def measure_run(accuracies: Accuracies, measure: str, last: int) -> float:
    evaluated = [a for a in accuracies if a is not None]
    if measure == "mean":
        return 100 * statistics.mean(a for a in accuracies[-last:] if a is not None)
    return 100 * (evaluated[-1] if measure == "last" else max(evaluated))


def cost_to_target(accuracies: Accuracies, target: float, cost: str, scale: int = 1) -> float | None:
    total = 0.0
    for line in metrics(accuracies, scale):
        total += {
            "rounds": 1,
            "gigabytes": (line["bytes_down"] + line["bytes_up"]) / 1e9,
            "passes": line["forwards"] + line["backwards"],
            "minutes": line["seconds"]["total"] / 60,
            "local_minutes": line["seconds"]["local"] / 60,
        }[cost]
        if line["test_accuracy"] is not None and line["test_accuracy"] >= target:
            return total
    return None


class TestMeasures:
    @pytest.mark.parametrize("measure", ["mean", "last", "best"])
    def test_a_cell_is_the_mean_of_its_seeds(self, write_run: WriteRun, measure: str) -> None:
        runs = write_all_runs(write_run)
        lines = csv_values("sweep.yaml", "--measure", measure)
        assert lines.keys() == {(*cell, measure) for cell in runs}
        for cell, seeds in runs.items():
            values = [measure_run(accuracies, measure, 3) for accuracies in seeds]
            line = lines[*cell, measure]
            assert float(line["value"]) == pytest.approx(statistics.mean(values), rel=1e-12)
            assert float(line["std"]) == pytest.approx(statistics.stdev(values), rel=1e-12)
            assert (line["sweep"], line["finished"], line["runs"]) == ("sweep", "3", "3")
            assert line["published"] == line["published_std"] == ""
        table = cells("sweep.yaml", "--measure", measure)
        for (row, column), seeds in runs.items():
            values = [measure_run(accuracies, measure, 3) for accuracies in seeds]
            text = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
            assert table[row][("Dir(0.1)", "IID").index(column)] == text

    def test_the_deviation_of_one_run_is_over_its_last_rounds(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed1", RISING)
        line = csv_values("sweep.yaml", "--only", "*seed1")["Fed A", "IID", "mean"]
        assert float(line["value"]) == pytest.approx(80)
        assert float(line["std"]) == pytest.approx(100 * statistics.stdev(RISING[-3:]))
        for measure, value in (("last", 90), ("best", 90)):
            line = csv_values("sweep.yaml", "--only", "*seed1", "--measure", measure)["Fed A", "IID", measure]
            assert float(line["value"]) == pytest.approx(value) and line["std"] == ""
        assert cells("sweep.yaml", "--only", "*seed1", "--measure", "last") == {"Fed A": ["–", "90.00"]} | {
            "Fed_B&%": ["–", "–"]
        }

    def test_the_text_names_the_kind_of_deviation(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        assert "± standard deviation over 3 seeds" in invoke_ok("sweep.yaml").out
        single = invoke_ok("sweep.yaml", "--only", "*seed1").out
        assert "seeds" not in single and "deviation" in single and "rounds" in single

    def test_the_text_distinguishes_deviations_over_rounds_and_seeds(self, write_run: WriteRun) -> None:
        """One cell has three runs, another only one."""
        for seed in range(3):
            write_run(f"out/Fed_A-IID-seed{seed}", [0.1 * seed, *RISING[1:]])
        write_run("out/Fed_B__-IID-seed0", RISING)
        text = invoke_ok("sweep.yaml").out
        legend = text.split("\n\n")[1]
        assert "over 3 seeds" in legend and "one run" in legend or "10.00" not in text, text

    def test_the_deviation_may_be_over_rounds_or_seeds(self, write_run: WriteRun) -> None:
        """Over rounds: the mean of the runs' own deviations, and none for values that are not means over rounds."""
        runs = write_all_runs(write_run)["Fed A", "IID"]
        deviations = [100 * statistics.stdev(run[-3:]) for run in runs]
        lines = csv_values("sweep.yaml", "--spread", "rounds", "--target", "0.1")
        assert float(lines["Fed A", "IID", "mean"]["std"]) == pytest.approx(statistics.mean(deviations))
        assert lines["Fed A", "IID", "rounds@0.1"]["std"] == ""
        text = invoke_ok("sweep.yaml", "--spread", "rounds").out
        assert "± standard deviation over the last 3 rounds, the mean of those of the seeds" in text
        seeds = [100 * statistics.mean(run[-3:]) for run in runs]
        for arguments in (["--spread", "seeds"], []):
            line = csv_values("sweep.yaml", *arguments)["Fed A", "IID", "mean"]
            assert float(line["std"]) == pytest.approx(statistics.stdev(seeds))
        assert csv_values("sweep.yaml", "--spread", "seeds", "--only", "*seed1")["Fed A", "IID", "mean"]["std"] == ""
        Path("sweep.yaml").write_text(SWEEP.replace("final_window: 3", "final_window: 3, spread: rounds"))
        assert float(csv_values("sweep.yaml")["Fed A", "IID", "mean"]["std"]) == pytest.approx(
            statistics.mean(deviations)
        )

    def test_rounds_that_were_not_evaluated_do_not_count(self, write_run: WriteRun) -> None:
        accuracies = [0.9, None, 0.3, None, 0.5]
        write_run("out/Fed_A-IID-seed0", accuracies)
        for last, value, std in ((1, 50, None), (2, 50, None), (3, 40, statistics.stdev([30, 50])), (4, 40, None)):
            line = csv_values("sweep.yaml", "--final-window", str(last), "--only", "*seed0")["Fed A", "IID", "mean"]
            assert float(line["value"]) == pytest.approx(value)
            if std:
                assert float(line["std"]) == pytest.approx(std)
        line = csv_values("sweep.yaml", "--final-window", "99")["Fed A", "IID", "mean"]
        assert float(line["value"]) == pytest.approx(statistics.mean([90, 30, 50]))

    def test_the_final_window_defaults_to_that_of_the_run(self, write_run: WriteRun) -> None:
        text = SWEEP.replace("table: {measure: mean, final_window: 3}", "")
        text = text.replace("fedavg}", "fedavg}, evaluate.final_window: 2").replace(
            "fedsam}", "fedsam}, evaluate.final_window: 4"
        )
        Path("sweep.yaml").write_text(text)
        write_run("out/Fed_A-IID-seed0", RISING, config={"evaluate.final_window": 2})
        write_run("out/Fed_B__-IID-seed0", RISING, config={"evaluate.final_window": 4})
        lines = csv_values("sweep.yaml")
        assert float(lines["Fed A", "IID", "mean"]["value"]) == pytest.approx(85)
        assert float(lines["Fed_B&%", "IID", "mean"]["value"]) == pytest.approx(72.5)
        assert float(
            csv_values("sweep.yaml", "--final-window", "1")["Fed_B&%", "IID", "mean"]["value"]
        ) == pytest.approx(90)

    def test_the_command_line_overrides_the_file(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", RISING)
        Path("sweep.yaml").write_text(
            SWEEP.replace("measure: mean, final_window: 3", "measure: best, final_window: 3, targets: [0.7]")
        )
        assert csv_values("sweep.yaml")["Fed A", "IID", "best"]["value"]
        lines = csv_values("sweep.yaml", "--measure", "mean", "--final-window", "1", "--target", "0.8")
        assert {measure for *_, measure in lines} == {"mean", "rounds@0.8"}
        assert float(lines["Fed A", "IID", "mean"]["value"]) == pytest.approx(90)

    def test_lower_is_better_for_tasks_that_declare_it(self, write_run: WriteRun) -> None:
        """Its values are not percentages, and a target is reached from above."""
        for name, errors in (("Fed_A", (3.0, 1.5, 2.0)), ("Fed_B__", (4.0, 2.5, 2.25))):
            folder = write_run(f"out/{name}-IID-seed0", errors)
            facts = json.loads((folder / "run.json").read_text())
            facts["facts"]["primary_metric"] = {"name": "rmse", "best": "min", "percent": False}
            (folder / "run.json").write_text(json.dumps(facts))
            lines = [line | {"test_accuracy": None, "test_rmse": line["test_accuracy"]} for line in metrics(errors)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        lines = csv_values("sweep.yaml", "--measure", "best", "--target", "2.4")
        assert float(lines["Fed A", "IID", "best"]["value"]) == 1.5
        assert float(lines["Fed_B&%", "IID", "best"]["value"]) == 2.25
        assert [float(lines[row, "IID", "rounds@2.4"]["value"]) for row in ("Fed A", "Fed_B&%")] == [2, 3]
        text = invoke_ok("sweep.yaml", "--measure", "best", "--format", "markdown", "--only", "IID").out
        assert "rmse" in text and "**1.5" in text and "%" not in text.replace("B&%", "").replace("B&amp;%", "")
        assert "**2.25" not in text


class TestExtraColumns:
    """Columns besides the metric: diagnostics, seconds."""

    EXTRA_COLUMNS = (
        "extra_columns: {flat: {key: diagnostics.lpf.lpf}, "
        "train_mean: {key: diagnostics.all.mean, percent: true, best: max}, "
        "seconds_a_round: {key: seconds.total, over: mean, columns: [IID]}}"
    )

    def write_measured_run(self, write_run: WriteRun, name: str, seed: int, *values_by_label: Any) -> None:
        """Write a run with diagnostics in some rounds."""
        folder = write_run(f"out/{name}-IID-seed{seed}", RISING)
        lines = list(metrics(RISING))
        for k, value in enumerate(values_by_label):
            lines[2 * k]["diagnostics"] = {"lpf": {"lpf": value, "loss": 9}, "all": {"mean": 0.25 * seed}}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    @pytest.fixture
    def sweep(self, write_run: WriteRun) -> str:
        Path("sweep.yaml").write_text(SWEEP.replace("final_window: 3", f"final_window: 3, {self.EXTRA_COLUMNS}"))
        for seed in range(3):
            self.write_measured_run(write_run, "Fed_A", seed, 99.0, 99.0, 1.0 + seed)
            self.write_measured_run(write_run, "Fed_B__", seed, 0.5)
        return "sweep.yaml"

    def test_the_last_round_with_the_key_counts(self, sweep: str) -> None:
        lines = csv_values(sweep)
        line = lines["Fed A", "IID", "flat"]
        assert (float(line["value"]), float(line["std"])) == (2.0, 1.0)
        assert float(lines["Fed_B&%", "IID", "flat"]["value"]) == 0.5
        assert float(lines["Fed A", "IID", "train_mean"]["value"]) == pytest.approx(25)
        assert float(lines["Fed A", "IID", "seconds_a_round"]["value"]) == pytest.approx(30 * 3)

    def test_the_mean_over_the_final_window_leaves_earlier_rounds_out(self, sweep: str) -> None:
        text = Path(sweep).read_text()
        Path(sweep).write_text(text.replace("lpf.lpf}", "lpf.lpf, over: final_window}"))
        lines = csv_values(sweep, "--final-window", str(len(RISING) - 2))
        assert float(lines["Fed A", "IID", "flat"]["value"]) == pytest.approx((99 + 2) / 2)
        assert lines["Fed_B&%", "IID", "flat"]["value"] == "", "measured before the window only"

    def test_columns_without_the_key_are_omitted(self, sweep: str) -> None:
        assert {column for _, column, measure in csv_values(sweep) if measure != "mean"} == {"IID"}
        Path("published.csv").write_text("sweep,row,column,measure,value,std\nsweep,Fed A,Dir(0.1),flat,2.67,\n")
        assert cells(sweep, "--only", "Dir(0.1)")["Fed A"] == ["–", "– (2.67)"]

    def test_extra_columns_have_their_own_format(self, sweep: str) -> None:
        Path("published.csv").write_text("sweep,row,column,measure,value,std\nsweep,Fed A,IID,train_mean,95.07,0.94\n")
        table = cells(sweep, "--only", "IID")
        assert table["Fed A"][1:] == ["2.0 ± 1.0", "25.00 ± 25.00 (95.07 ± 0.94)", "90 ± 0"]
        text = invoke_ok(sweep, "--only", "IID", "--format", "markdown").out
        assert "| train mean |" in text and "**0.5 ± 0**" in text and "**2.0 ± 1.0**" not in text

    def test_the_command_line_may_name_an_extra_column(self, sweep: str) -> None:
        lines = csv_values(sweep, "--also", "diagnostics.lpf.loss")
        assert float(lines["Fed A", "IID", "diagnostics.lpf.loss"]["value"]) == 9 and ("Fed A", "IID", "flat") in lines
        (line,) = (
            line
            for key, line in csv_values("out/Fed_A-IID-seed1", "--also", "diagnostics.lpf.lpf").items()
            if "." in key[2]
        )
        assert float(line["value"]) == 2

    def test_a_failed_measurement_has_no_value(self, write_run: WriteRun, sweep: str) -> None:
        shutil.rmtree("out")
        self.write_measured_run(write_run, "Fed_A", 0, 1.0, None)
        assert cells(sweep, "--only", "IID")["Fed A"][1] == "–*"

    def test_a_key_that_no_run_has_gets_a_suggestion(self, sweep: str) -> None:
        for key, nearest in (
            ("seconds.totl", "seconds.total"),
            ("diagnostics.lpf.lpff", "diagnostics.lpf.lpf"),
            ("test_acuracy", "test_accuracy"),
            ("train_los", "train_loss"),
        ):
            assert f"no run has {key} in its metrics.jsonl; did you mean {nearest!r}?" in error_line(
                sweep, "--also", key
            )

    def test_a_declared_key_that_no_run_has_gives_no_column(self, sweep: str) -> None:
        assert "spread.loss_std" not in {measure for *_, measure in csv_values(sweep, "--also", "spread.loss_std")}

    def test_the_help_lists_the_keys(self) -> None:
        text = " ".join(parser().format_help().split()).replace("- ", "-")
        keys = [info.key for info in list_keys() if info.key != "dropped"]
        assert [key for key in keys if key not in text] == [] and "seconds.local" in keys

    def test_a_key_that_is_not_a_number_is_named(self, sweep: str) -> None:
        assert "diagnostics.lpf in out/Fed_A" in error_line(sweep, "--also", "diagnostics.lpf")


@pytest.mark.parametrize(
    ("values", "cell"),
    [
        ((0.12345, 0.22345), "0.173 ± 0.071"),
        ((123.4, 1234.5), "679 ± 786"),
        ((2.0, 2.0), "2 ± 0"),
        ((1e-9, 3e-9), "2e-09 ± 1.414e-09"),
    ],
)
def test_a_deviation_has_two_digits_and_its_mean_as_many_decimals(
    values: Sequence[float], cell: str, write_run: WriteRun
) -> None:
    for seed, value in enumerate(values):
        folder = write_run(f"out/Fed_A-IID-seed{seed}", RISING)
        lines = [json.loads(line) | {"train_loss": value} for line in (folder / "metrics.jsonl").open()]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = cells("sweep.yaml", "--only", "Fed_A-IID-seed[01]", "--also", "train_loss")
    assert table["Fed A"][-1] == cell


class TestMeans:
    """Columns that are the mean of others."""

    def test_a_mean_of_the_file_is_over_all_its_columns(self, write_run: WriteRun) -> None:
        Path("sweep.yaml").write_text(SWEEP.replace("final_window: 3", "final_window: 3, means: {All: ['*']}"))
        write_all_runs(write_run)
        assert ("Fed A", "All", "mean") in csv_values("sweep.yaml")
        assert ("Fed A", "All", "mean") not in csv_values("sweep.yaml", "--only", "IID")
        assert ("Fed A", "All", "mean") in csv_values("sweep.yaml", "--only", "IID", "--mean", "All=*"), "as asked"

    def test_a_mean_is_over_the_cells_of_its_row(self, write_run: WriteRun) -> None:
        runs = write_all_runs(write_run)
        Path("published.csv").write_text("sweep,row,column,measure,value,std\nsweep,Fed A,All,mean,71.5,\n")
        lines = csv_values("sweep.yaml", "--mean", "All=Dir*,IID", "--mean", "One=IID", "--target", "0.1")
        for row in ("Fed A", "Fed_B&%"):
            cells_of_row = [
                statistics.mean(measure_run(run, "mean", 3) for run in runs[row, c]) for c in ("Dir(0.1)", "IID")
            ]
            line = lines[row, "All", "mean"]
            assert float(line["value"]) == pytest.approx(statistics.mean(cells_of_row))
            assert (line["std"], line["finished"], line["runs"]) == ("", "6", "6")
            assert float(lines[row, "One", "mean"]["value"]) == pytest.approx(cells_of_row[1])
        assert lines["Fed A", "All", "mean"]["published"] == "71.5"
        assert "All: mean of Dir(0.1), IID" in invoke_ok("sweep.yaml", "--mean", "All=*").out

    def test_a_row_that_lacks_a_cell_has_no_mean(self, write_run: WriteRun) -> None:
        Path("sweep.yaml").write_text(SWEEP.replace("final_window: 3", "final_window: 3, means: {All: [Dir*, IID]}"))
        write_run("out/Fed_A-IID-seed0", RISING)
        assert csv_values("sweep.yaml")["Fed A", "All", "mean"]["value"] == ""
        write_run("out/Fed_A-Dir_0.1_-seed0", [0.4] * 5)
        assert float(csv_values("sweep.yaml")["Fed A", "All", "mean"]["value"]) == pytest.approx((80 + 40) / 2)
        assert cells("sweep.yaml")["Fed A"][-1] == "60.00*", "not all seeds are finished"

    def test_a_mean_whose_columns_are_left_out_is_not_shown(self, write_run: WriteRun) -> None:
        Path("sweep.yaml").write_text(SWEEP.replace("final_window: 3", "final_window: 3, means: {All: [Dir*, IID]}"))
        assert {column for _, column, _ in csv_values("sweep.yaml", "--only", "IID")} == {"IID"}

    def test_mistakes_are_named(self, write_run: WriteRun) -> None:
        assert "valid: Dir(0.1), IID" in error_line("sweep.yaml", "--mean", "All=IID,Photo")
        assert "name of a column" in error_line("sweep.yaml", "--mean", "IID=*")
        for text in ("All", "All=", "=IID", "All=IID,"):
            result = invoke("sweep.yaml", "--mean", text)
            assert result.code == 2 and "NAME=COLUMN" in result.err and "Traceback" not in result.err, text


class TestTargets:
    def test_costs_are_summed_up_to_the_first_round_that_reaches_the_target(self, write_run: WriteRun) -> None:
        seeds = [[0.2, 0.5, 0.7, 0.8, 0.9], [0.1, 0.82, 0.3, 0.4, 0.5], [0.1, 0.2, None, None, 0.8]]
        for seed, accuracies in enumerate(seeds):
            write_run(f"out/Fed_A-IID-seed{seed}", accuracies, scale=seed + 1)
        options = [word for cost in COSTS for word in ("--cost", cost)]
        lines = csv_values("sweep.yaml", "--target", "0.8", "--target", "0.5", *options)
        for target in (0.8, 0.5):
            for cost in COSTS:
                values = [cost_to_target(a, target, cost, seed + 1) for seed, a in enumerate(seeds)]
                known = [value for value in values if value is not None]
                line = lines["Fed A", "IID", f"{cost}@{target}"]
                assert float(line["value"]) == pytest.approx(statistics.mean(known), rel=1e-12)
                assert float(line["std"]) == pytest.approx(statistics.stdev(known), rel=1e-12)
        assert lines["Fed A", "Dir(0.1)", "rounds@0.8"]["value"] == ""

    def test_rounds_are_the_default(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", RISING)
        lines = csv_values("sweep.yaml", "--target", "0.75")
        assert {measure for *_, measure in lines} == {"mean", "rounds@0.75"}
        assert float(lines["Fed A", "IID", "rounds@0.75"]["value"]) == 4
        assert "rounds to 75 %" in invoke_ok("sweep.yaml", "--target", "0.75").out
        assert cells("sweep.yaml", "--target", "0.75", "--only", "*seed0")["Fed A"][-1] == "4"

    def test_a_target_that_some_run_did_not_reach_is_a_cross(self, write_run: WriteRun) -> None:
        for seed in range(3):
            write_run(f"out/Fed_A-IID-seed{seed}", RISING)
            write_run(f"out/Fed_B__-IID-seed{seed}", RISING if seed else [0.1] * 5)
        only = ("sweep.yaml", "--only", "IID", "--target", "0.9")
        assert cells(*only)["Fed A"][-1].startswith("5") and cells(*only)["Fed_B&%"][-1] == "×"
        assert "$\\times$" in invoke_ok(*only, "--format", "latex").out
        row = next(line for line in invoke_ok(*only, "--format", "markdown").lines if "Fed_B" in line)
        assert "×" in row and "**×" not in row

    def test_csv_distinguishes_unreached_targets_from_missing_runs(self, write_run: WriteRun) -> None:
        """As the x in published.csv."""
        write_run("out/Fed_A-IID-seed0", [0.1] * 5)
        lines = csv_values("sweep.yaml", "--only", "*seed0", "--target", "0.9")
        assert lines["Fed_B&%", "IID", "rounds@0.9"]["value"] == "" == lines["Fed A", "IID", "rounds@0.9"]["std"]
        assert lines["Fed A", "IID", "rounds@0.9"]["value"] == "x"

    def test_the_only_run_that_reached_the_target_is_the_best(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", RISING)
        write_run("out/Fed_B__-IID-seed0", [0.1] * 5)
        table = invoke_ok("sweep.yaml", "--only", "*IID-seed0", "--target", "0.9", "--format", "markdown").out
        assert "| **5** |" in table and "| × |" in table, table

    def test_columns_have_their_own_targets(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        Path("sweep.yaml").write_text(
            SWEEP.replace("final_window: 3", "final_window: 3, targets: {IID: [0.2, 0.3], Dir(0.1): [0.4]}")
        )
        measures = {(column, measure) for _, column, measure in csv_values("sweep.yaml")}
        assert measures == {
            *(("IID", "mean"), ("IID", "rounds@0.2"), ("IID", "rounds@0.3")),
            *(("Dir(0.1)", "mean"), ("Dir(0.1)", "rounds@0.4")),
        }
        assert {m for *_, m in csv_values("sweep.yaml", "--target", "0.6")} == {"mean", "rounds@0.6"}

    @pytest.mark.parametrize("target", ["much", "nan", "0.8.1", ""])
    def test_a_target_is_a_number(self, target: str, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", RISING)
        result = invoke("sweep.yaml", "--target", target)
        assert result.code == 2 and "target" in result.err and "Traceback" not in result.err


class TestUnfinished:
    def test_only_finished_runs_count_if_there_are_any(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", RISING)
        write_run("out/Fed_A-IID-seed1", [0.1, 0.2], rounds=5)
        lines = csv_values("sweep.yaml", "--target", "0.5")
        line = lines["Fed A", "IID", "mean"]
        assert float(line["value"]) == pytest.approx(80) and (line["finished"], line["runs"]) == ("1", "3")
        assert float(lines["Fed A", "IID", "rounds@0.5"]["value"]) == 2
        result = invoke_ok("sweep.yaml")
        assert "80.00 ± 10.00*" in result.out
        assert "Fed_A-IID-seed1 (2 of 5 rounds)" in result.out and "Fed_A-IID-seed2 (0 of 5 rounds)" in result.out
        assert "Fed_A-IID-seed0" not in result.out

    def test_unfinished_runs_count_if_none_is_finished(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", [0.1, 0.2, 0.3, 0.6], rounds=5)
        write_run("out/Fed_A-IID-seed1", [0.3, 0.5], rounds=5)
        line = csv_values("sweep.yaml")["Fed A", "IID", "mean"]
        values = [100 * statistics.mean([0.2, 0.3, 0.6]), 40]
        assert float(line["value"]) == pytest.approx(statistics.mean(values))
        assert float(line["std"]) == pytest.approx(statistics.stdev(values))
        assert line["finished"] == "0"
        assert cells("sweep.yaml")["Fed A"][1].endswith("*")

    def test_a_target_may_still_be_reached(self, write_run: WriteRun) -> None:
        """A cross is for finished runs; this one is in progress."""
        write_run("out/Fed_A-IID-seed0", [0.1, 0.2], rounds=5)
        table = cells("sweep.yaml", "--only", "*seed0", "--target", "0.5")["Fed A"][-1]
        assert table in ("–", "–*", "×*"), table

    def test_a_run_without_evaluations_has_no_value(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", [None, None], rounds=5)
        write_run("out/Fed_A-Dir_0.1_-seed0", [0.4, None, None, None], rounds=5)
        write_run("out/Fed_B__-IID-seed0", [], rounds=5)
        lines = csv_values("sweep.yaml", "--only", "*seed0")
        assert lines["Fed A", "IID", "mean"]["value"] == lines["Fed_B&%", "IID", "mean"]["value"] == ""
        table = cells("sweep.yaml", "--only", "*seed0")
        assert table["Fed A"][1] == table["Fed_B&%"][1] == "–"
        assert "nan" not in invoke_ok("sweep.yaml", "--only", "*seed0").out

    def test_a_run_without_a_model_is_not_finished(self, write_run: WriteRun) -> None:
        """It was killed while it saved; the program would resume it."""
        (write_run("out/Fed_A-IID-seed0", RISING) / "model.safetensors").unlink()
        assert csv_values("sweep.yaml", "--only", "*seed0")["Fed A", "IID", "mean"]["finished"] == "0"

    def test_a_run_that_stopped_early_is_finished(self, write_run: WriteRun, trained: Path) -> None:
        folder = write_run("out/Fed_A-IID-seed0", RISING[:3], rounds=5)
        shutil.copy(trained / "model.safetensors", folder)
        (folder / "summary.json").write_text(json.dumps({"finished": True, "rounds": 3, "stopped": "no improvement"}))
        write_run("out/Fed_A-IID-seed1", RISING[:2], rounds=5)
        line = csv_values("sweep.yaml", "--measure", "last")["Fed A", "IID", "last"]
        assert (line["finished"], float(line["value"])) == ("1", pytest.approx(70))
        assert "Fed_A-IID-seed0" not in invoke_ok("sweep.yaml").out
        table = run_status.format_table([run_status.read_status("a", folder, 5, None, None)]).splitlines()
        assert table[1].split() == ["a", "finished", "3/5", "70.00", "%"]

    def test_a_run_is_finished_if_it_has_the_requested_rounds(self, write_run: WriteRun) -> None:
        """With more rounds a finished run continues; until then its cell is unfinished."""
        write_run("out/Fed_A-IID-seed0", RISING)
        assert csv_values("sweep.yaml", "rounds=9", "--only", "*seed0")["Fed A", "IID", "mean"]["finished"] == "0"
        assert "(5 of 9 rounds)" in invoke_ok("sweep.yaml", "rounds=9", "--only", "Fed_A-IID-seed0").out

    def test_a_sweep_without_runs_is_an_empty_table_or_one_line(self, write_run: WriteRun) -> None:
        result = invoke("sweep.yaml")
        if result.code:
            assert result.code == 2 and result.err.count("\n") == 1
        else:
            assert set(sum(cells("sweep.yaml").values(), [])) == {"–"}

    def test_rounds_that_two_jobs_wrote_count_once(self, write_run: WriteRun) -> None:
        folder = write_run("out/Fed_A-IID-seed0", RISING)
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join([*lines[:3], *lines[1:]]))
        words = ("sweep.yaml", "--only", "Fed_A-IID-seed0", "--target", "0.9", "--cost", "minutes")
        result = invoke(*words)
        warning = "warning: out/Fed_A-IID-seed0/metrics.jsonl has 2 rounds twice, as if two jobs had written at once"
        assert result.code == 0 and result.err == f"{warning}; the last one counts\n"
        (folder / "metrics.jsonl").write_text("".join(lines))
        assert invoke_ok(*words).out == result.out

    def test_an_incomplete_last_line_is_ignored(self, write_run: WriteRun) -> None:
        """The last line is incomplete while the run is in progress."""
        file = write_run("out/Fed_A-IID-seed0", RISING[:3], rounds=5) / "metrics.jsonl"
        file.write_text(file.read_text() + '{"round": 4, "test_lo')
        line = csv_values("sweep.yaml", "--only", "*seed0", "--final-window", "1")["Fed A", "IID", "mean"]
        assert float(line["value"]) == pytest.approx(70)


class TestPublished:
    LINES = (
        "sweep,row,column,measure,value,std\n"
        "sweep,Fed A,IID,mean,81.25,0.35\n"
        "sweep,Fed_B&%,IID,mean,79,\n"
        "sweep,Fed A,IID,rounds@0.8,123,\n"
        "sweep,Fed_B&%,IID,rounds@0.8,x,\n"
        "sweep,Fed A,IID,train_mean,99,\n"
        "other,Fed A,Dir(0.1),mean,1.5,\n"
    )

    def test_published_values_are_in_brackets(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        Path("published.csv").write_text(self.LINES)
        table = cells("sweep.yaml", "--only", "IID", "--target", "0.8")
        assert table["Fed A"][0].endswith(" (81.25 ± 0.35)") and table["Fed_B&%"][0].endswith(" (79)")
        assert table["Fed A"][1].endswith(" (123)") and table["Fed_B&%"][1].endswith(" (×)")
        assert "as published" in invoke_ok("sweep.yaml").out
        lines = csv_values("sweep.yaml", "--target", "0.8")
        line = lines["Fed A", "IID", "mean"]
        assert (float(line["published"]), float(line["published_std"])) == (81.25, 0.35)
        assert lines["Fed_B&%", "IID", "rounds@0.8"]["published"] == "x"
        assert lines["Fed A", "Dir(0.1)", "mean"]["published"] == "", "the value is of another sweep"
        assert csv_values("sweep.yaml", "--measure", "best")["Fed A", "IID", "best"]["published"] == ""

    def test_the_text_explains_the_published_deviation(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        Path("published.csv").write_text(self.LINES)
        assert "in brackets: as published\n" in invoke_ok("sweep.yaml").out
        Path("sweep.yaml").write_text(
            SWEEP.replace("final_window: 3", "final_window: 3, published_spread: over clients")
        )
        assert "in brackets: as published (± over clients)\n" in invoke_ok("sweep.yaml").out

    def test_failed_training_differs_from_an_unreached_target(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        Path("published.csv").write_text(self.LINES + "sweep,Fed A,Dir(0.1),mean,x,\n")
        assert cells("sweep.yaml", "--only", "Dir(0.1)")["Fed A"][0].endswith(" (failed)")
        text = invoke_ok("sweep.yaml").out
        assert "failed: training failed there" in text and "×" not in text
        assert "failed" not in invoke_ok("sweep.yaml", "--only", "IID").out
        assert csv_values("sweep.yaml")["Fed A", "Dir(0.1)", "mean"]["published"] == "x"

    def test_a_published_target_that_was_not_reached_is_explained(self, write_run: WriteRun) -> None:
        """Also if all our runs reached it."""
        for seed in range(3):
            write_run(f"out/Fed_B__-IID-seed{seed}", RISING)
        Path("published.csv").write_text(self.LINES)
        text = invoke_ok("sweep.yaml", "--only", "Fed_B*IID*", "--target", "0.8").out
        assert text.count("×") == 2 and "× not reached" in text and "failed" not in text

    def test_published_values_are_shown_before_any_run(self, write_run: WriteRun) -> None:
        Path("published.csv").write_text(self.LINES)
        write_run("out/Fed_A-Dir_0.1_-seed0", RISING)
        assert cells("sweep.yaml", "--only", "IID")["Fed A"] == ["– (81.25 ± 0.35)"]

    def test_another_file_may_be_named(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        Path("published.csv").write_text(self.LINES)
        Path("other.csv").write_text("sweep,row,column,measure,value,std\nsweep,Fed A,IID,mean,12.5,\n")
        table = cells("sweep.yaml", "--only", "IID", "--published", "other.csv")
        assert table["Fed A"][0].endswith("(12.5)") and "(" not in table["Fed_B&%"][0]

    def test_published_csv_is_read_beside_the_sweep_file(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        Path("elsewhere").mkdir()
        Path("elsewhere/sweep.yaml").write_text(SWEEP)
        Path("elsewhere/published.csv").write_text(self.LINES)
        assert "(81.25" in invoke_ok("elsewhere/sweep.yaml").out and "(81.25" not in invoke_ok("sweep.yaml").out

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("", ""),
            ("a,b,c\n1,2,3\n", ""),
            ("sweep,row,column,measure,value,std\nsweep,Fed A,IID,mean,many,\n", "many"),
            ("sweep,row,column,measure,value,std\nsweep,Fed A,IID,mean,1,much\n", "much"),
            ("sweep,row,column,measure,value,std\nsweep,Fed A\n", ""),
            ("sweep,row,column,measure,value,std\nsweep,Fed A,IID,mean,1,2,3,4\n", ""),
            ("\x00\x01\x02", ""),
        ],
    )
    def test_a_bad_file_is_named(self, text: str, part: str, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", RISING)
        Path("published.csv").write_text(text)
        assert "published.csv" in error_line("sweep.yaml") and part in error_line("sweep.yaml")

    def test_a_published_file_may_be_empty(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", RISING)
        Path("published.csv").write_text("sweep,row,column,measure,value,std\n")
        assert "80.00" in invoke_ok("sweep.yaml").out

    def test_a_missing_or_binary_published_file_is_named(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", RISING)
        assert "none.csv" in error_line("sweep.yaml", "--published", "none.csv")
        Path("bytes.csv").write_bytes(b"\xff\xfe\x00\x80")
        assert "bytes.csv" in error_line("sweep.yaml", "--published", "bytes.csv")


class TestFormats:
    def test_markdown_marks_the_best_values_bold(self, write_run: WriteRun) -> None:
        runs = write_all_runs(write_run)
        table = [line for line in invoke_ok("sweep.yaml", "--format", "markdown").lines if line.startswith("|")]
        head, rule, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
        assert len(head) == len(rule) == 3 and all(re.fullmatch(":?-+:?", cell) for cell in rule)
        assert "Dir(0.1)" in head[1] and "IID" in head[2]
        values = {
            cell: statistics.mean(measure_run(accuracies, "mean", 3) for accuracies in seeds)
            for cell, seeds in runs.items()
        }
        for k, column in enumerate(("Dir(0.1)", "IID"), 1):
            best = max(("Fed A", "Fed_B&%"), key=lambda row: values[row, column])
            for line in body:
                row = line[0].replace("&amp;", "&").replace("\\", "")
                assert line[k].startswith("**") == line[k].endswith("**") == (row == best)
                assert line[k].strip("*").split()[0] == f"{values[row, column]:.2f}"

    def test_stars_and_bars_are_escaped_in_markdown(self, write_run: WriteRun) -> None:
        """The star of an unfinished cell must not end its bold, nor a bar in a label its cell."""
        Path("sweep.yaml").write_text(SWEEP.replace("Fed A:", '"a|b*c_d":').replace("IID:", '"x|y":'))
        Path("published.csv").write_text("sweep,row,column,measure,value,std\nsweep,a|b*c_d,x|y,mean,5,\n")
        write_run("out/a_b_c_d-x_y-seed0", RISING)
        write_run("out/Fed_B__-x_y-seed0", RISING)
        table = [line for line in invoke_ok("sweep.yaml", "--format", "markdown").lines if line.startswith("|")]
        bare = [re.sub(r"\\.", "", line) for line in table]
        assert {line.count("|") for line in bare} == {4}
        for line in bare:
            for cell in line.strip("|").split("|"):
                inner = cell.strip().removeprefix("**").removesuffix("**")
                assert "*" not in inner, line

    def test_latex_is_complete_and_escaped(self, write_run: WriteRun) -> None:
        labels = r"a_b&c%d$e#f{g}h~i^j\k"
        Path("sweep.yaml").write_text(SWEEP.replace("Fed_B&%:", f"'{labels}':"))
        write_all_runs(write_run)
        name = re.sub(r"[^A-Za-z0-9._+]", "_", labels)
        for seed in range(3):
            write_run(f"out/{name}-IID-seed{seed}", RISING)
        Path("published.csv").write_text(f"sweep,row,column,measure,value,std\nsweep,{labels},IID,mean,5,0.5\n")
        text = invoke_ok("sweep.yaml", "--format", "latex", "--target", "0.85").out
        lines = [line for line in text.splitlines() if not line.startswith("%")]
        assert lines[0].startswith("\\begin{tabular}{") and lines[-1] == "\\end{tabular}"
        assert [line for line in lines if line.endswith("rule")] == ["\\toprule", "\\midrule", "\\bottomrule"]
        width = len(re.fullmatch(r"\\begin\{tabular\}\{([lcr]+)\}", lines[0])[1])  # type: ignore[index]
        for line in lines[1:-1]:
            if line.endswith("rule") or "cmidrule" in line:
                continue
            assert line.endswith(" \\\\")
            spans = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line))
            assert len(re.findall(r"(?<!\\)&", line)) + 1 + spans == width, line
        assert_balanced(lines)
        row = next(line for line in lines if line.startswith("a"))
        for escaped in (r"a\_b\&c\%d\$e\#f\{g\}h", r"i", r"j", r"k &"):
            assert escaped in row, row
        plain = re.sub(r"\$[^$]*\$", "", re.sub(r"\\[_&%$#{}]", "", row))
        assert not set("_#$~^%") & set(re.sub(r"\\textasciicircum|\\textasciitilde|\\\^|\\~", "", plain)), row
        assert "\\textbf{80.00 $\\pm$ 0.00 (5 $\\pm$ 0.5)}" in row
        assert text.isascii() or all(line.isascii() for line in lines)

    def test_csv_has_the_documented_header(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        result = invoke_ok("sweep.yaml", "--format", "csv")
        assert result.lines[0] == "sweep,row,column,measure,value,std,finished,runs,published,published_std"
        assert len(result.lines) == 5 and all(len(line) == 10 for line in csv.reader(result.lines))

    def test_csv_quotes_labels(self, write_run: WriteRun) -> None:
        label = 'a,"b"'
        Path("sweep.yaml").write_text(SWEEP.replace("Fed A:", f"'{label}':"))
        write_run("out/a__b_-IID-seed0", RISING)
        assert csv_values("sweep.yaml")[label, "IID", "mean"]["finished"] == "1"

    @pytest.mark.parametrize(
        ("suffix", "format"), [(".txt", "text"), (".md", "markdown"), (".tex", "latex"), (".csv", "csv")]
    )
    def test_an_output_file_equals_the_terminal_output(self, suffix: str, format: str, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        invoke_ok("sweep.yaml", "-o", f"table{suffix}")
        text = invoke_ok("sweep.yaml", "--format", format).out
        assert Path(f"table{suffix}").read_bytes().decode().replace("\r\n", "\n") == text.replace("\r\n", "\n")
        invoke_ok("sweep.yaml", "-o", "table.dat", "--format", format)
        assert Path("table.dat").read_bytes() == Path(f"table{suffix}").read_bytes()

    def test_an_output_file_names_runs_whose_folders_are_not_utf_8(self, write_run: WriteRun) -> None:
        write_run("runs/a", RISING, rounds=9).rename(os.fsdecode(b"runs/a\xff"))
        invoke_ok("runs", "-o", "new/table.md")
        assert "runs/a? (5 of 9 rounds)" in Path("new/table.md").read_text()

    def test_text_columns_are_aligned(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        table = invoke_ok("sweep.yaml", "--target", "0.5").out.split("\n\n")[0].splitlines()
        assert len({len(line) for line in table}) == 1, table


def assert_balanced(lines: Sequence[str]) -> None:
    """Unescaped braces and dollars are balanced, and environments are closed."""
    text = "\n".join(lines)
    bare = re.sub(r"\\[{}$]", "", text.replace("\\\\", ""))
    assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0
    assert re.findall(r"\\begin\{(\w+)\}", text) == re.findall(r"\\end\{(\w+)\}", text)[::-1]


class TestCurves:
    @pytest.mark.parametrize("against", ["rounds", "minutes"])
    def test_a_plot_has_coloured_lines(self, against: str, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        invoke_ok("sweep.yaml", "--curves", "curves.png", "--against", against)
        pixels = np.asarray(Image.open("curves.png").convert("RGB")).reshape(-1, 3)
        colourful = pixels[np.ptp(pixels.astype(int), 1) > 60]
        assert len(pixels) > 100_000 and len(np.unique(colourful, axis=0)) >= 2 and len(colourful) > 500

    @pytest.mark.parametrize(("name", "begin", "end"), [("c.pdf", b"%PDF", b"%%EOF"), ("c.svg", b"<?xml", b"</svg>")])
    def test_vector_formats_are_complete(self, name: str, begin: bytes, end: bytes, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        result = invoke_ok("sweep.yaml", "--curves", name)
        data = Path(name).read_bytes()
        assert data.startswith(begin) and data.rstrip().endswith(end) and len(data) > 5000
        assert "Fed A" in result.out, "the table is printed too"

    def test_unfinished_and_missing_runs_do_not_break_curves(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", [0.1, None, 0.3], rounds=5)
        write_run("out/Fed_A-IID-seed1", RISING)
        write_run("out/Fed_B__-IID-seed1", [None], rounds=5)
        write_run("out/Fed_B__-IID-seed2", [], rounds=5)
        invoke_ok("sweep.yaml", "--curves", "c.png")
        assert Path("c.png").stat().st_size > 5000

    def test_an_unknown_plot_format_is_refused(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        for name in ("c.doc", "c"):
            result = invoke("sweep.yaml", "--curves", name)
            assert result.code == 2 and result.err.startswith(f"error: {name} ") and result.err.count("\n") == 1
        assert not list(Path.cwd().glob("c*"))


class TestScatter:
    def points(self, key: str) -> dict[tuple[str, str], Point]:
        collection = collect(["sweep.yaml"])
        return scatter_points(collection, key, collection.sweep.table)

    def test_a_point_has_the_means_and_deviations_of_its_seeds(self, write_run: WriteRun) -> None:
        """Against a cost of all rounds, and against a number of the last round that has it."""
        for seed in range(3):
            write_run(f"out/Fed_A-IID-seed{seed}", [*RISING[:4], 0.7 + 0.1 * seed], scale=seed + 1)
        scores = [100 * statistics.mean([0.7, 0.8, 0.7 + 0.1 * seed]) for seed in range(3)]
        totals = [sum(30 * k * (seed + 1) for k in range(1, 6)) / 60 for seed in range(3)]
        lasts = [30 * 5 * (seed + 1) for seed in range(3)]
        for key, values in (("minutes", totals), ("seconds.total", lasts)):
            ((cell, point),) = self.points(key).items()
            assert cell == ("Fed A", "IID")
            assert (point.x, point.y) == pytest.approx((statistics.mean(values), statistics.mean(scores)))
            assert (point.x_error, point.y_error) == pytest.approx((statistics.stdev(values), statistics.stdev(scores)))

    def test_the_plot_names_rows_columns_and_the_number(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        result = invoke_ok("sweep.yaml", "--scatter", "s.svg", "--x", "train_loss")
        text = Path("s.svg").read_text()
        assert all(f"<!-- {label} -->" in text for label in ("Fed A", "Dir(0.1)", "IID", "train_loss"))
        assert "test accuracy (%)" in text and "Fed A" in result.out

    def test_runs_without_the_number_give_no_plot(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", RISING)
        result = invoke("sweep.yaml", "--scatter", "s.png", "--x", "spread.loss_std")
        assert result.code == 0 and "no scatter plot was drawn" in result.err and not Path("s.png").exists()

    def test_mistakes_are_named(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", RISING)
        assert "did you mean 'passes'?" in error_line("sweep.yaml", "--scatter", "s.png", "--x", "pases")
        assert "--x KEY" in error_line("sweep.yaml", "--scatter", "s.png")
        assert "--scatter FILE" in error_line("sweep.yaml", "--x", "passes")
        assert "s.doc" in error_line("sweep.yaml", "--scatter", "s.doc", "--x", "passes")

    def test_a_number_of_the_table_is_named_as_there(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        Path("sweep.yaml").write_text(SWEEP.replace("final_window: 3", "extra_columns: {loss: {key: train_loss}}"))
        invoke_ok("sweep.yaml", "--scatter", "s.svg", "--x", "train_loss")
        assert "<!-- loss -->" in Path("s.svg").read_text()


class TestSurfaces:
    GRID: ClassVar = {
        "x": [-1.0, 0.0, 1.0],
        "y": [-1.0, 0.0, 1.0],
        "loss": [[3.0, 2.0, 3.0], [2.0, 1.0, 2.0], [3.0] * 3],
    }

    def measure(self, folder: Path, values: Mapping[str, Any]) -> None:
        line = {"round": 5, "label": "surface", "values": values, "seconds": 1.0}
        (folder / "diagnostics.jsonl").write_text(f"{json.dumps(line)}\n")

    def test_one_panel_per_cell_that_has_a_surface(self, write_run: WriteRun) -> None:
        for row in ("Fed_A", "Fed_B__"):
            for seed in (0, 1):
                self.measure(write_run(f"out/{row}-IID-seed{seed}", RISING), self.GRID)
        write_run("out/Fed_A-Dir_0.1_-seed0", RISING)
        invoke_ok("sweep.yaml", "--surfaces", "s.svg")
        text = Path("s.svg").read_text()
        assert [text.count(f"<!-- {label} -->") for label in ("Fed A, IID", "Fed_B&amp;%, IID", "Fed A, Dir(0.1)")] == [
            1,
            1,
            0,
        ]

    def test_runs_without_surfaces_give_no_plot(self, write_run: WriteRun) -> None:
        self.measure(write_run("out/Fed_A-IID-seed0", RISING), {"sharpness": 1.0})
        result = invoke("sweep.yaml", "--surfaces", "s.png")
        assert result.code == 0 and "none was drawn" in result.err and not Path("s.png").exists()

    def test_a_damaged_line_is_named(self, write_run: WriteRun) -> None:
        (write_run("out/Fed_A-IID-seed0", RISING) / "diagnostics.jsonl").write_text("{}}\n")
        result = invoke("sweep.yaml", "--surfaces", "s.png")
        assert result.code == 2 and "line 1 of out/Fed_A-IID-seed0/diagnostics.jsonl" in result.err


class TestArchive:
    """A table, its plots and its report from the records alone."""

    def archive(self, write_run: WriteRun) -> str:
        write_all_runs(write_run)
        for folder in Path("out").iterdir():
            (folder / "summary.json").write_text(json.dumps({"finished": True, "rounds": 5}))
            (folder / "attempts.jsonl").write_text(json.dumps({"hosts": ["secret-host"]}) + "\n")
        table = invoke_ok("sweep.yaml", "--archive", "records.tar.xz").out
        shutil.rmtree("out")
        return table

    def test_the_table_is_the_same_without_the_runs(self, write_run: WriteRun) -> None:
        table = self.archive(write_run)
        assert "not finished" not in table
        assert invoke_ok("sweep.yaml", "--from", "records.tar.xz", "--curves", "c.png").out == table
        assert Path("c.png").stat().st_size > 0 and not Path("out").exists()

    def test_an_unfinished_run_stays_unfinished(self, write_run: WriteRun) -> None:
        write_run("out/Fed_A-IID-seed0", RISING[:3], rounds=5)
        table = invoke_ok("sweep.yaml", "--archive", "records.tar.xz").out
        assert "(3 of 5 rounds)" in table
        assert invoke_ok("sweep.yaml", "--from", "records.tar.xz").out == table

    def test_it_holds_records_only_and_is_reproducible(self, write_run: WriteRun) -> None:
        self.archive(write_run)
        with tarfile.open("records.tar.xz") as file:
            names = {Path(name).name for name in file.getnames()}
            text = b"".join(content.read() for member in file if (content := file.extractfile(member)))
        assert names == {"config.yaml", "run.json", "metrics.jsonl", "summary.json"} and b"secret-host" not in text
        first = Path("records.tar.xz").read_bytes()
        invoke_ok("sweep.yaml", "--from", "records.tar.xz", "--archive", "again.tar.xz")
        assert Path("again.tar.xz").read_bytes() == first

    def test_the_report_is_made_from_it(self, write_run: WriteRun) -> None:
        self.archive(write_run)
        assert report(["sweep.yaml", "--from", "records.tar.xz", "-o", "report.html"]) == 0
        assert "Fed A" in Path("report.html").read_text()

    def test_mistakes_are_named(self, write_run: WriteRun) -> None:
        self.archive(write_run)
        Path("bad.tar.xz").write_bytes(b"no archive")
        assert "does not exist" in error_line("sweep.yaml", "--from", "none.tar.xz")
        assert "bad.tar.xz cannot be extracted" in error_line("sweep.yaml", "--from", "bad.tar.xz")
        assert ".tar.xz" in error_line("sweep.yaml", "--from", "sweep.yaml")
        assert ".tar.xz" in error_line("sweep.yaml", "--archive", "records.zip")
        assert "name its file" in error_line("out", "--from", "records.tar.xz")
        assert "name its file" in error_line(write_run("alone", RISING), "--archive", "new.tar.xz")
        Path("other.yaml").write_text(SWEEP.replace("Fed A", "Other").replace("Fed_B&%", "More"))
        assert "no run of other.yaml" in error_line("other.yaml", "--from", "records.tar.xz")
        result = invoke("sweep.yaml", "--archive", "new.tar.xz")
        assert result.code == 0 and "no run has a record yet" in result.err and not Path("new.tar.xz").exists()

    def test_runs_in_folders_and_archives_become_one_archive(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        for folder in Path("out").iterdir():
            (folder / "summary.json").write_text(json.dumps({"finished": True, "rounds": 5}))
        everything = invoke_ok("sweep.yaml", "--archive", "all.tar.xz").out
        invoke_ok("sweep.yaml", "--only", "Fed A", "--archive", "a.tar.xz")
        invoke_ok("sweep.yaml", "--only", "Fed_B*", "--archive", "b.tar.xz")
        for folder in Path("out").glob("Fed_A-*"):
            shutil.rmtree(folder)
        result = invoke_ok("sweep.yaml", "--from", "a.tar.xz", "--archive", "a.tar.xz")
        assert result.out == everything
        assert Path("a.tar.xz").read_bytes() == Path("all.tar.xz").read_bytes()
        shutil.rmtree("out")
        invoke_ok("sweep.yaml", "--only", "Fed A", "--from", "all.tar.xz", "--archive", "a.tar.xz")
        both = ("--from", "b.tar.xz", "--from", "a.tar.xz")
        assert invoke_ok("sweep.yaml", *both, "--archive", "new.tar.xz").out == everything
        assert Path("new.tar.xz").read_bytes() == Path("all.tar.xz").read_bytes()
        assert invoke_ok("sweep.yaml", *both).out == everything
        assert report(["sweep.yaml", *both, "-o", "report.html"]) == 0

    def test_a_run_is_read_where_it_has_records_first(self, write_run: WriteRun) -> None:
        scores = {name: [score] * 5 for name, score in (("first", 0.2), ("second", 0.4), ("own", 0.6))}

        def accuracy(*arguments: str) -> float:
            lines = csv_values("sweep.yaml", "--only", "*IID-seed0", *arguments)
            return float(lines["Fed A", "IID", "mean"]["value"])

        for name, accuracies in scores.items():
            shutil.rmtree("out", ignore_errors=True)
            write_run("out/Fed_A-IID-seed0", accuracies)
            invoke_ok("sweep.yaml", "--archive", f"{name}.tar.xz")
        archives = ("--from", "first.tar.xz", "--from", "second.tar.xz")
        assert accuracy(*archives) == pytest.approx(20)
        assert accuracy(*archives, "--archive", "new.tar.xz") == pytest.approx(60)
        assert accuracy("--from", "new.tar.xz") == pytest.approx(60)
        Path("out/Fed_A-IID-seed0/metrics.jsonl").write_text("")
        assert accuracy(*archives, "--archive", "new.tar.xz") == pytest.approx(20)

    def test_an_archive_cannot_write_outside_of_its_folder(self, write_run: WriteRun) -> None:
        with tarfile.open("evil.tar.xz", "w:xz") as file:
            file.addfile(tarfile.TarInfo("../evil.txt"))
        assert "outside of its folder" in error_line("sweep.yaml", "--from", "evil.tar.xz")


class TestPlotOver:
    """Layouts of three algorithms and values of rho; FedAvg has none."""

    AS_COLUMNS = """
rows: {Sam: {algorithm.name: fedsam}, Mo: {algorithm.name: mofedsam}}
columns: {small: {algorithm.rho: 0.01}, large: {algorithm.rho: 0.1}, huge: {algorithm.rho: 1.0}}
grid: {seed: [0, 1]}
set: {model: mlp, rounds: 2}
dir: out
table: {measure: last}
"""
    AS_ROWS = """
rows:
  Avg: {algorithm: {name: fedavg}}
  rho=0.01: {algorithm: {name: fedsam, rho: 0.01}}
  rho=0.1: {algorithm: {name: fedsam, rho: 0.1}}
columns: {IID: {partition: iid}, Two: {partition: {name: shards, per_client: 2}}}
set: {model: mlp, rounds: 2}
dir: out
table: {measure: last}
"""
    AS_GRID = """
rows: {Sam: {algorithm.name: fedsam}}
columns: {IID: {partition: iid}, Two: {partition: {name: shards, per_client: 2}}}
grid: {algorithm.rho: [0.01, 0.1], local.lr: [0.1, 0.2]}
set: {model: mlp, rounds: 2}
dir: out
"""

    def lines(self, sweep: str, key: str = "algorithm.rho") -> dict[tuple[str, str], set[float | None]]:
        Path("rho.yaml").write_text(sweep)
        return {(line.title, line.label): {*line.runs} for line in lines_over(collect(["rho.yaml"]), key)}

    def test_the_layout_of_the_sweep_does_not_matter(self, write_run: WriteRun) -> None:
        assert self.lines(self.AS_COLUMNS) == {("", "Sam"): {0.01, 0.1, 1.0}, ("", "Mo"): {0.01, 0.1, 1.0}}
        levels = {("IID", "Avg"): {None}, ("Two", "Avg"): {None}}
        assert self.lines(self.AS_ROWS) == levels | {(c, "fedsam"): {0.01, 0.1} for c in ("IID", "Two")}
        panels = [f"{column}, lr={lr}" for column in ("IID", "Two") for lr in (0.1, 0.2)]
        assert self.lines(self.AS_GRID) == {(panel, "Sam"): {0.01, 0.1} for panel in panels}

    def test_runs_that_differ_in_more_than_the_key_are_no_points(self, write_run: WriteRun) -> None:
        """One setting at a time: a run with another rate is on no line, or on one of its own with its name."""
        text = "columns: {a: {algorithm.rho: 0.1}, b: {algorithm.rho: 0.2}, c: {local.lr: 0.3}%s}\n"
        text += "rows: {Sam: {algorithm: {name: fedsam, rho: 0.1}}}\nset: {model: mlp, local.lr: 0.1}\n"
        assert self.lines(text % "") == {("", "Sam"): {0.1, 0.2}}
        own = ", d: {algorithm.rho: 0.2, local.lr: 0.3}"
        assert self.lines(text % own) == {("", "Sam lr=0.1"): {0.1, 0.2}, ("", "Sam lr=0.3"): {0.1, 0.2}}

    def test_points_have_the_mean_and_deviation_of_the_seeds(self, write_run: WriteRun) -> None:
        for column, score in (("large", 0.5), ("small", 0.3)):
            for seed in range(2):
                write_run(f"out/Sam-{column}-seed{seed}", [0.1, score + 0.1 * seed])
        Path("rho.yaml").write_text(self.AS_COLUMNS)
        sam, mo = lines_over(collection := collect(["rho.yaml"]), "algorithm.rho")
        table, deviation = collection.sweep.table, statistics.stdev([30, 40])
        points = [(point.x, point.y, point.y_error) for point in line_points(sam, table)]
        assert points == [pytest.approx((0.01, 35, deviation)), pytest.approx((0.1, 55, deviation))]
        assert line_points(mo, table) == []

    def test_folders_give_the_lines_of_their_configurations(self, write_run: WriteRun) -> None:
        for rho in (0.05, 0.1):
            write_run(f"runs/{rho}", [rho] * 3, config={"algorithm": {"name": "fedsam", "rho": rho}})
        write_run("runs/avg", [0.5] * 3, config={"algorithm": {"name": "fedavg"}})
        lines = {line.label: {*line.runs} for line in lines_over(collect(["runs"]), "algorithm.rho")}
        assert lines == {"fedsam": {0.05, 0.1}, "fedavg": {None}}
        invoke_ok("runs", "--plot", "p.svg", "--over", "algorithm.rho")
        text = Path("p.svg").read_text()
        assert all(f"<!-- {label} -->" in text for label in ("fedsam", "fedavg", "algorithm.rho", "test accuracy (%)"))

    @pytest.mark.parametrize(
        ("values", "scale"), [((1, 30), "linear"), ((0.1, 3.1), "log"), ((0, 0.1, 9), "symlog"), ((0, 1), "linear")]
    )
    def test_wide_ranges_have_a_logarithmic_axis(self, values: Sequence[float], scale: str) -> None:
        panel = Figure().subplots()
        scale_x(panel, values)
        assert panel.get_xscale() == scale

    def test_mistakes_are_named(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        assert "mean over seeds" in error_line("sweep.yaml", "--plot", "p.png", "--over", "seed")
        shutil.rmtree("out")
        Path("rho.yaml").write_text(self.AS_COLUMNS)
        plot = ("rho.yaml", "--plot", "p.png")
        assert "no run has algorithm.roh in its configuration; did you mean 'algorithm.rho'?" in error_line(
            *plot, "--over", "algorithm.roh"
        )
        assert "local.epochs is 1 in all runs" in error_line(*plot, "local.epochs=1", "--over", "local.epochs")
        assert "not a number" in error_line(*plot, "--over", "algorithm.name")
        assert "--over KEY" in error_line(*plot)
        assert "--plot FILE" in error_line("rho.yaml", "--over", "algorithm.rho")
        Path("rho.yaml").write_text(self.AS_COLUMNS.replace("0.1}", "0.1, local.lr: 0.3}"))
        assert "no two runs" in error_line(*plot, "--only", "small", "--only", "large", "--over", "local.lr")
        result = invoke(*plot, "--over", "algorithm.rho")
        assert result.code == 0 and "no plot was drawn" in result.err and not Path("p.png").exists()


class TestSweeps:
    def test_only_takes_labels_and_names(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        assert {(row, column) for row, column, _ in csv_values("sweep.yaml", "--only", "IID")} == {
            *(("Fed A", "IID"), ("Fed_B&%", "IID"))
        }
        assert {row for row, *_ in csv_values("sweep.yaml", "--only", "Fed A")} == {"Fed A"}
        line = csv_values("sweep.yaml", "--only", "Fed_A-IID-seed[01]")["Fed A", "IID", "mean"]
        assert line["runs"] == "2"
        selected = csv_values("sweep.yaml", "--only", "Fed_A-IID-seed0", "--only", "Fed_B__-Dir*")
        assert {(row, column) for row, column, _ in selected if selected[row, column, "mean"]["value"]} == {
            *(("Fed A", "IID"), ("Fed_B&%", "Dir(0.1)"))
        }
        assert "nothing" in error_line("sweep.yaml", "--only", "nothing")

    def test_overrides_have_their_own_folder(self, write_run: WriteRun) -> None:
        Path("sweep.yaml").write_text(SWEEP.replace("dir: out\n", ""))
        write_run("runs/sweep/Fed_A-IID-seed0", RISING)
        write_run("runs/sweep-local.lr=0.5/Fed_A-IID-seed0", [0.1, 0.1, 0.1, 0.1, 0.1], config={"local.lr": 0.5})
        assert float(csv_values("sweep.yaml")["Fed A", "IID", "mean"]["value"]) == pytest.approx(80)
        assert float(csv_values("sweep.yaml", "local.lr=0.5")["Fed A", "IID", "mean"]["value"]) == pytest.approx(10)
        assert "lrr" in error_line("sweep.yaml", "local.lrr=0.5")

    def test_like_another_sweep_with_fewer_rows(self, write_run: WriteRun) -> None:
        runs = write_all_runs(write_run)
        Path("small.yaml").write_text(
            "like: sweep.yaml\nrows: [Fed_B&%]\ncolumns: [IID]\ndir: out\ntable: {final_window: 1}\n"
        )
        lines = csv_values("small.yaml")
        assert list(lines) == [("Fed_B&%", "IID", "mean")]
        values = [100 * accuracies[-1] for accuracies in runs["Fed_B&%", "IID"]]
        assert float(lines["Fed_B&%", "IID", "mean"]["value"]) == pytest.approx(statistics.mean(values))
        assert lines["Fed_B&%", "IID", "mean"]["sweep"] == "small"

    def test_a_grid_of_algorithms_is_a_table(self, write_run: WriteRun) -> None:
        Path("grid.yaml").write_text(
            "dir: out\ngrid: {algorithm.name: [fedavg, fedsam], seed: [0, 1]}\nset: {rounds: 5}\n"
        )
        for name, level in (("fedavg", 0.5), ("fedsam", 0.6)):
            for seed in range(2):
                write_run(f"out/{name}-seed{seed}", [level] * 5, config={"algorithm": {"name": name}, "seed": seed})
        lines = csv_values("grid.yaml")
        values_by_label = {
            label: float(line["value"]) for key, line in lines.items() for label in key if "fed" in label
        }
        assert [round(value) for _, value in sorted(values_by_label.items())] == [50, 60]
        assert all(line["runs"] == "2" for line in lines.values())


class TestFolders:
    def test_rows_are_algorithms_and_columns_other_differences(self, write_run: WriteRun) -> None:
        expected: dict[tuple[str, str], list[float]] = {}
        for a, name in enumerate(("fedavg", "fedsam")):
            for p, partition in enumerate(({"name": "iid"}, {"name": "shards", "per_client": 2})):
                for seed in range(2):
                    level = 0.1 + 0.2 * a + 0.05 * p + 0.01 * seed
                    algorithm = {"name": name} | ({"rho": 0.05} if a else {})
                    config = {"algorithm": algorithm, "partition": partition, "seed": seed}
                    write_run(f"runs/{name}/{partition['name']}/{seed}", [level] * (3 + seed), config=config)
                    expected.setdefault((name, str(partition["name"])), []).append(100 * level)
        lines = csv_values("runs")
        assert len(lines) == 4
        for (name, partition), values in expected.items():
            (line,) = [line for (row, column, _), line in lines.items() if name in row and partition in column]
            assert float(line["value"]) == pytest.approx(statistics.mean(values))
            assert float(line["std"]) == pytest.approx(statistics.stdev(values))
            assert line["runs"] == line["finished"] == "2"
        assert not any("seed" in column or "rounds" in column or "dir" in column for _, column, _ in lines)

    def test_different_settings_of_an_algorithm_are_rows(self, write_run: WriteRun) -> None:
        for rho in (0.05, 0.1):
            write_run(f"runs/{rho}", [rho] * 3, config={"algorithm": {"name": "fedsam", "rho": rho}})
        write_run("runs/avg", [0.5] * 3, config={"algorithm": {"name": "fedavg"}})
        rows = {row: float(line["value"]) for (row, *_), line in csv_values("runs").items()}
        assert len(rows) == 3 and "fedavg" in rows
        for rho in (0.05, 0.1):
            (row,) = [row for row in rows if str(rho) in row]
            assert "fedsam" in row and rows[row] == pytest.approx(100 * rho)

    def test_paths_and_checkpoint_settings_are_no_columns(self, write_run: WriteRun) -> None:
        more = {"every": 1, "keep": 2, "grace": 60.0}
        write_run("runs/a", [0.4] * 3, config={"checkpoint": more})
        write_run("runs/b", [0.6] * 3, config={"checkpoint": more | {"keep": 5}, "seed": 8})
        (line,) = csv_values("runs").values()
        assert float(line["value"]) == pytest.approx(50) and line["runs"] == "2"

    def test_one_run_and_several_folders(self, write_run: WriteRun) -> None:
        single = write_run("runs/one", RISING, config={"evaluate.final_window": 2})
        write_run(
            "more/deep/two",
            [0.5] * 5,
            config={"algorithm": {"name": "fedsam", "rho": 0.05}, "evaluate.final_window": 2},
        )
        (line,) = csv_values(single).values()
        assert float(line["value"]) == pytest.approx(85) and line["row"] == "fedavg"
        assert len(csv_values("runs", "more/deep")) == 2
        assert cells(single)["fedavg"] == [f"85.00 ± {statistics.stdev([80, 90]):.2f}"]

    def test_a_run_that_is_named_twice_counts_once(self, write_run: WriteRun) -> None:
        single = write_run("runs/one", RISING)
        for arguments in ([single, "runs"], [single, single.absolute()], ["runs", "runs/../runs"]):
            assert next(iter(csv_values(*arguments).values()))["runs"] == "1", arguments

    def test_only_and_targets_work_on_folders(self, write_run: WriteRun) -> None:
        write_run("runs/one", RISING)
        write_run("runs/two", [0.5] * 5, config={"algorithm": {"name": "fedsam", "rho": 0.05}})
        lines = csv_values("runs", "--only", "fedsam", "--target", "0.4", "--measure", "last")
        assert {(row, measure) for row, _, measure in lines} == {("fedsam", "last"), ("fedsam", "rounds@0.4")}
        assert {row for row, *_ in csv_values("runs", "--only", "one")} == {"fedavg"}

    def test_a_run_of_the_program_itself(self, trained: Path) -> None:
        summary = json.loads((trained / "summary.json").read_text())
        for measure, key in (("mean", "final_accuracy_mean"), ("last", "last_accuracy"), ("best", "best_accuracy")):
            (line,) = csv_values(trained, "--measure", measure).values()
            assert float(line["value"]) == pytest.approx(100 * summary[key])
            assert (line["finished"], line["runs"]) == ("1", "1")
        (line,) = [v for k, v in csv_values(trained, "--target", "0", "--cost", "gigabytes").items() if "@" in k[2]]
        first = json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])
        assert float(line["value"]) == pytest.approx((first["bytes_down"] + first["bytes_up"]) / 1e9)


class TestErrors:
    def test_missing_sources_are_named(self, write_run: WriteRun) -> None:
        Path("empty").mkdir()
        assert "empty" in error_line("empty") or "no run" in error_line("empty")
        assert "nowhere" in error_line("nowhere")
        assert "nowhere.yaml" in error_line("nowhere.yaml")

    def test_a_target_in_percent_is_refused_with_a_hint(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        assert "write 0.8 for 80 %" in error_line("sweep.yaml", "--target", "80")

    def test_an_unknown_suffix_is_refused(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        assert "x.doc" in error_line("sweep.yaml", "-o", "x.doc")
        assert not Path("x.doc").exists()

    def test_an_unwritable_folder_is_named(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        Path("file").touch()
        assert "file" in error_line("sweep.yaml", "-o", "file/x.md")
        result = invoke("sweep.yaml", "--curves", "file/x.png")
        assert result.code == 2 and result.err.startswith("error: ") and result.err.count("\n") == 1

    @pytest.mark.parametrize(
        "text", ["rows: {A: {seed: 1}\n", "- 1\n", "rows: {A: {local.lrr: 1}}\n", "rows: {A: {}}\ntable: 3\n", "\0"]
    )
    def test_an_invalid_sweep_is_one_line(self, text: str, write_run: WriteRun) -> None:
        Path("bad.yaml").write_text(text)
        error_line("bad.yaml")

    @pytest.mark.parametrize("damage", ["{half", "[1, 2]", "3", '{"round": "two"}', '{"no": "round"}', "\x00\x00"])
    def test_damaged_metrics_are_named(self, damage: str, write_run: WriteRun) -> None:
        file = write_run("out/Fed_A-IID-seed0", RISING) / "metrics.jsonl"
        lines = file.read_text().splitlines()
        lines[2] = damage
        file.write_text("\n".join(lines) + "\n")
        text = error_line("sweep.yaml")
        assert "Fed_A-IID-seed0" in text and ("metrics.jsonl" in text)
        assert "Fed_A-IID-seed0" in error_line("out")

    @pytest.mark.parametrize("value", ['"high"', "[0.5]", "true"])
    def test_an_accuracy_that_is_not_a_number_is_named(self, value: str, write_run: WriteRun) -> None:
        file = write_run("out/Fed_A-IID-seed0", RISING) / "metrics.jsonl"
        file.write_text(file.read_text().replace('"test_accuracy": 0.7', f'"test_accuracy": {value}'))
        assert "Fed_A-IID-seed0" in error_line("sweep.yaml")

    def test_a_cost_missing_from_records_is_named(self, write_run: WriteRun) -> None:
        file = write_run("out/Fed_A-IID-seed0", RISING) / "metrics.jsonl"
        file.write_text(file.read_text().replace('"forwards"', '"forward"'))
        text = error_line("sweep.yaml", "--target", "0.8", "--cost", "passes")
        assert "Fed_A-IID-seed0/metrics.jsonl lacks the passes of some rounds; choose another cost" in text
        assert invoke("sweep.yaml", "--target", "0.8", "--cost", "minutes").code == 0

    def test_metrics_that_lack_a_key_are_named(self, write_run: WriteRun) -> None:
        file = write_run("out/Fed_A-IID-seed0", RISING) / "metrics.jsonl"
        file.write_text(file.read_text().replace('"bytes_up"', '"bytes_upp"'))
        assert "Fed_A-IID-seed0" in error_line("sweep.yaml", "--target", "0.8", "--cost", "gigabytes")

    @pytest.mark.parametrize(("name", "text"), [("config.yaml", "{"), ("config.yaml", "[]"), ("run.json", "{")])
    def test_a_damaged_file_of_a_run_is_named(self, name: str, text: str, write_run: WriteRun) -> None:
        (write_run("runs/one", RISING) / name).write_text(text)
        assert "runs/one" in error_line("runs")

    def test_a_run_that_has_just_started_is_accepted(self, write_run: WriteRun) -> None:
        """Without run.json or metrics.jsonl."""
        for name in ("run.json", "metrics.jsonl"):
            (write_run(f"out/Fed_A-IID-seed{len(name) % 3}", RISING, rounds=9) / name).unlink()
        assert invoke("sweep.yaml").code == 0

    def test_invalid_options_are_refused(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        for arguments in (
            ["--final-window", "0"],
            ["--final-window", "-1"],
            ["--final-window", "x"],
            ["--measure", "median"],
            ["--cost", "euros"],
        ):
            result = invoke("sweep.yaml", *arguments)
            assert result.code == 2 and "Traceback" not in result.err, arguments

    def test_overrides_are_for_sweeps(self, write_run: WriteRun) -> None:
        write_all_runs(write_run)
        assert "seed=3" in error_line("out", "seed=3")


ACCURACY = st.one_of(st.none(), st.integers(0, 1000).map(lambda k: k / 1000))
RUNS = st.lists(st.lists(ACCURACY, min_size=1, max_size=7), min_size=1, max_size=3)


@settings(max_examples=30)
@given(
    runs=RUNS,
    rounds=st.integers(1, 8),
    last=st.integers(1, 8),
    measure=st.sampled_from(["mean", "last", "best"]),
    target=st.sampled_from(["0.25", "0.5", "0.9"]),
    cost=st.sampled_from(COSTS),
)
def test_csv_equals_a_plain_reference(
    trained: Path,
    tmp_path_factory: pytest.TempPathFactory,
    runs: list[list[float | None]],
    rounds: int,
    last: int,
    measure: str,
    target: str,
    cost: str,
) -> None:
    """The runs of one cell; the last round of a finished run is always evaluated."""
    folder = tmp_path_factory.mktemp("random")
    for seed, accuracies in enumerate(runs):
        del accuracies[rounds:]
        if len(accuracies) == rounds and accuracies[-1] is None:
            accuracies[-1] = 0.5
        write_sample_run(trained, folder / "out" / f"A-seed{seed}", accuracies, rounds, scale=seed + 1)
    seeds = list(range(len(runs)))
    content = {"rows": {"A": {}}, "grid": {"seed": seeds}, "set": {"rounds": rounds}, "dir": str(folder / "out")}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content))
    options = ["--final-window", str(last), "--measure", measure, "--target", target, "--cost", cost]
    lines = {key[2]: line for key, line in csv_values(folder / "sweep.yaml", *options).items()}

    finished = [k for k in seeds if len(runs[k]) == rounds]
    counting = finished or [k for k in seeds if any(a is not None for a in runs[k])]
    line = lines[measure]
    assert int(line["finished"]) == len(finished) and int(line["runs"]) == len(runs)
    windows = [[a for a in runs[k][-last:] if a is not None] for k in counting]
    if measure == "mean" and not all(windows):
        return  # an unfinished run without evaluations in its last rounds: not specified
    values = [measure_run(runs[k], measure, last) for k in counting]
    assert (line["value"] == "") == (not values)
    if values:
        assert float(line["value"]) == pytest.approx(statistics.mean(values), rel=1e-9, abs=1e-9)
    if len(values) > 1:
        assert float(line["std"]) == pytest.approx(statistics.stdev(values), rel=1e-9, abs=1e-9)
    elif measure == "mean" and values and len(windows[0]) > 1:
        assert float(line["std"]) == pytest.approx(100 * statistics.stdev(windows[0]), rel=1e-9, abs=1e-9)
    else:
        assert line["std"] in ("", "0.0")
    if finished:
        costs = [cost_to_target(runs[k], float(target), cost, k + 1) for k in finished]
        known = [value for value in costs if value is not None]
        if len(known) < len(costs):
            assert lines[f"{cost}@{target}"]["value"] in ("", "x")
        else:
            assert float(lines[f"{cost}@{target}"]["value"]) == pytest.approx(statistics.mean(known), rel=1e-9)
