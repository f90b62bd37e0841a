"""CNNs of two convolutions and two fully connected layers: McMahan et al. (2017); for EMNIST, Reddi et al. (2021)."""

from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fl_dist.models.base import models, norm_layer, require_images
from fl_dist.models.onednn_layout import BlockedModule, Blocks, to_dense


class CNN(BlockedModule):
    def __init__(self, shape: tuple[int, ...], outputs: int, norm: str, dropout: float, blocks: bool) -> None:
        super().__init__(blocks and norm == "none")
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.norm1 = norm_layer(norm, 32)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.norm2 = norm_layer(norm, 64)
        self.fc1 = nn.Linear(64 * (height // 4) * (width // 4), 512)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(512, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.to_blocks(x)
        # ReLU after the pool gives the same from a quarter of the work.
        x = F.relu(F.max_pool2d(self.norm1(self.conv1(x)), 2, 2))
        x = F.relu(F.max_pool2d(self.norm2(self.conv2(x)), 2, 2))
        outputs: Tensor = self.fc2(self.dropout(F.relu(self.fc1(to_dense(x).flatten(1)))))
        return outputs


class EmnistCNN(BlockedModule):
    """Of Reddi et al., which the FedSAM paper uses."""

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
def cnn(
    shape: tuple[int, ...],
    outputs: int,
    *,
    norm: Annotated[
        Literal["none", "batch", "group"], Field(description="normalisation after each convolution")
    ] = "none",
    dropout: Annotated[float, Field(ge=0, lt=1, description="share dropped before the last layer")] = 0.0,
    blocks: Blocks = True,
) -> nn.Module:
    """McMahan's CNN for images of any size from 4x4; 2,156,490 parameters for 3x32x32 and 10 classes."""
    require_images("cnn", shape, 4)
    return CNN(shape, outputs, norm, dropout, blocks)


@models.register
def emnist_cnn(shape: tuple[int, ...], outputs: int, *, blocks: Blocks = True) -> nn.Module:
    """Two 3x3 convolutions, dropout, two layers; 1,206,590 parameters for 1x28x28 and 62 classes."""
    require_images("emnist_cnn", shape, 6)
    return EmnistCNN(shape, outputs, blocks)
