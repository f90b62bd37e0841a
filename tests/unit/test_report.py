"""The report: every section, every number against one counted by hand, its server."""

import http.client
import json
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

from fl_dist.report.gather import Source
from fl_dist.report.lines import Line, over_seeds, thinned
from fl_dist.report.serve import Server, Watch
from fl_dist.report.tables import moment
from tests.support.fake_runs import append, clients, pretend, row, write_lines
from tests.support.report_pages import (
    ALL,
    EVIL,
    asked,
    data,
    data_of,
    made,
    served,
    traces,
    write_sweep,
)

LETTERS = st.text("ab1</%{", max_size=4)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sweep(here: Path) -> Path:
    return write_sweep(here)


def words_of(shown: dict[str, Any], section: str) -> str:
    """All HTML of a section."""
    return json.dumps(next(s for s in shown["sections"] if s["id"] == section), ensure_ascii=False)


def refused(*words: str | Path) -> str:
    said = asked(*words)
    assert said.code == 2 and said.err.startswith("error: ") and said.err.count("\n") == 1, said
    return said.err


class TestPage:
    def test_a_sweep_has_all_sections(self, sweep: Path) -> None:
        shown = data(sweep)
        assert [section["id"] for section in shown["sections"]] == ALL
        assert shown["title"] == "sweep" and "6 runs: 3 finished, 1 interrupted, 2 not begun" in shown["told"]
        summary = words_of(shown, "summary")
        assert summary.count("<progress") == 6 and "3 / 6" in summary and "Fed__B_-IID-seed1" in summary
        assert summary.count("%*</b>") == 1 and "* not finished" in summary
        assert "(71.5 ± 0.4)" in summary and "– (90)" in summary and "as published" in summary

    def test_everything_that_a_section_shows_is_there(self, sweep: Path) -> None:
        shown = data(sweep)

        def names(parts: list[dict[str, Any]]) -> Iterator[str]:
            for part in parts:
                yield from part.get("charts", [])
                for option in part.get("options", []):
                    yield from names(option["parts"])

        named = [name for section in shown["sections"] for name in names(section["parts"])]
        assert sorted(named) == sorted(shown["figures"])
        assert {trace["type"] for figure in shown["figures"].values() for trace in figure["data"]} == {
            *("scatter", "bar", "heatmap", "contour", "surface")
        }
        assert {"diagnostics/0.0/trajectory/client_loss/0/3d", "clients/0"} <= shown["figures"].keys()
        assert [option["label"] for part in shown["sections"][3]["parts"] for option in part.get("options", [])] == [
            *("Fed_A-IID-seed0", "Fed_A-IID-seed1", "Fed__B_-IID-seed0", "Fed__B_-IID-seed1")
        ]

    def test_curves_are_means_over_the_rounds_that_all_seeds_have(self, sweep: Path) -> None:
        shown = data(sweep)
        curves = traces(shown, "curves/0.0/test_accuracy")
        assert list(curves) == ["Fed A", "Fed &lt;B&gt;"]
        first, second = curves.values()
        scores = [[100 * row(k, level)["test_accuracy"] for level in (0.6, 0.65)] for k in range(1, 7)]
        assert first["x"] == [1, 2, 3, 4, 5, 6] and second["x"] == [1, 2, 3]
        assert first["y"] == pytest.approx([sum(pair) / 2 for pair in scores], rel=1e-5)
        band = next(t for t in shown["figures"]["curves/0.0/test_accuracy"]["data"] if t.get("fill"))
        assert band["y"] == pytest.approx([b for _, b in scores] + [a for a, _ in scores[::-1]], rel=1e-5)
        places = shown["places"][first["meta"]["place"]]
        assert places["gigabytes"] == pytest.approx([0.5 * k for k in range(1, 7)])
        assert places["passes"] == [80 * k for k in range(1, 7)]
        assert places["minutes"] == pytest.approx([2.5 * k / 60 for k in range(1, 7)], rel=1e-5)

    def test_the_comparison_is_sorted_and_has_what_was_published(self, sweep: Path) -> None:
        dots = traces(data(sweep), "compared/0.0")
        assert dots["published"]["x"] == [71.5] and dots["published"]["y"] == ["Fed A"]
        finals = [100 * sum(row(k, 0.6 + 0.05 * s)["test_accuracy"] for k in (4, 5, 6)) / 3 for s in (0, 1)]
        assert dots["Fed A"]["x"] == pytest.approx(finals, rel=1e-5)
        shown = data(sweep)["figures"]["compared/0.0"]
        assert shown["layout"]["yaxis"]["categoryarray"] == ["Fed A", "Fed &lt;B&gt;"]

    def test_what_is_not_finished_is_hollow(self, sweep: Path) -> None:
        first, second, _, seeds, _ = data(sweep)["figures"]["compared/0.0"]["data"]
        assert "symbol" not in first["marker"] and second["marker"]["symbol"] == "circle-open"
        assert second["x"] == [seeds["x"][0]]  # as in the table, the score of the seed that is finished
        assert seeds["marker"]["symbol"] == ["circle", "circle-open"]

    def test_published_numbers_may_lie_elsewhere(self, sweep: Path) -> None:
        shutil.move("published.csv", "other.csv")
        assert "71.5" not in words_of(data(sweep), "summary")
        assert "71.5" in words_of(data(sweep, "--published", "other.csv"), "summary")
        assert "other2.csv" in refused(sweep, "--published", "other2.csv")

    def test_the_cost_of_targets(self, sweep: Path) -> None:
        compared = words_of(data(sweep), "compared")
        assert "rounds to 50 %" in compared and "minutes to 50 %" in compared
        first = next(k for k in range(1, 7) if row(k, 0.8)["test_accuracy"] >= 0.5)
        assert f"<b>{first}*</b>" in compared and f"<b>{0.5 * first:.3g}*</b>" in compared
        assert "* not all runs of this cell are finished" in compared

    def test_seconds_by_phase(self, sweep: Path) -> None:
        shown = data(sweep)
        assert traces(shown, "times/diagnostics")["diagnostics"]["x"] == [10, 15, 15, 15]
        assert "<td>15.0 s + 1 min 30 s</td>" in words_of(shown, "summary")
        bars = traces(shown, "times/phases")
        assert {name: bar["x"][0] for name, bar in bars.items()} == {
            **{"broadcast": 0.1, "local": 2, "reduce": 0.2, "server": 0.1, "evaluate": 0.6, "checkpoint": 0.05},
            "length of a round": 2.5,
        }

    def test_workers_are_busy_within_their_rounds(self, sweep: Path) -> None:
        shown = data(sweep)
        lanes = traces(shown, "times/0")
        assert lanes["idle"]["base"][:4] == [0, 0, 2.5, 2.5] and lanes["idle"]["x"][0] == 2.5
        assert lanes["busy"]["x"][:2] == [2, 1.3] and lanes["busy"]["base"][:2] == [0.1, 0.1]
        assert {*lanes["idle"]["y"], *lanes["busy"]["y"]} == {"worker 1", "worker 2"}

    def test_lists_lie_over_classes_radii_or_places(self, here: Path) -> None:
        folder = pretend(here / "a", algorithm={"name": "a"})
        other = pretend(here / "b", rich=False, algorithm={"name": "b"})
        write_lines(other / "diagnostics.jsonl", {"round": 6, "label": "along", "values": {"random": [1.0, 2.0]}})
        shown = data(folder, other)
        (classes,) = shown["figures"]["diagnostics/0.0/clients/classes/class"]["data"]
        assert classes["x"] == [*range(10)] and classes["y"][9] == 0.8 and classes["mode"] == "markers"
        assert classes["text"] == "a, round 6"
        (along,) = shown["figures"]["diagnostics/0.0/along/random/radius"]["data"]
        assert along["name"] == "a" and along["x"][0] == -0.5
        (places,) = shown["figures"]["diagnostics/0.0/along/random/place in the list"]["data"]
        assert places["name"] == "b" and places["x"] == [0, 1]

    def test_what_was_measured_with_other_settings_is_not_mixed_with_the_runs_own(self, here: Path) -> None:
        own = {"name": "sharpness", "every": 3, "rho": 0.05, "rows": None}
        folder = pretend(here / "a", diagnostics={"sharpness": own})

        def line(label: str, value: float, **settings: Any) -> dict[str, Any]:
            return {"round": 6, "label": label, "values": {label: value}, "settings": settings}

        lines = [
            line("sharpness", 9.0, **own | {"every": 10, "rho": 0.5}),
            line("sharpness", 8.0, **own | {"every": 1}),
        ]
        lines += [line("trace", 5.0, samples=20), line("trace", 6.0, samples=30), line("trace", 7.0, samples=20)]
        write_lines(folder / "diagnostics.jsonl", *lines)
        shown = data(folder)
        last = {
            name: shown["figures"][f"diagnostics/0.0/{name}"]["data"][0]["y"][-1]
            for name in ("sharpness/sharpness", "sharpness (rho=0.5)/sharpness", "trace (samples=30)/trace")
        }
        assert [*last.values()] == [8.0, 9.0, 6.0]
        assert shown["figures"]["diagnostics/0.0/trace/trace"]["data"][0]["y"] == [7.0]

    def test_curves_of_one_run_lie_where_its_own_rounds_do(self, sweep: Path) -> None:
        shown = data(sweep)
        own = shown["places"][shown["figures"]["clients/loss/2"]["data"][0]["meta"]["place"]]
        row = shown["places"][traces(shown, "curves/0.0/test_accuracy")["Fed &lt;B&gt;"]["meta"]["place"]]
        assert (own["rounds"], row["rounds"]) == ([1, 2, 3, 4, 5, 6], [1, 2, 3])

    def test_every_number_of_a_round_is_shown(self, sweep: Path) -> None:
        shown = data(sweep)
        values = words_of(shown, "values")
        assert "Always the same: clients 4, dropped clients 0, bytes down 400,000,000, bytes up 100,000,000" in values
        assert "forward passes 40" in values and "broadcast 0.1" in values and "diagnostics 30" in values
        assert "Memory of the rank that uses most" in values and "memory (GB) 0.9" in values

    def test_a_plane_that_would_be_a_strip_is_not_true_to_scale(self, here: Path) -> None:
        folder = pretend(here / "a")
        assert data(folder)["figures"]["diagnostics/0.0/surface/loss/0"]["layout"]["yaxis"] == {
            "scaleanchor": "x",
            "constrain": "domain",
        }
        strip = {"x": [0, 1], "y": [0, 9], "loss": [[1, 2], [3, 4]]}
        write_lines(folder / "diagnostics.jsonl", {"round": 6, "label": "surface", "values": strip})
        assert data(folder)["figures"]["diagnostics/0.0/surface/loss/0"]["layout"] == {}

    def test_only_some_runs_and_several_sources(self, sweep: Path) -> None:
        assert data(sweep, "--only", "Fed A")["told"].startswith("2 runs")
        pretend(Path("alone/one"))
        both = data(sweep, "alone")
        assert both["title"] == "sweep, runs" and both["told"].startswith("7 runs")
        assert "sweep: IID" in words_of(both, "curves")
        assert data("alone/one")["title"] == "one"

    def test_settings_that_differ(self, here: Path) -> None:
        pretend(here / "a", local={"lr": 0.1}, run={"dir": "a"})
        pretend(here / "b", local={"lr": 0.25}, run={"dir": "b"})
        told = words_of(data("a", "b"), "settings")
        table, _, folded = told.partition("<details>")
        assert "local.lr" in table and "0.25" in table and "run.dir" not in table and "model.name" not in table
        assert "mlp" in folded

    def test_attempts_name_hosts_and_versions(self, here: Path) -> None:
        attempts = words_of(data(pretend(here / "a")), "attempts")
        assert "node1 (2 ranks), node2 (1 rank)" in attempts and "torch 2.13.0" in attempts and "4711" in attempts

    def test_the_page_does_not_say_where_runs_and_data_lie(self, here: Path) -> None:
        places = {"run": {"dir": str(here / "a")}, "data": {"name": "digits", "root": str(here / "files")}}
        page = made(pretend(here / "a", **places), pretend(here / "b", algorithm={"name": "fedsam"}))
        assert "name: digits" in page and "times/1" in page
        assert str(here) not in page


