"""Images in blocks of channels: the same numbers but for rounding, only where they are wanted and a CPU has kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import fl_dist
from fl_dist.core import Algorithm, Batch, Forward, Number, Part, Seen, Vars
from fl_dist.engine.client import Taps
from fl_dist.main import main
from fl_dist.models import blocks, cnn, models
from tests.support.marks import examples
from tests.support.processes import QUIET

SHAPES = {
    "cnn": [(1, 4, 4), (3, 5, 7), (1, 28, 28), (3, 32, 32)],
    "emnist_cnn": [(1, 6, 6), (2, 9, 8), (1, 28, 28)],
    "lenet5": [(1, 16, 16), (3, 19, 22), (3, 32, 32)],
}
CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


def build(name: str, shape: tuple[int, ...], **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return models.build(name, settings, shape=shape, outputs=5, classes=5, vocabulary=0).eval()


def images(shape: tuple[int, ...], rows: int = 6) -> Tensor:
    x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last)


def first_layer(module: nn.Module, x: Tensor) -> list[Tensor]:
    """What its first convolution is given."""
    given: list[Tensor] = []
    handle = module.conv1.register_forward_hook(lambda layer, inputs, output: given.append(inputs[0]))
    with blocks.in_blocks():
        module(x)
    handle.remove()
    return given


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    with blocks.in_blocks():
        loss = F.cross_entropy(module(x), torch.arange(len(x)) % 5)
    return [loss.detach(), *torch.autograd.grad(loss, [x, *module.parameters()])]


@pytest.mark.parametrize(("name", "shape"), CASES)
@pytest.mark.parametrize("rows", examples([1, 6], [6]))
def test_numbers_and_gradients_are_those_of_other_layouts(name: str, shape: tuple[int, ...], rows: int) -> None:
    x = images(shape, rows)
    ours, plain = (gradients(build(name, shape, blocks=chosen), x) for chosen in (True, False))
    for here, there in zip(ours, plain, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_equal_pixels_give_their_gradient_to_the_first(name: str) -> None:
    shape = SHAPES[name][-1]
    x = torch.ones(2, *shape)
    ours, plain = (gradients(build(name, shape, blocks=chosen), x) for chosen in (True, False))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_a_cpu_that_has_the_kernels_uses_them(name: str) -> None:
    shape = SHAPES[name][0]
    module, x = build(name, shape), images(shape)
    assert all(given.is_mkldnn == blocks._is_known() for given in first_layer(module, x))
    with blocks.in_blocks():
        assert module(x).layout == torch.strided
    assert not any(given.is_mkldnn for given in first_layer(build(name, shape, blocks=False), x))


@pytest.mark.parametrize("kind", ["AVX2", "AVX512", "DEFAULT", "SVE256"])
def test_only_some_cpus_are_known_to_have_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks._is_known.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kind)
    try:
        assert blocks._is_known() == (kind.startswith("AVX") and torch.backends.mkldnn.is_available())
    finally:
        blocks._is_known.cache_clear()


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_what_has_no_kernel_is_not_blocked(norm: str) -> None:
    x = images((3, 8, 8))
    assert not any(given.is_mkldnn for given in first_layer(build("cnn", (3, 8, 8), norm=norm), x))


def double(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = module.double()(x.double())
    return result


def bf16(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        result: Tensor = module(x)
        return result


def without_kernels(module: nn.Module, x: Tensor) -> Tensor:
    torch._C._set_mkldnn_enabled(False)
    try:
        result: Tensor = module(x)
        return result
    finally:
        torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize("call", [double, bf16, without_kernels])
def test_other_numbers_and_no_kernels(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    module, x = build("cnn", (3, 8, 8)), images((3, 8, 8))
    expected = module(x)
    with blocks.in_blocks():
        outputs = call(module, x)
    outputs.sum().backward()
    torch.testing.assert_close(outputs.float(), expected, rtol=0.1, atol=0.02)


def curvature(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The derivatives of the squared norm of the gradient."""
    params = list(module.parameters())
    slope = torch.autograd.grad(module(x).square().sum(), params, create_graph=True)
    squared = torch.stack([piece.square().sum() for piece in slope]).sum()
    return list(torch.autograd.grad(squared, params))


