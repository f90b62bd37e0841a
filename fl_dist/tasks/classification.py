"""One label a row, cross-entropy, accuracy."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fl_dist.data import Dataset
from fl_dist.tasks.base import Headline, Task, tasks


@tasks.register
class Classification(Task):
    """Cross-entropy of labels 0 to classes - 1."""

    logits = True
    headline: ClassVar = Headline("accuracy", "max", percent=True)

    def check(self, data: Dataset) -> None:
        for name in ("y_train", "y_test"):
            y: Tensor = getattr(data, name)
            if y.dim() != 1 or y.is_floating_point():
                raise ValueError(
                    f"task classification needs a whole number as the label of each row; {name} is of "
                    f"{str(y.dtype).removeprefix('torch.')} and shape {list(y.shape)}: set task.name to what fits"
                )

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(outputs, y, reduction="none"), "accuracy": outputs.argmax(1) == y}
