"""Small federated problems: run them through the program's entry point and read their run folders.

`CASES` has one entry per algorithm: settings with which every term has an effect, and its promised costs.
As a program, this module starts the ranks of distributed jobs (see `TrainingHarness.run_on_workers`).
"""

import contextlib
import hashlib
import inspect
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fl_dist import config as configuration
from fl_dist.algorithms import algorithms
from fl_dist.algorithms.core import Part
from fl_dist.common.randomness import torch_generator
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.local_training import LocalTraining
from fl_dist.main import main
from fl_dist.storage.checkpoint_writer import CheckpointWriter
from tests.support import processes
from tests.support.reference import Problem, ce_gradient
from tests.support.waiting import free_port

Settings = dict[str, Any]


class Case(NamedTuple):
    hyper: Settings
    passes: tuple[int, int]
    """Forward and backward passes per local step."""
    down: int
    up: int
    """Model-sized vectors that a client receives and sends per round."""
    memory: int
    """Model-sized vectors on a client: those it receives and those it keeps between rounds."""


SAM = {"rho": 0.3}
DUAL = {"dual": 0.3}
LOOKAHEAD = {"lookahead": 0.6}
TEACHER = {"distill": 1.5, "temperature": 2.0, "ema_decay": 0.7}
ADAM = {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.9, "tau": 0.05}
FEDGF = {"rho": 0.3, "rho_global": 0.25, "threshold": 1.1, "window": 3}

CASES: dict[str, Case] = {
    "fedavg": Case({}, (1, 1), 1, 1, 1),
    "fedavgm": Case({"server_momentum": 0.6}, (1, 1), 1, 1, 1),
    "fedadam": Case(ADAM, (1, 1), 1, 1, 1),
    "fedprox": Case({"prox": 0.5}, (1, 1), 1, 1, 1),
    "scaffold": Case({}, (1, 1), 2, 2, 3),
    "feddyn": Case(DUAL, (1, 1), 1, 1, 2),
    "fedcm": Case({"mix": 0.4}, (1, 1), 2, 1, 2),
    "mimelite": Case({"mix": 0.4}, (1, 1), 2, 2, 2),
    "fedrobust": Case({"ascent_lr": 0.5, "penalty": 0.3}, (1, 1), 1, 1, 1),
    "fedacg": Case({**LOOKAHEAD, "prox_w": 0.3}, (1, 1), 1, 1, 1),
    "fedntd": Case({"distill": 1.5, "temperature": 2.0}, (2, 1), 1, 1, 1),
    "fedsam": Case(SAM, (2, 2), 1, 1, 1),
    "fedasam": Case({**SAM, "asam_eta": 0.3}, (2, 2), 1, 1, 1),
    "mofedsam": Case({**SAM, "mix": 0.4}, (2, 2), 2, 1, 2),
    "fedgamma": Case(SAM, (2, 2), 2, 2, 3),
    "fedspeed": Case({**SAM, **DUAL}, (2, 2), 1, 1, 2),
    "fedsmoo": Case({**SAM, **DUAL}, (2, 2), 2, 2, 4),
    "fedlesam": Case(SAM, (1, 1), 1, 1, 2),
    "fedlesam_s": Case(SAM, (1, 1), 2, 2, 4),
    "fedlesam_d": Case({**SAM, **DUAL}, (1, 1), 1, 1, 3),
    "fedgf": Case(FEDGF, (2, 2), 2, 1, 2),
    "fedavg_nesterov": Case(LOOKAHEAD, (1, 1), 1, 1, 1),
    "fedsam_nesterov": Case({**LOOKAHEAD, **SAM}, (2, 2), 1, 1, 1),
    "fednsam": Case({**LOOKAHEAD, **SAM}, (1, 1), 2, 1, 2),
    "fednsam_minus_nesterov": Case({**LOOKAHEAD, **SAM}, (1, 1), 2, 1, 2),
    "fednsam_s": Case({**LOOKAHEAD, **SAM}, (1, 1), 3, 2, 4),
    "fednsam_d": Case({**LOOKAHEAD, **SAM, **DUAL}, (1, 1), 2, 1, 3),
    "fedgmt": Case({**DUAL, **TEACHER}, (2, 1), 2, 1, 3),
    "fedgmt_v2": Case({**DUAL, **TEACHER}, (2, 1), 1, 1, 3),
}

HOOKS = [name for name, value in vars(Part).items() if inspect.isfunction(value) and not name.startswith("_")]


