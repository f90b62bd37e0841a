"""Every diagnostic. A new file in this folder registers itself by being here."""

import importlib
import pkgutil
from typing import Any

from fl_dist.diagnostics.base import Planned, diagnostics

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Planned", "diagnostics", "plan"]


def plan(section: dict[str, dict[str, Any]]) -> list[Planned]:
    """From `{label: {name: ..., every: ..., settings}}`, already validated."""
    return [
        Planned(
            label,
            given["every"],
            diagnostics.build(given["name"], {k: v for k, v in given.items() if k not in ("name", "every")}),
        )
        for label, given in section.items()
    ]
