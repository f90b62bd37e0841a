"""What a task is: how rows become a batch, what is minimised, what is measured."""

from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from fl_dist.common.contract import Mistake, what
from fl_dist.common.registry import Registry
from fl_dist.core import Batch
from fl_dist.data import Dataset


class Headline(NamedTuple):
    """The metric by which a run is judged."""

    name: str = "loss"
    best: Literal["max", "min"] = "min"
    percent: bool = False

    def shown(self, value: float) -> str:
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4g}"


class Task:
    """One way to learn; `loss` and `measure` have to be there, the rest has defaults."""

    logits = False
    """Whether, once aligned, outputs are scores of classes and targets their numbers: what distillation needs."""
    headline: ClassVar[Headline] = Headline()

    def check(self, data: Dataset) -> None:
        """Raise ValueError if this data cannot be learnt so."""

    def outputs(self, data: Dataset) -> int:
        """How many numbers the model has to give for a row, or a token."""
        return data.classes

    def batch(self, x: Tensor, y: Tensor) -> Batch:
        """Rows of the data, already normalised, as what the model is given and what it should say."""
        return x, y

    def align(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets with one row a prediction, without those that do not count."""
        return outputs, y

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean over aligned predictions, which training minimises."""
        raise NotImplementedError

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        """By name, values (of aligned predictions) whose mean over the test set is the metric; `loss` among them."""
        raise NotImplementedError

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """The means, and what follows from them."""
        return means


def described(name: str, targets: Tensor) -> str:
    """What a data set has as targets, as the end of a message."""
    if targets.dim() == 2 and not targets.shape[1]:
        return f"{name} is missing"
    return f"{name} is of {str(targets.dtype).removeprefix('torch.')} and shape {list(targets.shape)}"


def try_task(task: Task, name: str, outputs: Tensor, y: Tensor) -> None:
    """Whether loss and metrics of a batch are what they have to be; Mistake says what they are instead."""
    aligned = task.align(outputs, y)
    loss = task.loss(*aligned)
    if not isinstance(loss, Tensor) or loss.dim():
        raise Mistake(f"task {name}: loss gave {what(loss)}, not a tensor of one number")
    values = task.measure(*aligned)
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise Mistake(f"task {name}: measure gave {what(values)}, not a dict of tensors")
    for metric, value in values.items():
        if not value.dim():
            raise Mistake(f"task {name}: measure gave one number for {metric!r}, not the values of its rows")
    if task.headline.best not in ("max", "min"):
        raise Mistake(f"task {name}: the best of its headline is {task.headline.best!r}, not max or min")
    metrics = task.metrics({metric: float(value.double().mean()) for metric, value in values.items()})
    for metric in ("loss", task.headline.name):
        if metric not in metrics:
            raise Mistake(f"task {name}: its metrics are {', '.join(metrics) or 'none'}; {metric!r} is missing")


tasks: Registry[Task] = Registry("task", Task)
