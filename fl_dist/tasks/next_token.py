"""Language models: each token of a row is to be predicted from those before it."""

import math
from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fl_dist.core import Batch
from fl_dist.data import Dataset
from fl_dist.tasks.base import Headline, Task, tasks


@tasks.register
def next_token(
    *,
    vocabulary: Annotated[
        int | None, Field(ge=1, description="ids are 0 to vocabulary - 1; null: the largest in the data decides")
    ] = None,
    padding: Annotated[int | None, Field(ge=0, description="the id that fills short rows and is not learnt")] = None,
) -> Task:
    """Rows of L + 1 ids; the model is given the first L and has to give [n, L, vocabulary]."""
    return NextToken(vocabulary, padding)


class NextToken(Task):
    logits = True
    headline: ClassVar = Headline("perplexity", "min")

    def __init__(self, vocabulary: int | None, padding: int | None) -> None:
        self.vocabulary, self.padding = vocabulary, padding

    def check(self, data: Dataset) -> None:
        x = data.x_train
        if data.is_real or x.dim() != 2 or x.shape[1] < 2:
            raise ValueError(
                "task next_token needs rows of at least two ids, in an integer type other than uint8; x_train is of "
                f"{str(x.dtype).removeprefix('torch.')} and shape {list(x.shape)}"
            )
        for name in ("x_train", "x_test"):
            if self.padding is not None and not bool((getattr(data, name)[:, 1:] != self.padding).any()):
                raise ValueError(f"task next_token: {name} holds nothing but padding, {self.padding}")
        if self.vocabulary is not None and data.ids > self.vocabulary:
            raise ValueError(f"task.vocabulary is {self.vocabulary}, but the data has ids up to {data.ids - 1}")

    def outputs(self, data: Dataset) -> int:
        return self.vocabulary or data.ids

    def batch(self, x: Tensor, y: Tensor) -> Batch:
        return x[:, :-1], x[:, 1:]

    def align(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs, y = outputs.flatten(0, 1), y.flatten()
        if self.padding is None:
            return outputs, y
        counts = y != self.padding
        return outputs[counts], y[counts]

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        # A batch may hold nothing but padding.
        return F.cross_entropy(outputs, y, reduction="sum") / max(1, len(y))

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(outputs, y, reduction="none"), "accuracy": outputs.argmax(1) == y}

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        return means | {"perplexity": math.exp(min(means["loss"], 700.0))}
