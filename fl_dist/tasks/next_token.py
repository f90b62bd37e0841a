"""Language models: predict each token of a row from those before it."""

import math
from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Batch
from fl_dist.common.errors import DataError
from fl_dist.data import Dataset
from fl_dist.tasks.base import PrimaryMetric, Task, describe_tensor, tasks


@tasks.register
def next_token(
    *,
    vocabulary: Annotated[
        int | None, Field(ge=1, description="ids are 0 to vocabulary - 1; null: the largest in the data decides")
    ] = None,
    padding: Annotated[int | None, Field(ge=0, description="the id that fills short rows and is not learnt")] = None,
) -> Task:
    """Rows of L + 1 ids; the model gets the first L and returns [n, L, vocabulary]."""
    return NextToken(vocabulary, padding)


class NextToken(Task):
    logits = True
    primary_metric: ClassVar = PrimaryMetric("perplexity", "min")

    def __init__(self, vocabulary: int | None, padding: int | None) -> None:
        self.vocabulary, self.padding = vocabulary, padding

    def check(self, data: Dataset) -> None:
        x = data.x_train
        if data.is_numeric or x.dim() != 2 or x.shape[1] < 2:
            raise DataError(
                "task next_token needs rows of at least two ids; "
                + describe_tensor("x_train", x)
                + ": store ids as int32 or int64"
            )
        for name in ("x_train", "x_test"):
            if self.padding is not None and not bool((getattr(data, name)[:, 1:] != self.padding).any()):
                raise DataError(f"task next_token: {name} holds nothing but padding, {self.padding}")
        if self.vocabulary is not None and data.vocabulary_size > self.vocabulary:
            raise DataError(
                f"task.vocabulary is {self.vocabulary}, but the data has ids up to {data.vocabulary_size - 1}"
            )

    def outputs(self, data: Dataset) -> int:
        return self.vocabulary or data.vocabulary_size

    def batch(self, x: Tensor, y: Tensor) -> Batch:
        return x[:, :-1], x[:, 1:]

    def align(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs, y = outputs.flatten(0, 1), y.flatten()
        if self.padding is None:
            return outputs, y
        is_token = y != self.padding
        return outputs[is_token], y[is_token]

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        # A batch may hold nothing but padding.
        return F.cross_entropy(outputs, y, reduction="sum") / max(1, len(y))

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(outputs, y, reduction="none"), "accuracy": outputs.argmax(1) == y}

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        return means | {"perplexity": math.exp(min(means["loss"], 700.0))}
