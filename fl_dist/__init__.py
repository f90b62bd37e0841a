"""Federated learning on clusters: one rank serves, the others train; the same bits on any number of workers."""

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_dist.algorithms.core import Algorithm, Part
    from fl_dist.callbacks.base import Callback
    from fl_dist.data import Dataset
    from fl_dist.diagnostics.base import Diagnostic
    from fl_dist.optimizers.base import Optimizer
    from fl_dist.runs import Run, load, run
    from fl_dist.tasks import Task

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.3.0"
__all__ = ["Algorithm", "Callback", "Dataset", "Diagnostic", "Optimizer", "Part", "Run", "Task", "load", "run"]
_MODULES = {
    **dict.fromkeys(("run", "load", "Run"), "fl_dist.runs"),
    **dict.fromkeys(("Part", "Algorithm"), "fl_dist.algorithms.core"),
    **{"Dataset": "fl_dist.data", "Task": "fl_dist.tasks"},
    **{"Callback": "fl_dist.callbacks.base", "Diagnostic": "fl_dist.diagnostics.base"},
    "Optimizer": "fl_dist.optimizers.base",
}
PARENT = os.getppid()
"""The parent process, recorded before the slow imports: by the end of them it may have died."""


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: programs prepare their terminal before the slow imports."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
