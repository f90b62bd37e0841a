"""Language models: predict each token of a row from those before it."""

import math
from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Batch
from fl_dist.common.errors import DataError
from fl_dist.common.rows import Rows, main_tensor
from fl_dist.data import Dataset
from fl_dist.data.dataset import IGNORE_INDEX, SPLITS
from fl_dist.tasks.base import PrimaryMetric, Task, describe_tensor, tasks


@tasks.register_as("causal_lm")
class CausalLM(Task):
    """Rows of L ids; the target of each is the id after it, or -100 if it is not learnt. Outputs are [n, L, ids]."""

    logits = True
    per_token = True
    allows_more_outputs = True
    primary_metric: ClassVar = PrimaryMetric("perplexity", "min")

    ignored: int | None = IGNORE_INDEX
    """The target that does not count."""

    def check(self, data: Dataset) -> None:
        for split in SPLITS:
            x, y = main_tensor(getattr(data, f"x_{split}")), getattr(data, f"y_{split}")
            if data.is_numeric or x.dim() != 2 or y.shape != x.shape or y.is_floating_point():
                raise DataError(
                    "task causal_lm needs rows of ids and as many targets; "
                    f"{describe_tensor(f'x_{split}', x)}, {describe_tensor(f'y_{split}', y)}"
                )
            if not bool((y != IGNORE_INDEX).any()):
                raise DataError(f"task causal_lm: y_{split} has no token to learn, only {IGNORE_INDEX}")
            known = y[y != IGNORE_INDEX] if int(y.min()) < 0 else y
            if int(known.min()) < 0:
                raise DataError(f"task causal_lm: y_{split} has a target {int(known.min())}; number ids from 0 on")
        ids = _count_ids(data)
        if data.vocabulary and ids > data.vocabulary:
            raise DataError(f"the vocabulary of the data is {data.vocabulary}, but it has ids up to {ids - 1}")

    def outputs(self, data: Dataset) -> int:
        return data.vocabulary or _count_ids(data)

    def align(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs, y = outputs.flatten(0, 1), y.flatten()
        if self.ignored is None:
            return outputs, y
        is_learnt = y != self.ignored
        return outputs[is_learnt], y[is_learnt]

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        # A batch may hold nothing to learn.
        return F.cross_entropy(outputs, y, reduction="sum") / max(1, len(y))

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(outputs, y, reduction="none"), "accuracy": outputs.argmax(1) == y}

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        return means | {"perplexity": math.exp(min(means["loss"], 700.0))}


def _count_ids(data: Dataset) -> int:
    """One more than the largest in rows and targets."""
    tensors = (main_tensor(data.x_train), main_tensor(data.x_test), data.y_train, data.y_test)
    return 1 + max(int(tensor.max()) for tensor in tensors if tensor.numel())


@tasks.register_as("next_token")
class NextToken(CausalLM):
    """Rows of L + 1 ids; the model gets the first L and returns [n, L, vocabulary]."""

    def __init__(
        self,
        *,
        vocabulary: Annotated[
            int | None, Field(ge=1, description="ids are 0 to vocabulary - 1; null: the largest in the data decides")
        ] = None,
        padding: Annotated[
            int | None, Field(ge=0, description="the id that fills short rows and is not learnt")
        ] = None,
    ) -> None:
        self.vocabulary, self.ignored = vocabulary, padding

    def check(self, data: Dataset) -> None:
        x = data.x_train
        if data.is_numeric or not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] < 2:
            raise DataError(
                "task next_token needs rows of at least two ids; "
                + describe_tensor("x_train", main_tensor(x))
                + ": store ids as int32 or int64"
            )
        if data.has_targets_of_tokens:
            raise DataError(
                "task next_token takes targets from the rows, but this data has its own; set task=causal_lm"
            )
        for name in ("x_train", "x_test"):
            if self.ignored is not None and not bool((getattr(data, name)[:, 1:] != self.ignored).any()):
                raise DataError(f"task next_token: {name} holds nothing but padding, {self.ignored}")
        if self.vocabulary is not None and data.vocabulary_size > self.vocabulary:
            raise DataError(
                f"task.vocabulary is {self.vocabulary}, but the data has ids up to {data.vocabulary_size - 1}"
            )

    def outputs(self, data: Dataset) -> int:
        return self.vocabulary or data.vocabulary_size

    def batch(self, x: Rows, y: Tensor) -> Batch:
        assert isinstance(x, Tensor)  # checked with the data
        return x[:, :-1], x[:, 1:]
