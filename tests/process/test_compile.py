"""`local.compile`: compiled local steps give the same bits on any number of ranks, and close to those without."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fl_dist.config import load
from fl_dist.main import main
from fl_dist.models import CompiledModule
from tests.support.marks import exhaustive
from tests.support.processes import NO_WANDB, run_ranks
from tests.support.run_folder import assert_same_run

SETTINGS = (
    *NO_WANDB,
    *("rounds=3", "clients.total=6", "clients.per_round=4", "partition={name: dirichlet, alpha: 0.5}"),
    *("local.epochs=1", "local.batch_size=40", "algorithm={name: fedsam, rho: 0.05}", "local.compile=true"),
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compiled code, shared by all ranks and runs as on a machine."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}


@exhaustive
@pytest.mark.timeout(1800)
def test_compiled_steps_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path, cache: dict[str, str]) -> None:
    for ranks in (3, 1):
        arguments = [*SETTINGS, "model={name: cnn, dropout: 0.2}", f"run.dir={tmp_path / str(ranks)}"]
        codes, outputs = run_ranks(ranks, arguments, timeout=900, **cache)
        assert not any(codes), outputs
    assert_same_run(tmp_path / "1", tmp_path / "3")


@exhaustive
@pytest.mark.timeout(1800)
def test_compiled_steps_are_those_of_the_model(tmp_path: Path, cache: dict[str, str]) -> None:
    arguments = [*SETTINGS, "model=mlp", "local.precision=float64"]
    codes, outputs = run_ranks(1, [*arguments, f"run.dir={tmp_path / 'compiled'}"], timeout=900, **cache)
    assert codes == [0], outputs
    assert main([*arguments, "local.compile=false", f"run.dir={tmp_path / 'eager'}"]) == 0
    eager, compiled = (load_file(tmp_path / name / "model.safetensors") for name in ("eager", "compiled"))
    for name, values in eager.items():
        torch.testing.assert_close(compiled[name], values, rtol=0, atol=1e-9)


def refuse(error: Exception) -> Callable[..., object]:
    def compile_module(*args: object, **options: object) -> object:
        raise error

    return compile_module


def test_a_model_that_cannot_be_compiled_ends_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CompiledModule, "__call__", refuse(RuntimeError("no g++")))
    assert main([*SETTINGS, f"run.dir={tmp_path / 'run'}"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: the model cannot be compiled: RuntimeError: no g++")
    assert "set local.compile=false" in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_batches_have_to_have_one_size() -> None:
    with pytest.raises(ValueError, match="set local.batch_size to a number"):
        load(None, ["local.compile=true", "local.batch_size=full"])
