"""A run as an object: started from Python, or read from its folder, finished or not."""

import contextlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_dist.common.imports import search_in
from fl_dist.common.randomness import seed_global, torch_seed
from fl_dist.common.reading import ConfigError, read_yaml
from fl_dist.config import NAMED, Config, validate
from fl_dist.config.arguments import QUICKSTART, default_name, look_around
from fl_dist.config.loading import merged
from fl_dist.data import Dataset, labels_of
from fl_dist.engine.client import DTYPES
from fl_dist.engine.evaluate import measured
from fl_dist.engine.flat import Flat
from fl_dist.engine.rows import Rows
from fl_dist.engine.world import build_clients, build_data, build_task
from fl_dist.execute import execute, settings
from fl_dist.machine import bf16
from fl_dist.machine.place import find
from fl_dist.machine.signals import StopRequest
from fl_dist.models import MadeFor, build_model
from fl_dist.monitor.summary import Summary, server_worth, summarise
from fl_dist.storage.checkpoint import newest, read_server
from fl_dist.storage.folder import CONFIG, METRICS, MODEL, RunFolder
from fl_dist.storage.metrics import Row, rows_in
from fl_dist.tasks import Headline, Task

Given = np.ndarray | Tensor


def run(config: str | Path | Mapping[str, Any] | None = None, *, quiet: bool = False, **overrides: Any) -> "Run":
    """Train in this process, or as the rank that it is, and return the run.

    `config` is a file, a mapping of keys, or nothing for the quick start; `overrides` are keys of it, as in
    `rounds=5, local={"lr": 0.1}, model=my_builder`. An unfinished run in the same folder goes on. Ctrl-C ends the run
    after its round; it is then returned unfinished.
    """
    made = _configured(config, overrides)
    folder = RunFolder(str(made.run.dir))
    bf16.make_safe(made)
    with contextlib.ExitStack() as stack:
        if quiet:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(settings(made))
        execute(made, folder, find(), stack.enter_context(StopRequest(made.checkpoint.grace)))
    return Run(folder.path)


def load(path: str | Path) -> "Run":
    """The run in a folder."""
    return Run(path)


class History(list[Row]):
    """Rows, one a round, as they stand in metrics.jsonl."""

    def frame(self) -> Any:
        """A pandas data frame; what is nested in a row becomes columns such as seconds.local."""
        try:
            import pandas as pd
        except ImportError:
            raise ImportError("History.frame needs pandas: pip install pandas") from None
        return pd.json_normalize(list(self))


