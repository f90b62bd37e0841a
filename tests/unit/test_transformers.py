"""Language models of transformers: the library's numbers, adapters, what is shared, written and refused."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fl_dist
from fl_dist.common.errors import FlDistError
from fl_dist.common.torchvision import without_broken_torchvision
from fl_dist.config import load
from fl_dist.federation.experiment import Experiment
from fl_dist.main import main
from fl_dist.models import ModelInterface, build_model
from fl_dist.models.transformers_files import quiet_library
from tests.support.language_models import GPT2, LENGTH, LLAMA, LORA, VOCABULARY, run_arguments, write_model
from tests.support.models import error_message
from tests.support.run_folder import model_hash, read_records

CAUSAL = ModelInterface((LENGTH,), VOCABULARY, VOCABULARY, per_token=True)
LABELS = ModelInterface((LENGTH,), 3, VOCABULARY)
MASKED_LM = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    write_model(folder / "gpt2", GPT2)
    write_model(folder / "shards", GPT2, max_shard_size="50KB")
    write_model(folder / "llama", LLAMA)
    write_model(folder / "half", LLAMA, torch.bfloat16)
    return folder


def build(path: Any, interface: ModelInterface = CAUSAL, **settings: Any) -> Any:
    torch.manual_seed(0)
    section = {"name": "transformers", "path": path if isinstance(path, dict) else str(path)} | settings
    return build_model(section, interface, torch.float32)


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def randomise(module: nn.Module) -> Any:
    """Draw what is trained again: adapters are 0 at first."""
    generator = torch.Generator().manual_seed(1)
    for p in trained(module).values():
        p.data.normal_(0, 0.1, generator=generator)
    return module


def load_with_library(path: Path, kind: str = "CausalLM", **options: Any) -> Any:
    with quiet_library() as library:
        return getattr(library, f"AutoModelFor{kind}").from_pretrained(path, **options).eval()


def padded_rows() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(LENGTH) < torch.tensor([[3], [8], [5], [1]])
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def run(folder: Path, name: str, model: dict[str, Any], *more: str, **data: Any) -> fl_dist.Run:
    assert main([*run_arguments(folder, model, f"run.dir={folder / name}", *more, **data)]) == 0
    return fl_dist.load(folder / name)


@pytest.mark.parametrize("name", ["gpt2", "shards", "llama"])
def test_logits_are_those_of_the_library(name: str, bases: Path) -> None:
    rows = padded_rows()
    expected, module = load_with_library(bases / name), build(bases / name).eval()
    assert torch.equal(module(rows["input_ids"]), expected(rows["input_ids"]).logits)
    torch.testing.assert_close(
        module(**rows)[rows["attention_mask"] == 1], expected(**rows).logits[rows["attention_mask"] == 1]
    )


def test_the_class_of_a_text_does_not_depend_on_its_padding(bases: Path) -> None:
    module, rows = build(bases / "gpt2", LABELS).eval(), padded_rows()
    logits = module(**rows)
    assert logits.shape == (4, 3)
    for row, count in enumerate(rows["attention_mask"].sum(1).tolist()):
        single = {name: tensor[row : row + 1, :count] for name, tensor in rows.items()}
        torch.testing.assert_close(module(**single), logits[row : row + 1])


def test_settings_alone_are_drawn_from_the_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | {"vocab_size": VOCABULARY}))
    by_settings, by_file, by_folder = build(GPT2), build(tmp_path / "config.json"), build(tmp_path)
    assert by_settings.network.config.vocab_size == VOCABULARY
    for other in (by_file, by_folder):
        assert all(p.equal(q) for p, q in zip(by_settings.parameters(), other.parameters(), strict=True))
    assert by_folder.origin == f"weights drawn from the seed: {tmp_path} has no .safetensors file"


def test_only_adapters_and_a_classifiers_head_are_trained(bases: Path) -> None:
    per_layer = 2 * (32 + 96)
    assert sum(p.numel() for p in trained(build(bases / "gpt2", lora=LORA)).values()) == 2 * per_layer
    module = build(bases / "gpt2", LABELS, lora=LORA)
    assert sum(p.numel() for p in trained(module).values()) == 2 * per_layer + 3 * 32
    randomise(module)(**padded_rows()).square().sum().backward()
    assert all(bool(p.grad.any()) for p in trained(module).values())


@pytest.mark.parametrize(("kind", "data"), [("CausalLM", {}), ("SequenceClassification", {"label": "label"})])
def test_a_run_writes_an_adapter_that_peft_loads_with_the_same_logits(
    kind: str, data: dict, bases: Path, tmp_path: Path
) -> None:
    result = run(tmp_path, "run", {"path": str(bases / "gpt2"), "lora": LORA}, **data)
    options = {"num_labels": 2, "pad_token_id": 1} if data else {}
    base = load_with_library(bases / "gpt2", kind, **options)
    with quiet_library():
        from peft import PeftModel

        reloaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "run" / "adapter").eval()
    rows = padded_rows()
    filled = rows | ({"input_ids": rows["input_ids"].masked_fill(rows["attention_mask"] == 0, 1)} if data else {})
    with torch.no_grad():
        expected = reloaded(**filled).logits
        assert not torch.allclose(base(**filled).logits, expected, atol=1e-3)
        torch.testing.assert_close(result.model()(**rows), expected)
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (LORA["r"], str(bases / "gpt2"))


def test_a_run_stores_and_sends_adapters_only(bases: Path, tmp_path: Path) -> None:
    result = run(tmp_path, "run", {"path": str(bases / "gpt2"), "lora": LORA}, "algorithm=fedavg")
    final = load_file(tmp_path / "run" / "model.safetensors")
    assert final.keys() == trained(build(bases / "gpt2", lora=LORA)).keys()
    numbers = sum(tensor.numel() for tensor in final.values())
    assert read_records(tmp_path / "run")[0]["bytes_up"] == 3 * 4 * numbers
    assert result.evaluate()["loss"] == pytest.approx(result.history[-1]["test_loss"])


def test_full_training_of_tied_weights_gives_a_folder_of_the_library(bases: Path, tmp_path: Path) -> None:
    result = run(tmp_path, "run", {"path": str(bases / "gpt2")})
    rows = padded_rows()["input_ids"]
    trained_model, before = load_with_library(tmp_path / "run" / "model"), load_with_library(bases / "gpt2")
    assert trained_model.lm_head.weight is trained_model.transformer.wte.weight
    assert not torch.allclose(trained_model.lm_head.weight, before.lm_head.weight)
    torch.testing.assert_close(result.model()(rows), trained_model(rows).logits)


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "float32"), ("half", "auto"), ("half", "bfloat16")])
def test_the_frozen_base_stays_in_the_file_that_all_ranks_map(
    name: str, dtype: str, bases: Path, tmp_path: Path
) -> None:
    file = bases / name / "model.safetensors"
    content = file.read_bytes()
    model = {"path": str(bases / name), "dtype": dtype, "lora": {"r": 2}}
    experiment = Experiment(load(None, run_arguments(tmp_path, model)), torch.device("cpu"))
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    mapped = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    for flat in (experiment.model, experiment.eval_model):
        frozen = [p for p in flat.module.parameters() if not p.requires_grad]
        assert {p.dtype for p in frozen} == {torch.float32 if dtype == "float32" else torch.bfloat16}
        assert all(any(first <= p.data_ptr() < last for first, last in mapped) for p in frozen)
    assert file.read_bytes() == content


def test_a_base_in_half_precision_trains_adapters_in_float32(bases: Path, tmp_path: Path) -> None:
    model = {"path": str(bases / "half"), "dtype": "auto", "lora": {"r": 2}}
    result = run(tmp_path, "run", model, "local.lr=0.3")
    assert {tensor.dtype for tensor in load_file(tmp_path / "run" / "model.safetensors").values()} == {torch.float32}
    losses = [row["train_loss"] for row in result.history]
    assert losses[-1] < losses[0] - 0.05
    assert result.model()(padded_rows()["input_ids"]).dtype == torch.float32


def test_a_head_in_float32_fits_a_base_in_half_precision(bases: Path) -> None:
    module = randomise(build(bases / "half", LABELS, dtype="bfloat16", lora={"r": 2}))
    module(**padded_rows()).square().sum().backward()
    assert all(p.dtype == torch.float32 and bool(p.grad.any()) for p in trained(module).values())


@pytest.mark.parametrize("lora", [None, LORA])
def test_gradient_checkpointing_changes_no_number(lora: dict | None, bases: Path) -> None:
    """Also with dropout, which GPT-2's configuration has."""
    gradients = []
    for is_on in (False, True):
        module = randomise(build(bases / "gpt2", lora=lora, gradient_checkpointing=is_on)).train()
        torch.manual_seed(3)
        loss = module(**padded_rows()).square().mean()
        loss.backward()
        gradients.append({name: p.grad for name, p in trained(module).items()} | {"loss": loss.detach()})
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


