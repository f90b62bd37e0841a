"""What a task is: how rows become a batch, what is minimised, what is measured."""

from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

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


tasks: Registry[Task] = Registry("task", Task)
