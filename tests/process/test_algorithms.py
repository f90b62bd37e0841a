"""Every algorithm has the same bits on any number of workers, and the costs that its table lists."""

from typing import Any

import numpy as np
import pytest

from fl_dist.algorithms import algorithms
from tests.support import reference
from tests.support.harness import (
    CASES,
    SCHEDULE,
    SIZES,
    Run,
    TrainingHarness,
    algorithm,
    run_python,
)
from tests.support.marks import examples

EXACT = {"rtol": 0, "atol": 1e-9}
WORKERS = examples((1, 2, 3), (3,))


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> TrainingHarness:
    return TrainingHarness(tmp_path_factory.mktemp("harness"))


def reference_config(harness: TrainingHarness, name: str, **changes: Any) -> dict[str, Any]:
    """The configuration in which an algorithm is compared with the reference."""
    is_averaging = name not in reference.OWN_SERVER_STEP
    return harness.config(algorithm(name, **changes), server={"lr": 0.7 if is_averaging else 1.0})


def sampled_config(harness: TrainingHarness, name: str, **changes: Any) -> dict[str, Any]:
    """The configuration in which bits are compared: random crops, dropout, BatchNorm, sampled clients."""
    clients = {"schedule": None, "per_round": 3}
    return harness.image_config(algorithm(name), rounds=3, clients=clients, local={"epochs": 1}, **changes)


@pytest.fixture(scope="module")
def on_workers(harness: TrainingHarness, request: pytest.FixtureRequest) -> dict[str, Run]:
    """The distributed runs that the selected tests need."""
    users = [item for item in request.session.items if "on_workers" in getattr(item, "fixturenames", ())]
    configs_by_workers: dict[int, dict[str, Any]] = {1: {}, 2: {}, 3: {}}
    for item in users:
        name, workers = item.callspec.params["name"], item.callspec.params.get("workers")
        run = f"sampled-{name}-{workers}" if workers else f"reference-{name}"
        configs_by_workers[workers or 3][run] = (
            sampled_config(harness, name) if workers else reference_config(harness, name)
        )
    return harness.run_on_workers({workers: configs for workers, configs in configs_by_workers.items() if configs})


class TestReference:
    """Minibatches, unequal step counts, partial participation, momentum, weight decay, clipping, a server rate."""

    @pytest.mark.parametrize("name", reference.PARAMETERS)
    def test_three_workers_equal_the_reference(
        self, harness: TrainingHarness, on_workers: dict[str, Run], name: str
    ) -> None:
        expected = reference.run(name, CASES[name].hyper, harness.problem(reference_config(harness, name)))
        np.testing.assert_allclose(on_workers[f"reference-{name}"].x, expected["x"][-1], **EXACT)


@pytest.mark.parametrize("name", [*algorithms])
class TestBits:
    @pytest.mark.parametrize("workers", WORKERS)
    def test_any_number_of_workers_gives_the_same_model(
        self, harness: TrainingHarness, on_workers: dict[str, Run], name: str, workers: int
    ) -> None:
        assert on_workers[f"sampled-{name}-{workers}"].sha == harness.run(sampled_config(harness, name)).sha

    def test_another_seed_gives_another_model(self, harness: TrainingHarness, name: str) -> None:
        assert harness.run(sampled_config(harness, name, seed=4)).sha != harness.run(sampled_config(harness, name)).sha


class TestCosts:
    @pytest.mark.parametrize("name", [*algorithms])
    def test_a_run_has_the_costs_of_the_table(
        self, harness: TrainingHarness, on_workers: dict[str, Run], name: str
    ) -> None:
        case = CASES[name]
        for run in (harness.run(reference_config(harness, name)), on_workers[f"reference-{name}"]):
            parameters = run.x.size
            for record, cohort in zip(run.records, SCHEDULE, strict=True):
                steps = sum(2 * -(-SIZES[client] // 4) for client in cohort)
                assert record["clients"] == len(cohort)
                assert (record["forwards"], record["backwards"]) == (steps * case.passes[0], steps * case.passes[1])
                assert record["bytes_down"] == len(cohort) * case.down * parameters * 8
                assert record["bytes_up"] == len(cohort) * case.up * parameters * 8

    def test_the_command_prints_the_table_of_all_algorithms(self) -> None:
        lines = run_python("-m", "fl_dist.algorithms", "--markdown").splitlines()
        assert [line.split(" | ")[0].strip("| ") for line in lines[2 : 2 + len(CASES)]] == sorted(CASES)
        assert "| fedgmt | Li et al. 2025 | dual + trajectory | 2F 1B | 2 | 1 | 3 |" in lines
