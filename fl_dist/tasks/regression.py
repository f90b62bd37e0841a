"""One or more numbers per row."""

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fl_dist.common.errors import DataError
from fl_dist.data import Dataset
from fl_dist.tasks.base import PrimaryMetric, Task, describe_tensor, tasks

LOSSES: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}


@tasks.register
class Regression(Task):
    """Targets of floating point, [n] or [n, k]; loss, root mean square and mean error are over all their entries."""

    primary_metric: ClassVar = PrimaryMetric("rmse", "min")

    def __init__(
        self,
        *,
        loss: Annotated[
            Literal["mse", "mae", "huber"], Field(description="squared, absolute or Huber's error (delta 1)")
        ] = "mse",
    ) -> None:
        self.kind = loss

    def check(self, data: Dataset) -> None:
        y = data.y_train
        if not y.is_floating_point() or y.dim() > 2 or not y.numel():
            raise DataError(
                f"task regression needs targets of floating point, [n] or [n, k]; {describe_tensor('y_train', y)}"
            )

    def outputs(self, data: Dataset) -> int:
        return 1 if data.y_train.dim() == 1 else data.y_train.shape[1]

    def align(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (outputs.squeeze(1), y) if y.dim() == 1 and outputs.dim() == 2 else (outputs, y)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return LOSSES[self.kind](outputs, y)

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        error = (outputs - y).double()
        return {"loss": LOSSES[self.kind](outputs, y, reduction="none"), "mse": error.square(), "mae": error.abs()}

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        return {"loss": means["loss"], "rmse": math.sqrt(means["mse"]), "mae": means["mae"]}
