"""ViT-CIFAR, the small vision transformer of FedGMT's experiments on CINIC-10."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_dist.common.errors import ModelError
from fl_dist.models.base import advise_on_shape, models

PATCH, DIM, HEADS, BLOCKS = 4, 384, 8, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(n, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        # The published model divides by the root of the whole width, not of one head's.
        x = F.scaled_dot_product_attention(q, k, v, scale=DIM**-0.5)
        outputs: Tensor = self.out(x.transpose(1, 2).flatten(2))
        return outputs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(DIM), Attention()
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        outputs: Tensor = x + self.mlp(self.norm2(x))
        return outputs


class ViT(nn.Module):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.embed = nn.Linear(channels * PATCH * PATCH, DIM)
        self.position = nn.Parameter(torch.randn(height * width // PATCH**2, DIM))
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.embed(to_patches(x)) + self.position)
        outputs: Tensor = self.head(self.norm(x.mean(1)))
        return outputs


def to_patches(x: Tensor) -> Tensor:
    """Images [n, C, H, W] as tokens [n, H*W/16, C*16], row by row."""
    n, channels, height, width = x.shape
    x = x.reshape(n, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


@models.register
def vit_cifar(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A transformer of two blocks on 4x4 patches; 1,825,162 parameters for 3x32x32 and 10 classes."""
    if len(shape) != 3 or shape[1] % PATCH or shape[2] % PATCH:
        raise ModelError(
            f"model vit_cifar needs images [C, H, W] with H and W multiples of {PATCH}, not {list(shape)};"
            f" {advise_on_shape(shape)}"
        )
    return ViT(shape, outputs)
