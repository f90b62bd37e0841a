"""Cohorts depend only on seed and round; clients are balanced over workers and stay with their state."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_dist.config import Clients
from fl_dist.federation import sampling, scheduling


def test_uniform_cohorts_have_the_size_and_no_repeats() -> None:
    cohorts = [sampling.sample_cohort(Clients(total=30, per_round=7), None, 3, t) for t in range(200)]
    assert all(len(c) == len(set(c)) == 7 and c == sorted(c) for c in cohorts)
    counts = np.bincount(np.concatenate(cohorts), minlength=30)
    assert counts.min() > 25
    assert cohorts != [sampling.sample_cohort(Clients(total=30, per_round=7), None, 4, t) for t in range(200)]


def test_bernoulli_cohorts_have_the_mean_and_are_never_empty() -> None:
    clients = Clients(total=20, per_round=2, sampling="bernoulli")
    cohorts = [sampling.sample_cohort(clients, None, 0, t) for t in range(500)]
    assert all(cohorts)
    assert len({len(c) for c in cohorts}) > 3
    assert np.mean([len(c) for c in cohorts]) == pytest.approx(2 / (1 - 0.9**20), abs=0.2)


@given(
    costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=30),
    workers=st.integers(1, 6),
    owners=st.lists(st.integers(0, 9), min_size=30, max_size=30),
)
@settings(max_examples=100)
def test_assignment_is_complete_and_balanced(costs: list[float], workers: int, owners: list[int]) -> None:
    loads = dict.fromkeys(range(workers), 0.0)
    assignment = scheduling.assign_clients(dict(enumerate(costs)), range(workers), {}, dict(enumerate(owners)))
    assert set(assignment) == set(range(len(costs)))
    for client, worker in assignment.items():
        loads[worker] += costs[client]
    # Longest first is within 4/3 of the best; the best is no less than the mean and the longest.
    assert max(loads.values()) <= 4 / 3 * (sum(costs) / workers + max(costs)) + 1e-9


def test_a_slow_worker_gets_clients_again() -> None:
    speeds, costs = scheduling.WorkerSpeeds([1, 2]), dict.fromkeys(range(3), 1.0)
    speeds.observe(1, 1.0, 0.01)
    speeds.observe(2, 1.0, 1.0)
    for _ in range(10):
        assignment = scheduling.assign_clients(costs, [1, 2], speeds.relative(), {})
        if 2 in assignment.values():
            return
        speeds.observe(1, 3.0, 0.03)
        speeds.observe_idle(2)
    raise AssertionError("the slow worker got no client")


def test_assignment_uses_measured_speeds() -> None:
    assignment = scheduling.assign_clients(dict.fromkeys(range(9), 1.0), [1, 2], {1: 1.0, 2: 0.5}, {})
    assert [list(assignment.values()).count(w) for w in (1, 2)] == [6, 3]


@given(
    costs=st.dictionaries(st.integers(0, 99), st.sampled_from([1.0, 2.0, 7.0]), min_size=1, max_size=30),
    speeds=st.lists(st.sampled_from([0.5, 1.0]), min_size=1, max_size=6),
    owners=st.lists(st.integers(0, 9), min_size=100, max_size=100),
)
@settings(max_examples=100)
def test_a_client_moves_to_the_worker_that_finishes_first_if_its_own_is_full(
    costs: dict[int, float], speeds: list[float], owners: list[int]
) -> None:
    workers, ends = range(len(speeds)), [0.0] * len(speeds)
    capacity = sum(costs.values()) / sum(speeds)
    assignment = scheduling.assign_clients(costs, workers, dict(enumerate(speeds)), dict(enumerate(owners)))
    for client in sorted(costs, key=lambda c: (-costs[c], c)):
        times = [ends[w] + costs[client] / speeds[w] for w in workers]
        owner = owners[client]
        fits = owner < len(speeds) and times[owner] <= capacity * (1 + 1e-9)
        assert assignment[client] == (owner if fits else times.index(min(times)))
        ends[assignment[client]] = times[assignment[client]]


def test_clients_stay_with_their_state_if_the_load_allows() -> None:
    owner = {c: 1 + c % 2 for c in range(10)}
    assert scheduling.assign_clients(dict.fromkeys(range(10), 1.0), [1, 2], {}, owner) == owner
