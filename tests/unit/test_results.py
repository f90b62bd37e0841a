"""Tables and curves of runs: every number against one counted by hand, every format read back, errors in one line."""

import csv
import functools
import io
import json
import re
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fl_dist.main import main as train
from fl_dist.results.__main__ import main
from tests.support.processes import QUIET
from tests.support.programs import Said, asker

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
table: {measure: mean, last: 3}
"""
RISING = (0.2, 0.5, 0.7, 0.8, 0.9)
asked = asker(main)


def told(*words: str | Path) -> Said:
    said = asked(*words)
    assert (said.code, said.err) == (0, ""), said.err
    return said


def refused(*words: str | Path) -> str:
    said = asked(*words)
    assert said.code == 2 and said.out == "" and said.err.startswith("error: "), said
    assert said.err.count("\n") == 1 and len(said.err) < 400, said.err
    return said.err


def numbers(*words: str | Path) -> dict[tuple[str, str, str], dict[str, str]]:
    """The lines of the csv, by row, column and measure."""
    lines = list(csv.DictReader(io.StringIO(told(*words, "--format", "csv").out)))
    assert len({(line["row"], line["column"], line["measure"]) for line in lines}) == len(lines)
    return {(line["row"], line["column"], line["measure"]): line for line in lines}


def cells(*words: str | Path) -> dict[str, list[str]]:
    """The rows of a table of text: label and cells."""
    table = told(*words).out.split("\n\n")[0].splitlines()
    return {parts[0]: parts[1:] for parts in (re.split(r"  +", line.rstrip()) for line in table if line[:1] != " ")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    small = ["model=mlp", "rounds=2", "clients={total: 4, per_round: 2}", "local.epochs=1", "partition=iid"]
    with redirect_stdout(io.StringIO()):
        assert train([*small, *QUIET, "algorithm=fedavg", f"run.dir={folder}"]) == 0
    return folder


Put = Callable[..., Path]


@pytest.fixture
def put(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return lambda *arguments, **more: make(trained, *arguments, **more)


def make(
    trained: Path,
    folder: str | Path,
    accuracies: Accuracies,
    rounds: int | None = None,
    config: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A run of these accuracies; it is finished if it has all its rounds."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    content = resolved(trained) | {"rounds": rounds or len(accuracies), "run": {"dir": str(folder)}}
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
def resolved(trained: Path) -> dict[str, Any]:
    return yaml.safe_load((trained / "config.yaml").read_text())


def metrics(accuracies: Accuracies, scale: int = 1) -> Iterator[dict[str, Any]]:
    for k, accuracy in enumerate(accuracies, 1):
        loss = None if accuracy is None else 1 - accuracy
        yield {
            **{"round": k, "test_loss": loss, "test_accuracy": accuracy, "train_loss": 1.5 / k, "clients": 2},
            **{"dropped": [], "bytes_down": 10**8 * scale + k, "bytes_up": 10**7 * k, "forwards": 20 * k * scale},
            **{"backwards": 3 + k, "lr": 0.1, "method": {}, "seconds": {"local": 7.0 * k, "total": 30.0 * k * scale}},
        }


def fill(put: Put, **more: Any) -> dict[tuple[str, str], list[list[float]]]:
    """All runs of the sweep, with accuracies of their own."""
    rng = np.random.default_rng(3)
    runs: dict[tuple[str, str], list[list[float]]] = {}
    for row, r in (("Fed A", "Fed_A"), ("Fed_B&%", "Fed_B__")):
        for column, c in (("Dir(0.1)", "Dir_0.1_"), ("IID", "IID")):
            runs[row, column] = []
            for seed in range(3):
                accuracies = [round(float(x), 4) for x in rng.uniform(0.1, 0.95, 5)]
                put(f"out/{r}-{c}-seed{seed}", accuracies, **more)
                runs[row, column].append(accuracies)
    return runs


def of_run(accuracies: Accuracies, measure: str, last: int) -> float:
    evaluated = [a for a in accuracies if a is not None]
    if measure == "mean":
        return 100 * statistics.mean(a for a in accuracies[-last:] if a is not None)
    return 100 * (evaluated[-1] if measure == "last" else max(evaluated))


def spent(accuracies: Accuracies, target: float, cost: str, scale: int = 1) -> float | None:
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
    def test_a_cell_is_the_mean_of_its_seeds(self, put: Put, measure: str) -> None:
        runs = fill(put)
        lines = numbers("sweep.yaml", "--measure", measure)
        assert lines.keys() == {(*cell, measure) for cell in runs}
        for cell, seeds in runs.items():
            values = [of_run(accuracies, measure, 3) for accuracies in seeds]
            line = lines[*cell, measure]
            assert float(line["value"]) == pytest.approx(statistics.mean(values), rel=1e-12)
            assert float(line["std"]) == pytest.approx(statistics.stdev(values), rel=1e-12)
            assert (line["sweep"], line["finished"], line["runs"]) == ("sweep", "3", "3")
            assert line["published"] == line["published_std"] == ""
        shown = cells("sweep.yaml", "--measure", measure)
        for (row, column), seeds in runs.items():
            values = [of_run(accuracies, measure, 3) for accuracies in seeds]
            text = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
            assert shown[row][("Dir(0.1)", "IID").index(column)] == text

    def test_the_deviation_of_one_run_is_that_of_its_last_rounds(self, put: Put) -> None:
        put("out/Fed_A-IID-seed1", RISING)
        line = numbers("sweep.yaml", "--only", "*seed1")["Fed A", "IID", "mean"]
        assert float(line["value"]) == pytest.approx(80)
        assert float(line["std"]) == pytest.approx(100 * statistics.stdev(RISING[-3:]))
        for measure, value in (("last", 90), ("best", 90)):
            line = numbers("sweep.yaml", "--only", "*seed1", "--measure", measure)["Fed A", "IID", measure]
            assert float(line["value"]) == pytest.approx(value) and line["std"] == ""
        assert cells("sweep.yaml", "--only", "*seed1", "--measure", "last") == {"Fed A": ["–", "90.00"]} | {
            "Fed_B&%": ["–", "–"]
        }

    def test_the_text_says_which_deviation_it_is(self, put: Put) -> None:
        fill(put)
        assert "deviation over 3 seeds" in told("sweep.yaml").out
        one = told("sweep.yaml", "--only", "*seed1").out
        assert "seeds" not in one and "deviation" in one and "rounds" in one

    def test_the_text_does_not_call_a_deviation_over_rounds_one_over_seeds(self, put: Put) -> None:
        """One cell has three runs, another only one so far."""
        for seed in range(3):
            put(f"out/Fed_A-IID-seed{seed}", [0.1 * seed, *RISING[1:]])
        put("out/Fed_B__-IID-seed0", RISING)
        text = told("sweep.yaml").out
        stated = text.split("\n\n")[1]
        assert "over 3 seeds" in stated and "one run" in stated or "10.00" not in text, text

    def test_the_deviation_may_be_over_rounds_or_seeds(self, put: Put) -> None:
        """Over rounds: the mean of what each run would have alone, and none for what is no mean of rounds."""
        runs = fill(put)["Fed A", "IID"]
        own = [100 * statistics.stdev(run[-3:]) for run in runs]
        lines = numbers("sweep.yaml", "--spread", "rounds", "--target", "0.1")
        assert float(lines["Fed A", "IID", "mean"]["std"]) == pytest.approx(statistics.mean(own))
        assert lines["Fed A", "IID", "rounds@0.1"]["std"] == ""
        text = told("sweep.yaml", "--spread", "rounds").out
        assert "± deviation over the last 3 rounds, the mean of those of the seeds" in text
        seeds = [100 * statistics.mean(run[-3:]) for run in runs]
        for words in (["--spread", "seeds"], []):
            line = numbers("sweep.yaml", *words)["Fed A", "IID", "mean"]
            assert float(line["std"]) == pytest.approx(statistics.stdev(seeds))
        assert numbers("sweep.yaml", "--spread", "seeds", "--only", "*seed1")["Fed A", "IID", "mean"]["std"] == ""
        Path("sweep.yaml").write_text(SWEEP.replace("last: 3", "last: 3, spread: rounds"))
        assert float(numbers("sweep.yaml")["Fed A", "IID", "mean"]["std"]) == pytest.approx(statistics.mean(own))

    def test_rounds_that_were_not_evaluated_do_not_count(self, put: Put) -> None:
        accuracies = [0.9, None, 0.3, None, 0.5]
        put("out/Fed_A-IID-seed0", accuracies)
        for last, value, std in ((1, 50, None), (2, 50, None), (3, 40, statistics.stdev([30, 50])), (4, 40, None)):
            line = numbers("sweep.yaml", "--last", str(last), "--only", "*seed0")["Fed A", "IID", "mean"]
            assert float(line["value"]) == pytest.approx(value)
            if std:
                assert float(line["std"]) == pytest.approx(std)
        line = numbers("sweep.yaml", "--last", "99")["Fed A", "IID", "mean"]
        assert float(line["value"]) == pytest.approx(statistics.mean([90, 30, 50]))

    def test_without_a_number_of_rounds_the_run_has_it(self, put: Put) -> None:
        text = SWEEP.replace("table: {measure: mean, last: 3}", "")
        text = text.replace("fedavg}", "fedavg}, evaluate.last: 2").replace("fedsam}", "fedsam}, evaluate.last: 4")
        Path("sweep.yaml").write_text(text)
        put("out/Fed_A-IID-seed0", RISING, config={"evaluate.last": 2})
        put("out/Fed_B__-IID-seed0", RISING, config={"evaluate.last": 4})
        lines = numbers("sweep.yaml")
        assert float(lines["Fed A", "IID", "mean"]["value"]) == pytest.approx(85)
        assert float(lines["Fed_B&%", "IID", "mean"]["value"]) == pytest.approx(72.5)
        assert float(numbers("sweep.yaml", "--last", "1")["Fed_B&%", "IID", "mean"]["value"]) == pytest.approx(90)

    def test_what_the_command_line_says_counts_before_the_file(self, put: Put) -> None:
        put("out/Fed_A-IID-seed0", RISING)
        Path("sweep.yaml").write_text(SWEEP.replace("measure: mean, last: 3", "measure: best, last: 3, targets: [0.7]"))
        assert numbers("sweep.yaml")["Fed A", "IID", "best"]["value"]
        lines = numbers("sweep.yaml", "--measure", "mean", "--last", "1", "--target", "0.8")
        assert {measure for *_, measure in lines} == {"mean", "rounds@0.8"}
        assert float(lines["Fed A", "IID", "mean"]["value"]) == pytest.approx(90)

    def test_less_is_better_for_a_task_that_says_so(self, put: Put) -> None:
        """Its numbers are no percentages, and its target is reached from above."""
        for name, errors in (("Fed_A", (3.0, 1.5, 2.0)), ("Fed_B__", (4.0, 2.5, 2.25))):
            folder = put(f"out/{name}-IID-seed0", errors)
            facts = json.loads((folder / "run.json").read_text())
            facts["facts"]["headline"] = {"name": "rmse", "best": "min", "percent": False}
            (folder / "run.json").write_text(json.dumps(facts))
            lines = [line | {"test_accuracy": None, "test_rmse": line["test_accuracy"]} for line in metrics(errors)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        lines = numbers("sweep.yaml", "--measure", "best", "--target", "2.4")
        assert float(lines["Fed A", "IID", "best"]["value"]) == 1.5
        assert float(lines["Fed_B&%", "IID", "best"]["value"]) == 2.25
        assert [float(lines[row, "IID", "rounds@2.4"]["value"]) for row in ("Fed A", "Fed_B&%")] == [2, 3]
        text = told("sweep.yaml", "--measure", "best", "--format", "markdown", "--only", "IID").out
        assert "rmse" in text and "**1.5" in text and "%" not in text.replace("B&%", "").replace("B&amp;%", "")
        assert "**2.25" not in text


class TestAlso:
    """Numbers of the rows besides the metric: diagnostics, seconds."""

    ALSO = (
        "also: {flat: {key: diagnostics.lpf.lpf}, train_mean: {key: diagnostics.all.mean, percent: true, best: max}, "
        "seconds_a_round: {key: seconds.total, over: mean, columns: [IID]}}"
    )

    def measured(self, put: Put, name: str, seed: int, *found: Any) -> None:
        """A run that was measured in some rounds."""
        folder = put(f"out/{name}-IID-seed{seed}", RISING)
        lines = list(metrics(RISING))
        for k, value in enumerate(found):
            lines[2 * k]["diagnostics"] = {"lpf": {"lpf": value, "loss": 9}, "all": {"mean": 0.25 * seed}}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    @pytest.fixture
    def sweep(self, put: Put) -> str:
        Path("sweep.yaml").write_text(SWEEP.replace("last: 3", f"last: 3, {self.ALSO}"))
        for seed in range(3):
            self.measured(put, "Fed_A", seed, 99.0, 99.0, 1.0 + seed)
            self.measured(put, "Fed_B__", seed, 0.5)
        return "sweep.yaml"

    def test_the_last_round_that_has_it_counts(self, sweep: str) -> None:
        lines = numbers(sweep)
        line = lines["Fed A", "IID", "flat"]
        assert (float(line["value"]), float(line["std"])) == (2.0, 1.0)
        assert float(lines["Fed_B&%", "IID", "flat"]["value"]) == 0.5
        assert float(lines["Fed A", "IID", "train_mean"]["value"]) == pytest.approx(25)
        assert float(lines["Fed A", "IID", "seconds_a_round"]["value"]) == pytest.approx(30 * 3)

    def test_columns_in_which_no_run_has_it_do_without(self, sweep: str) -> None:
        assert {column for _, column, measure in numbers(sweep) if measure != "mean"} == {"IID"}
        Path("published.csv").write_text("sweep,row,column,measure,value,std\nsweep,Fed A,Dir(0.1),flat,2.67,\n")
        assert cells(sweep, "--only", "Dir(0.1)")["Fed A"] == ["–", "– (2.67)"]

    def test_they_are_written_as_what_they_are(self, sweep: str) -> None:
        Path("published.csv").write_text("sweep,row,column,measure,value,std\nsweep,Fed A,IID,train_mean,95.07,0.94\n")
        shown = cells(sweep, "--only", "IID")
        assert shown["Fed A"][1:] == ["2 ± 1", "25.00 ± 25.00 (95.07 ± 0.94)", "90 ± 0"]
        text = told(sweep, "--only", "IID", "--format", "markdown").out
        assert "IID<br>train mean" in text and "**0.5 ± 0**" in text and "**2 ± 1**" not in text

    def test_the_command_line_may_name_one(self, sweep: str) -> None:
        lines = numbers(sweep, "--also", "diagnostics.lpf.loss")
        assert float(lines["Fed A", "IID", "diagnostics.lpf.loss"]["value"]) == 9 and ("Fed A", "IID", "flat") in lines
        (line,) = (
            line
            for key, line in numbers("out/Fed_A-IID-seed1", "--also", "diagnostics.lpf.lpf").items()
            if "." in key[2]
        )
        assert float(line["value"]) == 2

    def test_what_could_not_be_measured_is_no_number(self, put: Put, sweep: str) -> None:
        shutil.rmtree("out")
        self.measured(put, "Fed_A", 0, 1.0, None)
        assert cells(sweep, "--only", "IID")["Fed A"][1] == "–*"

    def test_what_is_no_number_is_named(self, sweep: str) -> None:
        assert "diagnostics.lpf in out/Fed_A" in refused(sweep, "--also", "diagnostics.lpf")


class TestTargets:
    def test_all_costs_are_summed_up_to_the_first_round_that_reaches_it(self, put: Put) -> None:
        seeds = [[0.2, 0.5, 0.7, 0.8, 0.9], [0.1, 0.82, 0.3, 0.4, 0.5], [0.1, 0.2, None, None, 0.8]]
        for seed, accuracies in enumerate(seeds):
            put(f"out/Fed_A-IID-seed{seed}", accuracies, scale=seed + 1)
        options = [word for cost in COSTS for word in ("--cost", cost)]
        lines = numbers("sweep.yaml", "--target", "0.8", "--target", "0.5", *options)
        for target in (0.8, 0.5):
            for cost in COSTS:
                values = [spent(a, target, cost, seed + 1) for seed, a in enumerate(seeds)]
                known = [value for value in values if value is not None]
                line = lines["Fed A", "IID", f"{cost}@{target}"]
                assert float(line["value"]) == pytest.approx(statistics.mean(known), rel=1e-12)
                assert float(line["std"]) == pytest.approx(statistics.stdev(known), rel=1e-12)
        assert lines["Fed A", "Dir(0.1)", "rounds@0.8"]["value"] == ""

    def test_rounds_are_the_default(self, put: Put) -> None:
        put("out/Fed_A-IID-seed0", RISING)
        lines = numbers("sweep.yaml", "--target", "0.75")
        assert {measure for *_, measure in lines} == {"mean", "rounds@0.75"}
        assert float(lines["Fed A", "IID", "rounds@0.75"]["value"]) == 4
        assert "rounds to 75 %" in told("sweep.yaml", "--target", "0.75").out
        assert cells("sweep.yaml", "--target", "0.75", "--only", "*seed0")["Fed A"][-1] == "4"

    def test_a_target_that_some_run_did_not_reach_is_a_cross(self, put: Put) -> None:
        for seed in range(3):
            put(f"out/Fed_A-IID-seed{seed}", RISING)
            put(f"out/Fed_B__-IID-seed{seed}", RISING if seed else [0.1] * 5)
        only = ("sweep.yaml", "--only", "IID", "--target", "0.9")
        assert cells(*only)["Fed A"][-1].startswith("5") and cells(*only)["Fed_B&%"][-1] == "×"
        assert "$\\times$" in told(*only, "--format", "latex").out
        row = next(line for line in told(*only, "--format", "markdown").lines if "Fed_B" in line)
        assert "×" in row and "**×" not in row

    def test_csv_tells_a_target_that_was_not_reached_from_a_run_that_is_missing(self, put: Put) -> None:
        """With the x of published.csv."""
        put("out/Fed_A-IID-seed0", [0.1] * 5)
        lines = numbers("sweep.yaml", "--only", "*seed0", "--target", "0.9")
        assert lines["Fed_B&%", "IID", "rounds@0.9"]["value"] == "" == lines["Fed A", "IID", "rounds@0.9"]["std"]
        assert lines["Fed A", "IID", "rounds@0.9"]["value"] == "x"

    def test_the_only_one_that_reached_it_is_the_best(self, put: Put) -> None:
        put("out/Fed_A-IID-seed0", RISING)
        put("out/Fed_B__-IID-seed0", [0.1] * 5)
        table = told("sweep.yaml", "--only", "*IID-seed0", "--target", "0.9", "--format", "markdown").out
        assert "| **5** |" in table and "| × |" in table, table

    def test_columns_have_targets_of_their_own(self, put: Put) -> None:
        fill(put)
        Path("sweep.yaml").write_text(SWEEP.replace("last: 3", "last: 3, targets: {IID: [0.2, 0.3], Dir(0.1): [0.4]}"))
        measures = {(column, measure) for _, column, measure in numbers("sweep.yaml")}
        assert measures == {
            *(("IID", "mean"), ("IID", "rounds@0.2"), ("IID", "rounds@0.3")),
            *(("Dir(0.1)", "mean"), ("Dir(0.1)", "rounds@0.4")),
        }
        assert {m for *_, m in numbers("sweep.yaml", "--target", "0.6")} == {"mean", "rounds@0.6"}

    @pytest.mark.parametrize("target", ["much", "nan", "0.8.1", ""])
    def test_a_target_is_a_number(self, target: str, put: Put) -> None:
        put("out/Fed_A-IID-seed0", RISING)
        said = asked("sweep.yaml", "--target", target)
        assert said.code == 2 and "target" in said.err and "Traceback" not in said.err


class TestUnfinished:
    def test_only_finished_runs_count_if_there_are_any(self, put: Put) -> None:
        put("out/Fed_A-IID-seed0", RISING)
        put("out/Fed_A-IID-seed1", [0.1, 0.2], rounds=5)
        lines = numbers("sweep.yaml", "--target", "0.5")
        line = lines["Fed A", "IID", "mean"]
        assert float(line["value"]) == pytest.approx(80) and (line["finished"], line["runs"]) == ("1", "3")
        assert float(lines["Fed A", "IID", "rounds@0.5"]["value"]) == 2
        said = told("sweep.yaml")
        assert "80.00 ± 10.00*" in said.out
        assert "Fed_A-IID-seed1 (2 of 5 rounds)" in said.out and "Fed_A-IID-seed2 (0 of 5 rounds)" in said.out
        assert "Fed_A-IID-seed0" not in said.out

    def test_unfinished_runs_count_if_there_is_nothing_else(self, put: Put) -> None:
        put("out/Fed_A-IID-seed0", [0.1, 0.2, 0.3, 0.6], rounds=5)
        put("out/Fed_A-IID-seed1", [0.3, 0.5], rounds=5)
        line = numbers("sweep.yaml")["Fed A", "IID", "mean"]
        values = [100 * statistics.mean([0.2, 0.3, 0.6]), 40]
        assert float(line["value"]) == pytest.approx(statistics.mean(values))
        assert float(line["std"]) == pytest.approx(statistics.stdev(values))
        assert line["finished"] == "0"
        assert cells("sweep.yaml")["Fed A"][1].endswith("*")

    def test_a_target_may_still_be_reached(self, put: Put) -> None:
        """A cross is for runs that ended without; this one has only begun."""
        put("out/Fed_A-IID-seed0", [0.1, 0.2], rounds=5)
        shown = cells("sweep.yaml", "--only", "*seed0", "--target", "0.5")["Fed A"][-1]
        assert shown in ("–", "–*", "×*"), shown

    def test_a_run_that_was_evaluated_nowhere_is_no_number(self, put: Put) -> None:
        put("out/Fed_A-IID-seed0", [None, None], rounds=5)
        put("out/Fed_A-Dir_0.1_-seed0", [0.4, None, None, None], rounds=5)
        put("out/Fed_B__-IID-seed0", [], rounds=5)
        lines = numbers("sweep.yaml", "--only", "*seed0")
        assert lines["Fed A", "IID", "mean"]["value"] == lines["Fed_B&%", "IID", "mean"]["value"] == ""
        shown = cells("sweep.yaml", "--only", "*seed0")
        assert shown["Fed A"][1] == shown["Fed_B&%"][1] == "–"
        assert "nan" not in told("sweep.yaml", "--only", "*seed0").out

    def test_a_run_without_a_model_is_not_finished(self, put: Put) -> None:
        """It was lost while it saved: the program resumes it, and its status says so."""
        (put("out/Fed_A-IID-seed0", RISING) / "model.safetensors").unlink()
        assert numbers("sweep.yaml", "--only", "*seed0")["Fed A", "IID", "mean"]["finished"] == "0"

    def test_finished_is_what_has_the_rounds_that_are_asked_for(self, put: Put) -> None:
        """With more rounds a finished run goes on; until then the cell is not what was asked for."""
        put("out/Fed_A-IID-seed0", RISING)
        assert numbers("sweep.yaml", "rounds=9", "--only", "*seed0")["Fed A", "IID", "mean"]["finished"] == "0"
        assert "(5 of 9 rounds)" in told("sweep.yaml", "rounds=9", "--only", "Fed_A-IID-seed0").out

    def test_nothing_at_all_is_said(self, put: Put) -> None:
        said = asked("sweep.yaml")
        if said.code:
            assert said.code == 2 and said.err.count("\n") == 1
        else:
            assert set(sum(cells("sweep.yaml").values(), [])) == {"–"}

    def test_a_line_that_is_being_written_is_left_out(self, put: Put) -> None:
        """The last one, without its end: the run goes on."""
        file = put("out/Fed_A-IID-seed0", RISING[:3], rounds=5) / "metrics.jsonl"
        file.write_text(file.read_text() + '{"round": 4, "test_lo')
        line = numbers("sweep.yaml", "--only", "*seed0", "--last", "1")["Fed A", "IID", "mean"]
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

    def test_they_stand_in_brackets_behind_ours(self, put: Put) -> None:
        fill(put)
        Path("published.csv").write_text(self.LINES)
        shown = cells("sweep.yaml", "--only", "IID", "--target", "0.8")
        assert shown["Fed A"][0].endswith(" (81.25 ± 0.35)") and shown["Fed_B&%"][0].endswith(" (79)")
        assert shown["Fed A"][1].endswith(" (123)") and shown["Fed_B&%"][1].endswith(" (×)")
        assert "as published" in told("sweep.yaml").out
        lines = numbers("sweep.yaml", "--target", "0.8")
        line = lines["Fed A", "IID", "mean"]
        assert (float(line["published"]), float(line["published_std"])) == (81.25, 0.35)
        assert lines["Fed_B&%", "IID", "rounds@0.8"]["published"] == "x"
        assert lines["Fed A", "Dir(0.1)", "mean"]["published"] == "", "it is of another sweep"
        assert numbers("sweep.yaml", "--measure", "best")["Fed A", "IID", "best"]["published"] == ""

    def test_the_text_says_what_their_deviation_is(self, put: Put) -> None:
        fill(put)
        Path("published.csv").write_text(self.LINES)
        assert "in brackets: as published\n" in told("sweep.yaml").out
        Path("sweep.yaml").write_text(SWEEP.replace("last: 3", "last: 3, published_spread: over clients"))
        assert "in brackets: as published (± over clients)\n" in told("sweep.yaml").out

    def test_training_that_failed_is_no_target_that_was_not_reached(self, put: Put) -> None:
        fill(put)
        Path("published.csv").write_text(self.LINES + "sweep,Fed A,Dir(0.1),mean,x,\n")
        assert cells("sweep.yaml", "--only", "Dir(0.1)")["Fed A"][0].endswith(" (failed)")
        text = told("sweep.yaml").out
        assert "failed: training failed there" in text and "×" not in text
        assert "failed" not in told("sweep.yaml", "--only", "IID").out
        assert numbers("sweep.yaml")["Fed A", "Dir(0.1)", "mean"]["published"] == "x"

    def test_a_published_target_that_was_not_reached_is_explained(self, put: Put) -> None:
        """Also where ours were all reached."""
        for seed in range(3):
            put(f"out/Fed_B__-IID-seed{seed}", RISING)
        Path("published.csv").write_text(self.LINES)
        text = told("sweep.yaml", "--only", "Fed_B*IID*", "--target", "0.8").out
        assert text.count("×") == 2 and "× not reached" in text and "failed" not in text

    def test_they_stand_there_before_anything_has_run(self, put: Put) -> None:
        Path("published.csv").write_text(self.LINES)
        put("out/Fed_A-Dir_0.1_-seed0", RISING)
        assert cells("sweep.yaml", "--only", "IID")["Fed A"] == ["– (81.25 ± 0.35)"]

    def test_another_file_may_be_named(self, put: Put) -> None:
        fill(put)
        Path("published.csv").write_text(self.LINES)
        Path("mine.csv").write_text("sweep,row,column,measure,value,std\nsweep,Fed A,IID,mean,12.5,\n")
        shown = cells("sweep.yaml", "--only", "IID", "--published", "mine.csv")
        assert shown["Fed A"][0].endswith("(12.5)") and "(" not in shown["Fed_B&%"][0]

    def test_they_lie_beside_the_sweep_not_where_one_stands(self, put: Put) -> None:
        fill(put)
        Path("there").mkdir()
        Path("there/sweep.yaml").write_text(SWEEP)
        Path("there/published.csv").write_text(self.LINES)
        assert "(81.25" in told("there/sweep.yaml").out and "(81.25" not in told("sweep.yaml").out

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
    def test_a_bad_file_is_named(self, text: str, part: str, put: Put) -> None:
        put("out/Fed_A-IID-seed0", RISING)
        Path("published.csv").write_text(text)
        assert "published.csv" in refused("sweep.yaml") and part in refused("sweep.yaml")

    def test_a_file_of_no_numbers_is_one(self, put: Put) -> None:
        put("out/Fed_A-IID-seed0", RISING)
        Path("published.csv").write_text("sweep,row,column,measure,value,std\n")
        assert "80.00" in told("sweep.yaml").out

    def test_a_file_that_is_not_there_or_not_text_is_named(self, put: Put) -> None:
        put("out/Fed_A-IID-seed0", RISING)
        assert "none.csv" in refused("sweep.yaml", "--published", "none.csv")
        Path("bytes.csv").write_bytes(b"\xff\xfe\x00\x80")
        assert "bytes.csv" in refused("sweep.yaml", "--published", "bytes.csv")


class TestFormats:
    def test_markdown_is_a_table_whose_best_are_bold(self, put: Put) -> None:
        runs = fill(put)
        table = [line for line in told("sweep.yaml", "--format", "markdown").lines if line.startswith("|")]
        head, rule, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
        assert len(head) == len(rule) == 3 and all(re.fullmatch(":?-+:?", cell) for cell in rule)
        assert "Dir(0.1)" in head[1] and "IID" in head[2]
        values = {
            cell: statistics.mean(of_run(accuracies, "mean", 3) for accuracies in seeds) for cell, seeds in runs.items()
        }
        for k, column in enumerate(("Dir(0.1)", "IID"), 1):
            best = max(("Fed A", "Fed_B&%"), key=lambda row: values[row, column])
            for line in body:
                row = line[0].replace("&amp;", "&").replace("\\", "")
                assert line[k].startswith("**") == line[k].endswith("**") == (row == best)
                assert line[k].strip("*").split()[0] == f"{values[row, column]:.2f}"

    def test_stars_and_bars_in_markdown_are_no_marks(self, put: Put) -> None:
        """A star behind an unfinished cell would end its bold; a bar in a label its cell."""
        Path("sweep.yaml").write_text(SWEEP.replace("Fed A:", '"a|b*c_d":').replace("IID:", '"x|y":'))
        Path("published.csv").write_text("sweep,row,column,measure,value,std\nsweep,a|b*c_d,x|y,mean,5,\n")
        put("out/a_b_c_d-x_y-seed0", RISING)
        put("out/Fed_B__-x_y-seed0", RISING)
        table = [line for line in told("sweep.yaml", "--format", "markdown").lines if line.startswith("|")]
        bare = [re.sub(r"\\.", "", line) for line in table]
        assert {line.count("|") for line in bare} == {4}
        for line in bare:
            for cell in line.strip("|").split("|"):
                inner = cell.strip().removeprefix("**").removesuffix("**")
                assert "*" not in inner, line

    def test_latex_is_whole_and_escaped(self, put: Put) -> None:
        labels = r"a_b&c%d$e#f{g}h~i^j\k"
        Path("sweep.yaml").write_text(SWEEP.replace("Fed_B&%:", f"'{labels}':"))
        fill(put)
        name = re.sub(r"[^A-Za-z0-9._+]", "_", labels)
        for seed in range(3):
            put(f"out/{name}-IID-seed{seed}", RISING)
        Path("published.csv").write_text(f"sweep,row,column,measure,value,std\nsweep,{labels},IID,mean,5,0.5\n")
        text = told("sweep.yaml", "--format", "latex", "--target", "0.85").out
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
        balance(lines)
        row = next(line for line in lines if line.startswith("a"))
        for escaped in (r"a\_b\&c\%d\$e\#f\{g\}h", r"i", r"j", r"k &"):
            assert escaped in row, row
        plain = re.sub(r"\$[^$]*\$", "", re.sub(r"\\[_&%$#{}]", "", row))
        assert not set("_#$~^%") & set(re.sub(r"\\textasciicircum|\\textasciitilde|\\\^|\\~", "", plain)), row
        assert "\\textbf{80.00 $\\pm$ 0.00 (5 $\\pm$ 0.5)}" in row
        assert text.isascii() or all(line.isascii() for line in lines)

    def test_csv_has_the_header_and_no_more(self, put: Put) -> None:
        fill(put)
        said = told("sweep.yaml", "--format", "csv")
        assert said.lines[0] == "sweep,row,column,measure,value,std,finished,runs,published,published_std"
        assert len(said.lines) == 5 and all(len(line) == 10 for line in csv.reader(said.lines))

    def test_csv_quotes_labels(self, put: Put) -> None:
        label = 'a,"b"'
        Path("sweep.yaml").write_text(SWEEP.replace("Fed A:", f"'{label}':"))
        put("out/a__b_-IID-seed0", RISING)
        assert numbers("sweep.yaml")[label, "IID", "mean"]["finished"] == "1"

    @pytest.mark.parametrize(
        ("suffix", "format"), [(".txt", "text"), (".md", "markdown"), (".tex", "latex"), (".csv", "csv")]
    )
    def test_a_file_has_what_the_terminal_would(self, suffix: str, format: str, put: Put) -> None:
        fill(put)
        told("sweep.yaml", "-o", f"table{suffix}")
        text = told("sweep.yaml", "--format", format).out
        assert Path(f"table{suffix}").read_bytes().decode().replace("\r\n", "\n") == text.replace("\r\n", "\n")
        told("sweep.yaml", "-o", "table.dat", "--format", format)
        assert Path("table.dat").read_bytes() == Path(f"table{suffix}").read_bytes()

    def test_columns_of_text_are_straight(self, put: Put) -> None:
        fill(put)
        table = told("sweep.yaml", "--target", "0.5").out.split("\n\n")[0].splitlines()
        assert len({len(line) for line in table}) == 1, table


def balance(lines: Sequence[str]) -> None:
    """Braces and dollars that are not escaped come in pairs, and environments end."""
    text = "\n".join(lines)
    bare = re.sub(r"\\[{}$]", "", text.replace("\\\\", ""))
    assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0
    assert re.findall(r"\\begin\{(\w+)\}", text) == re.findall(r"\\end\{(\w+)\}", text)[::-1]


class TestCurves:
    @pytest.mark.parametrize("against", ["rounds", "minutes"])
    def test_a_picture_has_lines_in_it(self, against: str, put: Put) -> None:
        fill(put)
        told("sweep.yaml", "--curves", "curves.png", "--against", against)
        pixels = np.asarray(Image.open("curves.png").convert("RGB")).reshape(-1, 3)
        colourful = pixels[np.ptp(pixels.astype(int), 1) > 60]
        assert len(pixels) > 100_000 and len(np.unique(colourful, axis=0)) >= 2 and len(colourful) > 500

    @pytest.mark.parametrize(("name", "begin", "end"), [("c.pdf", b"%PDF", b"%%EOF"), ("c.svg", b"<?xml", b"</svg>")])
    def test_other_files_are_whole(self, name: str, begin: bytes, end: bytes, put: Put) -> None:
        fill(put)
        said = told("sweep.yaml", "--curves", name)
        data = Path(name).read_bytes()
        assert data.startswith(begin) and data.rstrip().endswith(end) and len(data) > 5000
        assert "Fed A" in said.out, "the table is shown all the same"

    def test_unfinished_and_missing_runs_do_not_disturb(self, put: Put) -> None:
        put("out/Fed_A-IID-seed0", [0.1, None, 0.3], rounds=5)
        put("out/Fed_A-IID-seed1", RISING)
        put("out/Fed_B__-IID-seed1", [None], rounds=5)
        put("out/Fed_B__-IID-seed2", [], rounds=5)
        told("sweep.yaml", "--curves", "c.png")
        assert Path("c.png").stat().st_size > 5000

    def test_a_picture_of_another_kind_is_refused(self, put: Put) -> None:
        fill(put)
        for name in ("c.doc", "c"):
            said = asked("sweep.yaml", "--curves", name)
            assert said.code == 2 and said.err.startswith(f"error: {name} ") and said.err.count("\n") == 1
        assert not list(Path.cwd().glob("c*"))


class TestSweeps:
    def test_only_takes_labels_and_names(self, put: Put) -> None:
        fill(put)
        assert {(row, column) for row, column, _ in numbers("sweep.yaml", "--only", "IID")} == {
            *(("Fed A", "IID"), ("Fed_B&%", "IID"))
        }
        assert {row for row, *_ in numbers("sweep.yaml", "--only", "Fed A")} == {"Fed A"}
        line = numbers("sweep.yaml", "--only", "Fed_A-IID-seed[01]")["Fed A", "IID", "mean"]
        assert line["runs"] == "2"
        both = numbers("sweep.yaml", "--only", "Fed_A-IID-seed0", "--only", "Fed_B__-Dir*")
        assert {(row, column) for row, column, _ in both if both[row, column, "mean"]["value"]} == {
            *(("Fed A", "IID"), ("Fed_B&%", "Dir(0.1)"))
        }
        assert "nothing" in refused("sweep.yaml", "--only", "nothing")

    def test_overrides_lead_to_their_own_folder(self, put: Put) -> None:
        Path("sweep.yaml").write_text(SWEEP.replace("dir: out\n", ""))
        put("runs/sweep/Fed_A-IID-seed0", RISING)
        put("runs/sweep-local.lr=0.5/Fed_A-IID-seed0", [0.1, 0.1, 0.1, 0.1, 0.1], config={"local.lr": 0.5})
        assert float(numbers("sweep.yaml")["Fed A", "IID", "mean"]["value"]) == pytest.approx(80)
        assert float(numbers("sweep.yaml", "local.lr=0.5")["Fed A", "IID", "mean"]["value"]) == pytest.approx(10)
        assert "lrr" in refused("sweep.yaml", "local.lrr=0.5")

    def test_like_another_sweep_with_fewer_rows(self, put: Put) -> None:
        runs = fill(put)
        Path("small.yaml").write_text("like: sweep.yaml\nrows: [Fed_B&%]\ncolumns: [IID]\ndir: out\ntable: {last: 1}\n")
        lines = numbers("small.yaml")
        assert list(lines) == [("Fed_B&%", "IID", "mean")]
        values = [100 * accuracies[-1] for accuracies in runs["Fed_B&%", "IID"]]
        assert float(lines["Fed_B&%", "IID", "mean"]["value"]) == pytest.approx(statistics.mean(values))
        assert lines["Fed_B&%", "IID", "mean"]["sweep"] == "small"

    def test_a_grid_of_methods_is_a_table_too(self, put: Put) -> None:
        Path("grid.yaml").write_text(
            "dir: out\ngrid: {algorithm.name: [fedavg, fedsam], seed: [0, 1]}\nset: {rounds: 5}\n"
        )
        for name, level in (("fedavg", 0.5), ("fedsam", 0.6)):
            for seed in range(2):
                put(f"out/{name}-seed{seed}", [level] * 5, config={"algorithm": {"name": name}, "seed": seed})
        lines = numbers("grid.yaml")
        found = {label: float(line["value"]) for key, line in lines.items() for label in key if "fed" in label}
        assert [round(value) for _, value in sorted(found.items())] == [50, 60]
        assert all(line["runs"] == "2" for line in lines.values())


class TestFolders:
    def test_rows_are_algorithms_and_columns_what_else_differs(self, put: Put) -> None:
        expected: dict[tuple[str, str], list[float]] = {}
        for a, name in enumerate(("fedavg", "fedsam")):
            for p, partition in enumerate(({"name": "iid"}, {"name": "shards", "per_client": 2})):
                for seed in range(2):
                    level = 0.1 + 0.2 * a + 0.05 * p + 0.01 * seed
                    algorithm = {"name": name} | ({"rho": 0.05} if a else {})
                    config = {"algorithm": algorithm, "partition": partition, "seed": seed}
                    put(f"runs/{name}/{partition['name']}/{seed}", [level] * (3 + seed), config=config)
                    expected.setdefault((name, str(partition["name"])), []).append(100 * level)
        lines = numbers("runs")
        assert len(lines) == 4
        for (name, partition), values in expected.items():
            (line,) = [line for (row, column, _), line in lines.items() if name in row and partition in column]
            assert float(line["value"]) == pytest.approx(statistics.mean(values))
            assert float(line["std"]) == pytest.approx(statistics.stdev(values))
            assert line["runs"] == line["finished"] == "2"
        assert not any("seed" in column or "rounds" in column or "dir" in column for _, column, _ in lines)

    def test_settings_of_an_algorithm_that_differ_are_rows(self, put: Put) -> None:
        for rho in (0.05, 0.1):
            put(f"runs/{rho}", [rho] * 3, config={"algorithm": {"name": "fedsam", "rho": rho}})
        put("runs/avg", [0.5] * 3, config={"algorithm": {"name": "fedavg"}})
        rows = {row: float(line["value"]) for (row, *_), line in numbers("runs").items()}
        assert len(rows) == 3 and "fedavg" in rows
        for rho in (0.05, 0.1):
            (row,) = [row for row in rows if str(rho) in row]
            assert "fedsam" in row and rows[row] == pytest.approx(100 * rho)

    def test_places_of_files_are_no_columns(self, put: Put) -> None:
        more = {"every": 1, "keep": 2, "grace": 60.0}
        put("runs/a", [0.4] * 3, config={"checkpoint": more})
        put("runs/b", [0.6] * 3, config={"checkpoint": more | {"keep": 5}, "seed": 8})
        (line,) = numbers("runs").values()
        assert float(line["value"]) == pytest.approx(50) and line["runs"] == "2"

    def test_one_run_and_several_folders(self, put: Put) -> None:
        one = put("runs/one", RISING, config={"evaluate.last": 2})
        put("more/deep/two", [0.5] * 5, config={"algorithm": {"name": "fedsam", "rho": 0.05}, "evaluate.last": 2})
        (line,) = numbers(one).values()
        assert float(line["value"]) == pytest.approx(85) and line["row"] == "fedavg"
        assert len(numbers("runs", "more/deep")) == 2
        assert cells(one)["fedavg"] == [f"85.00 ± {statistics.stdev([80, 90]):.2f}"]

    def test_a_run_that_is_named_twice_counts_once(self, put: Put) -> None:
        one = put("runs/one", RISING)
        for words in ([one, "runs"], [one, one.absolute()], ["runs", "runs/../runs"]):
            assert next(iter(numbers(*words).values()))["runs"] == "1", words

    def test_only_and_targets_work_on_folders(self, put: Put) -> None:
        put("runs/one", RISING)
        put("runs/two", [0.5] * 5, config={"algorithm": {"name": "fedsam", "rho": 0.05}})
        lines = numbers("runs", "--only", "fedsam", "--target", "0.4", "--measure", "last")
        assert {(row, measure) for row, _, measure in lines} == {("fedsam", "last"), ("fedsam", "rounds@0.4")}
        assert {row for row, *_ in numbers("runs", "--only", "one")} == {"fedavg"}

    def test_a_run_of_the_program_itself(self, trained: Path) -> None:
        summary = json.loads((trained / "summary.json").read_text())
        for measure, key in (("mean", "final_accuracy_mean"), ("last", "last_accuracy"), ("best", "best_accuracy")):
            (line,) = numbers(trained, "--measure", measure).values()
            assert float(line["value"]) == pytest.approx(100 * summary[key])
            assert (line["finished"], line["runs"]) == ("1", "1")
        (line,) = [v for k, v in numbers(trained, "--target", "0", "--cost", "gigabytes").items() if "@" in k[2]]
        first = json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])
        assert float(line["value"]) == pytest.approx((first["bytes_down"] + first["bytes_up"]) / 1e9)


class TestErrors:
    def test_what_is_not_there(self, put: Put) -> None:
        Path("empty").mkdir()
        assert "empty" in refused("empty") or "no run" in refused("empty")
        assert "nowhere" in refused("nowhere")
        assert "nowhere.yaml" in refused("nowhere.yaml")

    def test_a_target_in_percent(self, put: Put) -> None:
        fill(put)
        assert "write 0.8 for 80 %" in refused("sweep.yaml", "--target", "80")

    def test_suffixes(self, put: Put) -> None:
        fill(put)
        assert "x.doc" in refused("sweep.yaml", "-o", "x.doc")
        assert not Path("x.doc").exists()

    def test_a_folder_that_cannot_be_written(self, put: Put) -> None:
        fill(put)
        Path("file").touch()
        assert "file" in refused("sweep.yaml", "-o", "file/x.md")
        said = asked("sweep.yaml", "--curves", "file/x.png")
        assert said.code == 2 and said.err.startswith("error: ") and said.err.count("\n") == 1

    @pytest.mark.parametrize(
        "text", ["rows: {A: {seed: 1}\n", "- 1\n", "rows: {A: {local.lrr: 1}}\n", "rows: {A: {}}\ntable: 3\n", "\0"]
    )
    def test_a_bad_sweep(self, text: str, put: Put) -> None:
        Path("bad.yaml").write_text(text)
        refused("bad.yaml")

    @pytest.mark.parametrize("damage", ["{half", "[1, 2]", "3", '{"round": "two"}', '{"no": "round"}', "\x00\x00"])
    def test_damaged_metrics_are_named(self, damage: str, put: Put) -> None:
        file = put("out/Fed_A-IID-seed0", RISING) / "metrics.jsonl"
        lines = file.read_text().splitlines()
        lines[2] = damage
        file.write_text("\n".join(lines) + "\n")
        text = refused("sweep.yaml")
        assert "Fed_A-IID-seed0" in text and ("metrics.jsonl" in text)
        assert "Fed_A-IID-seed0" in refused("out")

    @pytest.mark.parametrize("value", ['"high"', "[0.5]", "true"])
    def test_an_accuracy_that_is_no_number_is_named(self, value: str, put: Put) -> None:
        file = put("out/Fed_A-IID-seed0", RISING) / "metrics.jsonl"
        file.write_text(file.read_text().replace('"test_accuracy": 0.7', f'"test_accuracy": {value}'))
        assert "Fed_A-IID-seed0" in refused("sweep.yaml")

    def test_metrics_that_lack_a_key_are_named(self, put: Put) -> None:
        file = put("out/Fed_A-IID-seed0", RISING) / "metrics.jsonl"
        file.write_text(file.read_text().replace('"bytes_up"', '"bytes_upp"'))
        assert "Fed_A-IID-seed0" in refused("sweep.yaml", "--target", "0.8", "--cost", "gigabytes")

    @pytest.mark.parametrize(("name", "text"), [("config.yaml", "{"), ("config.yaml", "[]"), ("run.json", "{")])
    def test_a_damaged_file_of_a_run_is_named(self, name: str, text: str, put: Put) -> None:
        (put("runs/one", RISING) / name).write_text(text)
        assert "runs/one" in refused("runs")

    def test_a_run_that_has_only_begun(self, put: Put) -> None:
        """No run.json and no metrics.jsonl yet."""
        for name in ("run.json", "metrics.jsonl"):
            (put(f"out/Fed_A-IID-seed{len(name) % 3}", RISING, rounds=9) / name).unlink()
        assert asked("sweep.yaml").code == 0

    def test_nonsense_options(self, put: Put) -> None:
        fill(put)
        for words in (["--last", "0"], ["--last", "-1"], ["--last", "x"], ["--measure", "median"], ["--cost", "euros"]):
            said = asked("sweep.yaml", *words)
            assert said.code == 2 and "Traceback" not in said.err, words

    def test_overrides_are_for_sweeps(self, put: Put) -> None:
        fill(put)
        assert "seed=3" in refused("out", "seed=3")


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
def test_csv_is_what_a_plain_reference_says(
    trained: Path,
    tmp_path_factory: pytest.TempPathFactory,
    runs: list[list[float | None]],
    rounds: int,
    last: int,
    measure: str,
    target: str,
    cost: str,
) -> None:
    """Runs of one cell; the last round of a finished one is evaluated, as the program does it."""
    folder = tmp_path_factory.mktemp("random")
    for seed, accuracies in enumerate(runs):
        del accuracies[rounds:]
        if len(accuracies) == rounds and accuracies[-1] is None:
            accuracies[-1] = 0.5
        make(trained, folder / "out" / f"A-seed{seed}", accuracies, rounds, scale=seed + 1)
    seeds = list(range(len(runs)))
    content = {"rows": {"A": {}}, "grid": {"seed": seeds}, "set": {"rounds": rounds}, "dir": str(folder / "out")}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content))
    options = ["--last", str(last), "--measure", measure, "--target", target, "--cost", cost]
    lines = {key[2]: line for key, line in numbers(folder / "sweep.yaml", *options).items()}

    finished = [k for k in seeds if len(runs[k]) == rounds]
    counted = finished or [k for k in seeds if any(a is not None for a in runs[k])]
    line = lines[measure]
    assert int(line["finished"]) == len(finished) and int(line["runs"]) == len(runs)
    windows = [[a for a in runs[k][-last:] if a is not None] for k in counted]
    if measure == "mean" and not all(windows):
        return  # an unfinished run that was last evaluated before: nothing is said of it
    values = [of_run(runs[k], measure, last) for k in counted]
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
        costs = [spent(runs[k], float(target), cost, k + 1) for k in finished]
        known = [value for value in costs if value is not None]
        if len(known) < len(costs):
            assert lines[f"{cost}@{target}"]["value"] in ("", "x")
        else:
            assert float(lines[f"{cost}@{target}"]["value"]) == pytest.approx(statistics.mean(known), rel=1e-9)
