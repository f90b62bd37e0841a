"""Callbacks: what happens on rank 0 beside the rounds. A new file in this folder registers itself by being here."""

import importlib
import pkgutil

from fl_dist.callbacks.base import Callback, CallbackList, Measurements, RunContext, build_callbacks, callbacks

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Callback", "CallbackList", "Measurements", "RunContext", "build_callbacks", "callbacks"]
