"""The LeNet-5 variant of the FedNSAM and FedGF experiments."""

import torch.nn.functional as F
from torch import Tensor, nn

from fl_dist.models.base import models
from fl_dist.models.blocks import Blocks, blocked

SMALLEST = 16
"""Pixels that two 5x5 convolutions and two pools of 2 leave something of."""


class LeNet5(nn.Module):
    def __init__(self, shape: tuple[int, ...], outputs: int, blocks: bool) -> None:
        super().__init__()
        channels, height, width = shape
        self.blocks = blocks
        self.conv1 = nn.Conv2d(channels, 64, 5)
        self.conv2 = nn.Conv2d(64, 64, 5)
        self.fc1 = nn.Linear(64 * _left(height) * _left(width), 384)
        self.fc2 = nn.Linear(384, 192)
        self.fc3 = nn.Linear(192, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = blocked(x) if self.blocks else x
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 2).to_dense()
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


def _left(pixels: int) -> int:
    return ((pixels - 4) // 2 - 4) // 2


@models.register
def lenet5(shape: tuple[int, ...], outputs: int, *, blocks: Blocks = True) -> nn.Module:
    """Two 5x5 convolutions of 64 channels, three layers; 797,962 parameters for 3x32x32 and 10 classes."""
    if len(shape) != 3 or min(shape[1:]) < SMALLEST:
        raise ValueError(f"model lenet5 needs images [C, H, W] of at least 16x16, not {list(shape)}; use model cnn")
    return LeNet5(shape, outputs, blocks)
