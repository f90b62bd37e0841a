"""Whether the optimiser, the schedules and the keys that they use fit together."""

import contextlib
from collections.abc import Iterator

from fl_dist.common.errors import ConfigError
from fl_dist.config.schema import Config
from fl_dist.optimizers.base import build_optimizer, check_optimizer, optimizers
from fl_dist.optimizers.schedules import schedules


def neutral_keys(config: Config) -> dict[str, float]:
    """Values without effect for keys that the optimiser or the schedule does not use; to set one is an error."""
    local, neutral = config.local, {}
    optimizer, schedule = local.optimizer["name"], local.schedule["name"]
    has_own_decay = local.schedule.get("decay") is not None
    for key, value, user, is_used in (
        ("momentum", 0.0, f"optimizer {optimizer}", "momentum" in optimizers.takes(optimizer)),
        ("weight_decay", 0.0, f"optimizer {optimizer}", "weight_decay" in optimizers.takes(optimizer)),
        ("lr_decay", 1.0, f"schedule {schedule}", "lr_decay" in schedules.takes(schedule) and not has_own_decay),
    ):
        if is_used:
            continue
        if key in local.model_fields_set and (current := getattr(local, key)) != value:
            raise ConfigError(f"local.{key} is {current}, which the {user} does not use; set it to {value:g}")
        neutral[f"local.{key}"] = value
    return neutral


def check_optimizer_keys(config: Config) -> None:
    """Try two steps of the optimiser, and compute the rates of the first and the last round."""
    local = config.local
    with _naming_section("local.optimizer"):
        check_optimizer(local.optimizer["name"], build_optimizer(local.optimizer, local.momentum, local.weight_decay))
    for section, build_rate in (("local.schedule", config.local_rate), ("server.schedule", config.server_rate)):
        with _naming_section(section):
            rate = build_rate()
            for index in (0, config.rounds - 1):
                rate(index)


@contextlib.contextmanager
def _naming_section(section: str) -> Iterator[None]:
    try:
        yield
    except ValueError as e:
        raise ConfigError(f"{section}: {e}") from e
