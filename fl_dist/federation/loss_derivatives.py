"""Losses, gradients and Hessian-vector products of batches at the weights that a model is bound to."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from fl_dist.algorithms.core import Batch, unit_vector
from fl_dist.common.rows import call_module
from fl_dist.federation.flat_model import FlatModel
from fl_dist.federation.metric_sums import MetricSums
from fl_dist.models import second_order
from fl_dist.tasks import Task


def derivatives(
    model: FlatModel, task: Task, batches: Iterable[Batch], vector: Tensor | None = None
) -> Iterator[tuple[Tensor, int]]:
    """Of each batch's loss: the gradient, or the Hessian times `vector`; and its number of predictions.

    The tensor is overwritten by the next one.
    """
    params, result = model.params, torch.zeros_like(model.vector)
    views = model.views(result)
    for x, y in batches:
        with second_order(model.module):
            outputs, y = task.align(call_module(model.module, x), y)
            loss = task.loss(outputs, y)
            pieces = torch.autograd.grad(loss, params, create_graph=vector is not None, materialize_grads=True)
            if vector is not None:
                pieces = torch.autograd.grad(pieces, params, model.views(vector), materialize_grads=True)
        for view, piece in zip(views, pieces, strict=True):
            view.copy_(piece)
        yield result, len(y)


@torch.no_grad()
def measure(model: FlatModel, task: Task, batches: Iterable[Batch]) -> MetricSums:
    """What the task measures on the batches."""
    sums = MetricSums(model.vector.device)
    with second_order(model.module):
        for x, y in batches:
            sums.add(task.measure(*task.align(call_module(model.module, x), y)))
    return sums


@torch.no_grad()
def count_correct(model: FlatModel, task: Task, batches: Iterable[Batch], classes: int) -> Tensor:
    """Correct predictions and all predictions of each class."""
    counts = torch.zeros(2, classes, dtype=torch.int64)
    with second_order(model.module):
        for x, y in batches:
            outputs, y = task.align(call_module(model.module, x), y)
            for row, labels in zip(counts, (y[outputs.argmax(-1) == y], y), strict=True):
                row += torch.bincount(labels.cpu(), minlength=len(row))
    return counts


def sharpness(model: FlatModel, task: Task, batches: Callable[[], Iterable[Batch]], w: Tensor, rho: float) -> float:
    """How much the loss rises by a step of length `rho` from `w` along the gradient there."""
    total, count = torch.zeros_like(w, dtype=torch.float64), 0
    model.bind(w)
    for gradient, n in derivatives(model, task, batches()):
        total.add_(gradient, alpha=n)
        count += n
    loss = measure(model, task, batches()).means()["loss"]
    model.bind(w + unit_vector(total / max(1, count)).to(w.dtype) * rho)
    return measure(model, task, batches()).means()["loss"] - loss
