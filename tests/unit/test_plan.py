"""Cohorts depend on the seed and the round alone; clients are spread evenly over workers, at home where possible."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_dist.config import Clients
from fl_dist.engine import plan


def test_uniform_cohorts_have_the_size_and_no_repeats() -> None:
    drawn = [plan.cohort(Clients(total=30, per_round=7), None, 3, t) for t in range(200)]
    assert all(len(c) == len(set(c)) == 7 and c == sorted(c) for c in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=30)
    assert counts.min() > 25
    assert drawn != [plan.cohort(Clients(total=30, per_round=7), None, 4, t) for t in range(200)]


def test_bernoulli_cohorts_have_the_mean_and_are_never_empty() -> None:
    clients = Clients(total=20, per_round=2, sampling="bernoulli")
    drawn = [plan.cohort(clients, None, 0, t) for t in range(500)]
    assert all(drawn)
    assert len({len(c) for c in drawn}) > 3
    assert np.mean([len(c) for c in drawn]) == pytest.approx(2 / (1 - 0.9**20), abs=0.2)


@given(
    costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=30),
    workers=st.integers(1, 6),
    homes=st.lists(st.integers(0, 9), min_size=30, max_size=30),
)
@settings(max_examples=100)
def test_assignment_is_complete_and_balanced(costs: list[float], workers: int, homes: list[int]) -> None:
    loads = dict.fromkeys(range(workers), 0.0)
    placed = plan.assign(dict(enumerate(costs)), range(workers), {}, dict(enumerate(homes)))
    assert set(placed) == set(range(len(costs)))
    for client, worker in placed.items():
        loads[worker] += costs[client]
    # Longest first is within 4/3 of the best; the best is no less than the mean and the longest.
    assert max(loads.values()) <= 4 / 3 * (sum(costs) / workers + max(costs)) + 1e-9


def test_a_worker_that_was_slow_once_is_tried_again() -> None:
    speeds, costs = plan.Speeds([1, 2]), dict.fromkeys(range(3), 1.0)
    speeds.observe(1, 1.0, 0.01)
    speeds.observe(2, 1.0, 1.0)
    for _ in range(10):
        placed = plan.assign(costs, [1, 2], speeds.relative(), {})
        if 2 in placed.values():
            return
        speeds.observe(1, 3.0, 0.03)
        speeds.rest(2)
    raise AssertionError("it never was")


def test_longest_first_uses_measured_speeds() -> None:
    placed = plan.assign(dict.fromkeys(range(9), 1.0), [1, 2], {1: 1.0, 2: 0.5}, {})
    assert [list(placed.values()).count(w) for w in (1, 2)] == [6, 3]


@given(
    costs=st.dictionaries(st.integers(0, 99), st.sampled_from([1.0, 2.0, 7.0]), min_size=1, max_size=30),
    speeds=st.lists(st.sampled_from([0.5, 1.0]), min_size=1, max_size=6),
    homes=st.lists(st.integers(0, 9), min_size=100, max_size=100),
)
@settings(max_examples=100)
def test_a_client_without_room_at_home_goes_where_it_ends_soonest(
    costs: dict[int, float], speeds: list[float], homes: list[int]
) -> None:
    workers, ends = range(len(speeds)), [0.0] * len(speeds)
    room = sum(costs.values()) / sum(speeds)
    placed = plan.assign(costs, workers, dict(enumerate(speeds)), dict(enumerate(homes)))
    for client in sorted(costs, key=lambda c: (-costs[c], c)):
        times = [ends[w] + costs[client] / speeds[w] for w in workers]
        home = homes[client]
        fits = home < len(speeds) and times[home] <= room * (1 + 1e-9)
        assert placed[client] == (home if fits else times.index(min(times)))
        ends[placed[client]] = times[placed[client]]


def test_clients_stay_where_their_state_is_when_there_is_room() -> None:
    home = {c: 1 + c % 2 for c in range(10)}
    assert plan.assign(dict.fromkeys(range(10), 1.0), [1, 2], {}, home) == home
