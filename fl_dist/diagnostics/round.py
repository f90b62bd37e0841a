"""The clients of a round: how far apart they ended, how flat the loss is there, where they perturbed to."""

import statistics

import torch

from fl_dist.common.vector_math import norm, unit_vector
from fl_dist.diagnostics.base import (
    RECORDED_STEP_FRACTIONS,
    Diagnostic,
    DiagnosticContext,
    Radius,
    Values,
    cosine,
    diagnostics,
)


@diagnostics.register_as("flatness_distance")
class FlatnessDistance(Diagnostic):
    """Mean squared distance of the local models from their mean (FedNSAM, Eq. 4), and from the new model."""

    needs = ("ends",)

    def measure(self, context: DiagnosticContext) -> Values:
        centre = context.locals.mean("end")
        return {
            "distance": statistics.fmean(d**2 for d in context.locals.distances("end", centre)),
            "divergence": statistics.fmean(d**2 for d in context.locals.distances("end", context.x)),
        }


@diagnostics.register_as("flatness_discrepancy")
class FlatnessDiscrepancy(Diagnostic):
    """Sharpness of all clients' loss at the new model against that of local losses at local models (FedGF, Eq. 7)."""

    needs = ("ends",)

    def __init__(self, *, rho: Radius = 0.05) -> None:
        self.rho = rho

    def measure(self, context: DiagnosticContext) -> Values:
        oracle, x = context.loss_oracle, context.x
        global_ = oracle.loss(x + unit_vector(oracle.gradient(x)) * self.rho) - oracle.loss(x)
        sharpness, sizes = context.locals.sharpness(self.rho), context.locals.sizes
        local = sum(n * value for n, value in zip(sizes, sharpness, strict=True)) / sum(sizes)
        return {"discrepancy": abs(global_ - local), "global": global_, "local": local}


@diagnostics.register_as("perturbation_drift")
class PerturbationDrift(Diagnostic):
    """Distance of the clients' perturbations from the gradient of all clients' loss (FedLESAM): 0 parallel, 1 opposite.

    The mean over the first, the middle and the last local step of the clients that perturb; None if there are none.
    """

    needs = ("steps",)

    def measure(self, context: DiagnosticContext) -> Values:
        distances: list[float] = []
        perturbing: set[int] = set()
        for k in range(len(RECORDED_STEP_FRACTIONS)):
            positions = _perturbing_clients(context, k)
            if positions:
                virtual = context.start + (context.locals.mean(f"y{k}") - context.start) * context.server_lr
                chordal = context.locals.chordal_distances(f"delta{k}", context.loss_oracle.gradient(virtual))
                distances += [chordal[position] for position in positions]
            perturbing |= set(positions)
        return {"drift": statistics.fmean(distances) / 2 if distances else None, "perturbing": len(perturbing)}


@diagnostics.register
class Directions(Diagnostic):
    """Norms and cosines of the mean update, the server's step, its variables and clients' first perturbations."""

    needs = ("previous step", "steps")

    def measure(self, context: DiagnosticContext) -> Values:
        variables = {n: v for n, v in vars(context.server).items() if n != "x" and v.shape == context.x.shape}
        values: Values = {f"norm_{name}": norm(v) for name, v in variables.items()}
        for kind, step in context.last_step.items():
            values[f"norm_{kind}"] = norm(step)
            if kind in context.previous_step:
                values[f"cosine_{kind}_before"] = cosine(step, context.previous_step[kind])
            values |= {f"cosine_{kind}_{name}": cosine(step, v) for name, v in variables.items()}
        return values | {"cosine_perturbation": self._perturbation_cosine(context)}

    def _perturbation_cosine(self, context: DiagnosticContext) -> float | None:
        """With the gradient of all clients' loss; the mean over the clients that perturb, None if there are none."""
        positions = _perturbing_clients(context, 0)
        if not positions:
            return None
        gradient = context.loss_oracle.gradient(context.start)
        if not norm(gradient):
            return 0.0
        distances = context.locals.chordal_distances("delta0", gradient)
        return statistics.fmean(1 - distances[position] ** 2 / 2 for position in positions)


def _perturbing_clients(context: DiagnosticContext, k: int) -> list[int]:
    """Positions of the clients whose perturbation at the k-th recorded step is not 0."""
    lengths = context.locals.distances(f"delta{k}", torch.zeros_like(context.x))
    return [position for position, length in enumerate(lengths) if length]
