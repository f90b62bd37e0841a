"""Plain references of the diagnostics: float64, one process, the full data at once, dense Hessians."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass
class Problem:
    """A model (an own copy is kept, in float64 and evaluation mode), every client's rows, and the mean loss of rows."""

    module: nn.Module
    clients: list[tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy

    def __post_init__(self) -> None:
        """Copy the module, so that the caller's stays as it is; a client without rows has no F_i."""
        self.module = copy.deepcopy(self.module).double().eval()
        if any(len(y) == 0 for _, y in self.clients):
            raise ValueError("a client without rows")


def _parts(p: Problem, w: Tensor) -> dict[str, Tensor]:
    """The vector cut into the module's parameters, in the order of named_parameters."""
    named = dict(p.module.named_parameters())
    pieces = torch.split(w.double(), [value.numel() for value in named.values()])
    return {name: piece.view_as(value) for (name, value), piece in zip(named.items(), pieces, strict=True)}


def _output(p: Problem, w: Tensor, x: Tensor) -> Tensor:
    """The module's output at parameters w (attention by its plain formula, which can be differentiated twice)."""
    with sdpa_kernel(SDPBackend.MATH):
        out: Tensor = functional_call(p.module, _parts(p, w), (x.double() if x.is_floating_point() else x,))
    return out


def _loss(p: Problem, w: Tensor) -> Tensor:
    """F(w), differentiable: the mean over the rows of all clients, every row counting once."""
    x, y = (torch.cat(rows) for rows in zip(*p.clients, strict=True))
    return p.loss(_output(p, w, x), y)


def client(p: Problem, i: int) -> Problem:
    """The problem of client i alone, whose F is F_i."""
    return replace(p, clients=[p.clients[i]])


def _unit(v: Tensor) -> Tensor:
    """v / ||v||, and 0 for 0."""
    norm = v.norm()
    return v / norm if norm > 0 else torch.zeros_like(v)


def loss(p: Problem, w: Tensor) -> float:
    """F(w)."""
    with torch.no_grad():
        return _loss(p, w).item()


def client_loss(p: Problem, i: int, w: Tensor) -> float:
    """F_i(w)."""
    return loss(client(p, i), w)


def gradient(p: Problem, w: Tensor) -> Tensor:
    """The gradient of F at w."""
    w = w.detach().double().requires_grad_()
    return torch.autograd.grad(_loss(p, w), w)[0]


def hessian(p: Problem, w: Tensor) -> Tensor:
    """The dense Hessian of F at w."""
    w = w.detach().double().requires_grad_()
    (slope,) = torch.autograd.grad(_loss(p, w), w, create_graph=True)
    rows = [torch.autograd.grad(s, w, retain_graph=True, materialize_grads=True)[0] for s in slope]
    dense = torch.stack(rows)
    return (dense + dense.T) / 2


def sharpness(p: Problem, w: Tensor, rho: float, steps: int = 1) -> float:
    """The largest rise of F over the iterates of projected ascent in the ball of radius rho (the start not counted)."""
    delta = torch.zeros_like(w, dtype=torch.float64)
    rises: list[float] = []
    for _ in range(steps):
        delta = delta + rho * _unit(gradient(p, w + delta))
        if delta.norm() > rho:
            delta = rho * _unit(delta)
        rises.append(loss(p, w + delta) - loss(p, w))
    return max(rises)


def flatness_distance(ends: list[Tensor]) -> float:
    """The mean squared distance of the local end models from their unweighted mean."""
    return divergence(ends, torch.stack(ends).double().mean(0))


def divergence(ends: list[Tensor], x_new: Tensor) -> float:
    """The mean squared distance of the local end models from the published model."""
    return sum((end.double() - x_new.double()).square().sum().item() for end in ends) / len(ends)


def flatness_discrepancy(p: Problem, x_new: Tensor, ends: dict[int, Tensor], rho: float) -> float:
    """|sharpness of F at the new model - row-weighted mean of the sharpness of F_i at the participants' ends|."""
    rows = {i: len(p.clients[i][1]) for i in ends}
    local = sum(rows[i] * sharpness(client(p, i), end, rho) for i, end in ends.items()) / sum(rows.values())
    return abs(sharpness(p, x_new, rho) - local)


def perturbation_drift(p: Problem, x: Tensor, steps: dict[int, list[tuple[Tensor, Tensor]]], server_lr: float) -> float:
    """Half the mean distance of the clients' perturbation directions from the global one at the virtual models.

    A perturbation of 0 has no direction and does not count: as u(0) = 0 it would be halfway, whatever the others do.
    """
    terms: list[float] = []
    for step in zip(*steps.values(), strict=True):
        moved = torch.stack([y.double() - x.double() for y, _ in step]).mean(0)
        ascent = _unit(gradient(p, x + server_lr * moved))
        terms += [(ascent - _unit(delta.double())).norm().item() / 2 for _, delta in step if delta.any()]
    return sum(terms) / len(terms)


def eigenvalues(p: Problem, w: Tensor, top: int) -> list[float]:
    """The algebraically largest eigenvalues of the Hessian, the largest first."""
    values: list[float] = torch.linalg.eigvalsh(hessian(p, w)).flip(0)[:top].tolist()
    return values


def trace(p: Problem, w: Tensor) -> float:
    """The trace of the Hessian."""
    return hessian(p, w).trace().item()


def lpf(p: Problem, w: Tensor, noises: list[Tensor]) -> float:
    """The mean of F(w + noise)."""
    return sum(loss(p, w + noise) for noise in noises) / len(noises)


def along(p: Problem, w: Tensor, direction: Tensor, radii: list[float]) -> list[float]:
    """F(w + r u(direction)) for every radius."""
    return [loss(p, w + r * _unit(direction.double())) for r in radii]


def filter_normalised(p: Problem, w: Tensor, direction: Tensor) -> Tensor:
    """Every filter of the direction at the norm of the model's filter; parameters below two dimensions zeroed."""
    model, scaled = _parts(p, w), []
    for name, part in _parts(p, direction).items():
        if part.dim() < 2:
            scaled.append(torch.zeros_like(part).flatten())
        else:
            scaled += [f.norm() * _unit(d).flatten() for f, d in zip(model[name], part, strict=True)]
    return torch.cat(scaled)


def orthogonal(first: Tensor, second: Tensor) -> Tensor:
    """The second direction less its projection on the first."""
    axis = _unit(first.double())
    return second.double() - axis.dot(second.double()) * axis


def surface(p: Problem, w: Tensor, a: Tensor, b: Tensor, xs: list[float], ys: list[float]) -> list[list[float]]:
    """F(w + x a + y b): a row for every y, a column for every x."""
    return [[loss(p, w + x * a + y * b) for x in xs] for y in ys]


def plane(w0: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal axes of the plane through three models, the first axis from w0 to w1."""
    u = _unit(w1.double() - w0.double())
    return u, _unit(orthogonal(u, w2.double() - w0.double()))


def coordinates(w0: Tensor, u: Tensor, v: Tensor, w: Tensor) -> tuple[float, float, float]:
    """The position of w in the plane, and the norm of what lies outside it."""
    d = w.double() - w0.double()
    a, b = d.dot(u), d.dot(v)
    return a.item(), b.item(), (d - a * u - b * v).norm().item()


def _hits(p: Problem, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """1 for every row whose largest output is its label's, 0 for the others."""
    with torch.no_grad():
        return (_output(p, w, x).argmax(-1) == y).double()


def client_accuracy(p: Problem, w: Tensor) -> dict[str, float]:
    """Over the clients, the accuracy on their own rows: mean, population standard deviation, best, worst and the mean
    of the worst tenth."""
    each = torch.stack([_hits(p, w, x, y).mean() for x, y in p.clients])
    std = each.std(correction=0)
    tenth = each.sort().values[: -(-len(each) // 10)]
    extremes = {"best": each.max().item(), "worst": each.min().item(), "worst_tenth": tenth.mean().item()}
    return {"mean": each.mean().item(), "std": std.item(), **extremes}


def class_accuracy(p: Problem, w: Tensor, x: Tensor, y: Tensor, classes: int) -> list[float | None]:
    """The accuracy on the rows of every class, None for a class without rows."""
    hits = _hits(p, w, x, y)
    return [hits[y == c].mean().item() if (y == c).any() else None for c in range(classes)]


def cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of the angle between two vectors, 0 if either is zero."""
    return _unit(a.double()).dot(_unit(b.double())).item()
