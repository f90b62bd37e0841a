"""Whom the model serves: its metric for each client and each class."""

import math

from fl_dist.diagnostics.base import Diagnostic, Moment, Values, deviation, diagnostics, mean


@diagnostics.register
class Clients(Diagnostic):
    """The task's metric on each client's own rows (mean, deviation, best, worst), and each class's on the test rows."""

    def measure(self, at: Moment) -> Values:
        values, sign = at.landscape.clients(at.x), -1 if at.better == "max" else 1
        # One that is no number is the worst.
        ranked = sorted(values, key=lambda value: (math.isnan(value), sign * value))
        return {
            "mean": mean(values),
            "std": deviation(values),
            "best": ranked[0],
            "worst": ranked[-1],
            "classes": at.landscape.classes(at.x),
        }
