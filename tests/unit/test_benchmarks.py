"""The benchmarks run, and the model of a round's time is the arithmetic that it is said to be. Nothing is timed."""

import math

import pytest

from benchmarks import calibrate, growth, scaling
from benchmarks.round import cases
from benchmarks.scaling import Assumptions, Vectors, chain, client_seconds, predict, vectors_of
from tests.support.harness import CASES

FREE = {"latency": 0.0, "host": math.inf, "link": math.inf, "memory": math.inf}


def assumed(**changes: object) -> Assumptions:
    """10 clients of one second, a model of a million parameters, a network of 1 GB/s."""
    basis = {"parameters": 1e6, "clients": 10, "total": 10, "steps": 10, "step": 0.1, "bandwidth": 1e9, **FREE}
    return Assumptions(**{"vectors": Vectors(1, 1, 0, 1.0), **basis, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 10, 16])
def test_the_longest_worker_has_its_share_of_equal_clients_rounded_up(workers: int) -> None:
    assert predict(assumed(), workers).makespan == pytest.approx(math.ceil(10 / workers) * 1.0)


def test_bytes_go_through_a_chain_of_ranks_once_and_latency_counts_each_hop() -> None:
    assert chain(1e9, 9, 2e9, 1e-3) == pytest.approx(0.5 + 8e-3)
    assert chain(1e9, 1, 2e9, 1e-3) == 0.0
    r = predict(assumed(latency=1e-3, vectors=Vectors(2, 3, 0, 1.0)), 4)
    assert r.broadcast == pytest.approx(2 * 4e-3 + 4 * 1e-3)
    assert r.reduce == pytest.approx(3 * 8e-3 + 4 * 1e-3)


def test_gloo_passes_a_broadcast_down_a_tree_and_a_sum_around_a_ring() -> None:
    assert [calibrate.tree(1e9, ranks, 1e9, 0.5) for ranks in (2, 3, 4, 5)] == [1.5, 3.0, 3.0, 4.5]
    assert calibrate.ring(1e9, 4, 1e9, 0.5) == pytest.approx(2 * 3 / 4 + 6 * 0.5)


def test_a_round_is_the_sum_of_its_parts_and_evaluation_costs_what_it_outlasts_the_clients() -> None:
    assert predict(assumed(), 5).total == pytest.approx(2.0 + 4e-3 + 8e-3)
    assert predict(assumed(evaluation=1.5), 5).evaluation == 0.0
    assert predict(assumed(evaluation=2.5), 5).evaluation == pytest.approx(0.5)
    assert predict(assumed(evaluation=1.5, shared=True), 5).evaluation == 1.5
    assert predict(assumed(shared=True), 1).broadcast == 0.0


def test_a_clients_variables_cost_their_way_to_the_gpu_and_to_another_worker() -> None:
    keeping = {"vectors": Vectors(1, 1, 2, 1.0), "total": 100}
    assert client_seconds(assumed(**keeping, link=1e9)) == pytest.approx(1.0 + 2 * 2 * 4e-3)
    assert predict(assumed(**keeping, host=1e9), 1).moves == 0.0
    moved = predict(assumed(**keeping, host=1e9), 2).moves
    assert 0 < moved <= 5 * 2 * 4e-3
    assert predict(assumed(total=100, host=1e9), 2).moves == 0.0


@pytest.mark.parametrize("name", CASES)
def test_what_is_sent_is_what_the_algorithm_sends(name: str) -> None:
    v, case = vectors_of(name), CASES[name]
    assert (v.down, v.down + v.kept) == (case.down, case.memory)
    assert v.up >= case.up
    assert v.passes == (case.passes[0] + 2 * case.passes[1]) / 3


def test_the_model_says_where_more_workers_stop_to_pay(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--no-check --parameters 1M --clients 16 --steps 10 --step-ms 100 --algorithm fedavg --workers 1 8 16 32"
    assert scaling.main(given.split()) == 0
    shown = capsys.readouterr().out
    rows = [row for row in shown.splitlines() if row.startswith("| ")][2:]
    assert [row.split()[1] for row in rows] == ["1", "8", "16", "32"]
    assert [float(row.split()[-2]) for row in rows] == pytest.approx([1, 1, 1, 0.5], abs=0.02)
    assert "More than W = 16 does not pay: each worker has one client" in shown


def test_numbers_may_be_written_with_their_unit() -> None:
    assert [scaling.count(text) for text in ("86M", "1.5k", "2B", "7")] == [86e6, 1.5e3, 2e9, 7]


def test_widths_give_the_parameters_that_they_are_said_to() -> None:
    for parameters, width in growth.WIDTHS.items():
        assert 64 * width + width**2 + 2 * width + 10 * width + 10 == pytest.approx(parameters, rel=0.02)


def test_every_case_has_a_limit_for_each_ratio() -> None:
    limits = [limit[2] for case in cases("all", "") for limit in case.limits]
    assert limits == [*(0.92, 0.97) * 3, 1.1, 1.43, 1.3, 1.4]
