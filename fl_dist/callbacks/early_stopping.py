"""End a run when its metric has reached a target, or no longer improves."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from fl_dist.callbacks.base import Callback, RunContext, callbacks
from fl_dist.common.errors import ConfigError
from fl_dist.metrics.record import RoundRecord


@callbacks.register_as("early_stopping")
class EarlyStopping(Callback):
    """Stop at a target, or after `patience` rounds without improvement.

    A round's metric is known while the next round trains: that next round is the last one, on any number of workers.
    """

    def __init__(
        self,
        *,
        target: Annotated[float | None, Field(description="stop once the metric reaches it, such as 0.9")] = None,
        patience: Annotated[
            int | None, Field(ge=1, description="stop after so many rounds without improvement")
        ] = None,
        min_delta: Annotated[float, Field(ge=0, description="smallest change that counts as an improvement")] = 0.0,
        metric: Annotated[str | None, Field(description="metric of the test set (default: the task's own)")] = None,
        best: Annotated[
            Literal["max", "min"] | None, Field(description="which is better (default: the task's)")
        ] = None,
    ) -> None:
        if target is None and patience is None:
            raise ConfigError("callback early_stopping: give a target, a patience, or both")
        if metric is not None and best is None:
            raise ConfigError(f"callback early_stopping: say whether max or min of {metric} is best, as in best: min")
        self.target, self.patience, self.min_delta, self.metric, self.best = target, patience, min_delta, metric, best
        self._settings = [target, patience, min_delta, metric, best]
        self.best_value: float | None = None
        self.best_round = 0
        self.reason = ""

    def on_run_begin(self, context: RunContext) -> None:
        self.metric = self.metric or context.primary_metric.name
        self.best = self.best or context.primary_metric.best
        is_percent = context.primary_metric.percent and self.metric == context.primary_metric.name
        if is_percent and self.target is not None and self.target > 1:
            raise ConfigError(f"target {self.target:g} is out of reach: {self.metric} is at most 1; write 0.9 for 90 %")
        if self.reason:
            context.request_stop(self.reason)

    def on_round_end(self, record: RoundRecord, context: RunContext) -> None:
        assert self.metric is not None
        value = record.test.get(self.metric)
        if self.reason or not record.is_evaluated:
            return
        if value is None:
            known = ", ".join(name for name, value in record.test.items() if value is not None)
            raise ConfigError(f"the task does not measure {self.metric!r}; it measures {known}")
        sign = 1.0 if self.best == "max" else -1.0
        if self._improves(sign, value):
            self.best_value, self.best_round = value, record.round
        if self.target is not None and sign * value >= sign * self.target:
            self.reason = f"{self.metric} {value:.6g} in round {record.round} reached the target {self.target:g}"
        elif self.patience is not None and record.round - self.best_round >= self.patience:
            self.reason = (
                f"{self.metric} did not improve from round {self.best_round} to {record.round},"
                f" and round {record.round + 1} was already in training"
            )
        if self.reason:
            context.request_stop(self.reason)

    def _improves(self, sign: float, value: float) -> bool:
        if math.isnan(value):
            return False
        return self.best_value is None or sign * (value - self.best_value) > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        progress = {"best_value": self.best_value, "best_round": self.best_round, "reason": self.reason}
        return {**progress, "settings": self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With other settings than before, the run is judged by the new ones from here on."""
        self.best_value, self.best_round = state["best_value"], state["best_round"]
        self.reason = state["reason"] if state["settings"] == self._settings else ""
