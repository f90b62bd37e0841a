"""Federated learning on clusters: one rank serves, the others train; the same bits on any number of workers."""

import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_dist.runs import Run, load, run

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.2.0"
__all__ = ["Run", "load", "run"]
PARENT = os.getppid()
"""Who started this process, asked before the imports that take seconds: by then it may have died."""


def __getattr__(name: str) -> Any:
    """`fl_dist.run` and what belongs to it, imported when somebody asks: programs prepare their terminal first."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fl_dist import runs

    return getattr(runs, name)
