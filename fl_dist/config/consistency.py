"""Whether the keys of a configuration fit together."""

from typing import Any

from fl_dist.algorithms import build
from fl_dist.algorithms.core import Algorithm, ChainError, part_name
from fl_dist.algorithms.privacy_accountant import has_opacus
from fl_dist.common.errors import ConfigError
from fl_dist.common.hook_contract import HookContractError
from fl_dist.common.registry import BuilderError
from fl_dist.config.client_schedule import describe_clients, read_schedule
from fl_dist.config.optimizer_keys import check_optimizer_keys
from fl_dist.config.schema import MAX_COUNT, Config
from fl_dist.diagnostics import build_diagnostics, diagnostics

MISSING_REQUIREMENT = {
    "uniform weights": "bounds each client's part in the mean, which needs equal weights; set server.weighting=uniform",
    "all updates": "needs every client's update; set comm.reduce=gather",
    "opacus": "needs the package opacus for its accountant: pip install 'fl_dist[privacy]'",
}


def check_consistency(config: Config) -> None:
    """Keys that depend on each other."""
    clients = config.clients
    if clients.schedule is None and clients.per_round > clients.total:
        raise ConfigError(f"clients.per_round is {clients.per_round}, more than the {clients.total} of clients.total")
    if config.local.batch_size != "full" and not 1 <= config.local.batch_size <= MAX_COUNT:
        raise ConfigError(f"local.batch_size must be full, or from 1 to {MAX_COUNT:,}, not {config.local.batch_size}")
    if config.local.batch_size == "full" and config.local.compile:
        raise ConfigError("local.compile needs batches of one size; set local.batch_size to a number")
    algorithm = check_chain(config.algorithm, "algorithm")
    check_optimizer_keys(config)
    _check_diagnostics(config)
    _check_placement(config)
    schedule = read_schedule(config)
    smallest = clients.per_round if schedule is None else min(map(len, schedule))
    _check_requirements(config, algorithm, smallest)
    if clients.min_survivors > smallest:
        raise ConfigError(
            f"clients.min_survivors is {clients.min_survivors}, but a round may have only {smallest} clients"
        )


def check_chain(section: dict[str, Any], key: str) -> Algorithm:
    """The algorithm at this key, if its parts fit together."""
    try:
        return build(section)
    except (ChainError, HookContractError, BuilderError) as e:
        raise ConfigError(f"{key}: {e}") from None


def _check_requirements(config: Config, algorithm: Algorithm, smallest: int) -> None:
    """What parts need of other keys; `smallest`: clients of the smallest round."""
    have = {
        "uniform weights": config.server.weighting == "uniform",
        "all updates": config.comm.reduce == "gather",
        "opacus": has_opacus(),
    }
    for part in algorithm.parts:
        for need in (need for need in part.needs if not have.get(need, True)):
            raise ConfigError(f"algorithm: part {part_name(part)} {MISSING_REQUIREMENT[need]}")
        if part.min_clients > smallest:
            raise ConfigError(
                f"algorithm: part {part_name(part)} needs {part.min_clients} clients, but a round may have only"
                f" {smallest}; raise clients.per_round, or change the part's settings"
            )


def _check_diagnostics(config: Config) -> None:
    """Whether there are the clients and the rows that diagnostics measure."""
    for label, keys in config.diagnostics.items():
        for key in getattr(diagnostics[keys["name"]], "clients", ()):
            if keys[key] is not None and keys[key] >= config.clients.total:
                raise ConfigError(f"diagnostics.{label}.{key} is {keys[key]}; {describe_clients(config)}")
        if "validation rows" in getattr(diagnostics[keys["name"]], "needs", ()) and not config.clients.validation:
            raise ConfigError(
                f"diagnostics.{label} measures rows that clients hold out, but clients.validation is 0; set it when a"
                " run starts, such as clients.validation=0.2"
            )


def _check_placement(config: Config) -> None:
    """Whether the rows that the run needs are where it needs them."""
    if config.clients.placement != "process":
        if config.data["local"]:
            raise ConfigError("data.local is true, which needs clients.placement=process")
        return
    if config.data["local"] and config.partition["name"] != "given":
        raise ConfigError("data.local is true, so each client has the rows of its own files; set partition=given")
    if config.clients.validation and config.evaluate.where == "server":
        raise ConfigError("evaluate.where is server, but only workers have validation rows; set it to auto or workers")
    if config.data["local"] and not config.clients.validation and config.evaluate.where == "workers":
        raise ConfigError("evaluate.where is workers, but only rank 0 has test rows; set it to auto or server")
    for label, _, diagnostic in build_diagnostics(config.diagnostics):
        if "train_client" in diagnostic.needs:
            raise ConfigError(
                f"diagnostics.{label} trains a client on rank 0, which has no client's rows; remove it, or set "
                "clients.placement=balanced"
            )
