"""The report: every section, values against hand-computed ones, its server."""

import http.client
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_dist.metrics.record import VALIDATION, Norms, RoundRecord, Seconds, Spread, WorkerRecord, display_of, field
from fl_dist.report.record_charts import chart_fields
from fl_dist.report.run_source import RunSource
from fl_dist.report.series import Line, combine_seeds, downsample
from fl_dist.report.serve import LiveDocument, Server
from fl_dist.report.tables import format_time
from tests.support.report_pages import (
    ALL_SECTIONS,
    HTML_INJECTION,
    invoke,
    parse_data,
    render,
    render_data,
    serve_report,
    traces,
    write_sweep,
)
from tests.support.sample_runs import append_records, clients, round_record, write_lines, write_run

LETTERS = st.text("ab1</%{", max_size=4)


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sweep(working_folder: Path) -> Path:
    return write_sweep(working_folder)


def section_html(data: dict[str, Any], section: str) -> str:
    """The HTML of a section."""
    return json.dumps(next(s for s in data["sections"] if s["id"] == section), ensure_ascii=False)


def error_line(*arguments: str | Path) -> str:
    result = invoke(*arguments)
    assert result.code == 2 and result.err.startswith("error: ") and result.err.count("\n") == 1, result
    return result.err


class TestPage:
    def test_a_sweep_has_all_sections(self, sweep: Path) -> None:
        data = render_data(sweep)
        assert [section["id"] for section in data["sections"]] == ALL_SECTIONS
        assert data["title"] == "sweep" and "6 runs: 3 finished, 1 interrupted, 2 not begun" in data["runCounts"]
        summary = section_html(data, "summary")
        assert summary.count("<progress") == 6 and "3 / 6" in summary and "Fed__B_-IID-seed1" in summary
        assert summary.count("%*</b>") == 1 and "* not finished" in summary
        assert "(71.5 ± 0.4)" in summary and "– (90)" in summary and "as published" in summary

    def test_every_figure_of_a_section_exists(self, sweep: Path) -> None:
        data = render_data(sweep)

        def names(parts: list[dict[str, Any]]) -> Iterator[str]:
            for part in parts:
                yield from part.get("charts", [])
                for option in part.get("options", []):
                    yield from names(option["parts"])

        figure_names = [name for section in data["sections"] for name in names(section["parts"])]
        assert sorted(figure_names) == sorted(data["figures"])
        assert {trace["type"] for figure in data["figures"].values() for trace in figure["data"]} == {
            *("scatter", "bar", "heatmap", "contour", "surface")
        }
        assert {"diagnostics/0.0/trajectory/client_loss/0/3d", "clients/0"} <= data["figures"].keys()
        assert [option["label"] for part in data["sections"][3]["parts"] for option in part.get("options", [])] == [
            *("Fed_A-IID-seed0", "Fed_A-IID-seed1", "Fed__B_-IID-seed0", "Fed__B_-IID-seed1")
        ]

    def test_curves_are_means_over_the_rounds_that_all_seeds_have(self, sweep: Path) -> None:
        data = render_data(sweep)
        curves = traces(data, "curves/0.0/test_accuracy")
        assert list(curves) == ["Fed A", "Fed &lt;B&gt;"]
        first, second = curves.values()
        scores = [[100 * round_record(k, level)["test_accuracy"] for level in (0.6, 0.65)] for k in range(1, 7)]
        assert first["x"] == [1, 2, 3, 4, 5, 6] and second["x"] == [1, 2, 3]
        assert first["y"] == pytest.approx([sum(pair) / 2 for pair in scores], rel=1e-5)
        band = next(t for t in data["figures"]["curves/0.0/test_accuracy"]["data"] if t.get("fill"))
        assert band["y"] == pytest.approx([b for _, b in scores] + [a for a, _ in scores[::-1]], rel=1e-5)
        axis = data["axes"][first["meta"]["axes"]]
        assert axis["gigabytes"] == pytest.approx([0.5 * k for k in range(1, 7)])
        assert axis["passes"] == [80 * k for k in range(1, 7)]
        assert axis["minutes"] == pytest.approx([2.5 * k / 60 for k in range(1, 7)], rel=1e-5)

    def test_the_comparison_is_sorted_and_has_published_values(self, sweep: Path) -> None:
        dots = traces(render_data(sweep), "compared/0.0")
        assert dots["published"]["x"] == [71.5] and dots["published"]["y"] == ["Fed A"]
        finals = [100 * sum(round_record(k, 0.6 + 0.05 * s)["test_accuracy"] for k in (4, 5, 6)) / 3 for s in (0, 1)]
        assert dots["Fed A"]["x"] == pytest.approx(finals, rel=1e-5)
        data = render_data(sweep)["figures"]["compared/0.0"]
        assert data["layout"]["yaxis"]["categoryarray"] == ["Fed A", "Fed &lt;B&gt;"]

    def test_unfinished_runs_have_hollow_markers(self, sweep: Path) -> None:
        first, second, _, seeds, _ = render_data(sweep)["figures"]["compared/0.0"]["data"]
        assert "symbol" not in first["marker"] and second["marker"]["symbol"] == "circle-open"
        assert second["x"] == [seeds["x"][0]]  # as in the table, the score of the finished seed
        assert seeds["marker"]["symbol"] == ["circle", "circle-open"]

    def test_published_numbers_may_be_in_another_file(self, sweep: Path) -> None:
        shutil.move("published.csv", "other.csv")
        assert "71.5" not in section_html(render_data(sweep), "summary")
        assert "71.5" in section_html(render_data(sweep, "--published", "other.csv"), "summary")
        assert "other2.csv" in error_line(sweep, "--published", "other2.csv")

    def test_the_costs_of_targets_are_shown(self, sweep: Path) -> None:
        compared = section_html(render_data(sweep), "compared")
        assert "rounds to 50 %" in compared and "minutes to 50 %" in compared
        first = next(k for k in range(1, 7) if round_record(k, 0.8)["test_accuracy"] >= 0.5)
        assert f"<b>{first}*</b>" in compared and f"<b>{0.5 * first:.3g}*</b>" in compared
        assert "* not all runs of this cell are finished" in compared

    def test_seconds_are_shown_by_phase(self, sweep: Path) -> None:
        data = render_data(sweep)
        assert traces(data, "times/diagnostics")["diagnostics"]["x"] == [10, 15, 15, 15]
        assert "<td>15.0 s + 1 min 30 s</td>" in section_html(data, "summary")
        bars = traces(data, "times/phases")
        assert {name: bar["x"][0] for name, bar in bars.items()} == {
            **{"broadcast": 0.1, "local": 2, "reduce": 0.2, "server": 0.1, "evaluate": 0.6, "checkpoint": 0.05},
            "length of a round": 2.5,
        }

    def test_workers_are_busy_within_their_rounds(self, sweep: Path) -> None:
        data = render_data(sweep)
        lanes = traces(data, "times/0")
        assert lanes["idle"]["base"][:4] == [0, 0, 2.5, 2.5] and lanes["idle"]["x"][0] == 2.5
        assert lanes["busy"]["x"][:2] == [2, 1.3] and lanes["busy"]["base"][:2] == [0.1, 0.1]
        assert {*lanes["idle"]["y"], *lanes["busy"]["y"]} == {"worker 1", "worker 2"}

    def test_lists_are_plotted_over_classes_radii_or_positions(self, working_folder: Path) -> None:
        folder = write_run(working_folder / "a", algorithm={"name": "a"})
        other = write_run(working_folder / "b", detailed=False, algorithm={"name": "b"})
        write_lines(other / "diagnostics.jsonl", {"round": 6, "label": "along", "values": {"random": [1.0, 2.0]}})
        data = render_data(folder, other)
        (classes,) = data["figures"]["diagnostics/0.0/clients/classes/class"]["data"]
        assert classes["x"] == [*range(10)] and classes["y"][9] == 0.8 and classes["mode"] == "markers"
        assert classes["text"] == "a, round 6"
        (along,) = data["figures"]["diagnostics/0.0/along/random/radius"]["data"]
        assert along["name"] == "a" and along["x"][0] == -0.5
        (axis,) = data["figures"]["diagnostics/0.0/along/random/position in the list"]["data"]
        assert axis["name"] == "b" and axis["x"] == [0, 1]

    def test_diagnostics_with_other_settings_are_plotted_separately(self, working_folder: Path) -> None:
        own_settings = {"name": "sharpness", "every": 3, "rho": 0.05, "rows": None}
        folder = write_run(working_folder / "a", diagnostics={"sharpness": own_settings})

        def line(label: str, value: float, **settings: Any) -> dict[str, Any]:
            return {"round": 6, "label": label, "values": {label: value}, "settings": settings}

        lines = [
            line("sharpness", 9.0, **own_settings | {"every": 10, "rho": 0.5}),
            line("sharpness", 8.0, **own_settings | {"every": 1}),
        ]
        lines += [line("trace", 5.0, samples=20), line("trace", 6.0, samples=30), line("trace", 7.0, samples=20)]
        write_lines(folder / "diagnostics.jsonl", *lines)
        data = render_data(folder)
        last_values = {
            name: data["figures"][f"diagnostics/0.0/{name}"]["data"][0]["y"][-1]
            for name in ("sharpness/sharpness", "sharpness (rho=0.5)/sharpness", "trace (samples=30)/trace")
        }
        assert [*last_values.values()] == [8.0, 9.0, 6.0]
        assert data["figures"]["diagnostics/0.0/trace/trace"]["data"][0]["y"] == [7.0]

    def test_curves_of_one_run_use_its_own_rounds(self, sweep: Path) -> None:
        data = render_data(sweep)
        own_settings = data["axes"][data["figures"]["clients/loss/2"]["data"][0]["meta"]["axes"]]
        row = data["axes"][traces(data, "curves/0.0/test_accuracy")["Fed &lt;B&gt;"]["meta"]["axes"]]
        assert (own_settings["rounds"], row["rounds"]) == ([1, 2, 3, 4, 5, 6], [1, 2, 3])

    def test_every_value_of_a_record_is_shown(self, sweep: Path) -> None:
        data = render_data(sweep)
        values = section_html(data, "values")
        assert "Always the same: clients 4, dropped clients 0, bytes down 400,000,000, bytes up 100,000,000" in values
        assert "forward passes 40" in values and "broadcast 0.1" in values and "diagnostics 30" in values
        assert "Memory of the rank that uses most" in values and "memory (GB) 0.9" in values

    def test_every_field_of_the_record_with_a_title_or_heading_is_shown(self, working_folder: Path) -> None:
        folder = write_run(working_folder / "a", done=0)
        device = {"1": {"busy": 1.0, "clients": 2, "share": 0.5, "memory": 1, "device_memory": 2, "evaluate": 0.1}}
        records = [round_record(k) | {"workers": device} for k in (1, 2)]
        for record in records:
            record["spread"] |= {name: 0.5 for name in Spread.model_fields if name.startswith(VALIDATION)}
        append_records(folder, *records)
        values = section_html(render_data(folder), "values")
        titles = []
        for model in (RoundRecord, WorkerRecord):
            data = [display_of(info) for info in model.model_fields.values()]
            titles += [word for field in data for word in (field.title, field.heading) if word]
        for model in (Spread, Norms, Seconds):
            titles += model.model_fields
        assert len(titles) > 30 and [title for title in titles if title not in values] == []

    def test_a_declared_field_gets_a_chart(self) -> None:
        class Extended(RoundRecord):
            steps: int | None = field("local steps", "2_train", title="thousands of steps", scale=1e-3, default=None)
            energy: dict[str, float] = field("joules", "8_energy", heading="Energy", default={})

        record = Extended.from_json(round_record(1) | {"steps": 4000, "energy": {"gpu": 2.5}})
        charts = {
            (chart.display.heading, title): value
            for chart in chart_fields(Extended)
            for title, value in chart.values(record)
        }
        assert charts["", "thousands of steps"] == 4 and charts["Energy", "gpu"] == 2.5
        assert charts["", "busy share of workers"] == pytest.approx(0.65)
        assert charts["Memory of the rank that uses most", "memory (GB)"] == pytest.approx(0.9)

    def test_a_run_that_stopped_early_is_finished(self, working_folder: Path) -> None:
        data = render_data(write_run(working_folder / "a", done=4, stopped="accuracy has not improved for 2 rounds"))
        assert "1 run: 1 finished" in data["runCounts"]
        summary = section_html(data, "summary")
        assert "4 / 6" in summary and "%*</b>" not in summary

    def test_a_narrow_plane_is_not_drawn_to_scale(self, working_folder: Path) -> None:
        folder = write_run(working_folder / "a")
        assert render_data(folder)["figures"]["diagnostics/0.0/surface/loss/0"]["layout"]["yaxis"] == {
            "scaleanchor": "x",
            "constrain": "domain",
        }
        strip = {"x": [0, 1], "y": [0, 9], "loss": [[1, 2], [3, 4]]}
        write_lines(folder / "diagnostics.jsonl", {"round": 6, "label": "surface", "values": strip})
        assert render_data(folder)["figures"]["diagnostics/0.0/surface/loss/0"]["layout"] == {}

    def test_runs_can_be_selected_and_sources_combined(self, sweep: Path) -> None:
        assert render_data(sweep, "--only", "Fed A")["runCounts"].startswith("2 runs")
        write_run(Path("alone/one"))
        combined = render_data(sweep, "alone")
        assert combined["title"] == "sweep, runs" and combined["runCounts"].startswith("7 runs")
        assert "sweep: IID" in section_html(combined, "curves")
        assert render_data("alone/one")["title"] == "one"

    def test_different_settings_are_listed(self, working_folder: Path) -> None:
        write_run(working_folder / "a", local={"lr": 0.1}, run={"dir": "a"})
        write_run(working_folder / "b", local={"lr": 0.25}, run={"dir": "b"})
        section = section_html(render_data("a", "b"), "settings")
        table, _, details = section.partition("<details>")
        assert "local.lr" in table and "0.25" in table and "run.dir" not in table and "model.name" not in table
        assert "mlp" in details

    def test_attempts_name_hosts_and_versions(self, working_folder: Path) -> None:
        attempts = section_html(render_data(write_run(working_folder / "a")), "attempts")
        assert "node1 (2 ranks), node2 (1 rank)" in attempts and "torch 2.13.0" in attempts and "4711" in attempts

    def test_the_page_contains_no_local_paths(self, working_folder: Path) -> None:
        axis = {
            "run": {"dir": str(working_folder / "a")},
            "data": {"name": "digits", "root": str(working_folder / "files")},
        }
        page = render(
            write_run(working_folder / "a", **axis), write_run(working_folder / "b", algorithm={"name": "fedsam"})
        )
        assert "name: digits" in page and "times/1" in page
        assert str(working_folder) not in page


