"""What the clients of a round did: how far apart they ended, how flat it is there, where they looked."""

import statistics

import torch

from fl_dist.core import unit
from fl_dist.diagnostics.base import MARKS, Diagnostic, Moment, Need, Radius, Values, cosine, diagnostics, norm


@diagnostics.register_as("flatness_distance")
class FlatnessDistance(Diagnostic):
    """How far apart the local models ended (FedNSAM, Eq. 4), and how far from the new model: mean squared distances."""

    needs: tuple[Need, ...] = ("ends",)

    def measure(self, at: Moment) -> Values:
        middle = at.locals.mean("end")
        return {
            "distance": statistics.fmean(d**2 for d in at.locals.distances("end", middle)),
            "divergence": statistics.fmean(d**2 for d in at.locals.distances("end", at.x)),
        }


@diagnostics.register_as("flatness_discrepancy")
class FlatnessDiscrepancy(Diagnostic):
    """How much sharper or flatter the new model is for all than local models were for their clients (FedGF, Eq. 7)."""

    needs: tuple[Need, ...] = ("ends",)

    def __init__(self, *, rho: Radius = 0.05) -> None:
        self.rho = rho

    def measure(self, at: Moment) -> Values:
        top = at.x + unit(at.landscape.gradient(at.x)) * self.rho
        everyone = at.landscape.loss(top) - at.landscape.loss(at.x)
        rises, sizes = at.locals.sharpness(self.rho), at.locals.sizes
        own = sum(n * rise for n, rise in zip(sizes, rises, strict=True)) / sum(sizes)
        return {"discrepancy": abs(everyone - own), "global": everyone, "local": own}


@diagnostics.register_as("perturbation_drift")
class PerturbationDrift(Diagnostic):
    """How far the clients' perturbations point from where the loss of all rises (FedLESAM): 0 the same way, 1 opposite.

    Over the first, the middle and the last local step of the clients that perturb; None if there are none.
    """

    needs: tuple[Need, ...] = ("steps",)

    def measure(self, at: Moment) -> Values:
        chords: list[float] = []
        who: set[int] = set()
        for k in range(len(MARKS)):
            perturb = _perturbing(at, k)
            if perturb:
                virtual = at.start + (at.locals.mean(f"y{k}") - at.start) * at.server_lr
                found = at.locals.chords(f"delta{k}", at.landscape.gradient(virtual))
                chords += [found[place] for place in perturb]
            who |= set(perturb)
        return {"drift": statistics.fmean(chords) / 2 if chords else None, "perturbing": len(who)}


@diagnostics.register
class Directions(Diagnostic):
    """Lengths and cosines: of the mean update, the server's step, its variables, and clients' first perturbations."""

    needs: tuple[Need, ...] = ("previous step", "steps")

    def measure(self, at: Moment) -> Values:
        kept = {n: v for n, v in vars(at.server).items() if n != "x" and v.shape == at.x.shape}
        values: Values = {f"norm_{name}": norm(v) for name, v in kept.items()}
        for what, did in at.did.items():
            values[f"norm_{what}"] = norm(did)
            if what in at.before:
                values[f"cosine_{what}_before"] = cosine(did, at.before[what])
            values |= {f"cosine_{what}_{name}": cosine(did, v) for name, v in kept.items()}
        return values | {"cosine_perturbation": self._perturbation(at)}

    def _perturbation(self, at: Moment) -> float | None:
        """With the gradient of all clients' loss; the mean over the clients that perturb, None if there are none."""
        perturb = _perturbing(at, 0)
        if not perturb:
            return None
        gradient = at.landscape.gradient(at.start)
        if not norm(gradient):
            return 0.0
        chords = at.locals.chords("delta0", gradient)
        return statistics.fmean(1 - chords[place] ** 2 / 2 for place in perturb)


def _perturbing(at: Moment, mark: int) -> list[int]:
    """Places of the clients that perturbed at this mark: one that does not has no direction."""
    lengths = at.locals.distances(f"delta{mark}", torch.zeros_like(at.x))
    return [place for place, length in enumerate(lengths) if length]
