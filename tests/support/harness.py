"""Small federated problems, run through the program's own entry point and read back from the run folder.

`CASES` has one row an algorithm: settings that make every term act, and what the algorithm must cost.
As a program, this file starts the ranks of distributed jobs (see `Lab.on_workers`).
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
from fl_dist.common.randomness import torch_generator
from fl_dist.core import Part
from fl_dist.engine.client import LocalTraining
from fl_dist.engine.world import World
from fl_dist.main import main
from fl_dist.storage.saver import Saver
from tests.support import processes
from tests.support.reference import Problem, ce_gradient
from tests.support.waiting import free_port

Settings = dict[str, Any]


class Case(NamedTuple):
    hyper: Settings
    passes: tuple[int, int]
    """Forward and backward passes of a local step."""
    down: int
    up: int
    """Model-sized vectors that a client receives and sends in a round."""
    memory: int
    """Model-sized vectors on a client: what it receives and what it keeps between its rounds."""


SAM = {"rho": 0.3}
DUAL = {"dual": 0.3}
AHEAD = {"lookahead": 0.6}
TEACHER = {"distill": 1.5, "temperature": 2.0, "ema_decay": 0.7}
ADAM = {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.9, "tau": 0.05}
FLAT = {"rho": 0.3, "rho_global": 0.25, "threshold": 1.1, "window": 3}

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
    "fedacg": Case({**AHEAD, "prox_w": 0.3}, (1, 1), 1, 1, 1),
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
    "fedgf": Case(FLAT, (2, 2), 2, 1, 2),
    "fedavg_nesterov": Case(AHEAD, (1, 1), 1, 1, 1),
    "fedsam_nesterov": Case({**AHEAD, **SAM}, (2, 2), 1, 1, 1),
    "fednsam": Case({**AHEAD, **SAM}, (1, 1), 2, 1, 2),
    "fednsam_minus_nesterov": Case({**AHEAD, **SAM}, (1, 1), 2, 1, 2),
    "fednsam_s": Case({**AHEAD, **SAM}, (1, 1), 3, 2, 4),
    "fednsam_d": Case({**AHEAD, **SAM, **DUAL}, (1, 1), 2, 1, 3),
    "fedgmt": Case({**DUAL, **TEACHER}, (2, 1), 2, 1, 3),
    "fedgmt_v2": Case({**DUAL, **TEACHER}, (2, 1), 1, 1, 3),
}

HOOKS = [name for name, value in vars(Part).items() if inspect.isfunction(value) and not name.startswith("_")]


def hooks(name: str) -> list[str]:
    """Those that some part of the algorithm has."""
    parts = [type(part) for part in algorithms.build(name, {}).parts]
    return [hook for hook in HOOKS if any(getattr(part, hook) is not getattr(Part, hook) for part in parts)]


def representatives() -> set[str]:
    """For each hook the algorithm that has it and least else; and FedAvg, which has none."""
    found = {name: hooks(name) for name in algorithms}
    return {"fedavg"} | {min((len(has), name) for name, has in found.items() if hook in has)[1] for hook in HOOKS}


SIZES = (3, 5, 6, 8, 11)
"""Rows of each client: with batches of 4, from one step to three an epoch."""
SCHEDULE = [[0, 2, 4], [1, 3], [0, 1, 4], [2, 3, 4]]
EVERYONE = [[0, 1, 2, 3, 4]] * 4
FEATURES, CLASSES, HIDDEN = 4, 3, [3]
SILENT = {"wandb": {"mode": "disabled"}}


def algorithm(name: str, **changes: Any) -> Settings:
    """The configuration section of a case, with some settings changed."""
    return {"name": name, **(CASES[name].hyper if name in CASES else {}), **changes}


def merge(base: Settings, changes: Settings) -> Settings:
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict) and key not in ("algorithm", "model")
        merged[key] = merge(merged[key], value) if nested else value
    return merged


class Save(NamedTuple):
    """What a checkpoint is made of: clients are those that changed since the last one."""

    round: int
    clients: dict[int, dict[str, torch.Tensor]]
    server: dict[str, torch.Tensor]


class Run:
    """What a finished run left behind."""

    def __init__(self, config: Settings, folder: Path, saves: list[Save] | None = None) -> None:
        self.config, self.folder, self.saves = config, folder, saves or []

    @cached_property
    def sha(self) -> str:
        return hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest()

    @cached_property
    def x(self) -> np.ndarray:
        """The final parameters in the model's order."""
        tensors = load_file(self.folder / "model.safetensors")
        return torch.cat([tensors[name].flatten() for name in self.world.model.named(self.world.initial)]).numpy()

    @cached_property
    def buffers(self) -> dict[str, torch.Tensor]:
        tensors = load_file(self.folder / "model.safetensors")
        return {name: tensors[name] for name in self.world.model.buffers.names}

    @cached_property
    def rows(self) -> list[Settings]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @cached_property
    def world(self) -> World:
        return World(configuration.validate(self.config), torch.device("cpu"))

    def server(self, name: str) -> np.ndarray:
        """A server variable after each round."""
        return np.array([self.plain(save.server[name]) for save in self.saves])

    def clients(self, name: str, unset: float = np.nan) -> np.ndarray:
        """A variable of each client after each round, [round, client, ...]."""
        shape = self.plain(torch.zeros(self.world.template[name][0], dtype=torch.float64)).shape
        now, table = np.full((self.config["clients"]["total"], *shape), unset), []
        for save in self.saves:
            for client, variables in save.clients.items():
                now[client] = self.plain(variables[name])
            table.append(now.copy())
        return np.array(table)

    def plain(self, tensor: torch.Tensor) -> np.ndarray:
        """A model-sized vector without the gaps between parameters; anything else as it is."""
        if tensor.shape != self.world.initial.shape:
            return tensor.numpy()
        return torch.cat([view.flatten() for view in self.world.model.views(tensor)]).numpy()


