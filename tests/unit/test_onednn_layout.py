"""oneDNN's blocked image layout: equal up to rounding, used only in training and evaluation on supported CPUs."""

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
from fl_dist.algorithms.core import Algorithm, Batch, Forward, ModelOutput, Number, Part, Vars
from fl_dist.common.hook_contract import HookContractError
from fl_dist.main import main
from fl_dist.models import LayerOutputs, models, onednn_layout, second_order
from fl_dist.models.kernels import allow_first_order_kernels
from tests.support.marks import examples
from tests.support.processes import NO_WANDB

SHAPES = {
    "cnn": [(1, 4, 4), (3, 5, 7), (1, 28, 28), (3, 32, 32)],
    "emnist_cnn": [(1, 6, 6), (2, 9, 8), (1, 28, 28)],
    "lenet5": [(1, 16, 16), (3, 19, 22), (3, 32, 32)],
}
CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


def build(name: str, shape: tuple[int, ...], for_training: bool = True, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    module = models.build(name, settings, shape=shape, outputs=5, classes=5, vocabulary=0).eval()
    if for_training:
        allow_first_order_kernels(module)
    return module


def images(shape: tuple[int, ...], rows: int = 6) -> Tensor:
    x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last)


def first_layer(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The inputs of the first convolution."""
    captured: list[Tensor] = []
    handle = module.conv1.register_forward_hook(lambda layer, inputs, output: captured.append(inputs[0]))
    module(x)
    handle.remove()
    return captured


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(module(x), torch.arange(len(x)) % 5)
    return [loss.detach(), *torch.autograd.grad(loss, [x, *module.parameters()])]


@pytest.mark.parametrize(("name", "shape"), CASES)
@pytest.mark.parametrize("rows", examples([1, 6], [6]))
def test_outputs_and_gradients_equal_those_of_other_layouts(name: str, shape: tuple[int, ...], rows: int) -> None:
    x = images(shape, rows)
    blocked, plain = (gradients(build(name, shape, blocks=use_blocks), x) for use_blocks in (True, False))
    for actual, expected in zip(blocked, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_max_pooling_of_equal_pixels_sends_the_gradient_to_the_first(name: str) -> None:
    shape = SHAPES[name][-1]
    x = torch.ones(2, *shape)
    blocked, plain = (gradients(build(name, shape, blocks=use_blocks), x) for use_blocks in (True, False))
    torch.testing.assert_close(blocked, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_a_supported_cpu_uses_the_kernels(name: str) -> None:
    shape = SHAPES[name][0]
    module, x = build(name, shape), images(shape)
    assert all(captured.is_mkldnn == onednn_layout.is_supported() for captured in first_layer(module, x))
    assert module(x).layout == torch.strided
    for plain in (build(name, shape, blocks=False), build(name, shape, for_training=False)):
        assert not any(captured.is_mkldnn for captured in first_layer(plain, x))
    with second_order(module):
        assert not any(captured.is_mkldnn for captured in first_layer(module, x))


@pytest.mark.parametrize("kind", ["AVX2", "AVX512", "DEFAULT", "SVE256"])
def test_only_avx_cpus_are_supported(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    onednn_layout.is_supported.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kind)
    try:
        assert onednn_layout.is_supported() == (kind.startswith("AVX") and torch.backends.mkldnn.is_available())
    finally:
        onednn_layout.is_supported.cache_clear()


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_models_with_unsupported_layers_are_not_blocked(norm: str) -> None:
    x = images((3, 8, 8))
    assert not any(captured.is_mkldnn for captured in first_layer(build("cnn", (3, 8, 8), norm=norm), x))


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
def test_other_precisions_and_missing_kernels_work(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    module, x = build("cnn", (3, 8, 8)), images((3, 8, 8))
    expected = module(x).detach()
    outputs = call(module, x)
    outputs.sum().backward()
    torch.testing.assert_close(outputs.float(), expected, rtol=0.1, atol=0.02)


def curvature(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The derivatives of the squared norm of the gradient."""
    params = list(module.parameters())
    slope = torch.autograd.grad(module(x).square().sum(), params, create_graph=True)
    squared = torch.stack([piece.square().sum() for piece in slope]).sum()
    return list(torch.autograd.grad(squared, params))


def test_second_order_uses_the_usual_layout() -> None:
    x, module = images((3, 8, 8)), build("cnn", (3, 8, 8))
    with second_order(module):
        inside = curvature(module, x)
    torch.testing.assert_close(inside, curvature(build("cnn", (3, 8, 8), blocks=False), x), rtol=0, atol=0)
    torch.testing.assert_close(inside, curvature(build("cnn", (3, 8, 8), for_training=False), x), rtol=0, atol=0)
    if onednn_layout.is_supported():
        with pytest.raises(HookContractError, match="cannot be differentiated twice; set model.blocks=false"):
            curvature(module, x)


def test_second_order_nests_and_ends_with_an_error() -> None:
    module: Any = nn.Sequential(build("cnn", (3, 8, 8)), build("cnn", (3, 8, 8), for_training=False))
    with pytest.raises(KeyError), second_order(module):
        raise KeyError
    assert [layer.allows_blocks for layer in module] == [True, False]
    with second_order(module):
        with second_order(module):
            pass
        assert [layer.allows_blocks for layer in module] == [False, False]
    assert [layer.allows_blocks for layer in module] == [True, False]


def test_second_order_uses_the_math_kernel_of_attention_only_where_gradients_are_recorded() -> None:
    module = nn.Linear(1, 1)
    with second_order(module):
        assert not torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    with torch.no_grad(), second_order(module):
        assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_layer_outputs_for_parts_have_the_usual_layout() -> None:
    def layer_output(use_blocks: bool) -> list[Tensor]:
        """The output of a layer, and the gradient with respect to it."""
        module = build("cnn", (3, 8, 8), blocks=use_blocks)
        taps = LayerOutputs(module, ("conv2",))
        logits = module(images((3, 8, 8)))
        feature = taps.pop(torch.float32)["conv2"]
        assert feature.layout == torch.strided
        return [feature, *torch.autograd.grad(logits.square().sum(), feature)]

    torch.testing.assert_close(layer_output(True), layer_output(False), rtol=1e-4, atol=1e-6)


class Smooth(Part):
    """Penalises the gradient of the logits with respect to the images."""

    def inputs(self, x: Tensor, i: Vars) -> Tensor:
        return x.detach().requires_grad_()

    def penalty(self, output: ModelOutput, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Number:
        (slope,) = torch.autograd.grad(output.logits.sum(), batch[0], create_graph=True)
        return slope.square().mean()


def smooth() -> Algorithm:
    return Algorithm(Smooth())


def test_a_part_that_differentiates_twice_gets_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        *NO_WANDB,
        "rounds=1",
        "model=cnn",
        "algorithm=tests.unit.test_onednn_layout:smooth",
        "clients={total: 4, per_round: 1}",
    ]
    assert main([*settings, f"run.dir={tmp_path / 'plain'}", "model.blocks=false"]) == 0
    code = main([*settings, f"run.dir={tmp_path / 'blocks'}"])
    if onednn_layout.is_supported():
        error = capsys.readouterr().err
        assert code == 1 and "cannot be differentiated twice" in error and "set model.blocks=false" in error
    else:
        assert code == 0


def test_the_model_of_a_finished_run_is_not_blocked(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 1, 8, 8)).astype(np.float32), np.arange(40) % 3
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    settings = {"data": {"name": "npz", "path": str(tmp_path / "images.npz")}, "model": "cnn", "rounds": 1}
    run = fl_dist.run({**settings, "clients": {"total": 4, "per_round": 2}}, run={"dir": tmp_path / "run"}, quiet=True)
    metrics = {name: run.history[-1][f"test_{name}"] for name in ("loss", "accuracy")}
    assert run.evaluate(x[:9], y[:9]) == run.evaluate() == pytest.approx(metrics, rel=1e-6)
    assert all(torch.isfinite(piece).all() for piece in curvature(run.model(), torch.from_numpy(x[:4])))
    allowed: list[bool] = []

    def to_blocks(module: onednn_layout.BlockedModule, x: Tensor) -> Tensor:
        allowed.append(module.allows_blocks)
        return x

    with mock.patch.object(onednn_layout.BlockedModule, "to_blocks", to_blocks):
        run.evaluate()
        run.model()(torch.from_numpy(x[:4]))
    assert allowed == [True, False], "only in evaluation"
    x[3, 0, 2, 2] = np.nan
    with pytest.raises(ValueError, match="rows hold values that are not finite"):
        run.evaluate(x[:9], y[:9])


def test_nan_weights_are_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = build("cnn", (1, 8, 8)).state_dict()
    weights["conv2.weight"][0, 0, 0, 0] = torch.nan
    save_file({name: t for name, t in weights.items() if not name.startswith("fc2")}, tmp_path / "nan.safetensors")
    settings = [*NO_WANDB, "model=cnn", f"model.pretrained={tmp_path / 'nan.safetensors'}", "model.train=['fc*']"]
    assert main([*settings, f"run.dir={tmp_path / 'run'}"]) != 0
    assert "gave values that are not finite" in capsys.readouterr().err
