"""Keep the model of the best round so far."""

import json
import math
from collections.abc import Mapping
from typing import Any

from safetensors.torch import save

from fl_dist.callbacks.base import Callback, RunContext, callbacks
from fl_dist.common.files import write_atomically
from fl_dist.metrics.record import RoundRecord

BEST_MODEL = "best.safetensors"


@callbacks.register_as("best_model")
class BestModel(Callback):
    """Write `best.safetensors` whenever the task's metric improves; its metadata `best` name the round and value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def on_round_end(self, record: RoundRecord, context: RunContext) -> None:
        metric = context.primary_metric
        value = record.test.get(metric.name)
        if value is None or math.isnan(value):
            return
        if self.value is None or (value > self.value if metric.best == "max" else value < self.value):
            self.value = value
            # One entry: safetensors writes several in any order.
            about = {"best": json.dumps({"round": record.round, "metric": metric.name, "value": value})}
            write_atomically(context.folder / BEST_MODEL, save(context.state_dict(), about))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]