def overridden_hooks(name: str) -> list[str]:
    """The hooks that some part of the algorithm overrides."""
    parts = [type(part) for part in algorithms.build(name, {}).parts]
    return [hook for hook in HOOKS if any(getattr(part, hook) is not getattr(Part, hook) for part in parts)]


def representatives() -> set[str]:
    """For each hook the algorithm that overrides it and fewest others; and FedAvg, which overrides none."""
    hooks_by_algorithm = {name: overridden_hooks(name) for name in algorithms}
    overriding = {hook: [name for name, own in hooks_by_algorithm.items() if hook in own] for hook in HOOKS}
    return {"fedavg"} | {
        min(names, key=lambda name: (len(hooks_by_algorithm[name]), name)) for names in overriding.values() if names
    }


SIZES = (3, 5, 6, 8, 11)
"""Rows per client: with batches of 4, one to three steps per epoch."""
SCHEDULE = [[0, 2, 4], [1, 3], [0, 1, 4], [2, 3, 4]]
FULL_PARTICIPATION = [[0, 1, 2, 3, 4]] * 4
FEATURES, CLASSES, HIDDEN = 4, 3, [3]
NO_WANDB_SECTION = {"wandb": {"mode": "disabled"}}


def algorithm(name: str, **changes: Any) -> Settings:
    """The configuration section of a case, with some settings changed."""
    return {"name": name, **(CASES[name].hyper if name in CASES else {}), **changes}


def merge(base: Settings, changes: Settings) -> Settings:
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict) and key not in ("algorithm", "model")
        merged[key] = merge(merged[key], value) if nested else value
    return merged


class CheckpointContents(NamedTuple):
    """The contents of a checkpoint; clients: those that changed since the previous one."""

    round: int
    clients: dict[int, dict[str, torch.Tensor]]
    server: dict[str, torch.Tensor]


class Run:
    """The results of a finished run."""

    def __init__(self, config: Settings, folder: Path, checkpoints: list[CheckpointContents] | None = None) -> None:
        self.config, self.folder, self.checkpoints = config, folder, checkpoints or []

    @cached_property
    def sha(self) -> str:
        return hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest()

    @cached_property
    def x(self) -> np.ndarray:
        """The final parameters in the model's order."""
        tensors = load_file(self.folder / "model.safetensors")
        return torch.cat(
            [tensors[name].flatten() for name in self.experiment.model.named(self.experiment.initial)]
        ).numpy()

    @cached_property
    def buffers(self) -> dict[str, torch.Tensor]:
        tensors = load_file(self.folder / "model.safetensors")
        return {name: tensors[name] for name in self.experiment.model.buffers.names}

    @cached_property
    def records(self) -> list[Settings]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @cached_property
    def experiment(self) -> Experiment:
        return Experiment(configuration.validate(self.config), torch.device("cpu"))

    def server(self, name: str) -> np.ndarray:
        """A server variable after each round, [round, ...]."""
        return np.array([self.remove_padding(checkpoint.server[name]) for checkpoint in self.checkpoints])

    def clients(self, name: str, unset: float = np.nan) -> np.ndarray:
        """A variable of each client after each round, [round, client, ...]."""
        shape = self.remove_padding(torch.zeros(self.experiment.template[name][0], dtype=torch.float64)).shape
        current, table = np.full((self.config["clients"]["total"], *shape), unset), []
        for checkpoint in self.checkpoints:
            for client, variables in checkpoint.clients.items():
                current[client] = self.remove_padding(variables[name])
            table.append(current.copy())
        return np.array(table)

    def remove_padding(self, tensor: torch.Tensor) -> np.ndarray:
        """A model-sized vector without the padding between parameters; anything else unchanged."""
        if tensor.shape != self.experiment.initial.shape:
            return tensor.numpy()
        return torch.cat([view.flatten() for view in self.experiment.model.views(tensor)]).numpy()


def mlp_parameters(vector: np.ndarray, sizes: list[int]) -> dict[str, torch.Tensor]:
    """A flat vector as the parameters of an MLP, by name."""
    named, position = {}, 0
    for k, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False)):
        named[f"layers.{k}.weight"] = torch.tensor(vector[position : position + a * b].reshape(b, a))
        named[f"layers.{k}.bias"] = torch.tensor(vector[position + a * b : position + a * b + b])
        position += a * b + b
    return named