def test_more_rounds_continue_from_the_checkpoint(bases: Path, tmp_path: Path) -> None:
    model = {"path": str(bases / "gpt2"), "lora": LORA}
    run(tmp_path, "three", model)
    run(tmp_path, "extended", model, "rounds=1")
    run(tmp_path, "extended", model)
    assert model_hash(tmp_path / "extended") == model_hash(tmp_path / "three")
    adapters = [
        (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("three", "extended")
    ]
    assert adapters[0] == adapters[1]


@pytest.mark.parametrize("key", ["init", "pretrained"])
@pytest.mark.parametrize("file", ["model.safetensors", "adapter/adapter_model.safetensors"])
def test_a_run_begins_from_an_adapter(key: str, file: str, bases: Path, tmp_path: Path) -> None:
    final = randomise(build(bases / "gpt2", lora=LORA))
    tensors = {name: p.detach() for name, p in trained(final).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    final.export(tmp_path, tensors)
    loaded = build(bases / "gpt2", lora=LORA, **{key: str(tmp_path / file)})
    assert all(p.equal(tensors[name]) for name, p in trained(loaded).items())


REFUSED: dict[str, tuple[Any, ModelInterface, dict[str, Any], str]] = {
    "no folder": ("{}/nothing", CAUSAL, {}, "nothing does not exist; set it to a local folder with config.json and"),
    "a name of a hub": ("openai/gpt2", CAUSAL, {}, "model.path openai/gpt2 does not exist; set it to a local folder"),
    "no config": ("{}", CAUSAL, {}, "config.json cannot be read (No such file or directory: "),
    "pickles": ("{}/pickles", CAUSAL, {}, "has pytorch_model.bin, but no .safetensors file, and other formats may run"),
    "an adapter": ("{}/adapter", CAUSAL, {}, "adapter is an adapter; set it to the adapter's base, and model.init to"),
    "cut file": ("{}/cut", CAUSAL, {}, "cut cannot be loaded: "),
    "missing weights": ("{}/lost", CAUSAL, {}, "lost has no weights of transformer.ln_f.bias as its config.json"),
    "other shapes": ("{}/wide", CAUSAL, {}, "wide cannot be loaded: "),
    "ids": ("{}/gpt2", CAUSAL._replace(outputs=99), {}, "an embedding of 18 ids, but the data has ids up to 98; use"),
    "ids of texts": ("{}/gpt2", LABELS._replace(vocabulary=99), {}, "18 ids, but the data has ids up to 98"),
    "numbers": (GPT2, ModelInterface((3,), 2), {}, "model transformers needs rows of token ids, such as those of data"),
    "not causal": (
        MASKED_LM,
        CAUSAL,
        {},
        "is of the type bert, which does not predict the next token; choose a causal",
    ),
    "no texts": ({"model_type": "vit"}, LABELS, {}, "is of the type vit, which has no classifier of texts"),
    "unknown type": (
        {"model_type": "gpt3"},
        CAUSAL,
        {},
        "model_type 'gpt3', which transformers does not have; did you",
    ),
    "no type": ({"n_layer": 2}, CAUSAL, {}, "model_type 'None', which transformers does not have; set it, as in"),
    "misspelt setting": (GPT2 | {"n_layers": 2}, CAUSAL, {}, "gpt2 has no setting 'n_layers'; did you mean 'n_layer'?"),
    "bad setting": (GPT2 | {"n_head": 5}, CAUSAL, {}, "cannot be built: "),
    "targets": ("{}/gpt2", CAUSAL, {"lora": {"targets": ["c_atn"]}}, "named 'c_atn'; did you mean 'c_attn'?"),
    "no layer of targets": (
        "{}/gpt2",
        CAUSAL,
        {"lora": {"targets": ["q_proj"]}},
        "model.lora.targets: no layer is named 'q_proj'; ",
    ),
    "half precision of all": ("{}/gpt2", CAUSAL, {"dtype": "bfloat16"}, "set model.lora, or dtype to float32"),
    "another rank": (
        "{}/gpt2",
        CAUSAL,
        {"lora": LORA | {"r": 4}, "init": "{}/adapter.safetensors"},
        "set model to the",
    ),
    "another base": ("{}/llama", CAUSAL, {"lora": {}, "pretrained": "{}/adapter.safetensors"}, "shares no tensor by"),
    "another base, all": ("{}/llama", CAUSAL, {"lora": {}, "init": "{}/adapter.safetensors"}, "lacks 'network.base"),
}


@pytest.fixture(scope="module")
def defects(bases: Path) -> Path:
    """Folders that cannot be used, beside those that can."""
    settings = (bases / "gpt2" / "config.json").read_text()
    weights = load_file(bases / "gpt2" / "model.safetensors")
    for name in ("pickles", "cut", "lost", "wide"):
        (bases / name).mkdir()
        (bases / name / "config.json").write_text(settings)
    (bases / "pickles" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (bases / "cut" / "model.safetensors").write_bytes((bases / "gpt2" / "model.safetensors").read_bytes()[:5000])
    lost = {name: tensor for name, tensor in weights.items() if "ln_f" not in name}
    save_file(lost, bases / "lost" / "model.safetensors", {"format": "pt"})
    wide = weights | {"transformer.wpe.weight": torch.zeros(24, 48)}
    save_file(wide, bases / "wide" / "model.safetensors", {"format": "pt"})
    adapted = build(bases / "gpt2", lora=LORA)
    adapted.export(bases, {name: p.detach() for name, p in trained(adapted).items()})
    save_file({name: p.detach() for name, p in trained(adapted).items()}, bases / "adapter.safetensors")
    return bases


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line(case: str, defects: Path) -> None:
    path, interface, settings, message = REFUSED[case]
    path = path.format(defects) if isinstance(path, str) else path
    settings = {k: v.format(defects) if isinstance(v, str) else v for k, v in settings.items()}
    error = error_message(lambda: build(path, interface, **settings))
    assert message in error and len(error) < 400, error


def test_code_beside_a_model_is_not_run(bases: Path, tmp_path: Path) -> None:
    """A configuration may name code of its own, which the library would offer to run."""
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\n")
    (tmp_path / "model.safetensors").write_bytes((bases / "gpt2" / "model.safetensors").read_bytes())
    settings = json.loads((bases / "gpt2" / "config.json").read_text())
    settings["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    rows = padded_rows()["input_ids"]
    assert torch.equal(build(tmp_path).eval()(rows), build(bases / "gpt2").eval()(rows))


@pytest.mark.parametrize(
    ("package", "settings", "message"),
    [
        ("transformers", {}, "model transformers needs the package"),
        ("peft", {"lora": {}}, "model.lora needs the package"),
    ],
)
def test_without_the_packages_the_error_names_the_extra(
    package: str, settings: dict, message: str, bases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    error = error_message(lambda: build(bases / "gpt2", **settings))
    assert error.startswith(message) and error.endswith("pip install 'fl_dist[llm]'")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.length=30", "rows have 30 tokens, the model 24 positions; lower data.length"),
        (
            "model.lora.rank=4",
            "unknown key model.lora.rank (set on the command line); valid: alpha, dropout, r, targets",
        ),
        ("model.lora.r=0", "model.lora.r (set on the command line): input should be greater than or equal to 1, got 0"),
        ("task=regression", "task regression needs targets of floating point"),
    ],
)
def test_mistakes_of_a_configuration_are_one_line(
    word: str, message: str, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"path": str(bases / "gpt2"), "lora": LORA}
    assert main([*run_arguments(tmp_path, model, f"run.dir={tmp_path / 'run'}", word), "--check"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_vocabulary_may_be_larger_than_that_of_the_data(tmp_path: Path) -> None:
    write_model(tmp_path / "large", GPT2 | {"vocab_size": 64})
    run(tmp_path, "run", {"path": str(tmp_path / "large"), "lora": LORA}, "rounds=1")


def test_a_torchvision_of_another_torch_is_hidden_while_others_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    (package / "_C.so").write_bytes(b"of another torch")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    with without_broken_torchvision(), pytest.raises(ModuleNotFoundError):
        import torchvision
    with pytest.raises(RuntimeError, match="nms"):
        import torchvision
    (package / "_C.so").unlink()
    with without_broken_torchvision(), pytest.raises(RuntimeError, match="nms"):
        import torchvision  # noqa: F401


def test_a_model_that_cannot_be_written_is_an_error_in_one_line(bases: Path, tmp_path: Path) -> None:
    module = build(bases / "gpt2")
    (tmp_path / "model").write_text("a file where the folder has to be")
    with pytest.raises(FlDistError, match="model cannot be written: .*; repair that, and start the run again"):
        module.export(tmp_path, {name: p.detach() for name, p in trained(module).items()})
