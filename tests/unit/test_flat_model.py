"""A module as one vector: parameters are views of it, buffers are copied to it and back."""

import weakref

import torch
from torch import nn

from fl_dist.federation.flat_model import FlatModel


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


def test_parameters_are_aligned_views_of_one_vector() -> None:
    module = Uneven()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    flat = FlatModel(module)
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])
        assert (p.data_ptr() - flat.vector.data_ptr()) % 64 == 0
    flat.vector.fill_(2.0)
    assert all(bool((p == 2).all()) for p in module.parameters())
    assert flat.count == sum(p.numel() for p in module.parameters()) < flat.size


def test_a_bound_vector_supplies_the_parameters() -> None:
    flat, x = FlatModel(Uneven()), torch.randn(4, 3)
    flat.module.eval()
    original, other = flat.module(x), flat.vector * 2
    flat.bind(other)
    doubled = flat.module(x)
    flat.bind(flat.vector)
    assert not torch.equal(original, doubled)
    assert torch.equal(flat.module(x), original)


def test_gathered_gradients_equal_autograd() -> None:
    flat, x = FlatModel(Uneven()), torch.randn(4, 3)
    out = torch.full_like(flat.vector, 7.0)
    flat.module(x).square().sum().backward()
    flat.params[0].grad = None
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in flat.params]
    flat.gather_gradients(flat.views(out))
    for grad, view in zip(grads, flat.views(out), strict=True):
        assert torch.equal(view, grad)
    assert all(p.grad is None for p in flat.params)


def test_views_of_a_vector_are_cached_and_freed_with_it() -> None:
    flat = FlatModel(Uneven())
    vector = flat.vector.clone()
    assert flat.views(vector) is flat.views(vector)
    reference = weakref.ref(flat.views(vector)[0].untyped_storage())
    del vector
    assert reference() is None


def test_non_persistent_buffers_are_restored_not_sent() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.arange(3.0), persistent=False)
    flat = FlatModel(module)
    assert flat.buffers.size == 0
    module.get_buffer("table").zero_()
    flat.buffers.write(flat.buffers.new())
    assert module.get_buffer("table").tolist() == [0, 1, 2]


def test_buffers_are_copied_to_a_vector_and_back() -> None:
    flat = FlatModel(Uneven())
    flat.module(torch.randn(16, 3))
    saved = flat.buffers.read()
    before = {n: b.clone() for n, b in flat.module.named_buffers()}
    flat.module(torch.randn(16, 3))
    flat.buffers.write(saved)
    assert all(torch.equal(b, before[n]) for n, b in flat.module.named_buffers())