@contextlib.contextmanager
def capture_checkpoints() -> Iterator[list[CheckpointContents]]:
    """Capture the contents of each checkpoint instead of writing it."""
    checkpoints: list[CheckpointContents] = []

    def start(self: CheckpointWriter, round_: int, clients: Any, server: Any, extra: Any, last: bool) -> None:
        checkpoints.append(CheckpointContents(round_, clients, server))

    with mock.patch.object(CheckpointWriter, "start", start):
        yield checkpoints


def run(config: Settings, folder: Path, expect: int = 0) -> Run:
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(config))
    assert main([str(path), f"run.dir={folder}"]) == expect
    return Run(config, folder)


def run_with_checkpoints(config: Settings, folder: Path) -> Run:
    """A run with the variables of every round."""
    with capture_checkpoints() as checkpoints:
        finished = run(merge(config, {"checkpoint": {"every": 1}}), folder)
    assert [checkpoint.round for checkpoint in checkpoints] == list(range(1, config["rounds"] + 1))
    return Run(finished.config, folder, checkpoints)


class TrainingHarness:
    """A data set and an initial model in a folder, and a cache of runs on them by configuration."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, rng = folder, np.random.default_rng(seed)
        self.client = rng.permutation(np.repeat(np.arange(len(SIZES)), SIZES))
        # Each client has a preferred class, so that local and global directions differ.
        self.y = np.where(rng.random(len(self.client)) < 0.4, self.client % CLASSES, rng.integers(CLASSES, size=33))
        self.data = self.write_data("features", rng.normal(size=(33, FEATURES)) + 0.5 * self.client[:, None])
        self.images = self.write_data("images", rng.integers(256, size=(33, 1, 4, 4)).astype(np.uint8))
        self.initial_vector = rng.normal(size=FEATURES * 3 + 3 + 3 * CLASSES + CLASSES)
        self.init = self.write_init(self.initial_vector, HIDDEN)
        self._runs: dict[str, Run] = {}

    def write_data(self, name: str, x: np.ndarray, client: np.ndarray | None = None) -> Path:
        path = self.folder / f"{name}.npz"
        client = self.client if client is None else client
        np.savez(path, x_train=x, y_train=self.y, client=client, x_test=x[::3], y_test=self.y[::3])
        return path

    def write_init(self, vector: np.ndarray, hidden: list[int]) -> Path:
        path = self.folder / f"init-{len(vector)}.safetensors"
        save_file(mlp_parameters(vector, [FEATURES, *hidden, CLASSES]), path)
        return path

    @property
    def x(self) -> np.ndarray:
        return np.load(self.data)["x_train"]

    def gradient(self, client: int, w: np.ndarray, hidden: list[int] = HIDDEN) -> np.ndarray:
        """The gradient of the cross-entropy on all rows of the client, by the plain reference."""
        rows = self.client == client
        return ce_gradient(w, self.x[rows], self.y[rows], [FEATURES, *hidden, CLASSES])

    def config(self, settings: Settings, **changes: Any) -> Settings:
        """Minibatches, unequal clients, partial participation, momentum, weight decay, clipping, in float64."""
        base = {
            "seed": 3,
            "rounds": len(SCHEDULE),
            "data": {"name": "npz", "path": str(self.data)},
            "partition": {"name": "given"},
            "model": {"name": "mlp", "hidden": HIDDEN, "activation": "tanh", "init": str(self.init)},
            "clients": {"total": len(SIZES), "schedule": SCHEDULE},
            "local": {"epochs": 2, "batch_size": 4, "lr": 0.2, "lr_decay": 0.9, "momentum": 0.5},
            "checkpoint": {"every": 0},
            "monitor": NO_WANDB_SECTION,
            "algorithm": settings,
        }
        base["local"] |= {"weight_decay": 0.02, "clip": 1.2, "precision": "float64"}
        return merge(base, changes)

    def image_config(self, settings: Settings, **changes: Any) -> Settings:
        """A CNN with BatchNorm and dropout on augmented images, in float32."""
        model = {"name": "cnn", "norm": "batch", "dropout": 0.3}
        images = {"data": {"path": str(self.images)}, "augment": {"name": "crop_flip", "padding": 1}}
        return merge(self.config(settings, model=model, local={"precision": "float32"}, **images), changes)

    def problem(self, config: Settings) -> Problem:
        """The same problem for the plain reference, with minibatches in the program's order."""
        local, size = config["local"], config["local"]["batch_size"]

        def batches(t: int, i: int, n: int) -> list[np.ndarray]:
            order = torch_generator(config["seed"], "batches", t, i)
            epochs = [torch.arange(n) if n == size else torch.randperm(n, generator=order) for _ in range(2)]
            return [piece.numpy() for epoch in epochs for piece in epoch.split(size)]

        assert local["epochs"] == 2
        return Problem(
            x_train=self.x,
            y_train=self.y,
            client=self.client,
            init=self.initial_vector,
            hidden=HIDDEN,
            classes=CLASSES,
            schedule=config["clients"]["schedule"],
            lr=local["lr"],
            decay=local["lr_decay"],
            epochs=local["epochs"],
            momentum=local["momentum"],
            weight_decay=local["weight_decay"],
            clip=local["clip"],
            server_lr=config.get("server", {}).get("lr", 1.0),
            batches=None if size == "full" else batches,
        )

    def run(self, config: Settings, start: Callable[[Settings, Path], Run] = run) -> Run:
        """Call `main` in this process, once per configuration."""
        key = json.dumps(config, sort_keys=True) + start.__name__
        if key not in self._runs:
            self._runs[key] = start(config, self.folder / f"run-{len(self._runs)}")
        return self._runs[key]

    def run_with_state(self, settings: Settings, **changes: Any) -> Run:
        """A run with the variables of every round."""
        return self.run(self.config(settings, **changes), run_with_checkpoints)

    def run_on_workers(self, jobs: dict[int, dict[str, Settings]]) -> dict[str, Run]:
        """For each number of workers, run the configs in turn on a server and that many workers."""
        rank_jobs: list[tuple[int, list[list[str]]]] = []
        for workers, configs in jobs.items():
            rank_jobs.append((workers + 1, []))
            for name, config in configs.items():
                path = self.folder / f"{name}.json"
                path.write_text(json.dumps(config))
                rank_jobs[-1][1].append([str(path), f"run.dir={self.folder / name}"])
        path = self.folder / "jobs.json"
        path.write_text(json.dumps(rank_jobs))
        run_python("-m", "tests.support.harness", str(path))
        return {name: Run(config, self.folder / name) for configs in jobs.values() for name, config in configs.items()}


