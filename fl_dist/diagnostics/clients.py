"""Fairness: the metric of each client and of each class."""

from typing import Annotated, Literal

from pydantic import Field

from fl_dist.common.vector_math import summarize_clients
from fl_dist.diagnostics.base import Diagnostic, DiagnosticContext, Values, diagnostics


@diagnostics.register
class Clients(Diagnostic):
    """The task's metric on each client's own rows (mean, deviation, best, worst, worst tenth), and each class's on the
    test rows."""

    def __init__(
        self,
        *,
        on: Annotated[
            Literal["validation", "train"],
            Field(description="rows of a client: those it holds out (if nobody does, its training rows), or train"),
        ] = "validation",
    ) -> None:
        self.on_validation = on == "validation"

    def measure(self, context: DiagnosticContext) -> Values:
        metrics = context.loss_oracle.clients(context.x, self.on_validation)
        return {**summarize_clients(metrics, context.best_is), "classes": context.loss_oracle.classes(context.x)}
