"""The second derivative of the clients' loss: its largest eigenvalues, its trace."""

import contextlib
import statistics
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fl_dist.common.errors import FlDistError
from fl_dist.common.randomness import generator
from fl_dist.diagnostics.base import (
    ALL_ROWS,
    Diagnostic,
    DiagnosticContext,
    MeasurementError,
    RowCount,
    Values,
    diagnostics,
)


@diagnostics.register
class Spectrum(Diagnostic):
    """The largest eigenvalues of the Hessian, by Lanczos' method on Hessian-vector products."""

    def __init__(
        self,
        *,
        top: Annotated[int, Field(ge=1, le=1000, description="how many of the largest eigenvalues")] = 1,
        tolerance: Annotated[float, Field(gt=0, lt=1, description="relative accuracy")] = 1e-3,
        products: Annotated[int, Field(ge=1, le=10**6, description="maximum number of Hessian-vector products")] = 1000,
        rows: RowCount = None,
    ) -> None:
        self.top, self.tolerance, self.products, self.rows = top, tolerance, products, rows or ALL_ROWS

    def measure(self, context: DiagnosticContext) -> Values:
        hessian = HessianOperator(context, self.rows, self.products)
        try:
            with _one_thread():
                dense = hessian.size <= 2 * self.top + 1
                eigenvalues = hessian.eigenvalues() if dense else self._lanczos(context, hessian)
        except ProductLimitError:
            eigenvalues = []
        largest, count = sorted(eigenvalues, reverse=True)[: self.top], min(self.top, hessian.size)
        values: Values = {"largest": None, "eigenvalues": largest, "converged": len(largest)}
        values |= {"products": hessian.products, "rows": context.loss_oracle.count(self.rows)}
        if len(largest) < count:
            raise MeasurementError(f"{len(largest)} of {count} eigenvalues after {hessian.products} products", values)
        return values | {"largest": largest[0]}

    def _lanczos(self, context: DiagnosticContext, hessian: "HessianOperator") -> list[float]:
        from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh

        size = hessian.size
        # A restart costs as many products as there are vectors beyond those wanted; leave enough for one.
        max_vectors = max(self.top + 1, (self.products + self.top) // 2)
        vectors = min(size, max(2 * self.top + 1, 20), max_vectors)
        options = {
            "v0": hessian.pack(context.noise("spectrum")),
            "ncv": vectors,
            "maxiter": max(1, (self.products - vectors) // (vectors - self.top)),
            "tol": self.tolerance,
            "rng": generator(context.seed, "diagnostics spectrum"),
        }
        matrix = LinearOperator((size, size), matvec=hessian, dtype=np.float64)
        try:
            return list(eigsh(matrix, self.top, which="LA", return_eigenvectors=False, **options))
        except ArpackNoConvergence as e:
            return list(e.eigenvalues)
        except ArpackError as e:
            raise MeasurementError(f"Lanczos' method ended with {e}") from e


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For the BLAS of numpy and scipy: its sums depend on the number of threads, which torch does not set."""
    import scipy.linalg  # noqa: F401  (the limit reaches only libraries that are loaded)
    from threadpoolctl import ThreadpoolController

    # Another BLAS may be torch's as well.
    with ThreadpoolController().select(internal_api="openblas").limit(limits=1):
        yield


class ProductLimitError(FlDistError):
    """All Hessian-vector products that the settings allow have been used."""


class HessianOperator:
    """The Hessian as a function on numpy vectors, without the padding of the model's own vectors."""

    def __init__(self, context: DiagnosticContext, rows: int, max_products: int) -> None:
        self._context, self._rows, self._max_products, self.products = context, rows, max_products, 0
        self.size = sum(view.numel() for view in context.parameter_views(context.x))

    def __call__(self, v: np.ndarray) -> np.ndarray:
        if self.products == self._max_products:
            raise ProductLimitError(f"more than {self.products} Hessian-vector products")
        self.products += 1
        vector, start = torch.zeros_like(self._context.x), 0
        for view in self._context.parameter_views(vector):
            view.copy_(torch.from_numpy(v.reshape(-1)[start : start + view.numel()]).view(view.shape))
            start += view.numel()
        return self.pack(self._context.loss_oracle.hessian_vector_product(self._context.x, vector, self._rows))

    def pack(self, vector: Tensor) -> np.ndarray:
        return torch.cat([view.reshape(-1) for view in self._context.parameter_views(vector)]).double().cpu().numpy()

    def eigenvalues(self) -> list[float]:
        """All of them, from the whole matrix."""
        if self.size > self._max_products:
            raise ProductLimitError(f"a matrix of {self.size} columns needs more than {self._max_products} products")
        matrix = np.stack([self(column) for column in np.eye(self.size)])
        return list(np.linalg.eigvalsh((matrix + matrix.T) / 2))


@diagnostics.register
class Trace(Diagnostic):
    """The trace of the Hessian, estimated with random signs (Hutchinson), and the estimate's standard error."""

    def __init__(
        self,
        *,
        samples: Annotated[int, Field(ge=2, le=10**6, description="Hessian-vector products")] = 20,
        rows: RowCount = None,
    ) -> None:
        self.samples, self.rows = samples, rows or ALL_ROWS

    def measure(self, context: DiagnosticContext) -> Values:
        values = [self._estimate(context, context.signs("trace", k)) for k in range(self.samples)]
        error = statistics.stdev(values) / self.samples**0.5
        return {"trace": statistics.fmean(values), "error": error, "rows": context.loss_oracle.count(self.rows)}

    def _estimate(self, context: DiagnosticContext, v: Tensor) -> float:
        return float(
            torch.dot(v.double(), context.loss_oracle.hessian_vector_product(context.x, v, self.rows).double())
        )
