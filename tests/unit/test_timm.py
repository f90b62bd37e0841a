"""Networks of timm: published sizes, a formula written out, adapters, weight files."""

import math
import shlex
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fl_dist.main import main
from fl_dist.models import ModelInterface, build_model, load_init
from tests.support.models import CIFAR, build_by_name, error_message, parameter_count
from tests.support.processes import ROOT
from tests.support.snippets import snippets
from tests.support.timm_models import small_run_arguments, small_swin, timm

TINY = "test_vit"
HEADS, BLOCKS = 2, 6
"""Of TINY, a model of timm's own tests."""
IMAGENET = (3, 224, 224)


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("vit_base_patch16_224", 85_952_456),
        ("vit_base_patch32_224", 87_609_032),
        ("swin_small_patch4_window7_224", 48_991_058),
        ("swin_base_patch4_window7_224", 86_948_224),
    ],
)
def test_models_have_the_parameter_counts_of_the_papers(model: str, count: int) -> None:
    with torch.device("meta"):
        module = build_by_name("timm", IMAGENET, 200, model=model)
    assert parameter_count(module) == count == sum(p.numel() for p in trainable_parameters(module).values())
    assert not any(getattr(layer, "drop_prob", 0) or getattr(layer, "p", 0) for layer in module.modules())


@pytest.mark.parametrize(
    ("model", "head", "count"),
    [
        # Per attention: 16 * (width + 3 * width) for qkv and 16 * (width + width) for proj.
        ("vit_base_patch16_224", "head", 16 * 6 * 768 * 12 + 200 * 769),
        ("swin_small_patch4_window7_224", "head.fc", 16 * 6 * 96 * (2 * 1 + 2 * 2 + 18 * 4 + 2 * 8) + 200 * 769),
    ],
)
def test_only_adapters_and_head_are_trainable(model: str, head: str, count: int) -> None:
    with torch.device("meta"):
        plain, adapted = (build_by_name("timm", IMAGENET, 200, model=model, lora=rank) for rank in (0, 16))
    names, heads = trainable_parameters(plain).keys(), {f"{head}.weight", f"{head}.bias"}
    layers = [name for name in names if name.endswith((".attn.qkv.weight", ".attn.proj.weight"))]
    assert trainable_parameters(adapted).keys() == {f"{name}_{k}" for name in layers for k in "ab"} | heads
    assert dict(adapted.named_parameters()).keys() - trainable_parameters(adapted).keys() == names - heads
    assert sum(p.numel() for p in trainable_parameters(adapted).values()) == count


def randomise(module: nn.Module) -> nn.Module:
    """Draw every parameter again, so that none is 0 or 1 by initialisation."""
    generator = torch.Generator().manual_seed(1)
    for p in module.parameters():
        p.data.normal_(0, 0.1, generator=generator)
    return module


