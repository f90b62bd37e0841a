"""`clients.schedule`: the clients of every round, given in the configuration or in a file."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from fl_dist.common.errors import ConfigError
from fl_dist.common.formatting import shorten
from fl_dist.common.paths import expand_path
from fl_dist.common.yaml_reader import read_yaml
from fl_dist.config.schema import Config


def read_schedule(config: Config) -> list[list[int]] | None:
    """The explicit schedule, checked, or None."""
    schedule = config.clients.schedule
    if schedule is None:
        return None
    source = f"the schedule {shorten(schedule)}" if isinstance(schedule, str) else "clients.schedule"
    rounds = _read_schedule_file(expand_path(schedule)) if isinstance(schedule, str) else schedule
    is_table = isinstance(rounds, list) and all(isinstance(r, list) and all(type(c) is int for c in r) for r in rounds)
    if not is_table:
        raise ConfigError(f"{source} must be a list of lists of client ids, one list per round")
    if len(rounds) < config.rounds:
        raise ConfigError(f"{source} has {len(rounds)} rounds, but rounds is {config.rounds}")
    for index, clients in enumerate(rounds):
        if not clients or len(set(clients)) < len(clients):
            raise ConfigError(f"{source}: round {index} names {'no client' if not clients else 'a client twice'}")
        for client in clients:
            if not 0 <= client < config.clients.total:
                raise ConfigError(f"{source}: round {index} names client {shorten(client)}; {describe_clients(config)}")
    return rounds


def _read_schedule_file(path: Path) -> Any:
    """Validation and the experiment both ask for it: a file is read again only if it has changed."""
    stat = os.stat(path) if os.path.exists(path) else None
    return _read_cached(path, stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@lru_cache(maxsize=1)
def _read_cached(path: Path, version: tuple[int, ...] | None) -> Any:
    return read_yaml(path)


def describe_clients(config: Config) -> str:
    return f"there are clients 0 to {config.clients.total - 1}"
