"""Run configurations on the CPU and on the simulated GPU."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_dist.common import vector_math
from fl_dist.data.dataset import IGNORE_INDEX
from fl_dist.federation.uplink import ClientReport
from fl_dist.federation.worker import Worker
from fl_dist.main import main
from fl_dist.models import onednn_layout, resnet, vgg, vit
from tests.support import harness, simulated_gpu
from tests.support.harness import NO_WANDB_SECTION, Settings, algorithm, merge

SIZES = (4, 5, 7)
"""Rows per client: with batches of 3, at least two steps per epoch."""

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
    "personalization": {},
    "surface": {"points": 3},
    "plane": {"points": 3},
}


@dataclass
class DeviceRuns:
    """The runs of one configuration on both devices."""

    cpu: Path
    gpu: Path
    device: simulated_gpu.SimulatedGpu
    clients: list["ClientTrace"]

    def waits_within_steps(self) -> list[simulated_gpu.Wait]:
        """Waits after a client's first step and before its last."""
        return [w for c in self.clients for w in c.waits if c.first < w.step < c.last]


class ClientTrace(NamedTuple):
    """The steps and waits of one client's round."""

    first: int
    """The number of steps queued on the device before the client's round; `last`: after it."""
    last: int
    waits: list[simulated_gpu.Wait]


class DeviceComparison:
    """Runs each configuration once per device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, DeviceRuns] = {}

    def config(self, changes: Settings) -> Settings:
        base = {
            **{"seed": 3, "rounds": 2, "data": {"name": "npz", "path": "rows.npz"}, "partition": {"name": "given"}},
            **{"model": {"name": "mlp", "hidden": [8]}, "clients": {"total": len(SIZES), "per_round": 2}},
            **{"local": {"epochs": 2, "batch_size": 3, "lr": 0.1}, "evaluate": {"batch_size": 4}},
            **{"algorithm": {"name": "fedavg"}, "checkpoint": {"every": 0}, "monitor": NO_WANDB_SECTION},
        }
        config = merge(base, changes)
        config["data"]["path"] = str(self.folder / config["data"]["path"])
        return config

    def run(self, name: str, changes: Settings) -> DeviceRuns:
        if name not in self._runs:
            file = self.folder / f"{name}.json"
            file.write_text(json.dumps(self.config(changes)))
            cpu_folder, gpu_folder = self.folder / f"{name} on cpu", self.folder / f"{name} on gpu"
            # CUDA has neither the CPU's fused attention nor its channel-blocked kernels.
            with sdpa_kernel(SDPBackend.MATH), mock.patch.object(onednn_layout, "is_supported", return_value=False):
                assert main([str(file), f"run.dir={cpu_folder}", "topology.device=cpu"]) == 0
            # Norms are sums of pieces; those of a GPU are larger, and round differently.
            pieces = mock.patch.dict(vector_math.CHUNK_SIZES, cuda=vector_math.CHUNK_SIZES["cpu"])
            with simulated_gpu.simulate_gpu() as gpu, trace_clients(gpu) as clients, pieces:
                assert main([str(file), f"run.dir={gpu_folder}", "topology.device=cuda"]) == 0
            self._runs[name] = DeviceRuns(cpu_folder, gpu_folder, gpu, clients)
        return self._runs[name]


@contextlib.contextmanager
def small_models(folder: Path) -> Iterator[DeviceComparison]:
    """Patch the large models to small widths; yield a comparison with data for every model."""
    write_data(folder)
    # The published widths take minutes.
    vggs = mock.patch.object(vgg, "LAYERS", ((4,), (4,), (4, 4), (4, 4), (4, 4)))
    resnets, vits = mock.patch.object(resnet, "RESNET18_STAGES", [(64, 1), (128, 1)]), mock.patch.object(vit, "DIM", 16)
    with vggs, resnets, vits:
        yield DeviceComparison(folder)


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
    tokens = rng.integers(0, 9, (n, 6))
    following = np.where(rng.random((n, 6)) < 0.3, IGNORE_INDEX, np.roll(tokens, -1, 1))
    write("answers", tokens, y_train=following, y_test=following[:6])
    for side in (8, 16, 32):
        write(str(side), rng.integers(0, 256, (n, 3, side, side)).astype(np.uint8))
    repeated = np.repeat(x, 400, 0)
    unequal = np.where(np.arange(len(repeated)) < 2, np.arange(len(repeated)), 2)
    write("unequal", repeated, y_train=np.repeat(y, 400), client=unequal)


@contextlib.contextmanager
def trace_clients(gpu: simulated_gpu.SimulatedGpu) -> Iterator[list[ClientTrace]]:
    """Record the device's steps and the host's waits of each client."""
    clients, run_client = list[ClientTrace](), Worker._run_client

    def run(self: Worker, *arguments: Any) -> ClientReport:
        first, before = gpu.steps, len(gpu.waits)
        report = run_client(self, *arguments)
        clients.append(ClientTrace(first, gpu.steps, gpu.waits[before:]))
        return report

    with mock.patch.object(Worker, "_run_client", run):
        yield clients


def run_diagnostics(comparison: DeviceComparison) -> DeviceRuns:
    every_third = {label: {"every": 3, **settings} for label, settings in DIAGNOSTICS.items()}
    settings = {"clients": {"validation": 0.3}, "algorithm": algorithm("fedsam"), "rounds": 3}
    return comparison.run("diagnostics", settings | {"diagnostics": every_third})