@dataclass(frozen=True, repr=False)
class Clients:
    """Who has what of the training data."""

    rows: list[np.ndarray]
    """Of each client: indices of its rows."""
    classes: np.ndarray | None
    """Rows of [client, class]; None without labels."""

    @property
    def sizes(self) -> list[int]:
        return [len(rows) for rows in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Clients({len(self)} with {min(self.sizes)} to {max(self.sizes)} rows)"


def clients_of(config: Config, data: Dataset) -> Clients:
    rows, labels = build_clients(config, data), labels_of(data.y_train.numpy())
    if labels is None:
        return Clients(rows, None)
    return Clients(rows, np.stack([np.bincount(labels[r], minlength=data.classes) for r in rows]))


class Run:
    """What a run folder holds. A run that is under way shows its newest rows and its newest checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self._folder = RunFolder(path)
        self.path = self._folder.path
        if not (self.path / CONFIG).exists():
            raise ConfigError(f"{self.path} is no run: it has no {CONFIG}")

    def __repr__(self) -> str:
        state = "finished" if self.finished else "unfinished"
        return f"Run({os.fspath(self.path)!r}, {state}, {len(self.history)} of {self.config.rounds} rounds)"

    @cached_property
    def config(self) -> Config:
        """Every key with its value. (Nothing that it names is imported.)"""
        return Config.model_validate(read_yaml(self.path / CONFIG))

    @property
    def finished(self) -> bool:
        return (self.path / MODEL).exists()

    @property
    def history(self) -> History:
        """The rows so far."""
        return History(rows_in(self.path / METRICS))

    @property
    def summary(self) -> Summary:
        """What summary.json holds at the end, of the rows so far."""
        headline = Headline(**self._facts["headline"])
        evaluate = self.config.evaluate
        amounts = summarise(self.history, evaluate.last, headline, self.finished)
        return amounts | server_worth(self.history, spreads=evaluate.where != "server")

    @property
    def task(self) -> Task:
        return build_task(self._validated)

    def model(self) -> nn.Module:
        """The model with the final weights, or with those of the newest checkpoint, in evaluation mode."""
        config, facts = self._validated, self._facts
        fit = MadeFor(tuple(facts["shape"]), facts["outputs"], facts["vocabulary"])
        with torch.random.fork_rng(devices=[]):
            seed_global(torch_seed(config.seed, "model"), torch.device("cpu"))
            # A finished run's file holds everything; nothing else has to be there any more.
            section = config.model | ({"init": None, "pretrained": None} if self.finished else {})
            module = build_model(section, fit, DTYPES[config.local.precision])
        if self.finished:
            module.load_state_dict(load_file(self.path / MODEL), strict=False)
        else:
            self._restore(module)
        return module.eval()

    def evaluate(self, x: Given | None = None, y: Given | None = None) -> dict[str, float]:
        """The task's metrics on these rows, raw as in the data set; without any, on the test set."""
        data = self._data if x is None else self._given(x, y)
        precision = DTYPES[self.config.local.precision]
        rows = Rows(data.x_test, data.y_test, torch.device("cpu"), precision, math.inf)
        metrics = measured(self.model(), self.task, data, rows, self.config.evaluate.batch_size)
        return {name.removeprefix("test_"): value for name, value in metrics.items()}

    @cached_property
    def clients(self) -> Clients:
        return clients_of(self._validated, self._data)

    @cached_property
    def _validated(self) -> Config:
        """The configuration with everything that it names found and imported."""
        search_in(Path.cwd())
        return validate(read_yaml(self.path / CONFIG))

    @cached_property
    def _data(self) -> Dataset:
        return build_data(self._validated)

    @property
    def _facts(self) -> dict[str, Any]:
        facts = self._folder.remembered().facts
        if not facts:
            raise ConfigError(f"the run in {self.path} has not begun yet")
        return facts

    def _given(self, x: Given, y: Given | None) -> Dataset:
        rows = torch.as_tensor(x)
        if self._facts["bytes"] != (rows.dtype == torch.uint8):
            kind = "bytes (uint8)" if self._facts["bytes"] else "numbers, not bytes"
            raise ValueError(f"rows have to be {kind}, as in the run's data; they are {rows.dtype}")
        if rows.is_floating_point() and not bool(torch.isfinite(rows).all()):
            raise ValueError("rows hold values that are not finite; scale, replace or remove them")
        targets = torch.empty(len(rows), 0) if y is None else torch.as_tensor(y)
        targets = targets if targets.is_floating_point() else targets.long()
        return Dataset(rows, targets, rows, targets, mean=tuple(self._facts["mean"]), std=tuple(self._facts["std"]))

    def _restore(self, module: nn.Module) -> None:
        found = newest(self._folder.checkpoints, self._folder.remembered().id, lambda warning: None)
        if found is None:
            raise ConfigError(f"the run in {self.path} has neither a model nor a checkpoint yet")
        tensors, flat = read_server(self._folder.checkpoints, found.manifest), Flat(module)
        flat.vector.copy_(tensors["x"])
        flat.buffers.write(tensors["buffers"])


def _configured(config: str | Path | Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> Config:
    """The validated configuration, with a run folder."""
    path = str(config) if isinstance(config, str | Path) else None
    look_around(path)
    words = [f"{key}={json.dumps(value)}" for key, value in _flat(overrides)]
    given = _plain(config) if isinstance(config, Mapping) else None
    raw, where = merged(path or (str(QUICKSTART) if config is None else None), words, given)
    made = validate(raw, where)
    if made.run.dir is None:
        told = [f"{key}={json.dumps(value)}" for key, value in _flat(given or {})]
        name = default_name(path or (QUICKSTART if config is None else "run"), [*told, *words])
        made = made.model_copy(update={"run": made.run.model_copy(update={"dir": f"runs/{name}"})})
    return made


def _flat(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots, as on the command line; functions and classes as the names by which they can be imported."""
    for key, value in given.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and "parts" not in value:
            yield from _flat(value, f"{name}.")
        else:
            yield (f"{name}.name" if name in NAMED and not isinstance(value, Mapping) else name), _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    return _import_path(value) if callable(value) else value


def _import_path(builder: Callable[..., Any]) -> str:
    if not hasattr(builder, "__qualname__"):
        raise ConfigError(f"a {type(builder).__name__} cannot be named; give the function or class that builds it")
    if "<locals>" in builder.__qualname__:
        raise ConfigError(f"{builder.__qualname__} is defined inside a function and cannot be imported; move it out")
    return f"{builder.__module__}:{builder.__qualname__}"
