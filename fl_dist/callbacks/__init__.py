"""Callbacks: what happens on rank 0 beside the rounds. A new file in this folder registers itself by being here."""

from fl_dist.callbacks.base import Callback, CallbackList, Measurements, RunContext, build_callbacks, callbacks
from fl_dist.common.registry import import_submodules

import_submodules(__name__)
__all__ = ["Callback", "CallbackList", "Measurements", "RunContext", "build_callbacks", "callbacks"]
