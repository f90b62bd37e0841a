"""The plain reference diagnostics on cases with known answers."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support import reference_diagnostics as ref

CURVATURE = [[4.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, -2.0]]


def vec(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Offset(nn.Module):
    """Returns w - x for every row x."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x


def energy(a: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean over rows of 1/2 r^T A r."""
    return lambda r, _: 0.5 * ((r @ a) * r).sum(1).mean()


def quadratic(a: list[list[float]], *centres: list[list[float]]) -> ref.Problem:
    """Clients with F_i(w) = mean over their centres c of 1/2 (w-c)^T A (w-c)."""
    clients = [(torch.tensor(c, dtype=torch.float64), torch.zeros(len(c), dtype=torch.long)) for c in centres]
    return ref.Problem(Offset(len(a)), clients, energy(torch.tensor(a, dtype=torch.float64)))


def flat(module: nn.Module) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in module.parameters()])


def rise(a: Tensor, g: Tensor, d: Tensor) -> float:
    """F(w+d) - F(w) = g^T d + 1/2 d^T A d of a quadratic."""
    return (g @ d + 0.5 * d @ a @ d).item()


def test_quadratic_loss_gradient_hessian() -> None:
    p = quadratic(CURVATURE, [[1.0, 0.0, 1.0]])
    w, a = vec(2, 2, 2), torch.tensor(CURVATURE, dtype=torch.float64)
    # r = w - c = (1, 2, 1); A r = (6, 7, -2); F = (6 + 14 - 2) / 2 = 9
    assert ref.loss(p, w) == pytest.approx(9)
    torch.testing.assert_close(ref.gradient(p, w), vec(6, 7, -2))
    torch.testing.assert_close(ref.hessian(p, w), a)


def test_quadratic_eigenvalues_and_trace() -> None:
    p = quadratic(CURVATURE, [[1.0, 0.0, 1.0]])
    w = vec(2, 2, 2)
    # the block [[4,1],[1,3]] has (7 +- sqrt(5)) / 2; the rest is -2; the trace 4 + 3 - 2 = 5
    known = [(7 + math.sqrt(5)) / 2, (7 - math.sqrt(5)) / 2, -2]
    assert ref.eigenvalues(p, w, 3) == pytest.approx(known)
    assert ref.eigenvalues(p, w, 1) == pytest.approx(known[:1])
    assert ref.trace(p, w) == pytest.approx(5)
    # -9 is the largest in size, 1 the largest algebraically
    assert ref.eigenvalues(quadratic([[1.0, 0.0], [0.0, -9.0]], [[0.0, 0.0]]), vec(1, 1), 1) == pytest.approx([1])


@pytest.mark.parametrize("rho", [0.05, 0.1, 2.0])
def test_quadratic_sharpness_one_step(rho: float) -> None:
    p = quadratic(CURVATURE, [[1.0, 0.0, 1.0]])
    # g = (6, 7, -2), |g|^2 = 89, g^T A g = 4*36 + 2*42 + 3*49 - 2*4 = 367
    assert ref.sharpness(p, vec(2, 2, 2), rho) == pytest.approx(rho * math.sqrt(89) + rho**2 / 2 * 367 / 89)
    # at the stationary point u(0) = 0: no move
    assert ref.sharpness(p, vec(1, 0, 1), rho, 3) == 0


def test_quadratic_sharpness_several_steps() -> None:
    p = quadratic([[1.0, 0.0], [0.0, 3.0]], [[0.0, 0.0]])
    a, w, rho = torch.diag(vec(1, 3)), vec(1, 1), math.sqrt(10)
    # g = (1,3), d1 = (1,3): rise 10 + (1 + 27) / 2 = 24
    assert ref.sharpness(p, w, rho) == pytest.approx(24)
    # w + d1 = (2,4) has gradient (2,12), so d2 = rho u(u(1,3) + u(1,6)), the bisector put back on the ball
    bisector = vec(1, 3) / math.sqrt(10) + vec(1, 6) / math.sqrt(37)
    second = rise(a, vec(1, 3), rho * bisector / bisector.norm())
    assert second > 24
    assert ref.sharpness(p, w, rho, 2) == pytest.approx(second)


def test_sharpness_takes_the_largest_iterate_and_may_be_negative() -> None:
    p = quadratic([[-1.0]], [[0.0]])
    # F = -w^2/2 at 0.1: g < 0, d1 = -0.3, F(-0.2) - F(0.1) = -0.02 + 0.005
    assert ref.sharpness(p, vec(0.1), 0.3) == pytest.approx(-0.015)
    # at -0.2 g > 0: d2 = -0.3 + 0.3 = 0 (inside the ball, not stretched), rise 0; d3 = d1
    assert ref.sharpness(p, vec(0.1), 0.3, 2) == pytest.approx(0, abs=1e-15)
    assert ref.sharpness(p, vec(0.1), 0.3, 3) == pytest.approx(0, abs=1e-15)


def test_sharpness_does_not_stretch_inner_iterates() -> None:
    p = quadratic([[-1.0, 0.0], [0.0, -4.0]], [[0.0, 0.0]])
    # F(3,1) = -6.5, g = (-3,-4), d1 = (-3,-4) for rho 5: F(0,-3) = -18
    assert ref.sharpness(p, vec(3, 1), 5.0) == pytest.approx(-11.5)
    # g(0,-3) = (0,12): d2 = d1 + (0,5) = (-3,1), inside the ball: F(0,2) = -8
    assert ref.sharpness(p, vec(3, 1), 5.0, 2) == pytest.approx(-1.5)


def test_lpf_antithetic() -> None:
    p = quadratic(CURVATURE, [[1.0, 0.0, 1.0]])
    sigma = 0.3
    noises = [sign * sigma * math.sqrt(3) * e for e in torch.eye(3, dtype=torch.float64) for sign in (1, -1)]
    # +- cancels the slope; the covariance of the noises is sigma^2 I: F + sigma^2/2 tr A = 9 + 0.045 * 5
    assert ref.lpf(p, vec(2, 2, 2), noises) == pytest.approx(9 + sigma**2 / 2 * 5)


def test_along_and_surface() -> None:
    p = quadratic(CURVATURE, [[1.0, 0.0, 1.0]])
    w, radii = vec(2, 2, 2), [0.0, 1.0, 15.0]
    # along 7 e1 (made unit): 9 + 6 r + 2 r^2
    assert ref.along(p, w, vec(7, 0, 0), radii) == pytest.approx([9 + 6 * r + 2 * r * r for r in radii])
    assert ref.along(p, w, vec(0, 0, 0), radii) == pytest.approx([9, 9, 9])
    # F(w + x e1 + y 2 e3) = 9 + 6x + 2x^2 - 4y - 4y^2; a row for every y, directions not made unit
    xs, ys = [-1.0, 0.0, 2.0], [0.5, 1.0]
    grid = ref.surface(p, w, vec(1, 0, 0), vec(0, 0, 2), xs, ys)
    assert [len(row) for row in grid] == [3, 3]
    for row, y in zip(grid, ys, strict=True):
        assert row == pytest.approx([9 + 6 * x + 2 * x * x - 4 * y - 4 * y * y for x in xs])


def test_every_row_counts_once() -> None:
    p = quadratic([[2.0]], [[0.0]], [[3.0], [3.0], [3.0]])
    # F_0 = w^2, F_1 = (w-3)^2; at w = 1: 1 and 4; F = (1 + 3*4) / 4, slope (2 - 3*4) / 4
    w = vec(1)
    assert [ref.client_loss(p, 0, w), ref.client_loss(p, 1, w)] == pytest.approx([1, 4])
    assert ref.loss(p, w) == pytest.approx(13 / 4)
    torch.testing.assert_close(ref.gradient(p, w), vec(-2.5))


def test_flatness_discrepancy() -> None:
    p = quadratic([[2.0]], [[0.0]], [[3.0], [3.0], [3.0]], [[-1.0], [-1.0]])
    rho, w, ends = 0.1, vec(2), {0: vec(0.5), 1: vec(1)}
    # a 1-D quadratic with A = 2 rises by rho |g| + rho^2; the centres' mean is (0 + 9 - 2) / 6 = 7/6
    new = rho * 2 * (2 - 7 / 6)
    # g_0 = 2 * 0.5 = 1, g_1 = 2 * (1 - 3) = -4; weights 1/4 and 3/4 of the participants; rho^2 cancels
    local = rho * (1 / 4 * 1 + 3 / 4 * 4)
    assert local > new
    assert ref.flatness_discrepancy(p, w, ends, rho) == pytest.approx(local - new)
    # client 2 alone: weight 1, g_2 = 2 * (0.25 + 1)
    assert ref.flatness_discrepancy(p, w, {2: vec(0.25)}, rho) == pytest.approx(rho * 2.5 - new)


# lr 1: virtual (-1,0), opposite to delta; 0.25: (0.5,0), aligned; 0.5: the centre, u(0) = 0, half of |u(delta)| = 1
@pytest.mark.parametrize(("server_lr", "known"), [(1.0, 1.0), (0.25, 0.0), (0.5, 0.5)])
def test_perturbation_drift_virtual_model(server_lr: float, known: float) -> None:
    p = quadratic([[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0]])
    steps = {3: [(vec(-1, 1), vec(0.2, 0))], 7: [(vec(-1, -1), vec(5, 0))]}
    assert ref.perturbation_drift(p, vec(1, 0), steps, server_lr) == pytest.approx(known)


def test_perturbation_drift_mean_over_steps_and_clients() -> None:
    p = quadratic([[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0]])
    first, second = vec(1, 0), vec(0, 2)
    # ascent at x = (1,0) is e1: aligned 0, across sqrt(2)/2; then the virtual (0,2): ascent e2: opposite 1; no zero
    steps = {0: [(first, vec(3, 0)), (second, vec(0, -1))], 1: [(first, vec(0, 4)), (second, vec(0, 0))]}
    assert ref.perturbation_drift(p, first, steps, 1.0) == pytest.approx((0 + math.sqrt(2) / 2 + 1) / 3)
    with pytest.raises(ValueError):
        ref.perturbation_drift(p, first, {0: steps[0], 1: steps[1][:1]}, 1.0)


def test_distances() -> None:
    ends = [vec(0, 0), vec(2, 0), vec(1, 3)]
    # mean (1,1): squared distances 2, 2, 4
    assert ref.flatness_distance(ends) == pytest.approx(8 / 3)
    # from (0,1): 1, 5, 5
    assert ref.divergence(ends, vec(0, 1)) == pytest.approx(11 / 3)
    assert ref.flatness_distance([vec(5, 5)]) == 0


def test_linear_softmax_closed_form() -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 4).double()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1, 1])
    p = ref.Problem(module, [(x[:2], y[:2]), (x[2:], y[2:])])
    w = flat(module)
    slope, curve, total = torch.zeros(16, dtype=torch.float64), torch.zeros(16, 16, dtype=torch.float64), 0.0
    for row, label in zip(x, y, strict=True):
        # logits z = J w with J = [I (x) row^T, I]; slope J^T (s - e_y), Hessian J^T (diag(s) - s s^T) J
        eye = torch.eye(4, dtype=torch.float64)
        jacobian = torch.cat([torch.kron(eye, row[None]), eye], 1)
        s = torch.softmax(jacobian @ w, 0)
        slope += jacobian.T @ (s - eye[label]) / 7
        curve += jacobian.T @ (torch.diag(s) - torch.outer(s, s)) @ jacobian / 7
        total -= math.log(s[label].item()) / 7
    assert ref.loss(p, w) == pytest.approx(total)
    torch.testing.assert_close(ref.gradient(p, w), slope)
    torch.testing.assert_close(ref.hessian(p, w), curve)
    # tr = mean of (1 - |s|^2) (|row|^2 + 1)
    spread = 1 - torch.softmax(module(x), 1).square().sum(1)
    assert ref.trace(p, w) == pytest.approx((spread * (x.square().sum(1) + 1)).mean().item())


def test_linear_regression_closed_form() -> None:
    x, y = torch.tensor([[0.0], [1.0], [2.0]]).double(), torch.tensor([1, 3, 5])
    p = ref.Problem(nn.Linear(1, 1), [(x, y)], lambda out, t: 0.5 * (out[:, 0] - t).square().mean())
    # y = 2x + 1 exactly; the Hessian is the mean of (x,1)(x,1)^T = [[5/3, 1], [1, 1]]
    torch.testing.assert_close(ref.gradient(p, vec(2, 1)), vec(0, 0))
    torch.testing.assert_close(ref.hessian(p, vec(2, 1)), torch.tensor([[5 / 3, 1], [1, 1]], dtype=torch.float64))
    assert ref.loss(p, vec(2, 1)) == 0
    # at (0, 0) the residuals are -1, -3, -5: F = 35/6, slope -(0 + 3 + 10, 1 + 3 + 5) / 3
    assert ref.loss(p, vec(0, 0)) == pytest.approx(35 / 6)
    torch.testing.assert_close(ref.gradient(p, vec(0, 0)), vec(-13 / 3, -3))


def test_deep_model_against_differences() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Dropout(), nn.Linear(8, 3)
    )
    module.train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    p = ref.Problem(module, [(torch.randn(3, 1, 4, 4), torch.tensor([0, 1, 2]))])
    w = flat(module)
    step, eye = 1e-5, torch.eye(len(w), dtype=torch.float64)
    slope = vec(*[(ref.loss(p, w + step * e) - ref.loss(p, w - step * e)) / (2 * step) for e in eye])
    rows = [(ref.gradient(p, w + step * e) - ref.gradient(p, w - step * e)) / (2 * step) for e in eye]
    torch.testing.assert_close(ref.gradient(p, w), slope, atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(ref.hessian(p, w), torch.stack(rows), atol=1e-8, rtol=1e-6)
    # the caller's module keeps its mode, type and buffers
    assert module.training
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())


def test_hessian_through_attention() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q = self.mix(x)[:, None]
            return nn.functional.scaled_dot_product_attention(q, q, q)[:, 0].mean(1)

    torch.manual_seed(2)
    module = Attention()
    p = ref.Problem(module, [(torch.randn(3, 4, 2), torch.tensor([0, 1, 1]))])
    w, step = flat(module), 1e-5
    eye = torch.eye(4, dtype=torch.float64)
    rows = [(ref.gradient(p, w + step * e) - ref.gradient(p, w - step * e)) / (2 * step) for e in eye]
    torch.testing.assert_close(ref.hessian(p, w), torch.stack(rows), atol=1e-8, rtol=1e-6)


def test_filter_normalised() -> None:
    p = ref.Problem(nn.Linear(2, 3), [(torch.zeros(1, 2), torch.tensor([0]))])
    w = vec(3, 4, 0, 0, 0, 2, 9, 9, 9)
    d = vec(0, 2, 5, 5, 0, 0, 1, 1, 1)
    # rows of norms 5, 0, 2 against (0,2), (5,5), (0,0): (0,5), (0,0), (0,0); the bias zeroed
    torch.testing.assert_close(ref.filter_normalised(p, w, d), vec(0, 5, 0, 0, 0, 0, 0, 0, 0))


def test_filter_normalised_convolution() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3))
    p = ref.Problem(module, [(torch.zeros(1, 2, 2, 2), torch.tensor([0]))])
    # a filter is the 2*2*2 = 8 weights of one output: (2, 3, 4) per weight has norm sqrt(8) * (2, 3, 4)
    w = torch.cat([vec(2, 3, 4).repeat_interleave(8), torch.ones(9).double()])
    d = torch.ones(33).double()
    d[8] = -1
    # all of equal size: every weight takes its filter's size and the direction's sign; biases and scales zeroed
    known = torch.cat([vec(2, 3, 4).repeat_interleave(8), torch.zeros(9).double()])
    known[8] = -3
    torch.testing.assert_close(ref.filter_normalised(p, w, d), known)


def test_orthogonal() -> None:
    # (1,2) on (3,0) is (1,0)
    torch.testing.assert_close(ref.orthogonal(vec(3, 0), vec(1, 2)), vec(0, 2))
    torch.testing.assert_close(ref.orthogonal(vec(0, 0), vec(1, 2)), vec(1, 2))
    # (2,0,1) on (1,1,0) is (1,1,0)
    torch.testing.assert_close(ref.orthogonal(vec(1, 1, 0), vec(2, 0, 1)), vec(1, -1, 1))


def test_plane_and_coordinates() -> None:
    w0 = vec(1, 1, 1)
    u, v = ref.plane(w0, vec(1, 3, 1), vec(4, 6, 1))
    # w1 - w0 = 2 e2; w2 - w0 = (3,5,0), less 5 e2: 3 e1
    torch.testing.assert_close(u, vec(0, 1, 0))
    torch.testing.assert_close(v, vec(1, 0, 0))
    assert ref.coordinates(w0, u, v, vec(4, 6, 1)) == pytest.approx((5, 3, 0))
    assert ref.coordinates(w0, u, v, vec(0, 3, -6)) == pytest.approx((2, -1, 7))
    assert ref.coordinates(w0, u, v, w0) == (0, 0, 0)


def test_accuracies() -> None:
    # the identity as model: the prediction is the position of the row's largest entry
    p = ref.Problem(nn.Linear(3, 3, bias=False), [])
    rows, w = torch.eye(3), torch.eye(3).flatten()
    p.clients = [(rows[[0, 1]], torch.tensor([0, 2])), (rows[[2]], torch.tensor([2])), (rows[[0]], torch.tensor([1]))]
    # 1/2, 1, 0 (clients count alike): population variance (0 + 1/4 + 1/4) / 3
    known = {"mean": 0.5, "std": math.sqrt(1 / 6), "best": 1.0, "worst": 0.0, "worst_tenth": 0.0}
    assert ref.client_accuracy(p, w) == pytest.approx(known)
    # class 0: one of two right; class 1 without rows; class 2: right
    assert ref.class_accuracy(p, w, rows[[0, 1, 2]], torch.tensor([0, 0, 2]), 4) == [0.5, None, 1.0, None]


def test_cosine() -> None:
    # (3,4).(4,3) / 25
    assert ref.cosine(vec(3, 4), vec(4, 3)) == pytest.approx(24 / 25)
    assert ref.cosine(vec(1, 0), vec(-2, 0)) == pytest.approx(-1)
    assert ref.cosine(vec(1, 0), vec(0, 0)) == 0


def test_a_client_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="without rows"):
        ref.Problem(nn.Linear(1, 2), [(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long))])
