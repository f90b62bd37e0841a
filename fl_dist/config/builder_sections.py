"""Sections that name a builder: their registries, and the keys that they have whatever its name."""

import functools
from typing import Annotated, Any, Literal

from fl_dist.algorithms import algorithms
from fl_dist.common.imports import is_import_path
from fl_dist.common.registry import Registry, StrictModel
from fl_dist.config.schema import Config, key
from fl_dist.data import datasets
from fl_dist.data.augmentation import augmentations
from fl_dist.data.partition import partitions
from fl_dist.models import models
from fl_dist.optimizers.base import optimizers
from fl_dist.optimizers.schedules import schedules
from fl_dist.tasks import tasks

BUILDER_SECTIONS: dict[str, Registry[Any]] = {
    "task": tasks,
    "data": datasets,
    "augment": augmentations,
    "partition": partitions,
    "model": models,
    "algorithm": algorithms,
    "local.optimizer": optimizers,
    "local.schedule": schedules,
    "server.schedule": schedules,
}
"""Sections of the form {name: ..., settings}: the registries of their builders."""


class ModelKeys(StrictModel):
    """Keys of `model` besides the settings of its builder."""

    init: Annotated[str | None, key("a .safetensors file with every parameter by name, to start from")] = None
    pretrained: Annotated[str | None, key("a .safetensors file: parameters of the same name and shape are loaded")] = (
        None
    )
    train: Annotated[
        list[str] | None,
        key("names of the parameters to train, with * for any text; the others are frozen and never sent"),
    ] = None


class DataKeys(StrictModel):
    """Keys of `data` besides the settings of its builder."""

    local: Annotated[
        bool,
        key(
            "each worker reads its own files, rank 0 the test rows; {client} in a path is a client's number, or server"
        ),
    ] = False


class DiagnosticKeys(StrictModel):
    """Keys of a diagnostic besides its settings."""

    name: Annotated[str | None, key("the diagnostic (default: the label)")] = None
    every: Annotated[int, key("rounds between measurements", ge=1)] = 10


class CallbackKeys(StrictModel):
    """Keys of a callback beside its settings."""

    optional: Annotated[bool, key("if the callback fails, continue without it")] = False


class OptimizerKeys(StrictModel):
    """Keys of `local.optimizer` besides the settings of its builder."""

    keep: Annotated[
        Literal["round", "client"], key("its variables are new in each round, or kept for each client between rounds")
    ] = "round"


class ScheduleKeys(StrictModel):
    """Keys of a schedule besides its settings."""

    warmup: Annotated[int, key("first rounds, in which the rate grows linearly to lr", ge=0)] = 0


COMMON_KEYS: dict[str, type[StrictModel]] = {
    "data": DataKeys,
    "model": ModelKeys,
    "local.optimizer": OptimizerKeys,
    "local.schedule": ScheduleKeys,
    "server.schedule": ScheduleKeys,
}
"""Keys of a section that every builder has."""


def get_key(config: Config, key: str) -> Any:
    """The value of a key with dots."""
    return functools.reduce(getattr, key.split("."), config)


def default_name(section: str) -> str:
    """The builder of a section that names none."""
    name: str = get_key(Config(), section)["name"]
    return name


def user_import_paths(config: Config) -> set[str]:
    """The names `module:name` in a configuration."""
    names = [get_key(config, section).get("name") for section in BUILDER_SECTIONS]
    names += [name for key in ("parts", "with") for part in config.algorithm.get(key, []) for name in part]
    return {name for name in names if is_import_path(name)}
