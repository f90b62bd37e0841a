"""Every algorithm has the same bits on any number of workers, at the price that its table names."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_dist.algorithms import algorithms
from tests.support import reference
from tests.support.harness import (
    CASES,
    SCHEDULE,
    SIZES,
    Lab,
    Run,
    algorithm,
    python,
)
from tests.support.marks import examples

EXACT = {"rtol": 0, "atol": 1e-9}
WORKERS = examples((1, 2, 3), (3,))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


def faithful(lab: Lab, name: str, **changes: Any) -> dict[str, Any]:
    """The setting in which an algorithm is held against the reference."""
    averages = name not in reference.MOMENTUM | reference.DUAL | {"fedadam"}
    return lab.config(algorithm(name, **changes), server={"lr": 0.7 if averages else 1.0})


def drawn(lab: Lab, name: str, **changes: Any) -> dict[str, Any]:
    """The setting in which bits are compared: random crops, dropout, BatchNorm, clients drawn by the seed."""
    clients = {"schedule": None, "per_round": 3}
    return lab.on_images(algorithm(name), rounds=3, clients=clients, local={"epochs": 1}, **changes)


@pytest.fixture(scope="module")
def on_workers(lab: Lab, request: pytest.FixtureRequest) -> dict[str, Run]:
    """The distributed runs that the selected tests need."""
    users = [item for item in request.session.items if "on_workers" in getattr(item, "fixturenames", ())]
    wanted: dict[int, dict[str, Any]] = {1: {}, 2: {}, 3: {}}
    for item in users:
        name, workers = item.callspec.params["name"], item.callspec.params.get("workers")
        run = f"drawn-{name}-{workers}" if workers else f"faithful-{name}"
        wanted[workers or 3][run] = drawn(lab, name) if workers else faithful(lab, name)
    return lab.on_workers({workers: configs for workers, configs in wanted.items() if configs})


class TestReference:
    """Minibatches, unequal step counts, partial participation, momentum, weight decay, clipping, a server rate."""

    @pytest.mark.parametrize("name", reference.PARAMETERS)
    def test_three_workers_equal_the_plain_version(self, lab: Lab, on_workers: dict[str, Run], name: str) -> None:
        told = reference.run(name, CASES[name].hyper, lab.problem(faithful(lab, name)))
        np.testing.assert_allclose(on_workers[f"faithful-{name}"].x, told["x"][-1], **EXACT)


@pytest.mark.parametrize("name", [*algorithms])
class TestBits:
    @pytest.mark.parametrize("workers", WORKERS)
    def test_any_number_of_workers_gives_the_same_model(
        self, lab: Lab, on_workers: dict[str, Run], name: str, workers: int
    ) -> None:
        assert on_workers[f"drawn-{name}-{workers}"].sha == lab.run(drawn(lab, name)).sha

    def test_another_seed_gives_another_model(self, lab: Lab, name: str) -> None:
        assert lab.run(drawn(lab, name, seed=4)).sha != lab.run(drawn(lab, name)).sha


class TestCosts:
    @pytest.mark.parametrize("name", [*algorithms])
    def test_a_run_costs_what_the_table_says(self, lab: Lab, on_workers: dict[str, Run], name: str) -> None:
        case = CASES[name]
        for run in (lab.run(faithful(lab, name)), on_workers[f"faithful-{name}"]):
            parameters = run.x.size
            for told, cohort in zip(run.rows, SCHEDULE, strict=True):
                steps = sum(2 * -(-SIZES[client] // 4) for client in cohort)
                assert told["clients"] == len(cohort)
                assert (told["forwards"], told["backwards"]) == (steps * case.passes[0], steps * case.passes[1])
                assert told["bytes_down"] == len(cohort) * case.down * parameters * 8
                assert told["bytes_up"] == len(cohort) * case.up * parameters * 8

    def test_the_table_is_printed_and_is_the_one_in_the_documentation(self) -> None:
        lines = python("-m", "fl_dist.algorithms", "--markdown").splitlines()
        assert [line.split(" | ")[0].strip("| ") for line in lines[2 : 2 + len(CASES)]] == sorted(CASES)
        assert "| fedgmt | Li et al. 2025 | dual + trajectory | 2F 1B | 2 | 1 | 3 |" in lines
        page = Path(__file__).parents[2] / "docs" / "algorithms.md"
        table = "\n".join(lines[: lines.index("")])
        assert table in page.read_text(), "copy the table into docs/algorithms.md"
