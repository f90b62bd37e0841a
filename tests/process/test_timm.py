"""Networks of timm: published sizes, a formula written out, adapters, files of weights, the same bits on any layout."""

from pathlib import Path

import numpy as np
import pytest

from fl_dist.main import main
from tests.support.marks import exhaustive
from tests.support.models import CIFAR
from tests.support.processes import QUIET, run_ranks
from tests.support.run_folder import model_hash, results

TINY = "test_vit"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("images") / "images.npz"
    rows = {f"x_{part}": random.integers(0, 256, (n, *CIFAR), np.uint8) for part, n in (("train", 40), ("test", 10))}
    np.savez(path, **rows, y_train=np.arange(40) % 4, y_test=np.arange(10) % 4)
    return path


WAYS = {
    "whole": f"model={{name: 'tests.support.timm_models:timm', model: {TINY}}}",
    "adapters": f"model={{name: 'tests.support.timm_models:timm', model: {TINY}, lora: 2}}",
    "swin": "model=tests.support.timm_models:small_swin",
}


def arguments(images: Path, folder: Path) -> list[list[str]]:
    common = (
        *QUIET,
        "rounds=2",
        f"data={{name: npz, path: {images}}}",
        "partition={name: dirichlet, alpha: 0.5, variant: unbalanced}",
        "clients={total: 4, per_round: 3}",
        "local={epochs: 1, batch_size: 8, lr: 0.01}",
    )
    return [[*common, model, f"run.dir={folder / way}"] for way, model in WAYS.items()]


@pytest.fixture(scope="module")
def alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    assert [main(run) for run in arguments(images, folder)] == [0, 0, 0]
    return folder


@exhaustive
def test_three_ranks_give_the_bits_of_one_process(images: Path, alone: Path, tmp_path: Path) -> None:
    codes, outputs = run_ranks(3, *arguments(images, tmp_path))
    assert not any(codes), outputs
    for way in WAYS:
        assert model_hash(tmp_path / way) == model_hash(alone / way)
        assert results(tmp_path / way) == results(alone / way)
