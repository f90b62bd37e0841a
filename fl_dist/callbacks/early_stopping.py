"""End a run when its metric has reached a target, no longer improves, or comes to a limit."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from fl_dist.callbacks.base import Callback, Measurements, RunContext, callbacks
from fl_dist.common.errors import ConfigError
from fl_dist.metrics.record import RoundRecord

METRIC = slice(3, 5)
"""Of the settings in a checkpoint: which metric, and whether more or less of it is better."""


@callbacks.register_as("early_stopping")
class EarlyStopping(Callback):
    """Stop at a target, after `patience` rounds without improvement, or before a number exceeds a limit.

    A round's metric is known while the next round trains: that next round is the last one, on any number of workers.
    A limit allows for that round, and for the one after it if the run continued, at the growth of the last round: a
    number that grows ever slower, such as epsilon, stays below it from the third round on.
    """

    def __init__(
        self,
        *,
        target: Annotated[float | None, Field(description="stop once the metric reaches it, such as 0.9")] = None,
        patience: Annotated[
            int | None, Field(ge=1, description="stop after so many rounds without improvement")
        ] = None,
        min_delta: Annotated[float, Field(ge=0, description="smallest change that counts as an improvement")] = 0.0,
        metric: Annotated[
            str | None,
            Field(description="metric of the test set (default: the task's own), or what the algorithm reports"),
        ] = None,
        best: Annotated[
            Literal["max", "min"] | None, Field(description="which is better (default: the task's)")
        ] = None,
        limit: Annotated[
            float | None, Field(description="stop before the metric exceeds it, such as 8 for epsilon")
        ] = None,
    ) -> None:
        if target is None and patience is None and limit is None:
            raise ConfigError("callback early_stopping: give a target, a patience or a limit")
        has_best = target is not None or patience is not None
        if metric is not None and best is None and has_best:
            raise ConfigError(f"callback early_stopping: say whether max or min of {metric} is best, as in best: min")
        self.target, self.patience, self.min_delta, self.metric, self.best = target, patience, min_delta, metric, best
        self.limit = limit
        self._settings = [target, patience, min_delta, metric, best, *([] if limit is None else [limit])]
        self.best_value: float | None = None
        self.best_round = 0
        self.last_value: float | None = None
        self.reason = ""

    def check(self, measurements: Measurements) -> None:
        primary = measurements.primary_metric
        metric = self.metric or primary.name
        if metric not in (*measurements.test, *measurements.method):
            reported = f"; the algorithm reports {', '.join(measurements.method)}" if measurements.method else ""
            raise ConfigError(
                f"the task does not measure {metric!r}; it measures {', '.join(measurements.test)}{reported}"
            )
        if primary.percent and metric == primary.name and self.target is not None and self.target > 1:
            raise ConfigError(f"target {self.target:g} is out of reach: {metric} is at most 1; write 0.9 for 90 %")

    def on_run_begin(self, context: RunContext) -> None:
        self.metric = self.metric or context.primary_metric.name
        self.best = self.best or context.primary_metric.best
        if self.reason:
            context.request_stop(self.reason)

    def on_round_end(self, record: RoundRecord, context: RunContext) -> None:
        assert self.metric is not None
        value = {**record.method, **record.test}.get(self.metric)
        if self.reason or value is None:
            return
        self.reason = self._find_reason(value, record.round)
        self.last_value = value
        if self.reason:
            context.request_stop(self.reason)

    def _find_reason(self, value: float, round_number: int) -> str:
        """Why the run has to end, or an empty text."""
        sign, running = 1.0 if self.best == "max" else -1.0, f"round {round_number + 1} was already in training"
        if self._improves(sign, value):
            self.best_value, self.best_round = value, round_number
        if self.target is not None and sign * value >= sign * self.target:
            return f"{self.metric} {value:.6g} in round {round_number} reached the target {self.target:g}"
        growth = 0.0 if self.last_value is None else value - self.last_value
        if self.limit is not None and value + 2 * growth > self.limit:
            came = "exceeds" if value > self.limit else "came to"
            return f"{self.metric} {value:.6g} in round {round_number} {came} the limit {self.limit:g}, and {running}"
        if self.patience is not None and round_number - self.best_round >= self.patience:
            return f"{self.metric} did not improve from round {self.best_round} to {round_number}, and {running}"
        return ""

    def _improves(self, sign: float, value: float) -> bool:
        if math.isnan(value):
            return False
        return self.best_value is None or sign * (value - self.best_value) > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        progress = {"best_value": self.best_value, "best_round": self.best_round, "reason": self.reason}
        return {**progress, "last_value": self.last_value, "settings": self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With other settings than before, the run is judged by the new ones from here on."""
        if state["settings"][METRIC] != self._settings[METRIC]:
            return  # values of another metric
        self.best_value, self.best_round = state["best_value"], state["best_round"]
        self.last_value = state.get("last_value")  # not in checkpoints of older versions
        self.reason = state["reason"] if state["settings"] == self._settings else ""