def test_what_is_not_blocked_can_be_derived_twice() -> None:
    x = images((3, 8, 8))
    outside = curvature(build("cnn", (3, 8, 8)), x)
    with blocks.in_blocks():
        torch.testing.assert_close(outside, curvature(build("cnn", (3, 8, 8), blocks=False), x))


def test_blocks_end_with_an_error_and_where_others_go_on() -> None:
    with pytest.raises(KeyError), blocks.in_blocks():
        raise KeyError
    assert not blocks._wanted
    with blocks.in_blocks():
        with blocks.in_blocks():
            pass
        assert blocks._wanted


def test_parts_see_layers_as_they_are_elsewhere() -> None:
    def seen(chosen: bool) -> list[Tensor]:
        """The output of a layer, and by it the derivative of what follows."""
        module = build("cnn", (3, 8, 8), blocks=chosen)
        taps = Taps(module, ("conv2",))
        with blocks.in_blocks():
            logits = module(images((3, 8, 8)))
        feature = taps.drained(torch.float32)["conv2"]
        assert feature.layout == torch.strided
        return [feature, *torch.autograd.grad(logits.square().sum(), feature)]

    torch.testing.assert_close(seen(True), seen(False), rtol=1e-4, atol=1e-6)


class Smooth(Part):
    """Penalises the gradient of the logits by the images."""

    def inputs(self, x: Tensor, i: Vars) -> Tensor:
        return x.detach().requires_grad_()

    def penalty(self, seen: Seen, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Number:
        (slope,) = torch.autograd.grad(seen.logits.sum(), batch[0], create_graph=True)
        return slope.square().mean()


def smooth() -> Algorithm:
    return Algorithm(Smooth())


def test_a_part_that_derives_twice_is_told_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *QUIET,
        "rounds=1",
        "model=cnn",
        "algorithm=tests.unit.test_blocks:smooth",
        "clients={total: 4, per_round: 1}",
    ]
    assert main([*words, f"run.dir={tmp_path / 'plain'}", "model.blocks=false"]) == 0
    code = main([*words, f"run.dir={tmp_path / 'blocks'}"])
    if blocks._is_known():
        error = capsys.readouterr().err
        assert code == 1 and "cannot be derived twice" in error and "set model.blocks=false" in error
    else:
        assert code == 0


def test_a_finished_runs_model_is_like_any_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 1, 8, 8)).astype(np.float32), np.arange(40) % 3
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    words = {"data": {"name": "npz", "path": str(tmp_path / "images.npz")}, "model": "cnn", "rounds": 1}
    made = fl_dist.run({**words, "clients": {"total": 4, "per_round": 2}}, run={"dir": tmp_path / "run"}, quiet=True)
    last = {name: made.history[-1][f"test_{name}"] for name in ("loss", "accuracy")}
    assert made.evaluate(x[:9], y[:9]) == made.evaluate() == pytest.approx(last, rel=1e-6)
    assert all(torch.isfinite(piece).all() for piece in curvature(made.model(), torch.from_numpy(x[:4])))
    with mock.patch.object(cnn, "blocked", side_effect=lambda x: wanted.append(blocks._wanted) or x):
        wanted: list[bool] = []
        made.evaluate()
        made.model()(torch.from_numpy(x[:4]))
    assert wanted == [True, False], "in evaluations only"
    x[3, 0, 2, 2] = np.nan
    with pytest.raises(ValueError, match="rows hold values that are not finite"):
        made.evaluate(x[:9], y[:9])


def test_weights_that_are_no_numbers_are_seen_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = build("cnn", (1, 8, 8)).state_dict()
    weights["conv2.weight"][0, 0, 0, 0] = torch.nan
    save_file({name: t for name, t in weights.items() if not name.startswith("fc2")}, tmp_path / "nan.safetensors")
    words = [*QUIET, "model=cnn", f"model.pretrained={tmp_path / 'nan.safetensors'}", "model.train=['fc*']"]
    assert main([*words, f"run.dir={tmp_path / 'run'}"]) != 0
    assert "gave values that are not finite" in capsys.readouterr().err
