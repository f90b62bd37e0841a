"""Algorithms, one file per paper. A new file in this folder registers itself by being here."""

from typing import Any

from fl_dist.algorithms.core import Algorithm, algorithms, papers, parts
from fl_dist.common.registry import import_submodules

import_submodules(__name__)
__all__ = ["algorithms", "build", "papers", "parts"]


def build(settings: dict[str, Any]) -> Algorithm:
    """From `{name: ..., hyper-parameters}` or `{parts: [{name: settings}, ...]}`, already validated."""
    if "parts" in settings:
        return Algorithm(*(parts.build(name, own) for part in settings["parts"] for name, own in part.items()))
    return algorithms.build(settings["name"], {k: v for k, v in settings.items() if k != "name"})
