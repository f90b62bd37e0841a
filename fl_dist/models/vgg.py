"""VGG-11 without normalisation, for 32x32 images: Simonyan and Zisserman (2015), as in FedNSAM's experiments."""

from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fl_dist.models.base import models, require_images

LAYERS = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Channels of the convolutions; each group ends with a pool of 2."""


class VGG(nn.Module):
    def __init__(self, channels: int, positions: int, hidden: int, outputs: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for group in LAYERS:
            for width in group:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.fc1 = nn.Linear(channels * positions, hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.fc2(F.relu(self.fc1(self.features(x).flatten(1))))
        return outputs


@models.register
def vgg11(
    shape: tuple[int, ...],
    outputs: int,
    *,
    hidden: Annotated[
        int | None, Field(ge=1, le=10**6, description="units before the last layer; null: 100, for over 10 classes 256")
    ] = None,
) -> nn.Module:
    """Eight convolutions and two layers; 9,272,790 parameters for 3x32x32 and 10 classes, 9,377,508 for 100."""
    require_images("vgg11", shape, 32, "cnn")
    positions = (shape[1] // 32) * (shape[2] // 32)
    # The published networks have 100 hidden units for 10 classes and 256 for 100.
    return VGG(shape[0], positions, hidden or (100 if outputs <= 10 else 256), outputs)
