"""The model of a round's time follows its documentation; nothing is timed."""

import math

import pytest

from benchmarks import calibrate, growth, scaling
from benchmarks.round import select_cases
from benchmarks.scaling import Assumptions, Vectors, client_seconds, count_vectors, pipeline_seconds, predict_round
from tests.support.harness import CASES

FREE = {"latency": 0.0, "host_bandwidth": math.inf, "gpu_link_bandwidth": math.inf, "memory_bandwidth": math.inf}


def make_assumptions(**changes: object) -> Assumptions:
    """10 clients of one second, a model of a million parameters, a network of 1 GB/s."""
    clients = {"clients_per_round": 10, "total_clients": 10, "steps": 10, "step_seconds": 0.1}
    basis = {"parameters": 1e6, "vectors": Vectors(1, 1, 0, 1.0), "bandwidth": 1e9, **clients, **FREE}
    return Assumptions(**{**basis, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 10, 16])
def test_the_longest_worker_has_its_share_of_equal_clients_rounded_up(workers: int) -> None:
    assert predict_round(make_assumptions(), workers).makespan == pytest.approx(math.ceil(10 / workers) * 1.0)


def test_bytes_go_through_a_chain_of_ranks_once_and_latency_counts_each_hop() -> None:
    assert pipeline_seconds(1e9, 9, 2e9, 1e-3) == pytest.approx(0.5 + 8e-3)
    assert pipeline_seconds(1e9, 1, 2e9, 1e-3) == 0.0
    r = predict_round(make_assumptions(latency=1e-3, vectors=Vectors(2, 3, 0, 1.0)), 4)
    assert r.broadcast == pytest.approx(2 * 4e-3 + 4 * 1e-3)
    assert r.reduce == pytest.approx(3 * 8e-3 + 4 * 1e-3)


def test_gloo_passes_a_broadcast_down_a_tree_and_a_sum_around_a_ring() -> None:
    assert [calibrate.broadcast_seconds(1e9, ranks, 1e9, 0.5) for ranks in (2, 3, 4, 5)] == [1.5, 3.0, 3.0, 4.5]
    assert calibrate.reduce_seconds(1e9, 4, 1e9, 0.5) == pytest.approx(2 * 3 / 4 + 6 * 0.5)


def test_a_round_is_the_sum_of_its_parts_and_evaluation_costs_what_it_outlasts_the_clients() -> None:
    assert predict_round(make_assumptions(), 5).total == pytest.approx(2.0 + 4e-3 + 8e-3)
    assert predict_round(make_assumptions(evaluation_seconds=1.5), 5).evaluation == 0.0
    assert predict_round(make_assumptions(evaluation_seconds=2.5), 5).evaluation == pytest.approx(0.5)
    assert predict_round(make_assumptions(evaluation_seconds=1.5, is_server_shared=True), 5).evaluation == 1.5
    assert predict_round(make_assumptions(is_server_shared=True), 1).broadcast == 0.0


def test_client_state_costs_transfers_to_the_gpu_and_to_another_worker() -> None:
    stateful = {"vectors": Vectors(1, 1, 2, 1.0), "total_clients": 100}
    assert client_seconds(make_assumptions(**stateful, gpu_link_bandwidth=1e9)) == pytest.approx(1.0 + 2 * 2 * 4e-3)
    assert predict_round(make_assumptions(**stateful, host_bandwidth=1e9), 1).moves == 0.0
    moved = predict_round(make_assumptions(**stateful, host_bandwidth=1e9), 2).moves
    assert 0 < moved <= 5 * 2 * 4e-3
    assert predict_round(make_assumptions(total_clients=100, host_bandwidth=1e9), 2).moves == 0.0


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_the_algorithm(name: str) -> None:
    v, case = count_vectors(name), CASES[name]
    assert (v.down, v.down + v.client_state) == (case.down, case.memory)
    assert v.up >= case.up
    assert v.passes == (case.passes[0] + 2 * case.passes[1]) / 3


def test_the_model_recommends_the_number_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--no-check --parameters 1M --clients 16 --steps 10 --step-ms 100 --algorithm fedavg --workers 1 8 16 32"
    assert scaling.main(options.split()) == 0
    output = capsys.readouterr().out
    rows = [row for row in output.splitlines() if row.startswith("| ")][2:]
    assert [row.split()[1] for row in rows] == ["1", "8", "16", "32"]
    assert [float(row.split()[-2]) for row in rows] == pytest.approx([1, 1, 1, 0.5], abs=0.02)
    assert "More than W = 16 does not pay: each worker has one client" in output


def test_numbers_may_have_a_unit() -> None:
    assert [scaling.parse_count(text) for text in ("86M", "1.5k", "2B", "7")] == [86e6, 1.5e3, 2e9, 7]


def test_widths_give_their_number_of_parameters() -> None:
    for parameters, width in growth.WIDTHS.items():
        assert 64 * width + width**2 + 2 * width + 10 * width + 10 == pytest.approx(parameters, rel=0.02)


def test_every_case_has_a_limit_for_each_ratio() -> None:
    limits = [limit[2] for case in select_cases("all", "") for limit in case.limits]
    assert limits == [*(0.92, 0.97) * 3, 1.2, 1.56, 1.3, 1.4]
