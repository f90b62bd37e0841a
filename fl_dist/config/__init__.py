"""Configurations: their keys, how a file and overrides become one, what --help shows."""

from fl_dist.common.errors import ConfigError
from fl_dist.config.builder_sections import BUILDER_SECTIONS, user_import_paths
from fl_dist.config.client_schedule import read_schedule
from fl_dist.config.comparison import differences
from fl_dist.config.loading import load, validate
from fl_dist.config.overrides import read_recorded_config
from fl_dist.config.schema import LAYOUT_KEYS, Clients, Communication, Config, Local, Run, Topology, Wandb

__all__ = [
    "BUILDER_SECTIONS",
    "LAYOUT_KEYS",
    "Clients",
    "Communication",
    "Config",
    "ConfigError",
    "Local",
    "Run",
    "Topology",
    "Wandb",
    "differences",
    "load",
    "read_recorded_config",
    "read_schedule",
    "user_import_paths",
    "validate",
]
