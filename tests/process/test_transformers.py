"""Promise: language models have the same bits on any number of workers, and after a kill; a user's own train too."""

import json
import runpy
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fl_dist
from fl_dist.main import main
from fl_dist.models.transformers_files import quiet_library
from tests.support.checkpoints import run_forked_main
from tests.support.harness import synchronous_checkpoints
from tests.support.language_models import (
    GPT2,
    LLAMA,
    LORA,
    own_model_arguments,
    run_arguments,
    write_model,
    write_texts,
    write_tokenizer,
)
from tests.support.marks import exhaustive
from tests.support.processes import ROOT, run_ranks
from tests.support.run_folder import assert_same_run, read_records
from tests.support.snippets import create_workspace, run_command
from tests.support.user_guide import LANGUAGE_MODELS, guide_snippets, write_files

METHODS = ("fedsam", "fedgmt", "scaffold")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Arguments of a run each: adapters of two families, all (tied) weights, classes of padded texts."""
    folder = tmp_path_factory.mktemp("language")
    whole = str(write_model(folder / "gpt2", GPT2))
    half = str(write_model(folder / "llama", LLAMA, torch.bfloat16))
    return {
        "adapters": run_arguments(folder, {"path": whole, "lora": LORA}, "algorithm=fedsam"),
        "half": run_arguments(folder, {"path": half, "dtype": "auto", "lora": {}, "gradient_checkpointing": True}),
        "tied": run_arguments(folder, {"path": whole}, "algorithm=scaffold"),
        "classes": run_arguments(folder, {"path": whole, "lora": LORA}, label="label"),
    }


def test_any_layout_and_a_kill_give_the_bits_of_one_process(cases: dict[str, list[str]], tmp_path: Path) -> None:
    def runs(layout: str) -> list[list[str]]:
        return [[*arguments, f"run.dir={tmp_path / layout / name}"] for name, arguments in cases.items()]

    assert [main(run) for run in runs("one")] == [0] * len(cases)
    with synchronous_checkpoints():
        assert run_forked_main("server:2", runs("three")[0]) == -signal.SIGKILL
    codes, outputs = run_ranks(3, *runs("three"))
    assert not any(codes) and "resuming after round" in outputs[0], outputs
    for name in cases:
        assert_same_run(tmp_path / "three" / name, tmp_path / "one" / name)
    files = (tmp_path / layout / "half" / "adapter" / "adapter_model.safetensors" for layout in ("one", "three"))
    assert len({file.read_bytes() for file in files}) == 1


def test_a_users_own_gpt2_with_adapters_of_peft_sends_only_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [own_model_arguments(tmp_path, f"algorithm={name}", f"run.dir={tmp_path / name}") for name in METHODS]
    codes, outputs = run_ranks(3, *runs)
    assert not any(codes), outputs
    for name in METHODS:
        records, final = read_records(tmp_path / name), load_file(tmp_path / name / "model.safetensors")
        adapters = sum(tensor.numel() for key, tensor in final.items() if "lora_" in key)
        vectors = 2 if name == "scaffold" else 1
        assert records[0]["bytes_up"] == 2 * vectors * 4 * adapters > 0
        assert records[-1]["test_loss"] < records[0]["test_loss"]


def test_the_guide_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    page = LANGUAGE_MODELS[:1]
    write_files(tmp_path, page)
    write_tokenizer(write_model(tmp_path / "base", GPT2 | {"n_positions": 128}))
    write_texts(tmp_path / "texts.jsonl")
    for command in [command for snippet in guide_snippets("sh", page) for command in snippet.commands()]:
        run_command(command)
    (reload,) = [snippet.text for snippet in guide_snippets("python", page) if "from_pretrained" in snippet.text]
    names: dict = {}
    with quiet_library():
        exec(reload, names)
    ids = torch.arange(3, 9)[None]
    logits = fl_dist.load("runs/adapters").model()(ids)
    torch.testing.assert_close(names["model"].eval()(ids).logits, logits)
    assert not torch.allclose(logits, fl_dist.load("runs/again").model()(ids))


@exhaustive
def test_the_tutorial_works_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    prepare, base, sweep, results = [c for s in guide_snippets("sh", LANGUAGE_MODELS[1:]) for c in s.commands()]
    run_command(prepare)
    corpus = tmp_path / "data" / "instructions" / "corpus.jsonl"
    corpus.write_text("".join(corpus.read_text().splitlines(keepends=True)[:400]))
    run_command(f"{base} rounds=1")
    run_command(f"{sweep} rounds=2 local.steps=3")
    run_command(f"{results} local.steps=3")
    runs = tmp_path / "runs" / "instructions-local.steps=3"
    assert len(list(runs.glob("*/adapter/adapter_model.safetensors"))) == 3
    (ask,) = guide_snippets("python", LANGUAGE_MODELS[1:])
    with quiet_library():
        exec(ask.text.replace("runs/instructions/", f"{runs}/"), {})


def test_instructions_of_the_test_set_are_new_and_have_the_right_answers(tmp_path: Path) -> None:
    run_path = str(ROOT / "configs" / "instructions" / "prepare.py")
    runpy.run_path(run_path)["main"](tmp_path)
    train, test = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    assert Counter(row["domain"] for row in train) == dict.fromkeys({row["domain"] for row in test}, 240)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    for row in [*train, *test]:
        words = row["prompt"].split()[3:-2]
        if row["domain"] == "arithmetic":
            assert int(row["answer"]) == int(words[0]) + int(words[2])
        if row["domain"] == "reversing":
            assert row["answer"].split() == words[::-1]
