"""Promise: language models have the same bits on any number of workers, and after a kill; a user's own train too."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fl_dist.main import main
from tests.support.language_models import GPT2, LLAMA, LORA, own_model_arguments, run_arguments, write_model
from tests.support.processes import run_ranks
from tests.support.run_folder import assert_same_run, read_records

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
    run_ranks(1, [*runs("three")[0], "topology.server=shared"], FL_DIST_FAULT="server:2")
    assert not (tmp_path / "three" / "adapters" / "model.safetensors").exists()
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
