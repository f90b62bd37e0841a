"""The text classifier of FedGMT's experiments on AG News, after FastText: Joulin et al. (2017)."""

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from fl_dist.common.errors import ModelError
from fl_dist.models.base import models


class FastText(nn.Module):
    def __init__(self, vocabulary: int, width: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        # The mean counts padding too, as the published network does; there is no activation between the layers.
        outputs: Tensor = self.fc2(self.fc1(self.embed(tokens).mean(1)))
        return outputs


@models.register
def fasttext(
    shape: tuple[int, ...],
    outputs: int,
    vocabulary: int,
    *,
    width: Annotated[int, Field(ge=1, le=10**5, description="of a token's vector and of the hidden layer")] = 32,
) -> nn.Module:
    """The mean of the tokens' vectors and two layers; 3,157,508 parameters for AG News (98,635 tokens, 4 classes)."""
    if len(shape) != 1 or not vocabulary:
        raise ModelError(f"model fasttext needs rows of tokens [length], not {list(shape)} of numbers; use model mlp")
    return FastText(vocabulary, width, outputs)
