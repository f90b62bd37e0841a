"""The state of every algorithm survives a save and its loading."""

from typing import Any
from unittest import mock

import pytest

from fl_dist.algorithms import algorithms
from fl_dist.engine.client import LocalTraining
from tests.support.harness import (
    SCHEDULE,
    Lab,
    algorithm,
    representatives,
    run,
    saving_at_once,
)
from tests.support.marks import examples


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


class TestInterruption:
    @pytest.mark.parametrize("name", examples(algorithms, representatives()))
    def test_state_survives_save_and_load(self, lab: Lab, name: str) -> None:
        config, folder = lab.config(algorithm(name), checkpoint={"every": 2}), lab.folder / f"broken-{name}"
        with failing_at(sum(map(len, SCHEDULE[:2])) + 2), saving_at_once():
            run(config, folder, expect=1)
            assert not (folder / "model.safetensors").exists()
        again = run(config, folder)
        assert again.sha == lab.run(lab.config(algorithm(name))).sha
        assert [row["round"] for row in again.rows] == [1, 2, 3, 4]


def failing_at(call: int) -> Any:
    """The local training of this number, counted over rounds and clients, fails half-way."""
    original, calls = LocalTraining.run, iter(range(1, 1000))

    def sometimes(self: LocalTraining, *arguments: Any) -> Any:
        trained = original(self, *arguments)
        if next(calls) == call:
            raise OSError("the disk of the data is gone")
        return trained

    return mock.patch.object(LocalTraining, "run", sometimes)
