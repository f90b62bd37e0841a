"""Random changes of a batch of raw images, before normalise(): padding is black, as in torchvision.

Random numbers come from a generator on the CPU, so that they do not depend on the device of the images.
"""

from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fl_dist.common.errors import DataError
from fl_dist.common.registry import Registry
from fl_dist.data.dataset import to_device

Augmentation = Callable[[Tensor, torch.Generator], Tensor]

augmentations: Registry[Augmentation] = Registry("augmentation", Callable)


@augmentations.register
def none() -> Augmentation:
    """Images as they are."""
    return lambda x, generator: x


@augmentations.register
def crop_flip(
    *,
    padding: Annotated[int, Field(ge=0, le=1000, description="black pixels added on each side before the crop")] = 4,
    flip: Annotated[bool, Field(description="mirror half of the images, chosen at random, left to right")] = True,
    share: Annotated[float, Field(gt=0, le=1, description="probability of a crop (FedLESAM's code: 0.5)")] = 1.0,
) -> Augmentation:
    """For each image a random crop of the padded image, and a mirror image with probability 1/2."""

    def augment(x: Tensor, generator: torch.Generator) -> Tensor:
        if x.dim() != 4:
            raise DataError(f"crop_flip needs images [n, C, H, W], not rows of shape {list(x.shape)}; set augment none")
        top, left = torch.randint(2 * padding + 1, (2, len(x)), generator=generator)
        mirror = torch.randint(2 if flip else 1, (len(x),), generator=generator)
        if share < 1:
            uncropped = torch.rand(len(x), generator=generator) >= share
            top, left = (torch.where(uncropped, padding, offset) for offset in (top, left))
        return _crop(x, padding, *to_device(torch.stack((top, left, mirror)), x.device))

    return augment


def _crop(x: Tensor, padding: int, top: Tensor, left: Tensor, mirror: Tensor) -> Tensor:
    n, channels, height, width = x.shape
    column = torch.arange(width, device=x.device).expand(n, width)
    column = torch.where(mirror.bool()[:, None], width - 1 - column, column) + left[:, None]
    row = torch.arange(height, device=x.device) + top[:, None]
    pixel = (row[:, :, None] * (width + 2 * padding) + column[:, None, :]).view(n, 1, height * width)
    padded = F.pad(x, (padding,) * 4).flatten(2)
    return padded.gather(2, pixel.expand(n, channels, -1)).view_as(x)
