"""Compression of what a client sends: sent = C(d).

With error feedback a client keeps what it has not sent so far, e:  v = d + e;  sent = C(v);  e <- v - sent

top_k: Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018.
    C(v) = the k = round(share n) entries of largest |v|
sign: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
    C(v) = s sign(v);  s = mean |v|, sign(0) = +1
quantise: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017.
    C(v) = sign(v) scale/L (l + [u < p]);  L = 2^(bits-1) - 1, scale = max |v|, l + p = L |v|/scale

QSGD scales by the norm of v, which leaves most levels unused. Its mean over u is v, so it has no error feedback: with
few bits its error is larger than v, and what was not sent would grow without end. n counts parameters, not gaps of
the vector. Clients' messages are simulated: their bytes are counted, and ranks still send sums of whole vectors.
"""

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Part, Round, Vars, parts

Feedback = Annotated[bool, Field(description="error feedback: what was not sent is added to the client's next update")]


class Compression(Part):
    """`compress` is the map C of the rule above."""

    role = "compression"

    def upload(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> Tensor:
        return self.compress(delta, r)

    def compress(self, v: Tensor, r: Round) -> Tensor:
        """A new vector: what the server receives instead of `v`."""
        raise NotImplementedError


class FeedbackCompression(Compression):
    """One whose error a client makes up for in its next round."""

    def __init__(self, *, feedback: Feedback = True) -> None:
        self.feedback, self.client = feedback, ("residual",) if feedback else ()

    def upload(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> Tensor:
        if not self.feedback:
            return super().upload(delta, s, i, r)
        target = delta + i.residual
        sent = self.compress(target, r)
        i.residual = target.sub_(sent)
        return sent


@parts.register_as("top_k")
class TopK(FeedbackCompression):
    """Sends the largest entries of the update, with their places."""

    def __init__(
        self,
        *,
        share: Annotated[float, Field(gt=0, le=1, description="of the parameters that is sent")] = 0.01,
        feedback: Feedback = True,
    ) -> None:
        super().__init__(feedback=feedback)
        self.share = share

    def compress(self, v: Tensor, r: Round) -> Tensor:
        size, k = v.abs(), self._count(r)
        smallest = size.topk(k, sorted=False).values.amin()
        larger, equal = size > smallest, size == smallest
        # Among equal entries those of lower index, which torch does not promise.
        mask = larger | (equal & (equal.cumsum(0, dtype=torch.int32) <= k - larger.sum()))
        return v * mask  # not `where`: an entry that is not finite has to stay visible

    def upload_bytes(self, r: Round, number_bytes: int) -> float:
        return self._count(r) * (number_bytes + math.ceil(math.log2(r.parameter_count)) / 8)

    def _count(self, r: Round) -> int:
        return max(1, math.floor(self.share * r.parameter_count + 0.5))


@parts.register_as("sign")
class Sign(FeedbackCompression):
    """Sends one bit per parameter, and their mean size."""

    def compress(self, v: Tensor, r: Round) -> Tensor:
        mean = v.abs().sum(dtype=torch.float64).div_(r.parameter_count).to(v.dtype)
        return torch.where(v >= 0, mean, -mean) * r.is_parameter

    def upload_bytes(self, r: Round, number_bytes: int) -> float:
        return r.parameter_count / 8 + number_bytes


@parts.register_as("quantise")
class Quantise(Compression):
    """Sends few bits per parameter, rounded at random so that the mean is right."""

    def __init__(
        self, *, bits: Annotated[int, Field(ge=2, le=16, description="per parameter, its sign included")] = 8
    ) -> None:
        self.bits, self.levels = bits, 2 ** (bits - 1) - 1

    def compress(self, v: Tensor, r: Round) -> Tensor:
        scale, size = v.abs().amax(), v.abs()
        exact = size.div_(torch.where(scale == 0, 1.0, scale)).mul_(self.levels)
        lower = exact.floor()
        uniform = torch.from_numpy(r.generator("quantise").random(len(v))).to(v)
        return lower.add_(uniform < exact.sub_(lower)).mul_(scale / self.levels).copysign_(v)

    def upload_bytes(self, r: Round, number_bytes: int) -> float:
        return r.parameter_count * self.bits / 8 + number_bytes
