"""A run as an object: started from Python, or read from its folder, finished or not."""

import contextlib
import io
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_dist.common.errors import ConfigError, DataError
from fl_dist.common.imports import prepend_to_path
from fl_dist.common.randomness import seed_global, torch_seed
from fl_dist.common.rows import Rows, count_rows, main_tensor, tensors_of
from fl_dist.common.torch_globals import preserve_torch_globals, use_default_settings
from fl_dist.config import Config, validate
from fl_dist.config.overrides import read_recorded_config
from fl_dist.config.python_arguments import load_arguments
from fl_dist.data import Dataset
from fl_dist.distributed import bf16
from fl_dist.distributed.failures import end_failed_run, exit_code
from fl_dist.distributed.rank_info import find_rank
from fl_dist.distributed.signals import StopRequest
from fl_dist.distributed.torch_settings import torch_settings
from fl_dist.execute import execute
from fl_dist.federation.batch_loader import BatchLoader
from fl_dist.federation.client_data import DTYPES, IMAGE_FORMATS
from fl_dist.federation.client_rows import build_clients, build_data, count_classes
from fl_dist.federation.evaluation import evaluate_rows
from fl_dist.federation.experiment import build_task
from fl_dist.federation.flat_model import FlatModel
from fl_dist.metrics.file import read_records
from fl_dist.metrics.record import RoundRecord
from fl_dist.metrics.summary import Summary, server_load, summarize
from fl_dist.models import ModelInterface, build_model
from fl_dist.storage.checkpoint import newest_checkpoint, read_server
from fl_dist.storage.run_folder import CONFIG, METRICS, MODEL, RunFolder
from fl_dist.tasks import PrimaryMetric, Task

Array = np.ndarray | Tensor


def run(config: str | Path | Mapping[str, Any] | None = None, *, quiet: bool = False, **overrides: Any) -> "Run":
    """Train in this process, or as the rank that it is, and return the run.

    `config` is a file, a mapping of keys, or nothing for the quick start; `overrides` are keys of it, as in
    `rounds=5, local={"lr": 0.1}, model=my_builder`. A function or a class stands for its `module:name`. `quiet` prints
    nothing.

    An unfinished run in the same folder is resumed; a finished or different one is an error. Without `run.dir`, the
    folder is `runs/<file>-<overrides>`. Ctrl-C ends the run after the current round; it is then returned unfinished.
    Log levels, search path, environment, signals, random numbers and settings of torch are restored, also after a
    failure. Errors of the program derive from `fl_dist.common.errors.FlDistError`. A rank of a job that fails does not
    return: rank 0 prints the error, and the process ends.
    """
    with _preserve_process_state():
        validated = load_arguments(config, overrides)
        folder = RunFolder(str(validated.run.dir))
        bf16.ensure_bf16_works(validated)
        output = contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext()
        with output, torch_settings(validated), StopRequest(validated.checkpoint.grace) as stop:
            rank_info = find_rank()
            try:
                execute(validated, folder, rank_info, stop)
            except Exception as e:
                if rank_info is not None:
                    end_failed_run(e, rank_info, stop.exit_code(exit_code(e)), with_traceback=True)
                raise
    return Run(folder.path)


@contextlib.contextmanager
def _preserve_process_state() -> Iterator[None]:
    """Restore the search path of modules, the environment and settings of torch; the log and signals have their own."""
    search_path, environment = list(sys.path), dict(os.environ)
    try:
        with preserve_torch_globals():
            use_default_settings()  # also while the configuration is validated
            yield
    finally:
        sys.path[:] = search_path
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextlib.contextmanager
def _search_working_folder() -> Iterator[None]:
    """Within it, the user's modules are found where the run was started, as a rule."""
    with _preserve_process_state():
        prepend_to_path(Path.cwd())
        yield


def load(path: str | Path) -> "Run":
    """The run in a folder, finished or not. It imports no code of the user's before it builds the model."""
    return Run(path)


class History(list[dict[str, Any]]):
    """The rows of metrics.jsonl, one per round."""

    def frame(self) -> Any:
        """A pandas data frame; nested values become columns such as seconds.local."""
        try:
            import pandas as pd
        except ImportError:
            raise ImportError("History.frame needs pandas: pip install pandas") from None
        return pd.json_normalize(list(self))


