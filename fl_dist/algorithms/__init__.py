"""Every algorithm, one file a paper. A new file in this folder registers itself by being here."""

import importlib
import pkgutil
from typing import Any

from fl_dist.algorithms.table import algorithms, papers
from fl_dist.core import Algorithm, Part, parts

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["algorithms", "build", "papers", "parts"]


def build(settings: dict[str, Any]) -> Algorithm:
    """From `{name: ..., hyper-parameters}` or `{parts: [{name: settings}, ...]}`, already validated."""
    if "parts" in settings:
        chain: list[Part] = [parts.build(name, given) for part in settings["parts"] for name, given in part.items()]
        return Algorithm(*chain)
    return algorithms.build(settings["name"], {k: v for k, v in settings.items() if k != "name"})
