"""The second derivative of the clients' loss: its largest eigenvalues, its trace."""

import contextlib
import statistics
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fl_dist.common.randomness import generator
from fl_dist.diagnostics.base import ALL, Diagnostic, Moment, SomeRows, Unmeasurable, Values, diagnostics


@diagnostics.register
class Spectrum(Diagnostic):
    """The largest eigenvalues of the Hessian, by Lanczos' method on Hessian-vector products."""

    def __init__(
        self,
        *,
        top: Annotated[int, Field(ge=1, le=1000, description="how many of the largest eigenvalues")] = 1,
        tolerance: Annotated[float, Field(gt=0, lt=1, description="relative accuracy")] = 1e-3,
        products: Annotated[int, Field(ge=1, le=10**6, description="most Hessian-vector products")] = 1000,
        rows: SomeRows = None,
    ) -> None:
        self.top, self.tolerance, self.products, self.rows = top, tolerance, products, rows or ALL

    def measure(self, at: Moment) -> Values:
        operator = Operator(at, self.rows, self.products)
        try:
            with _one_thread():
                found = operator.dense() if operator.size <= 2 * self.top + 1 else self._lanczos(at, operator)
        except Spent:
            found = []
        values, wanted = sorted(found, reverse=True)[: self.top], min(self.top, operator.size)
        told: Values = {"largest": None, "eigenvalues": values, "converged": len(values)}
        told |= {"products": operator.products, "rows": at.landscape.count(self.rows)}
        if len(values) < wanted:
            raise Unmeasurable(f"{len(values)} of {wanted} eigenvalues after {operator.products} products", told)
        return told | {"largest": values[0]}

    def _lanczos(self, at: Moment, operator: "Operator") -> list[float]:
        from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh

        size = operator.size
        first = operator.packed(at.noise("spectrum"))
        # Room for at least one restart, which costs as many products as there are vectors beyond those wanted.
        most = max(self.top + 1, (self.products + self.top) // 2)
        vectors = min(size, max(2 * self.top + 1, 20), most)
        restarts = max(1, (self.products - vectors) // (vectors - self.top))
        matrix = LinearOperator((size, size), matvec=operator, dtype=np.float64)
        try:
            return list(
                eigsh(
                    matrix,
                    self.top,
                    which="LA",
                    v0=first,
                    ncv=vectors,
                    maxiter=restarts,
                    tol=self.tolerance,
                    return_eigenvectors=False,
                    rng=generator(at.seed, "diagnostics spectrum"),
                )
            )
        except ArpackNoConvergence as e:
            return list(e.eigenvalues)
        except ArpackError as e:
            raise Unmeasurable(f"Lanczos' method ended with {e}") from e


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For the BLAS of numpy and scipy: its sums depend on the number of threads, which torch's setting leaves alone."""
    import scipy.linalg  # noqa: F401  (only a library that is loaded can be told)
    from threadpoolctl import ThreadpoolController

    # No other BLAS, for that may be torch's too.
    with ThreadpoolController().select(internal_api="openblas").limit(limits=1):
        yield


class Spent(Exception):
    """There may be no more products."""


class Operator:
    """The Hessian as a function on numpy vectors without the gaps of the model's own."""

    def __init__(self, at: Moment, rows: int, most: int) -> None:
        self._at, self._rows, self._most, self.products = at, rows, most, 0
        self.size = sum(piece.numel() for piece in at.pieces(at.x))

    def __call__(self, v: np.ndarray) -> np.ndarray:
        if self.products == self._most:
            raise Spent
        self.products += 1
        vector, start = torch.zeros_like(self._at.x), 0
        for piece in self._at.pieces(vector):
            piece.copy_(torch.from_numpy(v.reshape(-1)[start : start + piece.numel()]).view(piece.shape))
            start += piece.numel()
        return self.packed(self._at.landscape.curvature(self._at.x, vector, self._rows))

    def packed(self, vector: Tensor) -> np.ndarray:
        return torch.cat([piece.reshape(-1) for piece in self._at.pieces(vector)]).double().cpu().numpy()

    def dense(self) -> list[float]:
        if self.size > self._most:
            raise Spent
        columns = [self(column) for column in np.eye(self.size)]
        matrix = np.stack(columns)
        return list(np.linalg.eigvalsh((matrix + matrix.T) / 2))


@diagnostics.register
class Trace(Diagnostic):
    """The trace of the Hessian, estimated with random signs (Hutchinson), and the estimate's standard error."""

    def __init__(
        self,
        *,
        samples: Annotated[int, Field(ge=2, le=10**6, description="Hessian-vector products")] = 20,
        rows: SomeRows = None,
    ) -> None:
        self.samples, self.rows = samples, rows or ALL

    def measure(self, at: Moment) -> Values:
        values = [self._estimate(at, at.signs("trace", k)) for k in range(self.samples)]
        error = statistics.stdev(values) / self.samples**0.5
        return {"trace": statistics.fmean(values), "error": error, "rows": at.landscape.count(self.rows)}

    def _estimate(self, at: Moment, v: Tensor) -> float:
        return float(torch.dot(v.double(), at.landscape.curvature(at.x, v, self.rows).double()))
