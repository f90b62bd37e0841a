"""Fully connected networks; without a hidden layer, softmax regression."""

import itertools
import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fl_dist.models.base import models


class MLP(nn.Module):
    def __init__(self, sizes: list[int], activation: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.activation = {"tanh": torch.tanh, "relu": torch.relu}[activation]

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        x = x.flatten(1)
        for layer in hidden:
            x = self.activation(layer(x))
        outputs: Tensor = last(x)
        return outputs


@models.register
def mlp(
    shape: tuple[int, ...],
    outputs: int,
    *,
    hidden: Annotated[
        list[Annotated[int, Field(ge=1, le=10**6)]],
        Field(max_length=1000, description="units of each hidden layer; [] is a linear model"),
    ] = [64],  # noqa: B006  (never changed)
    activation: Annotated[Literal["tanh", "relu"], Field(description="after each hidden layer")] = "tanh",
) -> nn.Module:
    """A fully connected network on the flattened input; parameters layers.0.weight, layers.0.bias, ..."""
    return MLP([math.prod(shape), *hidden, outputs], activation)
