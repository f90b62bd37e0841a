"""Fairness: the metric of each client and of each class."""

import math

from fl_dist.common.vector_math import mean, standard_deviation
from fl_dist.diagnostics.base import Diagnostic, DiagnosticContext, Values, diagnostics


@diagnostics.register
class Clients(Diagnostic):
    """The task's metric on each client's own rows (mean, deviation, best, worst), and each class's on the test rows."""

    def measure(self, context: DiagnosticContext) -> Values:
        values, sign = context.loss_oracle.clients(context.x), -1 if context.best_is == "max" else 1
        # NaN is the worst.
        ranked = sorted(values, key=lambda value: (math.isnan(value), sign * value))
        return {
            "mean": mean(values),
            "std": standard_deviation(values),
            "best": ranked[0],
            "worst": ranked[-1],
            "classes": context.loss_oracle.classes(context.x),
        }
