"""A module whose parameters are views of one aligned vector, with gradients copied into another.

Views start at multiples of 64 bytes: kernels may choose another code path, and so other bits, for
unaligned memory. The gaps hold zeros and change no norm.
"""

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fl_dist.common.errors import ModelError
from fl_dist.models import PretrainedModule

ALIGNMENT = 64
COUNT = 2.0**20
"""Counters (BatchNorm's batches) are divided by this in the vector, to stay within the range of the sums."""


class FlatModel:
    """A model bound to a vector of what is trained; `bind` points the parameters at another one without copying."""

    def __init__(self, module: nn.Module, shared_with: "FlatModel | None" = None) -> None:
        """Without a vector of its own if `shared_with` is a model of the same values: it begins bound to that one's."""
        self.module = module
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise ModelError("the model has no parameter that is to be trained")
        self.names, self.params = list(trained), list(trained.values())
        if len({p.dtype for p in self.params}) != 1:
            raise ModelError("the model's parameters must all have one dtype")
        first = self.params[0]
        self._lengths = _layout([p.numel() for p in self.params], first.element_size())
        self.size = sum(self._lengths)
        self.count = sum(p.numel() for p in self.params)
        self._views = WeakIdKeyDictionary()
        self.vector: Tensor = self._flatten(first) if shared_with is None else shared_with.vector
        self._bound: Tensor | None = None
        self.bind(self.vector)
        self._frozen_norms = {name: m for name, m in module.named_modules() if _is_frozen_norm(m)}
        inside = {f"{name}.{b}" for name, m in self._frozen_norms.items() for b, _ in m.named_buffers(recurse=False)}
        self.buffers = FlatBuffers(module, first, inside)
        everything = dict(module.named_parameters()) | {n: b for n, b in module.named_buffers() if n in inside}
        self.frozen = {name: tensor.data for name, tensor in everything.items() if name not in trained}
        """Neither trained nor sent."""

    def _flatten(self, like: Tensor) -> Tensor:
        vector = torch.zeros(self.size, dtype=like.dtype, device=like.device)
        for view, p in zip(self.views(vector), self.params, strict=True):
            view.copy_(p.detach())
        return vector

    @cached_property
    def parameter_mask(self) -> Tensor:
        """True at the entries of parameters, False in the gaps."""
        return self._mask(lambda name: True)

    @cached_property
    def weight_mask(self) -> Tensor:
        """True at the entries of parameters that are named weights."""
        return self._mask(lambda name: "weight" in name)

    def _mask(self, is_included: Callable[[str], bool]) -> Tensor:
        mask = torch.zeros_like(self.vector, dtype=torch.bool)
        for name, view in self.named(mask).items():
            view.fill_(is_included(name))
        return mask

    def train(self) -> None:
        """Training mode, except for layers with statistics whose parameters are frozen."""
        self.module.train()
        for module in self._frozen_norms.values():
            module.eval()

    def share_frozen(self, module: nn.Module) -> None:
        """Move another module of the same names to this device, where it uses the memory of what is frozen here."""
        for name, tensor in module.named_parameters():
            if name in self.frozen:
                tensor.data = tensor.data.new_empty(0)  # so that it is never there twice
        module.to(self.vector.device)
        for name, tensor in module.named_parameters():
            if name in self.frozen:
                tensor.data = self.frozen[name]

    @property
    def saved(self) -> dict[str, Tensor]:
        """What is frozen and belongs to the file of the model; the rest is in files of the user's."""
        external = self.module.external if isinstance(self.module, PretrainedModule) else ()
        return {name: tensor for name, tensor in self.frozen.items() if name not in external}

    def views(self, vector: Tensor) -> list[Tensor]:
        """The vector's pieces in the shapes of the parameters, created once per vector."""
        views: list[Tensor] | None = self._views.get(vector)
        if views is None:
            # Views of a detached vector: views of the key itself would keep it alive.
            pieces = vector.detach().split(self._lengths)[::2]
            views = self._views[vector] = [piece.view(p.shape) for piece, p in zip(pieces, self.params, strict=True)]
        return views

    def bind(self, vector: Tensor) -> None:
        """Let the module compute at `vector`. Never between a forward pass and its backward pass."""
        if vector is not self._bound:
            for p, view in zip(self.params, self.views(vector), strict=True):
                p.data = view
            self._bound = vector

    def clear_gradients(self) -> None:
        for p in self.params:
            p.grad = None

    def gather_gradients(self, views: list[Tensor]) -> None:
        """Move the parameters' gradients into the `views` of a vector; an unused parameter's is 0."""
        torch._foreach_copy_(views, [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])
        self.clear_gradients()

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Parameter name -> its piece of `vector`."""
        return dict(zip(self.names, self.views(vector), strict=True))


class FlatBuffers:
    """The module's buffers (BatchNorm statistics) to and from one vector in the dtype of the parameters.

    Buffers with `persistent=False` follow from the module's settings: they are not sent, but reset.
    """

    def __init__(self, module: nn.Module, like: Tensor, without: set[str]) -> None:
        saved = module.state_dict().keys()
        buffers = {name: buffer for name, buffer in module.named_buffers() if name not in without and name in saved}
        self._computed = [(buffer, buffer.clone()) for name, buffer in module.named_buffers() if name not in saved]
        self.names, self.items = list(buffers), list(buffers.values())
        self.size = sum(b.numel() for b in self.items)
        self.dtype, self.device = like.dtype, like.device

    def _pieces(self, vector: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for item in self.items:
            yield item, vector[start : start + item.numel()].view(item.shape)
            start += item.numel()

    def read(self, out: Tensor | None = None) -> Tensor:
        """The buffers as a vector, in the memory of `out` if it is given."""
        out = self.new() if out is None else out
        for item, piece in self._pieces(out):
            piece.copy_(item)
            if not item.is_floating_point():
                piece.div_(COUNT)
        return out

    def write(self, vector: Tensor) -> None:
        for item, piece in self._pieces(vector):
            item.copy_(piece if item.is_floating_point() else (piece * COUNT).round())
        for item, first in self._computed:
            item.copy_(first)

    def new(self) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        return {
            name: (piece if item.is_floating_point() else (piece * COUNT).round().to(item.dtype))
            for name, (item, piece) in zip(self.names, self._pieces(vector), strict=True)
        }


def _is_frozen_norm(module: nn.Module) -> bool:
    """A layer with statistics whose own parameters are all frozen, such as a pretrained BatchNorm."""
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own) and any(True for _ in module.buffers(recurse=False))


def _layout(sizes: list[int], element_size: int) -> list[int]:
    """Lengths of pieces of these sizes, each followed by that of the gap after which the next is aligned."""
    step = ALIGNMENT // element_size
    return [length for size in sizes for length in (size, -size % step)]
