"""Configurations: their keys, how a file and overrides become one, what --help shows."""

from fl_dist.common.errors import ConfigError
from fl_dist.config.loading import load, validate
from fl_dist.config.schema import Clients, Communication, Config, Local, Topology

__all__ = ["Clients", "Communication", "Config", "ConfigError", "Local", "Topology", "load", "validate"]