def vit_reference(w: dict[str, Tensor], x: Tensor, heads: int = HEADS, blocks: int = BLOCKS) -> Tensor:
    """A vision transformer from its parameters: Dosovitskiy et al. (2021)."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(name: str, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in linear(f"{name}.qkv", x).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return linear(f"{name}.proj", (weights @ v).transpose(1, 2).flatten(2))

    kernel = w["patch_embed.proj.weight"]
    tokens = F.unfold(x, kernel.shape[-1], stride=kernel.shape[-1]).transpose(1, 2)
    tokens = tokens @ kernel.flatten(1).T + w["patch_embed.proj.bias"]
    y = torch.cat([w["cls_token"].expand(len(x), -1, -1), tokens], 1) + w["pos_embed"]
    for k in range(blocks):
        y = y + attention(f"blocks.{k}.attn", norm(f"blocks.{k}.norm1", y))
        z = linear(f"blocks.{k}.mlp.fc1", norm(f"blocks.{k}.norm2", y))
        y = y + linear(f"blocks.{k}.mlp.fc2", z * (1 + torch.erf(z / math.sqrt(2))) / 2)
    return linear("head", norm("norm", y)[:, 0])


@pytest.mark.parametrize(("model", "heads", "blocks"), [(TINY, HEADS, BLOCKS), ("vit_tiny_patch16_224", 3, 12)])
def test_vit_follows_the_formula(model: str, heads: int, blocks: int) -> None:
    module, x = randomise(build_by_name("timm", model=model)).double(), torch.randn(2, *CIFAR, dtype=torch.float64)
    expected = vit_reference(dict(module.named_parameters()), x, heads, blocks)
    assert expected.std() > 0.1
    torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)


def test_adapters_start_at_zero_and_add_twice_their_product() -> None:
    plain, adapted, x = (
        build_by_name("timm", model=TINY),
        build_by_name("timm", model=TINY, lora=4),
        torch.randn(2, *CIFAR),
    )
    assert adapted(x).equal(plain(x))
    adapted = randomise(adapted).double()
    w, x = dict(adapted.named_parameters()), x.double()
    merged = {
        name: p + 2 * w[f"{name}_b"] @ w[f"{name}_a"] if f"{name}_a" in w else p
        for name, p in w.items()
        if not name.endswith(("weight_a", "weight_b"))
    }
    torch.testing.assert_close(adapted(x), vit_reference(merged, x), rtol=1e-9, atol=1e-9)


def test_gradients_flow_to_adapters_and_head_only() -> None:
    module, x = randomise(build_by_name("timm", model=TINY, lora=2)).train(), torch.randn(2, *CIFAR)
    module(x).square().sum().backward()
    with_gradient = {name for name, p in module.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert with_gradient == trainable_parameters(module).keys()


@pytest.mark.parametrize("lora", [0, 2])
def test_weights_with_another_head_are_loaded_without_it(lora: int, tmp_path: Path) -> None:
    other = build_by_name("timm", classes=7, seed=1, model=TINY).state_dict()
    save_file(other, tmp_path / "weights.safetensors")
    section = {"name": "timm", "model": TINY, "lora": lora}
    torch.manual_seed(0)
    loaded = build_model(
        section | {"pretrained": str(tmp_path / "weights.safetensors")}, ModelInterface(CIFAR, 10), torch.float32
    ).state_dict()
    fresh = build_by_name("timm", model=TINY, lora=lora).state_dict()
    loaded_names = {name for name in fresh if name in other and not name.startswith("head.")}
    assert len(loaded_names) == len(other) - 2
    assert all(loaded[name].equal(other[name] if name in loaded_names else fresh[name]) for name in fresh)


def test_the_documented_command_writes_a_weight_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented command, without downloading the weights."""
    text = (ROOT / "docs" / "papers.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith('python -c "import sys, timm')]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-c", TINY])
    Path("data/weights").mkdir(parents=True)
    exec(shlex.split(line)[2].replace("pretrained=True", "pretrained=False"), {})
    section = {"name": "timm", "model": TINY, "pretrained": f"data/weights/{TINY}.safetensors"}
    loaded = build_model(section, ModelInterface((3, 160, 160), 200), torch.float32).state_dict()
    file = load_file(section["pretrained"])
    assert {name for name in loaded if not loaded[name].equal(file[name])} == {"head.weight", "head.bias"}


def test_the_documented_code_counts_the_multiply_adds_of_a_paper(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = [s for s in snippets("python") if "FlopCounterMode" in s.text]
    exec(snippet.text, {})
    assert capsys.readouterr().out == "8.7G\n"


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    assert [main(run) for run in small_run_arguments(folder)] == [0, 0, 0]
    return folder


def test_adapters_are_trained_and_other_weights_are_unchanged(single_process: Path) -> None:
    final = load_file(single_process / "adapters" / "model.safetensors")
    assert all(p.any() for name, p in final.items() if name.endswith("weight_b"))
    assert final["blocks.0.attn.qkv.weight_b"].shape == (192, 2)
    assert bool((final["blocks.0.norm1.weight"] == 1).all())


def test_constant_buffers_of_swin_are_unchanged_by_training(single_process: Path) -> None:
    """Indices and masks are buffers, which are sent and averaged."""
    module = small_swin(CIFAR, 4)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    load_init(module, single_process / "swin" / "model.safetensors")
    assert {b.dtype for b in before.values() if b.any()} == {torch.long, torch.float32}
    assert all(buffer.equal(before[name]) for name, buffer in module.named_buffers())


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        ((64,), {}, "model timm needs images [C, H, W], not [64]; use model mlp"),
        (
            CIFAR,
            {"model": "vit_base_patch16_244"},
            "no model 'vit_base_patch16_244'; did you mean 'vit_base_patch16_224'?",
        ),
        (CIFAR, {"model": "hf-hub:timm/vit"}, "timm has no model 'hf-hub:timm/vit'; "),
        (
            CIFAR,
            {"model": "test_resnet", "lora": 2},
            "test_resnet has no attention with layers qkv and proj; set",
        ),
        (CIFAR, {"model": "beitv2_base_patch16_224", "lora": 2}, "has no attention with layers qkv and proj"),
        (CIFAR, {"model": "vgg11"}, "vgg11 cannot be built for images [3, 32, 32]: "),
    ],
)
def test_models_that_cannot_be_built_are_one_line_errors(shape: tuple[int, ...], settings: dict, message: str) -> None:
    with torch.device("meta"):
        error = error_message(lambda: build_by_name("timm", shape, **settings))
    assert message in error and len(error) < 250


def test_networks_for_any_image_size_need_no_size() -> None:
    assert build_by_name("timm", (1, 40, 32), 3, model="test_resnet")(torch.zeros(2, 1, 40, 32)).shape == (2, 3)


def test_without_timm_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert error_message(lambda: timm(CIFAR, 10)) == "model timm needs the package timm: pip install timm"