def layers(vector: np.ndarray, sizes: list[int]) -> dict[str, torch.Tensor]:
    """A flat vector as the parameters of an MLP, by name."""
    named, at = {}, 0
    for k, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False)):
        named[f"layers.{k}.weight"] = torch.tensor(vector[at : at + a * b].reshape(b, a))
        named[f"layers.{k}.bias"] = torch.tensor(vector[at + a * b : at + a * b + b])
        at += a * b + b
    return named


@contextlib.contextmanager
def keeping_saves() -> Iterator[list[Save]]:
    """What would go into each checkpoint, without the disk."""
    saves: list[Save] = []

    def start(self: Saver, round_: int, clients: Any, server: Any, extra: Any, last: bool) -> None:
        saves.append(Save(round_, clients, server))

    with mock.patch.object(Saver, "start", start):
        yield saves


def run(config: Settings, folder: Path, expect: int = 0) -> Run:
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(config))
    assert main([str(path), f"run.dir={folder}"]) == expect
    return Run(config, folder)


def kept(config: Settings, folder: Path) -> Run:
    """A run with every round's variables."""
    with keeping_saves() as saves:
        done = run(merge(config, {"checkpoint": {"every": 1}}), folder)
    assert [save.round for save in saves] == list(range(1, config["rounds"] + 1))
    return Run(done.config, folder, saves)


