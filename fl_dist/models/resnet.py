"""Residual networks: He et al. (2016), with the stems and normalisations of the papers' experiments."""

from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fl_dist.models.base import models, norm_layer, require_images

Stem = Annotated[
    Literal["imagenet", "cifar"], Field(description="7x7 of stride 2 and a pool, or 3x3 that keeps the image's size")
]
Norm = Literal["group", "batch", "none"]
RESNET18_STAGES = [(64, 2), (128, 2), (256, 2), (512, 2)]


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the size changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = norm_layer(norm, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), norm_layer(norm, out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, channels: int, outputs: int, stages: list[tuple[int, int]], stem: str, norm: Norm) -> None:
        """`stages`: width and number of blocks of each; all but the first halve the image."""
        super().__init__()
        first = stages[0][0]
        self.has_pool = stem == "imagenet"
        kernel, stride, padding = (7, 2, 3) if self.has_pool else (3, 1, 1)
        self.conv = nn.Conv2d(channels, first, kernel, stride, padding, bias=False)
        # The published network with BatchNorm blocks has GroupNorm in its stem.
        self.norm = norm_layer("group" if norm == "batch" else norm, first)
        widths = [first, *(width for width, _ in stages)]
        self.stages = nn.Sequential(
            *(_stage(widths[k], width, blocks, 1 if k == 0 else 2, norm) for k, (width, blocks) in enumerate(stages))
        )
        self.fc = nn.Linear(widths[-1], outputs)
        if norm != "none":
            _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        if self.has_pool:
            x = F.max_pool2d(x, 3, 2, padding=1)
        outputs: Tensor = self.fc(F.adaptive_avg_pool2d(self.stages(x), 1).flatten(1))
        return outputs


def _stage(in_channels: int, out_channels: int, blocks: int, stride: int, norm: Norm) -> nn.Module:
    return nn.Sequential(
        Block(in_channels, out_channels, stride, norm),
        *(Block(out_channels, out_channels, 1, norm) for _ in range(blocks - 1)),
    )


def _initialize(module: nn.Module) -> None:
    """Convolutions by He et al. (2015), scaled for the backward pass as in torchvision."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def _channels(name: str, shape: tuple[int, ...]) -> int:
    require_images(name, shape)
    return shape[0]


@models.register
def resnet8_gn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Three blocks, GroupNorm, ImageNet's stem (FedGMT); 1,258,404 parameters for 3 channels and 100 classes."""
    return ResNet(_channels("resnet8_gn", shape), outputs, [(64, 1), (128, 1), (256, 1)], "imagenet", "group")


@models.register
def resnet18_gn(shape: tuple[int, ...], outputs: int, *, stem: Stem = "imagenet") -> nn.Module:
    """GroupNorm (FedLESAM: imagenet; FedNSAM: cifar); 11,181,642 and 11,173,962 parameters for 10 classes."""
    return ResNet(_channels("resnet18_gn", shape), outputs, RESNET18_STAGES, stem, "group")


@models.register
def resnet18(
    shape: tuple[int, ...],
    outputs: int,
    *,
    norm: Annotated[
        Literal["batch", "none"], Field(description="in the blocks; the stem has GroupNorm with batch, none with none")
    ] = "batch",
    stem: Stem = "cifar",
) -> nn.Module:
    """BatchNorm (FedNSAM) or no normalisation (FedGF); 11,210,532 parameters without, for 100 classes."""
    return ResNet(_channels("resnet18", shape), outputs, RESNET18_STAGES, stem, norm)