class TestWhatIsMissing:
    def test_a_run_that_has_not_begun(self, here: Path) -> None:
        shown = data(pretend(here / "a", done=0, rich=False))
        assert [section["id"] for section in shown["sections"]] == ["summary", "settings"]
        assert "not begun" in words_of(shown, "summary")

    def test_sections_without_data_are_left_out(self, here: Path) -> None:
        shown = data(pretend(here / "a", rich=False))
        assert {section["id"] for section in shown["sections"]} == {*ALL} - {"clients", "diagnostics", "attempts"}

    def test_an_axis_that_a_run_does_not_know(self, here: Path) -> None:
        for name in ("a", "b"):
            folder = pretend(here / name, done=0, rich=False, algorithm={"name": name})
            lines = [row(k, rich=False) for k in range(1, 4)]
            append(folder, *({k: v for k, v in line.items() if name == "a" or k != "forwards"} for line in lines))
        shown = data("a", "b")
        known, lacking = shown["places"].values()
        assert "passes" in known and "passes" not in lacking and "minutes" in lacking
        assert "passes to" not in words_of(shown, "compared") and "minutes to" in words_of(shown, "compared")

    def test_lines_that_are_not_whole(self, here: Path) -> None:
        folder = pretend(here / "a", rounds=9, done=3)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"round": 4, "test_acc')
        assert "cannot be read" not in words_of(data(folder), "summary")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write("\n" + json.dumps(row(5)) + "\n")
        summary = words_of(data(folder), "summary")
        assert "1 line of metrics.jsonl cannot be read, the first is line 4" in summary and "5 / 9" in summary

    def test_seeds_that_share_no_round(self, here: Path) -> None:
        for seed in range(2):
            append(pretend(here / f"seed{seed}", done=0, seed=seed), row(1 + seed), row(3 + seed))
        shown = data("seed0", "seed1")
        assert "2 interrupted" in shown["told"] and not [name for name in shown["figures"] if "curves/" in name]

    def test_a_configuration_that_cannot_be_read(self, sweep: Path) -> None:
        for text in ("[", "rounds: many", "- 1"):
            (sweep.parent / "out" / "Fed_A-IID-seed0" / "config.yaml").write_text(text)
            shown = data("out")
            assert "left out" in words_of(shown, "summary") and shown["told"].startswith("3 runs")
        (sweep.parent / "out" / "Fed_A-IID-seed0" / "config.yaml").write_text("[")
        assert "is not valid YAML" in words_of(data(sweep), "summary")

    def test_a_record_that_is_damaged(self, here: Path) -> None:
        (pretend(here / "a") / "run.json").write_text("{")
        assert "run.json is missing or damaged" in words_of(data("a"), "summary")

    def test_numbers_that_are_none(self, here: Path) -> None:
        folder = pretend(here / "a", done=5)
        odd = {"test_loss": float("nan"), "train_loss": float("inf"), "lr": "x", "norms": {"model": None, "step": [1]}}
        append(folder, row(6) | odd | {"method": 3, "spread": [], "workers": {"1": None}, "diagnostics": {"a": 1}})
        assert data(folder)["figures"]["curves/0.0/test_loss"]["data"][0]["x"] == [1, 2, 3, 4, 5]

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
    def test_nothing_in_a_row_breaks_the_page(
        self, tmp_path_factory: pytest.TempPathFactory, odd: dict[str, Any]
    ) -> None:
        folder = pretend(tmp_path_factory.mktemp("odd") / "run", done=1)
        append(folder, row(2) | odd)
        write_lines(folder / "diagnostics.jsonl", {"round": 2, "label": "l", "values": odd}, odd)
        write_lines(folder / "attempts.jsonl", odd, {"hosts": odd, "versions": odd, "time": 1e300})
        (folder / "clients.json").write_text(json.dumps({"sizes": [*odd.values()], "classes": [*odd.values()]}))
        _, shown = Watch(Source([str(folder)])).now()
        json.dumps(shown, allow_nan=False)

    def test_clients_without_classes_and_too_many_of_them(self, here: Path) -> None:
        folder = pretend(here / "a")
        (folder / "clients.json").write_text(json.dumps({"sizes": [3, 4], "classes": None}))
        assert [trace["type"] for trace in data(folder)["figures"]["clients/0"]["data"]] == ["bar"]
        (folder / "clients.json").write_text(json.dumps(clients(total=700)))
        shown = data(folder)
        assert "the first 500 are drawn" in words_of(shown, "clients")
        assert len(shown["figures"]["clients/0"]["data"][0]["x"]) == 500

    def test_what_cannot_be_shown_is_said_in_one_line(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "no run in nowhere" in refused("nowhere")
        assert "cannot read nowhere.yaml" in refused("nowhere.yaml")
        assert "no run is 'x'" in refused(pretend(here / "a"), "--only", "x")
        assert "port" in refused(here / "a", "--serve", "--port", "70000")
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
        assert refused(here / "a") == "error: the report needs plotly: pip install 'fl_dist[report]'\n"


class TestText:
    def test_nothing_from_files_is_markup(self, here: Path) -> None:
        folder = pretend(here / "run<img src=x>", algorithm={"name": EVIL}, local={EVIL: EVIL})
        append(folder, row(7) | {"method": {EVIL: 1.0}, "diagnostics": {EVIL: {EVIL: 2.0, "list": [1, 2]}}})
        write_lines(folder / "attempts.jsonl", {"hosts": [EVIL], "versions": {EVIL: EVIL}, "device": EVIL})
        page = made(folder)
        assert page.count("<script") - page.count('"<script') >= 3 and "<img src" not in page.replace("\\u003c", "")
        shown = data_of(page)
        for section in shown["sections"]:
            for part in section["parts"]:
                assert "<img" not in part.get("html", "")
        names = [trace.get("name", "") for figure in shown["figures"].values() for trace in figure["data"]]
        assert any("&lt;img" in name for name in names) and not any("<" in name for name in names)

    def test_nothing_is_fetched(self, here: Path) -> None:
        page = made(pretend(here / "a"))
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
        assert policy and "default-src 'none'" in policy[1] and "connect-src 'none'" in policy[1]
        head = page[: page.index("<script")]
        assert "http" not in head.replace("http-equiv", "") and "@import" not in head


class TestLines:
    @given(
        st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
        st.integers(min_value=4, max_value=60),
    )
    def test_a_thin_line_keeps_ends_and_extremes(self, values: list[float], most: int) -> None:
        values = [float(f"{value:.6g}") for value in values]
        rounds = [*range(1, len(values) + 1)]
        thin = thinned(Line(rounds, values, [v - 1 for v in values], [v + 1 for v in values], 2), most)
        assert len(thin.rounds) <= max(most, 4) and thin.rounds == sorted(set(thin.rounds))
        assert (thin.rounds[0], thin.rounds[-1]) == (1, len(values))
        assert (min(thin.mean), max(thin.mean)) == (min(values), max(values))
        assert min(thin.low) == pytest.approx(min(values) - 1, rel=1e-5, abs=1e-5)
        assert all(values[index - 1] == value for index, value in zip(thin.rounds, thin.mean, strict=True))

    def test_seeds_that_have_no_round_in_common(self) -> None:
        assert over_seeds([{1: 0.5}, {2: 0.5}]) is None and over_seeds([{}, {}]) is None
        line = over_seeds([{1: 1.0, 2: 2.0}, {}, {2: 4.0, 3: 1.0}])
        assert line == Line([2], [3.0], [2.0], [4.0], 2)

    def test_a_long_run_stays_small(self, here: Path) -> None:
        folder = pretend(here / "a", rounds=6000, done=0)
        append(folder, *(row(k, 0.5 + 0.01 * (k % 7), rich=False) | {"norms": {"model": k}} for k in range(1, 5001)))
        shown = data(folder)
        assert len(shown["figures"]["curves/0.0/train_loss"]["data"][0]["x"]) <= 2000
        assert len(shown["figures"]["values/0.0/Norms/model"]["data"][0]["x"]) <= 500
        assert len(json.dumps(shown)) < 400_000


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
    def test_what_is_new_and_nothing_else(self, here: Path) -> None:
        folder, other = pretend(here / "a", rounds=9, done=4), pretend(here / "b", algorithm={"name": "fedsam"})
        with served(folder, other) as server:
            status, body, version = get(server, "/data")
            whole = json.loads(body)
            assert status == 200 and version and whole["figures"].keys() == set(whole["names"])
            assert get(server, "/data", If_None_Match=version) == (304, "", version)
            append(folder, row(5))
            status, body, newer = get(server, "/data", If_None_Match=version)
            new = json.loads(body)
            assert status == 200 and newer != version and new["names"] == whole["names"]
            assert 0 < len(new["figures"]) < len(whole["figures"])
            assert new["figures"]["curves/0.0/test_accuracy"]["data"][0]["x"] == [1, 2, 3, 4, 5]
            assert {"times/0", "times/1"} & new["figures"].keys() == {"times/0"} and "5 / 9" in words_of(new, "summary")
            assert json.loads(get(server, "/data", If_None_Match='"unknown"')[1])["figures"].keys() == set(new["names"])

    def test_a_line_that_is_being_written_is_waited_for(self, here: Path) -> None:
        folder = pretend(here / "a", rounds=9, done=4)
        with served(folder) as server:
            line = json.dumps(row(5)) + "\n"
            for part in (line[:50], line[50:]):
                _, _, before = get(server, "/data")
                with open(folder / "metrics.jsonl", "a") as file:
                    file.write(part)
                _, body, after = get(server, "/data")
                assert ("5 / 9" in body) == (before != after) == part.endswith("\n") and "cannot be read" not in body

    def test_new_runs_appear(self, sweep: Path) -> None:
        with served(sweep) as server:
            assert "2 not begun" in get(server, "/data")[1]
            pretend(sweep.parent / "out" / "Later-IID-seed0")
            assert "1 not begun" in get(server, "/data")[1]
        with served("out") as server:
            assert json.loads(get(server, "/data")[1])["told"].startswith("5 runs")
            pretend(sweep.parent / "out" / "Later-IID-seed1")
            assert json.loads(get(server, "/data")[1])["told"].startswith("6 runs")

    def test_it_is_for_this_machine_only(self, here: Path) -> None:
        with served(pretend(here / "a")) as server:
            assert server.server_address[0] == "127.0.0.1"
            port = server.server_address[1]
            for host in ("127.0.0.1", f"127.0.0.1:{port}", f"localhost:{port}", "localhost:8888", "[::1]:1"):
                assert get(server, "/data", Host=host)[0] == 200, host
            for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "localhost:x"):
                assert get(server, "/data", Host=host)[0] == 403, host
                assert get(server, "/", Host=host)[0] == 403, host
            assert get(server, "/../../etc/passwd")[0] == 404

    def test_a_folder_that_cannot_be_read_for_a_while(self, here: Path) -> None:
        config = pretend(here / "a") / "config.yaml"
        with served("a", "b") as server:
            text = config.read_text()
            config.write_text("[")
            status, said, _ = get(server, "/data")
            assert status == 503 and "config.yaml" in said and "\n" not in said
            pretend(here / "b")
            status, said, _ = get(server, "/data")
            assert status == 200 and "left out" in said and json.loads(said)["told"].startswith("1 run")
            config.write_text(text)
            assert json.loads(get(server, "/data")[1])["told"].startswith("2 runs")


def test_times_are_told_to_the_minute() -> None:
    for seconds in (1794857630.5, 1794857700.0, 1794861000.25):
        assert moment(seconds) == time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
