"""The base of tasks: how rows become a batch, what is minimised, what is measured."""

from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from fl_dist.algorithms.core import Batch
from fl_dist.common.hook_contract import HookContractError, describe_value, require_number
from fl_dist.common.registry import Registry
from fl_dist.common.rows import Rows
from fl_dist.data import Dataset


class PrimaryMetric(NamedTuple):
    """The metric by which a run is judged."""

    name: str = "loss"
    """One of the task's metrics."""
    best: Literal["max", "min"] = "min"
    """Which values are better."""
    percent: bool = False
    """Show 0.5 as 50 %."""

    def format(self, value: float) -> str:
        """The value as people read it."""
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4g}"


class Task:
    """What is learnt; `loss` and `measure` are required, the rest has defaults."""

    logits = False
    """Whether aligned outputs are scores of classes and aligned targets class numbers, as distillation needs them."""
    per_token = False
    """Whether the model returns `outputs` numbers for each token of a row, not for the row."""
    allows_more_outputs = False
    """Whether a model may return more than `outputs` numbers: a vocabulary with ids that do not occur."""
    primary_metric: ClassVar[PrimaryMetric] = PrimaryMetric()
    """The metric of tables, the console and early stopping."""

    def check(self, data: Dataset) -> None:
        """Raise DataError if the task cannot use this data."""

    def outputs(self, data: Dataset) -> int:
        """How many numbers the model must return per row, or per token."""
        return data.classes

    def batch(self, x: Rows, y: Tensor) -> Batch:
        """Normalised rows of the data as the model's inputs and targets."""
        return x, y

    def align(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets with one row per prediction, without those that do not count."""
        return outputs, y

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean over aligned predictions, which training minimises."""
        raise NotImplementedError

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Values per aligned prediction, by name; their means over the test set are metrics. `loss` must be there."""
        raise NotImplementedError

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """The metrics, from the means of what `measure` returned."""
        return means


def describe_tensor(name: str, tensor: Tensor) -> str:
    """A tensor of a data set, for the end of a message."""
    if tensor.dim() == 2 and not tensor.shape[1]:
        return f"{name} is missing"
    return f"{name} has type {str(tensor.dtype).removeprefix('torch.')} and shape {list(tensor.shape)}"


def check_task(task: Task, name: str, outputs: Tensor, y: Tensor) -> tuple[str, ...]:
    """The names of the metrics; HookContractError unless loss and metrics of a batch are what they must be."""
    if hasattr(task, "headline"):
        raise HookContractError(f"task {name} has 'headline', which is called 'primary_metric'; rename it")
    aligned = task.align(outputs, y)
    loss = task.loss(*aligned)
    if not isinstance(loss, Tensor) or loss.dim():
        raise HookContractError(f"task {name}: loss gave {describe_value(loss)}, not a tensor of one number")
    values = task.measure(*aligned)
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise HookContractError(f"task {name}: measure gave {describe_value(values)}, not a dict of tensors")
    for metric, value in values.items():
        if not value.dim():
            raise HookContractError(f"task {name}: measure gave one number for {metric!r}, not the values of its rows")
    primary = task.primary_metric
    if primary.best not in ("max", "min"):
        raise HookContractError(f"task {name}: the best of its primary_metric is {primary.best!r}, not max or min")
    metrics = task.metrics({metric: float(value.double().mean()) for metric, value in values.items()})
    for metric in ("loss", primary.name):
        if metric not in metrics:
            known = ", ".join(metrics) or "none"
            raise HookContractError(f"task {name}: its metrics are {known}; {metric!r} is missing")
    for metric, number in metrics.items():
        require_number(f"task {name}: metrics, for {metric!r},", number)
    return tuple(metrics)


tasks: Registry[Task] = Registry("task", Task)
