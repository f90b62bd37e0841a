"""One label per row, cross-entropy, accuracy."""

import logging
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_dist.common.errors import DataError
from fl_dist.data import Dataset
from fl_dist.tasks.base import PrimaryMetric, Task, describe_tensor, tasks

log = logging.getLogger(__name__)


@tasks.register
class Classification(Task):
    """Cross-entropy of labels 0 to classes - 1."""

    logits = True
    primary_metric: ClassVar = PrimaryMetric("accuracy", "max", percent=True)

    def check(self, data: Dataset) -> None:
        for name in ("y_train", "y_test"):
            y: Tensor = getattr(data, name)
            if y.dim() != 1 or y.is_floating_point():
                raise DataError(
                    f"task classification needs a whole number as the label of each row; {describe_tensor(name, y)}: "
                    + ("set task=causal_lm to predict each token" if data.has_targets_of_tokens else _advise(y))
                )
        low, high = (int(extreme) for extreme in torch.aminmax(self._labels(data)))
        if low < 0 or (data.classes and high >= data.classes):
            wrong, classes = (low if low < 0 else high), f"; it has {data.classes} classes" if data.classes else ""
            raise DataError(f"the data has a label {wrong}: number labels from 0 on{classes}")
        if int(data.y_train.min()) > 0:
            log.warning("no training row has label 0; labels count from 0")

    def outputs(self, data: Dataset) -> int:
        return data.classes or int(self._labels(data).max()) + 1

    @staticmethod
    def _labels(data: Dataset) -> Tensor:
        return torch.cat([data.y_train, data.y_test])

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(outputs, y, reduction="none"), "accuracy": outputs.argmax(1) == y}


def _advise(y: Tensor) -> str:
    """What to do with targets that are not labels."""
    if y.dim() == 2 and y.shape[1] == 1 and not y.is_floating_point():
        return "reshape it to [n]"
    if y.is_floating_point() and y.numel():
        return "convert it to integers; for real targets set task=regression"
    return "set task.name to one that fits"
