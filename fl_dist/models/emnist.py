"""The CNN for EMNIST of Reddi et al. (2021), which the FedSAM paper uses."""

import torch.nn.functional as F
from torch import Tensor, nn

from fl_dist.models.base import models, require_images
from fl_dist.models.blocks import BlockedModule, Blocks, to_dense


class EmnistCNN(BlockedModule):
    def __init__(self, shape: tuple[int, ...], outputs: int, blocks: bool) -> None:
        super().__init__(blocks)
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
        self.fc2 = nn.Linear(128, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(self.to_blocks(x))))), 2, 2)
        x = self.dropout1(to_dense(x))
        outputs: Tensor = self.fc2(self.dropout2(F.relu(self.fc1(x.flatten(1)))))
        return outputs


@models.register
def emnist_cnn(shape: tuple[int, ...], outputs: int, *, blocks: Blocks = True) -> nn.Module:
    """Two 3x3 convolutions, dropout, two layers; 1,206,590 parameters for 1x28x28 and 62 classes."""
    require_images("emnist_cnn", shape, 6)
    return EmnistCNN(shape, outputs, blocks)
