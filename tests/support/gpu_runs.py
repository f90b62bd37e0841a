"""Configurations that run both on the CPU and on the pretended GPU."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_dist.engine.worker import Worker
from fl_dist.main import main
from fl_dist.models import blocks, resnet, vgg, vit
from tests.support import gpu, harness
from tests.support.harness import SILENT, Settings, algorithm, merge

SIZES = (4, 5, 7)
"""Rows of each client: with batches of 3, at least two steps an epoch."""

ALGORITHMS: dict[str, Settings] = {name: {"algorithm": algorithm(name)} for name in harness.CASES}
DIAGNOSTICS: dict[str, Settings] = {
    "sharpness": {"steps": 2},
    "lpf": {"samples": 2},
    "along": {"points": 3, "directions": 1},
    "spectrum": {"top": 1, "rows": 6},
    "trace": {"samples": 2},
    "flatness_distance": {},
    "flatness_discrepancy": {},
    "perturbation_drift": {},
    "directions": {},
    "clients": {},
    "surface": {"points": 3},
    "plane": {"points": 3},
}


@dataclass
class Pair:
    """One configuration on both devices."""

    cpu: Path
    gpu: Path
    seen: gpu.Gpu
    clients: list["Watched"]

    def within_steps(self) -> list[gpu.Wait]:
        """Waits after a client's first step and before its last."""
        return [w for c in self.clients for w in c.waits if c.first < w.step < c.last]


class Watched(NamedTuple):
    """A client's round, from its variables on the host to its sums."""

    first: int
    """Steps that the device had been given before; and after."""
    last: int
    waits: list[gpu.Wait]


class Lab:
    """Runs each configuration once a device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pairs: dict[str, Pair] = {}

    def config(self, changes: Settings) -> Settings:
        base = {
            **{"seed": 3, "rounds": 2, "data": {"name": "npz", "path": "rows.npz"}, "partition": {"name": "given"}},
            **{"model": {"name": "mlp", "hidden": [8]}, "clients": {"total": len(SIZES), "per_round": 2}},
            **{"local": {"epochs": 2, "batch_size": 3, "lr": 0.1}, "evaluate": {"batch_size": 4}},
            **{"algorithm": {"name": "fedavg"}, "checkpoint": {"every": 0}, "monitor": SILENT},
        }
        config = merge(base, changes)
        config["data"]["path"] = str(self.folder / config["data"]["path"])
        return config

    def pair(self, name: str, changes: Settings) -> Pair:
        if name not in self._pairs:
            file = self.folder / f"{name}.json"
            file.write_text(json.dumps(self.config(changes)))
            here, there = self.folder / f"{name} on cpu", self.folder / f"{name} on gpu"
            # The CPU's own kernels, of attention and on blocks of channels, are none of CUDA's.
            with sdpa_kernel(SDPBackend.MATH), mock.patch.object(blocks, "_is_known", return_value=False):
                assert main([str(file), f"run.dir={here}", "topology.device=cpu"]) == 0
            with gpu.pretended() as seen, watched(seen) as clients:
                assert main([str(file), f"run.dir={there}", "topology.device=cuda"]) == 0
            self._pairs[name] = Pair(here, there, seen, clients)
        return self._pairs[name]


@contextlib.contextmanager
def small_models(folder: Path) -> Iterator[Lab]:
    """A lab with data for every model."""
    write_data(folder)
    # The published widths would take minutes.
    vggs = mock.patch.object(vgg, "LAYERS", ((4,), (4,), (4, 4), (4, 4), (4, 4)))
    resnets, vits = mock.patch.object(resnet, "EIGHTEEN", [(64, 1), (128, 1)]), mock.patch.object(vit, "DIM", 16)
    with vggs, resnets, vits:
        yield Lab(folder)


def write_data(folder: Path) -> None:
    rng, n = np.random.default_rng(5), sum(SIZES)
    client, y = np.repeat(np.arange(len(SIZES)), SIZES), rng.integers(0, 3, n)
    rest = {"y_train": y, "y_test": y[:6], "client": client}

    def write(name: str, x: np.ndarray, **changes: np.ndarray) -> None:
        np.savez(folder / f"{name}.npz", **{"x_train": x, "x_test": x[:6]} | rest | changes)

    x = rng.normal(size=(n, 6)) + np.eye(3, 6)[y]
    write("rows", x)
    write("numbers", x, y_train=x[:, :2].sum(1), y_test=x[:6, :2].sum(1))
    write("text", rng.integers(0, 9, (n, 6)))
    for side in (8, 16, 32):
        write(str(side), rng.integers(0, 256, (n, 3, side, side)).astype(np.uint8))
    many = np.repeat(x, 400, 0)
    unequal = np.where(np.arange(len(many)) < 2, np.arange(len(many)), 2)
    write("unequal", many, y_train=np.repeat(y, 400), client=unequal)


@contextlib.contextmanager
def watched(seen: gpu.Gpu) -> Iterator[list[Watched]]:
    """Notes the device's steps and the host's waits of each client."""
    clients, whole = list[Watched](), Worker._client

    def run(self: Worker, *arguments: Any) -> None:
        first, before = seen.steps, len(seen.waits)
        whole(self, *arguments)
        clients.append(Watched(first, seen.steps, seen.waits[before:]))

    with mock.patch.object(Worker, "_client", run):
        yield clients


def diagnosed(lab: Lab) -> Pair:
    last = {label: {"every": 3, **settings} for label, settings in DIAGNOSTICS.items()}
    return lab.pair("diagnostics", {"algorithm": algorithm("fedsam"), "diagnostics": last, "rounds": 3})
