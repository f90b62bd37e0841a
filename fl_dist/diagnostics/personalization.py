"""Personalised models: the metric of each client after local steps of its own from the global model."""

import math
from typing import Annotated

from pydantic import Field

from fl_dist.common.vector_math import mean, summarize_clients
from fl_dist.diagnostics.base import (
    Diagnostic,
    DiagnosticContext,
    FineTuning,
    MeasurementError,
    Values,
    diagnostics,
)


@diagnostics.register
class Personalization(Diagnostic):
    """The task's metric of each client on its validation rows, after plain SGD from the new model on its training rows
    (mean, deviation, best, worst, worst tenth), and the mean gain over the new model."""

    needs = ("validation rows",)

    def __init__(
        self,
        *,
        epochs: Annotated[int, Field(ge=1, le=10**7, description="passes over a client's training rows")] = 1,
        steps: Annotated[
            int | None, Field(ge=1, le=10**7, description="local steps of each client, instead of epochs")
        ] = None,
        lr: Annotated[float | None, Field(gt=0, description="learning rate of these steps; null: local.lr")] = None,
        clients: Annotated[
            int | None,
            Field(ge=1, description="number of clients, sampled once by the seed; null: all that hold rows out"),
        ] = None,
    ) -> None:
        # An epoch has at least one step.
        self.settings = FineTuning(steps or epochs, steps or 0, lr or 0.0, clients or 0)

    def measure(self, context: DiagnosticContext) -> Values:
        before, after = context.loss_oracle.fine_tune(context.x, self.settings)
        sign = 1 if context.best_is == "max" else -1
        gain = mean([sign * (own - global_) for global_, own in zip(before, after, strict=True)])
        values = {**summarize_clients(after, context.best_is), "gain": gain, "clients": len(after)}
        if failed := sum(map(math.isnan, after)):
            reason = f"the local steps of {failed} of {len(after)} clients diverged or failed; a lower lr may help"
            raise MeasurementError(reason, values)
        return values
