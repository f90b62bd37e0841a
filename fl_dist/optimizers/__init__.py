"""Optimisers of local steps, one file each, and schedules of learning rates. A new file here registers itself."""

from fl_dist.common.registry import import_submodules
from fl_dist.optimizers.base import (
    Optimizer,
    build_optimizer,
    check_optimizer,
    client_variables,
    optimizers,
    pop_client_variables,
)
from fl_dist.optimizers.schedules import build_rate, depends_on_rounds, schedules

import_submodules(__name__)
__all__ = [
    "Optimizer",
    "build_optimizer",
    "build_rate",
    "check_optimizer",
    "client_variables",
    "depends_on_rounds",
    "optimizers",
    "pop_client_variables",
    "schedules",
]
