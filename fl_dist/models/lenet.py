"""The LeNet-5 variant of the FedNSAM and FedGF experiments."""

from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fl_dist.models.base import models, require_images
from fl_dist.models.onednn_layout import BlockedModule, Blocks, to_dense

Width = Annotated[int, Field(ge=1, le=10**6)]
Pair = tuple[Width, Width]


class LeNet5(BlockedModule):
    def __init__(self, shape: tuple[int, ...], outputs: int, channels: Pair, units: Pair, blocks: bool) -> None:
        super().__init__(blocks)
        colours, height, width = shape
        self.conv1 = nn.Conv2d(colours, channels[0], 5)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 5)
        self.fc1 = nn.Linear(channels[1] * _pooled_size(height) * _pooled_size(width), units[0])
        self.fc2 = nn.Linear(units[0], units[1])
        self.fc3 = nn.Linear(units[1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(self.to_blocks(x))), 2, 2)
        x = to_dense(F.max_pool2d(F.relu(self.conv2(x)), 2, 2))
        outputs: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))
        return outputs


def _pooled_size(pixels: int) -> int:
    """After two 5x5 convolutions, each with a pool of 2."""
    return ((pixels - 4) // 2 - 4) // 2


@models.register
def lenet5(
    shape: tuple[int, ...],
    outputs: int,
    *,
    channels: Annotated[Pair, Field(description="of the two 5x5 convolutions; the classic LeNet-5 has [6, 16]")] = (
        64,
        64,
    ),
    units: Annotated[Pair, Field(description="of the two hidden layers; the classic LeNet-5 has [120, 84]")] = (
        384,
        192,
    ),
    blocks: Blocks = True,
) -> nn.Module:
    """Two 5x5 convolutions and three layers. For 3x32x32 and 10 classes 797,962 parameters, with the classic widths
    (and ReLU) 62,006."""
    require_images("lenet5", shape, 16, "cnn")
    return LeNet5(shape, outputs, channels, units, blocks)
