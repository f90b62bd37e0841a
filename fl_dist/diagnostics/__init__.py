"""Diagnostics, one file per kind. A new file in this folder registers itself by being here."""

from typing import Any

from fl_dist.common.registry import import_submodules
from fl_dist.diagnostics.base import ScheduledDiagnostic, diagnostics

import_submodules(__name__)
__all__ = ["ScheduledDiagnostic", "build_diagnostics", "diagnostics"]


def build_diagnostics(section: dict[str, dict[str, Any]]) -> list[ScheduledDiagnostic]:
    """From `{label: {name: ..., every: ..., settings}}`, already validated."""
    return [
        ScheduledDiagnostic(
            label,
            settings["every"],
            diagnostics.build(settings["name"], {k: v for k, v in settings.items() if k not in ("name", "every")}),
        )
        for label, settings in section.items()
    ]
