"""Algorithms, one file per paper. A new file in this folder registers itself by being here."""

import importlib
from typing import TYPE_CHECKING, Any

from fl_dist.common.registry import import_submodules

if TYPE_CHECKING:
    from fl_dist.algorithms.core import algorithms, build, papers, parts

__all__ = ["algorithms", "build", "papers", "parts"]


def __getattr__(name: str) -> Any:
    """The registries are filled at their first use: `--help` of a command needs neither them nor torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_submodules(__name__)
    return globals().setdefault(name, getattr(importlib.import_module(f"{__name__}.core"), name))