class TestIncompleteRuns:
    def test_a_run_that_has_not_started_is_shown(self, working_folder: Path) -> None:
        data = render_data(write_run(working_folder / "a", done=0, detailed=False))
        assert [section["id"] for section in data["sections"]] == ["summary", "settings"]
        assert "not begun" in section_html(data, "summary")

    def test_sections_without_data_are_omitted(self, working_folder: Path) -> None:
        data = render_data(write_run(working_folder / "a", detailed=False))
        assert {section["id"] for section in data["sections"]} == {*ALL_SECTIONS} - {
            "clients",
            "diagnostics",
            "attempts",
        }

    def test_an_axis_missing_from_a_run_is_omitted(self, working_folder: Path) -> None:
        for name in ("a", "b"):
            folder = write_run(working_folder / name, done=0, detailed=False, algorithm={"name": name})
            lines = [round_record(k, detailed=False) for k in range(1, 4)]
            append_records(
                folder, *({k: v for k, v in line.items() if name == "a" or k != "forwards"} for line in lines)
            )
        data = render_data("a", "b")
        complete, incomplete = data["axes"].values()
        assert "passes" in complete and "passes" not in incomplete and "minutes" in incomplete
        assert "passes to" not in section_html(data, "compared") and "minutes to" in section_html(data, "compared")

    def test_incomplete_lines_are_skipped_and_named(self, working_folder: Path) -> None:
        folder = write_run(working_folder / "a", rounds=9, done=3)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"round": 4, "test_acc')
        assert "cannot be read" not in section_html(render_data(folder), "summary")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write("\n" + json.dumps(round_record(5)) + "\n")
        summary = section_html(render_data(folder), "summary")
        assert "1 line of metrics.jsonl cannot be read, the first is line 4" in summary and "5 / 9" in summary

    def test_seeds_without_a_common_round_have_no_curve(self, working_folder: Path) -> None:
        for seed in range(2):
            append_records(
                write_run(working_folder / f"seed{seed}", done=0, seed=seed),
                round_record(1 + seed),
                round_record(3 + seed),
            )
        data = render_data("seed0", "seed1")
        assert "2 interrupted" in data["runCounts"] and not [name for name in data["figures"] if "curves/" in name]

    def test_an_unreadable_configuration_is_named(self, sweep: Path) -> None:
        for text in ("[", "rounds: many", "- 1"):
            (sweep.parent / "out" / "Fed_A-IID-seed0" / "config.yaml").write_text(text)
            data = render_data("out")
            assert "left out" in section_html(data, "summary") and data["runCounts"].startswith("3 runs")
        (sweep.parent / "out" / "Fed_A-IID-seed0" / "config.yaml").write_text("[")
        assert "is not valid YAML" in section_html(render_data(sweep), "summary")

    def test_a_damaged_run_info_is_named(self, working_folder: Path) -> None:
        (write_run(working_folder / "a") / "run.json").write_text("{")
        assert "run.json is missing or damaged" in section_html(render_data("a"), "summary")

    def test_values_that_are_not_finite_are_omitted(self, working_folder: Path) -> None:
        folder = write_run(working_folder / "a", done=5)
        nan = {"test_loss": float("nan"), "train_loss": float("inf"), "method": {"momentum_norm": float("nan")}}
        append_records(folder, round_record(6) | nan)
        data = render_data(folder)["figures"]
        for name in ("curves/0.0/test_loss", "curves/0.0/train_loss", "values/0.0/Method/momentum_norm"):
            assert data[name]["data"][0]["x"] == [1, 2, 3, 4, 5]
        assert data["curves/0.0/test_accuracy"]["data"][0]["x"] == [1, 2, 3, 4, 5, 6]

    def test_a_line_that_is_not_a_record_is_skipped_and_named(self, working_folder: Path) -> None:
        folder = write_run(working_folder / "a", done=5)
        values = {
            "test_loss": float("nan"),
            "train_loss": float("inf"),
            "lr": "x",
            "norms": {"model": None, "step": [1]},
        }
        append_records(
            folder,
            round_record(6) | values | {"method": 3, "spread": [], "workers": {"1": None}, "diagnostics": {"a": 1}},
        )
        data = render_data(folder)
        assert data["figures"]["curves/0.0/test_loss"]["data"][0]["x"] == [1, 2, 3, 4, 5]
        assert "1 line of metrics.jsonl cannot be read, the first is line 6" in section_html(data, "summary")

    def test_rounds_that_two_jobs_wrote_count_once_and_are_named(self, working_folder: Path) -> None:
        folder = write_run(working_folder / "a", done=5)
        append_records(folder, round_record(4), round_record(5))
        data = render_data(folder)
        assert data["figures"]["curves/0.0/test_loss"]["data"][0]["x"] == [1, 2, 3, 4, 5]
        assert "metrics.jsonl has 2 rounds twice" in section_html(data, "summary")

    @pytest.mark.parametrize("values", [{"bytes_up": 10**400}, {"method": {"a": -(10**30)}}])
    def test_a_record_with_an_absurd_number_is_skipped_and_named(
        self, working_folder: Path, values: dict[str, Any]
    ) -> None:
        folder = write_run(working_folder / "a", done=5)
        append_records(folder, round_record(6) | values)
        data = render_data(folder)
        assert data["figures"]["curves/0.0/test_loss"]["data"][0]["x"] == [1, 2, 3, 4, 5]
        assert "1 line of metrics.jsonl cannot be read, the first is line 6" in section_html(data, "summary")

    @pytest.mark.parametrize("name", ["metrics.jsonl", "diagnostics.jsonl", "clients.json", "lock", "config.yaml"])
    def test_a_pipe_does_not_block(self, working_folder: Path, name: str) -> None:
        write_run(working_folder / "runs" / "b", done=2)
        folder = write_run(working_folder / "runs" / "a", done=5)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        page = json.dumps(render_data(working_folder / "runs"))
        assert name == "lock" or "not a regular file" in page

    @settings(max_examples=60)
    @given(
        st.dictionaries(
            st.sampled_from(
                ["method", "norms", "spread", "workers", "diagnostics", "time", "lr", "clients", "seconds"]
            ),
            st.recursive(
                st.none() | st.booleans() | st.floats() | st.integers() | LETTERS,
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LETTERS, inner, max_size=3),
                max_leaves=8,
            ),
        )
    )
    def test_no_record_breaks_the_page(self, tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
        folder = write_run(tmp_path_factory.mktemp("odd") / "run", done=1)
        append_records(folder, round_record(2) | values)
        write_lines(folder / "diagnostics.jsonl", {"round": 2, "label": "l", "values": values}, values)
        write_lines(folder / "attempts.jsonl", values, {"hosts": values, "versions": values, "time": 1e300})
        (folder / "clients.json").write_text(json.dumps({"sizes": [*values.values()], "classes": [*values.values()]}))
        _, data = LiveDocument(RunSource([str(folder)])).current()
        json.dumps(data, allow_nan=False)

    def test_clients_without_classes_and_many_clients_are_drawn(self, working_folder: Path) -> None:
        folder = write_run(working_folder / "a")
        (folder / "clients.json").write_text(json.dumps({"sizes": [3, 4], "classes": None}))
        assert [trace["type"] for trace in render_data(folder)["figures"]["clients/0"]["data"]] == ["bar"]
        (folder / "clients.json").write_text(json.dumps(clients(total=700)))
        data = render_data(folder)
        assert "the first 500 are drawn" in section_html(data, "clients")
        assert len(data["figures"]["clients/0"]["data"][0]["x"]) == 500

    def test_errors_are_one_line(self, working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "no run in nowhere" in error_line("nowhere")
        assert "cannot read nowhere.yaml" in error_line("nowhere.yaml")
        assert "no run is 'x'" in error_line(write_run(working_folder / "a"), "--only", "x")
        assert "port" in error_line(working_folder / "a", "--serve", "--port", "70000")
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
        assert error_line(working_folder / "a") == "error: the report needs plotly: pip install 'fl_dist[report]'\n"


class TestText:
    def test_text_from_files_is_escaped(self, working_folder: Path) -> None:
        folder = write_run(
            working_folder / "run<img src=x>",
            algorithm={"name": HTML_INJECTION},
            local={HTML_INJECTION: HTML_INJECTION},
        )
        append_records(
            folder,
            round_record(7)
            | {"method": {HTML_INJECTION: 1.0}, "diagnostics": {HTML_INJECTION: {HTML_INJECTION: 2.0, "list": [1, 2]}}},
        )
        write_lines(
            folder / "attempts.jsonl",
            {"hosts": [HTML_INJECTION], "versions": {HTML_INJECTION: HTML_INJECTION}, "device": HTML_INJECTION},
        )
        page = render(folder)
        assert page.count("<script") - page.count('"<script') >= 3 and "<img src" not in page.replace("\\u003c", "")
        data = parse_data(page)
        for section in data["sections"]:
            for part in section["parts"]:
                assert "<img" not in part.get("html", "")
        names = [trace.get("name", "") for figure in data["figures"].values() for trace in figure["data"]]
        assert any("&lt;img" in name for name in names) and not any("<" in name for name in names)

    def test_the_page_loads_nothing(self, working_folder: Path) -> None:
        page = render(write_run(working_folder / "a"))
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
        assert policy and "default-src 'none'" in policy[1] and "connect-src 'none'" in policy[1]
        head = page[: page.index("<script")]
        assert "http" not in head.replace("http-equiv", "") and "@import" not in head


class TestLines:
    @given(
        st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
        st.integers(min_value=4, max_value=60),
    )
    def test_a_downsampled_line_keeps_ends_and_extremes(self, values: list[float], max_points: int) -> None:
        values = [float(f"{value:.6g}") for value in values]
        rounds = [*range(1, len(values) + 1)]
        sampled = downsample(Line(rounds, values, [v - 1 for v in values], [v + 1 for v in values], 2), max_points)
        assert len(sampled.rounds) <= max(max_points, 4) and sampled.rounds == sorted(set(sampled.rounds))
        assert (sampled.rounds[0], sampled.rounds[-1]) == (1, len(values))
        assert (min(sampled.mean), max(sampled.mean)) == (min(values), max(values))
        assert min(sampled.low) == pytest.approx(min(values) - 1, rel=1e-5, abs=1e-5)
        assert all(values[index - 1] == value for index, value in zip(sampled.rounds, sampled.mean, strict=True))

    def test_over_seeds_keeps_common_rounds_only(self) -> None:
        assert combine_seeds([{1: 0.5}, {2: 0.5}]) is None and combine_seeds([{}, {}]) is None
        line = combine_seeds([{1: 1.0, 2: 2.0}, {}, {2: 4.0, 3: 1.0}])
        assert line == Line([2], [3.0], [2.0], [4.0], 2)

    def test_the_page_of_a_long_run_is_small(self, working_folder: Path) -> None:
        folder = write_run(working_folder / "a", rounds=6000, done=0)
        append_records(
            folder,
            *(
                round_record(k, 0.5 + 0.01 * (k % 7), detailed=False)
                | {"norms": {"update": 1.0, "drift": 1.0, "model": k}}
                for k in range(1, 5001)
            ),
        )
        data = render_data(folder)
        assert len(data["figures"]["curves/0.0/train_loss"]["data"][0]["x"]) <= 2000
        assert len(data["figures"]["values/0.0/Norms/model"]["data"][0]["x"]) <= 500
        assert len(json.dumps(data)) < 400_000


def get(server: Server, path: str, **headers: str) -> tuple[int, str, str | None]:
    """Status, body and version."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers["ETag"]
    finally:
        connection.close()


class TestServer:
    def test_the_server_sends_only_changed_figures(self, working_folder: Path) -> None:
        folder, other = (
            write_run(working_folder / "a", rounds=9, done=4),
            write_run(working_folder / "b", algorithm={"name": "fedsam"}),
        )
        with serve_report(folder, other) as server:
            status, body, version = get(server, "/data")
            full = json.loads(body)
            assert status == 200 and version and full["figures"].keys() == set(full["figureNames"])
            assert get(server, "/data", If_None_Match=version) == (304, "", version)
            append_records(folder, round_record(5))
            status, body, newer = get(server, "/data", If_None_Match=version)
            new = json.loads(body)
            assert status == 200 and newer != version and new["figureNames"] == full["figureNames"]
            assert 0 < len(new["figures"]) < len(full["figures"])
            assert new["figures"]["curves/0.0/test_accuracy"]["data"][0]["x"] == [1, 2, 3, 4, 5]
            assert {"times/0", "times/1"} & new["figures"].keys() == {"times/0"} and "5 / 9" in section_html(
                new, "summary"
            )
            assert json.loads(get(server, "/data", If_None_Match='"unknown"')[1])["figures"].keys() == set(
                new["figureNames"]
            )

    def test_an_incomplete_line_is_not_an_error(self, working_folder: Path) -> None:
        folder = write_run(working_folder / "a", rounds=9, done=4)
        with serve_report(folder) as server:
            line = json.dumps(round_record(5)) + "\n"
            for part in (line[:50], line[50:]):
                _, _, before = get(server, "/data")
                with open(folder / "metrics.jsonl", "a") as file:
                    file.write(part)
                _, body, after = get(server, "/data")
                assert ("5 / 9" in body) == (before != after) == part.endswith("\n") and "cannot be read" not in body

    def test_new_runs_appear(self, sweep: Path) -> None:
        with serve_report(sweep) as server:
            assert "2 not begun" in get(server, "/data")[1]
            write_run(sweep.parent / "out" / "Later-IID-seed0")
            assert "1 not begun" in get(server, "/data")[1]
        with serve_report("out") as server:
            assert json.loads(get(server, "/data")[1])["runCounts"].startswith("5 runs")
            write_run(sweep.parent / "out" / "Later-IID-seed1")
            assert json.loads(get(server, "/data")[1])["runCounts"].startswith("6 runs")

    def test_the_server_accepts_local_requests_only(self, working_folder: Path) -> None:
        with serve_report(write_run(working_folder / "a")) as server:
            assert server.server_address[0] == "127.0.0.1"
            port = server.server_address[1]
            for host in ("127.0.0.1", f"127.0.0.1:{port}", f"localhost:{port}", "localhost:8888", "[::1]:1"):
                assert get(server, "/data", Host=host)[0] == 200, host
            for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "localhost:x"):
                assert get(server, "/data", Host=host)[0] == 403, host
                assert get(server, "/", Host=host)[0] == 403, host
            assert get(server, "/../../etc/passwd")[0] == 404

    def test_a_temporarily_unreadable_folder_is_reported_and_recovers(self, working_folder: Path) -> None:
        config = write_run(working_folder / "a") / "config.yaml"
        with serve_report("a", "b") as server:
            text = config.read_text()
            config.write_text("[")
            status, result, _ = get(server, "/data")
            assert status == 503 and "config.yaml" in result and "\n" not in result
            write_run(working_folder / "b")
            status, result, _ = get(server, "/data")
            assert status == 200 and "left out" in result and json.loads(result)["runCounts"].startswith("1 run")
            config.write_text(text)
            assert json.loads(get(server, "/data")[1])["runCounts"].startswith("2 runs")


def test_times_are_formatted_to_the_minute() -> None:
    for seconds in (1794857630.5, 1794857700.0, 1794861000.25):
        assert format_time(seconds) == time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