@dataclass(frozen=True, repr=False)
class Clients:
    """The partition of the training data."""

    rows: list[np.ndarray]
    """The indices of each client's training rows."""
    classes: np.ndarray | None
    """Number of training rows by [client, class]; None without labels."""
    validation: list[np.ndarray]
    """The indices of the rows that each client holds out (`clients.validation`)."""

    @property
    def sizes(self) -> list[int]:
        """Number of training rows of each client."""
        return [len(rows) for rows in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Clients({len(self)} with {min(self.sizes)} to {max(self.sizes)} rows)"


def clients_of(config: Config, data: Dataset) -> Clients:
    rows, validation = build_clients(config, data)
    counts = count_classes(data, rows)
    return Clients(rows, None if counts is None else np.stack(list(counts)), validation)


class Run:
    """The contents of a run folder. An unfinished run shows its newest rows and its newest checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self._folder = RunFolder(path)
        self.path = self._folder.path
        """The run folder."""
        if not (self.path / CONFIG).exists():
            raise ConfigError(f"{self.path} is no run: it has no {CONFIG}")

    def __repr__(self) -> str:
        state = "finished" if self.finished else "unfinished"
        return f"Run({os.fspath(self.path)!r}, {state}, {len(self.history)} of {self.config.rounds} rounds)"

    @cached_property
    def config(self) -> Config:
        """Every key with its value. (No `module:name` in it is imported.)"""
        return Config.model_validate(read_recorded_config(self.path / CONFIG))

    @property
    def finished(self) -> bool:
        """Whether the final model is written."""
        return (self.path / MODEL).exists()

    @property
    def history(self) -> History:
        """The rows of metrics.jsonl so far, one dictionary per round."""
        return History(record.to_json() for record in self._records)

    @property
    def summary(self) -> Summary:
        """The summary.json of the rows so far."""
        primary_metric = PrimaryMetric(**self._facts["primary_metric"])
        records, window = self._records, self.config.evaluate.final_window
        stopped = {"stopped": reason} if self.finished and (reason := self._folder.stop_reason()) else {}
        return summarize(records, window, primary_metric, self.finished) | stopped | server_load(records)

    @property
    def _records(self) -> list[RoundRecord]:
        return read_records(self.path / METRICS)

    @property
    def task(self) -> Task:
        """The task, with the settings of the run."""
        config = self._validated
        with _search_working_folder():
            return build_task(config)

    def model(self) -> nn.Module:
        """The model with the final weights, or with those of the newest checkpoint, in evaluation mode."""
        return self._module()

    def _module(self, for_training: bool = False) -> nn.Module:
        config, facts = self._validated, self._facts
        interface = ModelInterface(
            tuple(facts["shape"]), facts["outputs"], facts["vocabulary"], facts.get("per_token", False)
        )
        with _search_working_folder():
            seed_global(torch_seed(config.seed, "model"), torch.device("cpu"))
            # The file of a finished run holds all weights: the other files need not exist any more.
            section = config.model | ({"init": None, "pretrained": None} if self.finished else {})
            module = build_model(section, interface, DTYPES[config.local.precision], for_training)
        bf16.ensure_weights_work(module, torch.device("cpu"))
        if self.finished:
            module.load_state_dict(load_file(self.path / MODEL), strict=False)
        else:
            self._restore(module)
        return module.eval()

    def evaluate(self, x: Array | Mapping[str, Array] | None = None, y: Array | None = None) -> dict[str, float]:
        """The task's metrics on these rows, raw as in the data set; without any, on the test set."""
        data = self._data if x is None else self._as_dataset(x, y)
        local, evaluate = self.config.local, self.config.evaluate
        if local.precision == "bf16":
            bf16.ensure_cpu_has_bf16()
        dtype, image_format = DTYPES[local.precision], IMAGE_FORMATS[local.memory_format]
        rows = BatchLoader(data.x_test, data.y_test, torch.device("cpu"), dtype, math.inf, image_format)
        module, task = self._module(True), self.task
        with _search_working_folder():
            return evaluate_rows(module, task, data, rows, evaluate.batch_size, local.precision)

    @cached_property
    def clients(self) -> Clients:
        """Which rows each client has; reads the data."""
        config, data = self._validated, self._data
        with _search_working_folder():
            return clients_of(config, data)

    @cached_property
    def _validated(self) -> Config:
        """The configuration, after importing every `module:name` in it."""
        with _search_working_folder():
            return validate(read_recorded_config(self.path / CONFIG))

    @cached_property
    def _data(self) -> Dataset:
        with _search_working_folder():
            return build_data(self._validated)

    @property
    def _facts(self) -> dict[str, Any]:
        facts = self._folder.read_info().facts
        if not facts:
            raise ConfigError(f"the run in {self.path} has not begun yet")
        return facts

    def _as_dataset(self, x: Array | Mapping[str, Array], y: Array | None) -> Dataset:
        rows: Rows = {k: torch.as_tensor(v) for k, v in x.items()} if isinstance(x, Mapping) else torch.as_tensor(x)
        dtype = main_tensor(rows).dtype
        if self._facts["bytes"] != (dtype == torch.uint8):
            kind = "bytes (uint8)" if self._facts["bytes"] else "numbers, not bytes"
            raise DataError(f"rows have to be {kind}, as in the run's data; they are {dtype}")
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors_of(rows)):
            raise DataError("rows hold values that are not finite; scale, replace or remove them")
        targets = torch.empty(count_rows(rows), 0) if y is None else torch.as_tensor(y)
        targets = targets if targets.is_floating_point() else targets.long()
        return Dataset(rows, targets, rows, targets, mean=tuple(self._facts["mean"]), std=tuple(self._facts["std"]))

    def _restore(self, module: nn.Module) -> None:
        newest = newest_checkpoint(self._folder.checkpoints, self._folder.read_info().id, lambda warning: None)
        if newest is None:
            raise ConfigError(f"the run in {self.path} has neither a model nor a checkpoint yet")
        tensors, flat = read_server(self._folder.checkpoints, newest.manifest), FlatModel(module)
        flat.vector.copy_(tensors["x"])
        flat.buffers.write(tensors["buffers"])
