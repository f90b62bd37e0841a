"""The state of every algorithm is restored from a checkpoint."""

from typing import Any
from unittest import mock

import pytest

from fl_dist.algorithms import algorithms
from fl_dist.federation.local_training import LocalTraining
from tests.support.harness import (
    SCHEDULE,
    TrainingHarness,
    algorithm,
    representatives,
    run,
    synchronous_checkpoints,
)
from tests.support.marks import examples


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> TrainingHarness:
    return TrainingHarness(tmp_path_factory.mktemp("harness"))


class TestResume:
    @pytest.mark.parametrize("name", examples(algorithms, representatives()))
    def test_a_resumed_run_equals_an_uninterrupted_one(self, harness: TrainingHarness, name: str) -> None:
        config, folder = (
            harness.config(algorithm(name), checkpoint={"every": 2}),
            harness.folder / f"interrupted-{name}",
        )
        with fail_at(sum(map(len, SCHEDULE[:2])) + 2), synchronous_checkpoints():
            run(config, folder, expect=1)
            assert not (folder / "model.safetensors").exists()
        resumed = run(config, folder)
        assert resumed.sha == harness.run(harness.config(algorithm(name))).sha
        assert [record["round"] for record in resumed.records] == [1, 2, 3, 4]


def fail_at(call: int) -> Any:
    """Let the n-th local training, counted over rounds and clients, fail."""
    original, calls = LocalTraining.run, iter(range(1, 1000))

    def run_or_fail(self: LocalTraining, *arguments: Any) -> Any:
        trained = original(self, *arguments)
        if next(calls) == call:
            raise OSError("the disk of the data is gone")
        return trained

    return mock.patch.object(LocalTraining, "run", run_or_fail)
