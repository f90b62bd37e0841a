"""Fairness: the metric of each client and of each class."""

from fl_dist.common.vector_math import summarize_clients
from fl_dist.diagnostics.base import Diagnostic, DiagnosticContext, Values, diagnostics


@diagnostics.register
class Clients(Diagnostic):
    """The task's metric on each client's own rows (mean, deviation, best, worst, worst tenth), and each class's on the
    test rows. A client's own rows are those it holds out (`clients.validation`); if nobody does, its training rows."""

    def measure(self, context: DiagnosticContext) -> Values:
        values = summarize_clients(context.loss_oracle.clients(context.x), context.best_is)
        return {**values, "classes": context.loss_oracle.classes(context.x)}
