"""What a user writes: the keys, how files and overrides become a configuration, what --help says."""

from fl_dist.common.reading import ConfigError
from fl_dist.config.loading import NAMED, differences, dump, import_paths, load, schedule, validate
from fl_dist.config.schema import LAYOUT, Clients, Communication, Config, Local, Run, Topology, Wandb

__all__ = [
    "LAYOUT",
    "NAMED",
    "Clients",
    "Communication",
    "Config",
    "ConfigError",
    "Local",
    "Run",
    "Topology",
    "Wandb",
    "differences",
    "dump",
    "import_paths",
    "load",
    "schedule",
    "validate",
]