def run_python(*arguments: str, expect: int = 0, **environment: str) -> str:
    """The output of a Python process, which never outlives the test."""
    command, env = [sys.executable, *arguments], processes.environment(**environment)
    code, output = processes.run(command, timeout=480, env=env)
    assert code == expect, output[-3000:]
    return output


@contextlib.contextmanager
def synchronous_checkpoints() -> Iterator[None]:
    """Finish each checkpoint before training continues, so that none is skipped."""
    start = CheckpointWriter.start

    def start_and_wait(self: CheckpointWriter, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        self.join()

    with mock.patch.object(CheckpointWriter, "start", start_and_wait):
        yield


@contextlib.contextmanager
def record_client_models() -> Iterator[list[tuple[int, int, np.ndarray, np.ndarray]]]:
    """Record round, client, start and end model (padded vectors) of every local training."""
    trainings: list[tuple[int, int, np.ndarray, np.ndarray]] = []
    run_training = LocalTraining.run

    def run_and_record(self: LocalTraining, client: int, s: Any, buffers: Any, state: Any, r: Any, *more: Any) -> Any:
        trained = run_training(self, client, s, buffers, state, r, *more)
        trainings.append((r.index, client, s.x.clone(), s.x + trained.delta))
        return trained

    with mock.patch.object(LocalTraining, "run", run_and_record):
        yield trainings


def run_jobs(rank_jobs: list[tuple[int, list[list[str]]]]) -> int:
    """Fork the ranks of each job from this process, which imports torch and its compiler once."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.optim.SGD([torch.zeros(1)], lr=1.0)
    fork, codes = multiprocessing.get_context("fork"), []
    for size, runs in rank_jobs:
        port = free_port()
        ranks = [fork.Process(target=run_rank, args=(k, size, port, runs)) for k in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            codes.append(process.exitcode or 0)
    return max(map(abs, codes))


def run_rank(number: int, size: int, port: int, runs: list[list[str]]) -> None:
    variables = {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in variables.items()}}
    sys.exit(max(main(arguments) for arguments in runs))


if __name__ == "__main__":
    sys.exit(run_jobs(json.loads(Path(sys.argv[1]).read_text())))
