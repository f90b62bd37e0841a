"""Models have the published sizes and formulas; parameter files are loaded exactly or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from fl_dist.models import load_init, models
from fl_dist.models.vit import HEADS, Attention, to_patches
from fl_dist.models.weights import load_pretrained
from tests.support.models import CIFAR, build_by_name, error_message, parameter_count


def test_every_setting_has_a_description() -> None:
    for name in models:
        assert all(field.description for field in models.schema(name).model_fields.values())


def test_published_parameter_counts() -> None:
    assert parameter_count(build_by_name("cnn")) == 2_156_490
    assert parameter_count(build_by_name("vit_cifar")) == 1_825_162
    assert parameter_count(build_by_name("mlp", (5,), 3, hidden=[])) == 18


@pytest.mark.parametrize(
    ("name", "shape", "classes", "settings", "count"),
    [
        ("lenet5", CIFAR, 10, {}, 797_962),
        ("lenet5", CIFAR, 100, {}, 815_332),
        ("lenet5", CIFAR, 10, {"channels": [6, 16], "units": [120, 84]}, 62_006),
        ("resnet8_gn", CIFAR, 100, {}, 1_258_404),
        ("resnet18_gn", CIFAR, 10, {}, 11_181_642),
        ("resnet18_gn", CIFAR, 100, {}, 11_227_812),
        ("resnet18_gn", CIFAR, 10, {"stem": "cifar"}, 11_173_962),
        ("resnet18_gn", CIFAR, 100, {"stem": "cifar"}, 11_220_132),
        ("resnet18_gn", (3, 64, 64), 200, {"stem": "cifar"}, 11_271_432),
        ("resnet18", CIFAR, 10, {}, 11_173_962),
        ("resnet18", CIFAR, 100, {"norm": "none"}, 11_210_532),
        ("fasttext", (200,), 4, {}, 3_157_508),
        ("emnist_cnn", (1, 28, 28), 62, {}, 1_206_590),
        ("vgg11", CIFAR, 10, {}, 9_272_790),
        ("vgg11", CIFAR, 100, {}, 9_377_508),
    ],
)
def test_models_have_the_parameter_counts_of_the_papers(
    name: str, shape: tuple[int, ...], classes: int, settings: dict, count: int
) -> None:
    model = build_by_name(name, shape, classes, **settings)
    assert parameter_count(model) == count
    rows = torch.zeros(2, *shape, dtype=torch.long if name == "fasttext" else torch.float32)
    assert model.eval()(rows).shape == (2, classes)


def test_batchnorm_of_resnet18_has_its_statistics() -> None:
    assert sum(buffer.numel() for buffer in build_by_name("resnet18").buffers()) == 9_491


def test_resnet_follows_the_formula() -> None:
    """One block with and one without downsampling, written out."""
    model, x = build_by_name("resnet8_gn", classes=5).eval(), torch.randn(2, *CIFAR)

    def block(b: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(F.group_norm(F.conv2d(x, b.conv1.weight, None, b.conv1.stride, 1), 2, b.norm1.weight, b.norm1.bias))
        y = F.group_norm(F.conv2d(y, b.conv2.weight, None, 1, 1), 2, b.norm2.weight, b.norm2.bias)
        if not isinstance(b.shortcut, nn.Identity):
            conv, norm = b.shortcut
            x = F.group_norm(F.conv2d(x, conv.weight, None, 2), 2, norm.weight, norm.bias)
        return F.relu(x + y)

    y = F.relu(F.group_norm(F.conv2d(x, model.conv.weight, None, 2, 3), 2, model.norm.weight, model.norm.bias))
    y = F.max_pool2d(y, 3, 2, 1)
    for (b,) in model.stages:
        y = block(b, y)
    expected = F.linear(y.mean((2, 3)), model.fc.weight, model.fc.bias)
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_fasttext_averages_padding_too() -> None:
    model, tokens = build_by_name("fasttext", (5,), 4), torch.tensor([[7, 9, 0, 0, 0]])
    vectors = model.embed.weight
    mean = (vectors[7] + vectors[9]) / 5
    assert torch.equal(vectors[0], torch.zeros(32))
    expected = (mean @ model.fc1.weight.T + model.fc1.bias) @ model.fc2.weight.T + model.fc2.bias
    assert torch.allclose(model(tokens)[0], expected, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "cnn", "vit_cifar"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8), (2, 8, 12)])
def test_models_return_logits_for_every_image_size(name: str, shape: tuple[int, ...]) -> None:
    assert build_by_name(name, shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("mlp", {}), ("cnn", {"norm": "group"}), ("cnn", {"norm": "batch"}), ("vit_cifar", {})],
)
def test_a_model_is_a_function_of_the_seed(name: str, settings: dict) -> None:
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    first, again, other = (build_by_name(name, (1, 8, 8), seed=seed, **settings)(x) for seed in (0, 0, 1))
    assert first.equal(again) and not first.equal(other)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_mlp_follows_the_formula_and_has_the_documented_names(activation: str) -> None:
    model, x = build_by_name("mlp", (2, 3), 4, hidden=[5, 6], activation=activation), torch.randn(3, 2, 3)
    values = dict(model.named_parameters())
    assert list(values) == [f"layers.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]
    act, y = getattr(torch, activation), x.reshape(3, 6)
    for i in range(3):
        y = y @ values[f"layers.{i}.weight"].T + values[f"layers.{i}.bias"]
        y = act(y) if i < 2 else y
    torch.testing.assert_close(model(x), y)


@pytest.mark.parametrize("norm", ["none", "group"])
def test_cnn_follows_the_formula(norm: str) -> None:
    model, x = build_by_name("cnn", norm=norm), torch.randn(2, *CIFAR)
    groups = (lambda z: F.group_norm(z, 2)) if norm == "group" else (lambda z: z)
    y = F.max_pool2d(groups(F.conv2d(x, model.conv1.weight, model.conv1.bias, padding=2)).relu(), 2)
    y = F.max_pool2d(groups(F.conv2d(y, model.conv2.weight, model.conv2.bias, padding=2)).relu(), 2)
    y = (y.reshape(2, 4096) @ model.fc1.weight.T + model.fc1.bias).relu()
    torch.testing.assert_close(model(x), y @ model.fc2.weight.T + model.fc2.bias)


def test_cnn_norm_adds_its_parameters_after_each_convolution() -> None:
    for norm, buffers in (("none", 0), ("batch", 6), ("group", 0)):
        model = build_by_name("cnn", norm=norm)
        assert parameter_count(model) == 2_156_490 + (0 if norm == "none" else 2 * (32 + 64))
        assert len(list(model.buffers())) == buffers
    before = build_by_name("cnn", norm="batch")
    x = torch.randn(8, *CIFAR)
    before(x)
    expected = 0.1 * before.conv1(x).mean((0, 2, 3))
    torch.testing.assert_close(before.norm1.running_mean, expected, rtol=1e-4, atol=1e-6)


def test_cnn_drops_units_in_training_only() -> None:
    model, x = build_by_name("cnn", (1, 8, 8), dropout=0.5), torch.randn(4, 1, 8, 8)
    assert not model(x).equal(model(x))
    torch.manual_seed(3)
    first = model(x)
    torch.manual_seed(3)
    assert model(x).equal(first)
    assert model.eval()(x).equal(build_by_name("cnn", (1, 8, 8))(x))


def test_vit_patches_are_those_of_unfold() -> None:
    x = torch.randn(2, 3, 8, 12)
    assert to_patches(x).equal(F.unfold(x, 4, stride=4).transpose(1, 2))


def test_vit_attention_is_scaled_by_the_whole_width() -> None:
    torch.manual_seed(0)
    attention, x = Attention().double(), torch.randn(2, 5, 384, dtype=torch.float64)
    q, k, v = (part.view(2, 5, HEADS, 48).transpose(1, 2) for part in attention.qkv(x).chunk(3, -1))
    weights = torch.softmax(q @ k.transpose(-1, -2) / 384**0.5, -1)
    expected = attention.out((weights @ v).transpose(1, 2).reshape(2, 5, 384))
    torch.testing.assert_close(attention(x), expected)


def test_vit_is_two_pre_norm_blocks_then_mean_norm_and_head() -> None:
    model, x = build_by_name("vit_cifar").double(), torch.randn(2, *CIFAR, dtype=torch.float64)
    y = to_patches(x) @ model.embed.weight.T + model.embed.bias + model.position
    for block in model.blocks:
        y = y + block.attention(F.layer_norm(y, (384,), block.norm1.weight, block.norm1.bias))
        z = F.layer_norm(y, (384,), block.norm2.weight, block.norm2.bias)
        y = y + F.gelu(block.mlp[2](F.gelu(block.mlp[0](z))))
    assert len(model.blocks) == 2 and model.position.shape == (64, 384)
    torch.testing.assert_close(model(x), model.head(F.layer_norm(y.mean(1), (384,))))
    assert abs(model.position.std() - 1) < 0.02


@pytest.mark.parametrize(("name", "shape"), [("cnn", (5,)), ("cnn", (1, 3, 8)), ("vit_cifar", (1, 30, 32))])
def test_a_model_refuses_unsupported_input_shapes(name: str, shape: tuple[int, ...]) -> None:
    assert f"not {list(shape)}; use model mlp" in error_message(build_by_name, name, shape)


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((28, 28, 3), "move the channels first"),
        ((30, 30, 1), "move the channels first"),
        ((28, 28), "add a channel axis, x[:, None], or use model mlp"),
        ((1, 2, 3), "use model mlp"),
    ],
)
@pytest.mark.parametrize("name", ["cnn", "vit_cifar"])
def test_rows_in_another_order_of_axes_get_advice(name: str, shape: tuple[int, ...], advice: str) -> None:
    assert error_message(build_by_name, name, shape).endswith(f"not {list(shape)}; {advice}")


@pytest.fixture
def init_file(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = {name: p.detach().double() for name, p in build_by_name("mlp", (5,), 3, seed=7).named_parameters()}
    save_file(tensors, tmp_path / "init.safetensors")
    return tmp_path / "init.safetensors", tensors


def test_init_is_copied_in_place_and_converted(init_file: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = init_file
    model = build_by_name("mlp", (5,), 3)
    pointers = [p.data_ptr() for p in model.parameters()]
    load_init(model, path)
    assert all(p.dtype == torch.float32 and p.equal(tensors[n].float()) for n, p in model.named_parameters())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(p.requires_grad for p in model.parameters())


def test_init_may_hold_buffers(tmp_path: Path) -> None:
    model, other = build_by_name("cnn", (1, 8, 8), norm="batch"), build_by_name("cnn", (1, 8, 8), norm="batch", seed=1)
    other.norm1.running_mean.fill_(3)
    save_file(other.state_dict(), tmp_path / "all.safetensors")
    load_init(model, tmp_path / "all.safetensors")
    assert all(a.equal(b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    save_file(dict(other.named_parameters()), tmp_path / "parameters.safetensors")
    load_init(model, tmp_path / "parameters.safetensors")


def test_init_that_does_not_fit_is_refused_and_changes_nothing(
    init_file: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, tensors = init_file
    model = build_by_name("mlp", (5,), 3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    renamed = {name.replace("1.bias", "9.bias"): tensor for name, tensor in tensors.items()}
    save_file(renamed, path)
    assert "lacks 'layers.1.bias' and has unknown 'layers.9.bias'" in error_message(load_init, model, path)
    save_file(tensors | {"layers.1.weight": torch.zeros(3, 63)}, path)
    assert "layers.1.weight has shape [3, 63], in the model [3, 64]" in error_message(load_init, model, path)

    assert all(p.equal(before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("load", [load_init, load_pretrained])
def test_weights_that_are_no_floats_are_refused(load: Callable[..., None], dtype: torch.dtype, tmp_path: Path) -> None:
    model = build_by_name("mlp", (5,), 3)
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "w.safetensors")
    message = error_message(load, model, tmp_path / "w.safetensors")
    assert f"is of type {str(dtype).removeprefix('torch.')}, in the model float32" in message
    load(model, write_half(model, tmp_path / "half.safetensors"))


def write_half(model: nn.Module, path: Path) -> Path:
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}, path)
    return path


def test_init_names_an_absent_or_damaged_file(init_file: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = init_file
    model, data = build_by_name("mlp", (5,), 3), path.read_bytes()
    for damaged in (b"", b"text", data[:-1], b"\xff" * 100):
        path.write_bytes(damaged)
        assert f"{path} is not a readable .safetensors file" in error_message(load_init, model, path)
    assert "does not exist" in error_message(load_init, model, path.with_name("none"))
