"""The LeNet-5 variant of the FedNSAM and FedGF experiments."""

import torch.nn.functional as F
from torch import Tensor, nn

from fl_dist.models.base import models, require_images
from fl_dist.models.blocks import BlockedModule, Blocks, to_dense


class LeNet5(BlockedModule):
    def __init__(self, shape: tuple[int, ...], outputs: int, blocks: bool) -> None:
        super().__init__(blocks)
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 64, 5)
        self.conv2 = nn.Conv2d(64, 64, 5)
        self.fc1 = nn.Linear(64 * _pooled_size(height) * _pooled_size(width), 384)
        self.fc2 = nn.Linear(384, 192)
        self.fc3 = nn.Linear(192, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(self.to_blocks(x))), 2, 2)
        x = to_dense(F.max_pool2d(F.relu(self.conv2(x)), 2, 2))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


def _pooled_size(pixels: int) -> int:
    """After two 5x5 convolutions, each with a pool of 2."""
    return ((pixels - 4) // 2 - 4) // 2


@models.register
def lenet5(shape: tuple[int, ...], outputs: int, *, blocks: Blocks = True) -> nn.Module:
    """Two 5x5 convolutions of 64 channels, three layers; 797,962 parameters for 3x32x32 and 10 classes."""
    require_images("lenet5", shape, 16, "cnn")
    return LeNet5(shape, outputs, blocks)
