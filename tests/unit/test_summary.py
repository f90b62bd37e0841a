"""The summary of a run: final score, totals, the load of a dedicated server."""

from typing import Any

import pytest

from fl_dist.metrics import RoundRecord
from fl_dist.metrics.summary import server_load, summarize, summary_lines
from fl_dist.tasks.classification import Classification

METRIC = Classification.primary_metric
COMMON_FIELDS = {"round": 1, "bytes_down": 1, "bytes_up": 2, "dropped": []}


def test_final_accuracy_is_mean_and_sample_deviation_of_the_last_rounds() -> None:
    records: list[dict[str, Any]] = [
        COMMON_FIELDS | {"seconds": {"total": 1.5}, "round": k, "test_accuracy": accuracy}
        for k, accuracy in enumerate([0.9, 0.5, None, 0.7], 1)
    ]
    summary = summarize([*map(RoundRecord.from_json, records)], 3, METRIC, finished=True)
    assert summary["final_accuracy_mean"] == pytest.approx(0.6)
    assert summary["final_accuracy_std"] == pytest.approx(0.02**0.5)
    assert (summary["best_accuracy"], summary["best_round"], summary["last_accuracy"]) == (0.9, 1, 0.7)
    assert (summary["bytes"], summary["seconds"]) == (12, 6.0)
    records[0] |= {"seconds": {"total": 1.5, "diagnostics": 70.0}}
    summary = summarize([*map(RoundRecord.from_json, records)], 3, METRIC, finished=True)
    assert "time            6.0 s and 1 min 10 s of diagnostics" in summary_lines(summary, METRIC, "")


@pytest.mark.parametrize(("window", "has_hint"), [(4, True), (3, True), (2, False), (1, False)])
def test_a_final_score_over_most_rounds_names_the_setting(window: int, has_hint: bool) -> None:
    """The first rounds of a short run would make it much lower than its last score."""
    records = [COMMON_FIELDS | {"seconds": {"total": 1.0}, "round": k, "test_accuracy": k / 10} for k in range(1, 5)]
    lines = summary_lines(summarize([*map(RoundRecord.from_json, records)], window, METRIC, finished=True), METRIC, "")
    assert any("evaluate.final_window" in line for line in lines) == has_hint


def server_record(total: float, busy: dict[int, tuple[float, int]], evaluate: float = 0.0, by: int = 1) -> RoundRecord:
    """A record with busy seconds and clients per worker, and an evaluation by the first ranks."""
    ranks: dict[str, dict[str, Any]] = {"0": {"memory": 1}}
    ranks |= {str(rank): {"busy": seconds, "clients": clients} for rank, (seconds, clients) in busy.items()}
    for rank in range(by if evaluate else 0):
        ranks[str(rank)]["evaluate"] = evaluate
    local = max(seconds for seconds, _ in busy.values())
    seconds = {"total": total, "local": local, "server": 0.1, "checkpoint": 0.1}
    return RoundRecord.from_json(COMMON_FIELDS | {"seconds": seconds, "workers": ranks})


TWO_WORKERS = {1: (4.0, 2), 2: (4.0, 2)}


@pytest.mark.parametrize(
    ("records", "busy"),
    [
        ([server_record(5, TWO_WORKERS)], 0.2 / 5),
        # The evaluation of round 1 ran during round 2, by rank 0 or by all ranks.
        ([server_record(5, TWO_WORKERS, 3.0), server_record(5, TWO_WORKERS)], 3.4 / 10),
        ([server_record(5, TWO_WORKERS, 1.0, by=3), server_record(6, TWO_WORKERS)], 1.4 / 11),
        # The run started with a shared server.
        ([server_record(5, {0: (4.0, 2), 1: (4.0, 2)}), server_record(9, {1: (8.0, 4)})], 0.2 / 9),
    ],
)
def test_the_load_of_a_dedicated_server_is_its_share_of_the_time(records: list[RoundRecord], busy: float) -> None:
    assert server_load(records) == {"server_busy": pytest.approx(busy)}


def test_without_a_dedicated_server_there_is_no_load() -> None:
    assert server_load([server_record(5, {0: (4.0, 2)}), server_record(5, {0: (4.0, 2), 1: (4.0, 2)})]) == {}
    assert server_load([RoundRecord.from_json(COMMON_FIELDS | {"seconds": {"total": 1.0}})]) == {}
    assert server_load([]) == {}


def test_a_run_that_one_process_resumed_has_no_dedicated_server() -> None:
    assert server_load([server_record(5, TWO_WORKERS), server_record(5, {0: (4.0, 2)})]) == {}


def test_the_summary_shows_the_load_of_the_server() -> None:
    lines = []
    for records in ([server_record(5, TWO_WORKERS)], [server_record(5, TWO_WORKERS, 9.0)] * 2):
        summary = summarize(records, 3, METRIC, finished=True) | server_load(records)
        lines += [line for line in summary_lines(summary, METRIC, "") if line.startswith("server")]
    assert lines == [
        "server          busy 4 % of the time; topology.server=shared would let it train too",
        "server          busy 94 % of the time",
    ]


@pytest.mark.parametrize(("columns", "needed"), [(60, 2), (80, 2), (120, 1)])
def test_the_summary_fits_the_terminal(columns: int, needed: int) -> None:
    records = [server_record(36000, {1: (35000.0, 4)})]
    summary = summarize(records, 3, METRIC, finished=True) | server_load(records)
    lines = summary_lines(summary, METRIC, "runs/my", columns)
    assert max(map(len, lines)) <= columns
    first = next(k for k, line in enumerate(lines) if line.startswith("server"))
    wrapped = lines[first : lines.index("files           runs/my/")]
    assert len(wrapped) == needed
    assert all(line.startswith(" " * 16) for line in wrapped[1:])
    assert " ".join(line.strip() for line in wrapped) in summary_lines(summary, METRIC, "")


def test_a_run_that_stopped_early_says_why() -> None:
    summary = summarize([server_record(5, TWO_WORKERS)], 3, METRIC, finished=True) | {
        "stopped": "no improvement for 2 rounds"
    }
    assert "stopped         after round 1: no improvement for 2 rounds" in summary_lines(summary, METRIC, "")