class Lab:
    """A data set and a starting model in a folder, and runs on them; equal runs are made once."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, rng = folder, np.random.default_rng(seed)
        self.client = rng.permutation(np.repeat(np.arange(len(SIZES)), SIZES))
        # Each client leans towards a class of its own, so that local and global directions differ.
        self.y = np.where(rng.random(len(self.client)) < 0.4, self.client % CLASSES, rng.integers(CLASSES, size=33))
        self.data = self.write_data("features", rng.normal(size=(33, FEATURES)) + 0.5 * self.client[:, None])
        self.images = self.write_data("images", rng.integers(256, size=(33, 1, 4, 4)).astype(np.uint8))
        self.start = rng.normal(size=FEATURES * 3 + 3 + 3 * CLASSES + CLASSES)
        self.init = self.write_init(self.start, HIDDEN)
        self._made: dict[str, Run] = {}

    def write_data(self, name: str, x: np.ndarray, client: np.ndarray | None = None) -> Path:
        path = self.folder / f"{name}.npz"
        client = self.client if client is None else client
        np.savez(path, x_train=x, y_train=self.y, client=client, x_test=x[::3], y_test=self.y[::3])
        return path

    def write_init(self, vector: np.ndarray, hidden: list[int]) -> Path:
        path = self.folder / f"init-{len(vector)}.safetensors"
        save_file(layers(vector, [FEATURES, *hidden, CLASSES]), path)
        return path

    @property
    def x(self) -> np.ndarray:
        return np.load(self.data)["x_train"]

    def gradient(self, client: int, w: np.ndarray, hidden: list[int] = HIDDEN) -> np.ndarray:
        """Of the cross-entropy on all of the client's data, by the plain reference."""
        mine = self.client == client
        return ce_gradient(w, self.x[mine], self.y[mine], [FEATURES, *hidden, CLASSES])

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
            "monitor": SILENT,
            "algorithm": settings,
        }
        base["local"] |= {"weight_decay": 0.02, "clip": 1.2, "precision": "float64"}
        return merge(base, changes)

    def on_images(self, settings: Settings, **changes: Any) -> Settings:
        """A CNN with BatchNorm and dropout on augmented images, in float32."""
        model = {"name": "cnn", "norm": "batch", "dropout": 0.3}
        images = {"data": {"path": str(self.images)}, "augment": {"name": "crop_flip", "padding": 1}}
        return merge(self.config(settings, model=model, local={"precision": "float32"}, **images), changes)

    def problem(self, config: Settings) -> Problem:
        """The same setting for the plain reference, minibatches in the order of the program's generator."""
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
            init=self.start,
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
        """Through `main` in this process."""
        key = json.dumps(config, sort_keys=True) + start.__name__
        if key not in self._made:
            self._made[key] = start(config, self.folder / f"run-{len(self._made)}")
        return self._made[key]

    def saved(self, settings: Settings, **changes: Any) -> Run:
        """With every round's variables."""
        return self.run(self.config(settings, **changes), kept)

    def on_workers(self, wanted: dict[int, dict[str, Settings]]) -> dict[str, Run]:
        """For each number of workers, run configs one after another on a server and so many workers."""
        listed: list[tuple[int, list[list[str]]]] = []
        for workers, configs in wanted.items():
            listed.append((workers + 1, []))
            for name, config in configs.items():
                path = self.folder / f"{name}.json"
                path.write_text(json.dumps(config))
                listed[-1][1].append([str(path), f"run.dir={self.folder / name}"])
        path = self.folder / "jobs.json"
        path.write_text(json.dumps(listed))
        python("-m", "tests.support.harness", str(path))
        return {
            name: Run(config, self.folder / name) for configs in wanted.values() for name, config in configs.items()
        }


def python(*arguments: str, expect: int = 0, **environment: str) -> str:
    """A Python process of its own, ended with the test whatever happens; its output."""
    command, env = [sys.executable, *arguments], processes.environment(**environment)
    code, output = processes.run(command, timeout=480, env=env)
    assert code == expect, output[-3000:]
    return output


@contextlib.contextmanager
def saving_at_once() -> Iterator[None]:
    """Saves that end before training goes on: none is skipped because the one before is still being written."""
    start = Saver.start

    def start_and_wait(self: Saver, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        self.join()

    with mock.patch.object(Saver, "start", start_and_wait):
        yield


@contextlib.contextmanager
def watching_clients() -> Iterator[list[tuple[int, int, np.ndarray, np.ndarray]]]:
    """Round, client, where it started and where it ended (padded vectors), for every local training."""
    seen: list[tuple[int, int, np.ndarray, np.ndarray]] = []
    local = LocalTraining.run

    def watched(self: LocalTraining, client: int, s: Any, buffers: Any, state: Any, r: Any, *more: Any) -> Any:
        trained = local(self, client, s, buffers, state, r, *more)
        seen.append((r.index, client, s.x.clone(), s.x + trained.delta))
        return trained

    with mock.patch.object(LocalTraining, "run", watched):
        yield seen


def serve(listed: list[tuple[int, list[list[str]]]]) -> int:
    """Each job in ranks of its own, forked from this process: torch and its compiler are imported once for all."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.optim.SGD([torch.zeros(1)], lr=1.0)
    fork, codes = multiprocessing.get_context("fork"), []
    for size, runs in listed:
        port = free_port()
        ranks = [fork.Process(target=rank, args=(k, size, port, runs)) for k in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            codes.append(process.exitcode or 0)
    return max(map(abs, codes))


def rank(number: int, size: int, port: int, runs: list[list[str]]) -> None:
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    sys.exit(max(main(arguments) for arguments in runs))


if __name__ == "__main__":
    sys.exit(serve(json.loads(Path(sys.argv[1]).read_text())))
