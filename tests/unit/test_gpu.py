"""On a simulated GPU: the bits of the CPU, no waits within local training, correct memory counts."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_dist.algorithms import algorithms
from fl_dist.algorithms.core import Vars
from fl_dist.common.vector_math import float64_norm
from fl_dist.config import Topology, validate
from fl_dist.diagnose import main as diagnose
from fl_dist.diagnostics.base import diagnostics
from fl_dist.distributed.collectives import LocalCollectives
from fl_dist.distributed.devices import pick_device
from fl_dist.distributed.host_transfer import HostTransfer
from fl_dist.distributed.process_group import select_backend
from fl_dist.distributed.torch_settings import torch_settings
from fl_dist.federation.client_state import ClientStateStore
from fl_dist.federation.downlink import Downlink
from fl_dist.main import main
from fl_dist.models import models
from fl_dist.tasks import tasks
from tests.support import simulated_gpu
from tests.support.gpu_comparison import (
    ALGORITHMS,
    DIAGNOSTICS,
    DeviceComparison,
    DeviceRuns,
    run_diagnostics,
    small_models,
)
from tests.support.harness import Settings, algorithm, merge, representatives
from tests.support.marks import examples
from tests.support.processes import NO_WANDB
from tests.support.run_folder import model_hash, reproducible_records

IMAGES, LARGER, LARGEST = ({"data": {"path": f"{side}.npz"}} for side in (8, 16, 32))
TEXT, NUMBERS = ({"data": {"path": f"{kind}.npz"}} for kind in ("text", "numbers"))
BATCH_NORM = {"name": "cnn", "norm": "batch", "dropout": 0.3}
EXACT = {"local": {"precision": "float64"}}
# Moving a module to a simulated GPU makes two parameters of one that is tied.
TINY_GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "tie_word_embeddings": False}
MODELS: dict[str, Settings] = {
    "cnn": IMAGES,
    "emnist_cnn": IMAGES,
    "fasttext": TEXT,
    "lenet5": LARGER,
    "mlp": {},
    "resnet8_gn": {**IMAGES, **EXACT},
    "resnet18": {**IMAGES, **EXACT},
    "resnet18_gn": {**IMAGES, **EXACT, "model": {"name": "resnet18_gn", "stem": "cifar"}},
    "timm": {**LARGER, "model": {"name": "tests.support.timm_models:timm", "model": "test_vit"}},
    "transformers": {
        **TEXT,
        "task": "next_token",
        "model": {"name": "transformers", "path": TINY_GPT2, "lora": {"r": 2}},
    },
    "vgg11": LARGEST,
    "vit_cifar": IMAGES,
}
TASKS: dict[str, Settings] = {
    "classification": {},
    "regression": {**NUMBERS, "task": "regression"},
    "next_token": {**TEXT, "task": {"name": "next_token", "padding": 0}, "model": "tests.unit.test_gpu:NextToken"},
    "causal_lm": {"data": {"path": "answers.npz"}, "task": "causal_lm", "model": "tests.unit.test_gpu:NextToken"},
}
OTHER_CASES: dict[str, Settings] = {
    "crop_flip": {**IMAGES, "augment": {"name": "crop_flip", "padding": 1}},
    "some crops": {**IMAGES, "augment": {"name": "crop_flip", "padding": 1, "share": 0.5}},
    "clipping": {"local": {"clip": 0.3}},
    "no padding": {**TEXT, "task": "next_token", "model": "tests.unit.test_gpu:NextToken"},
    "float32 reduce": {"comm": {"reduce": "float32"}},
    "two words": {"server": {"weighting": "samples"}, "data": {"path": "unequal.npz"}},
    "batch norm": {**IMAGES, "model": BATCH_NORM, "algorithm": algorithm("fedsam")},
    "contiguous images": {**IMAGES, "model": {"name": "cnn"}, "local": {"memory_format": "contiguous"}},
    "rows beyond memory": {**IMAGES, "topology": {"data_memory": 0}},
    "adamw": {"local": {"optimizer": {"name": "adamw", "keep": "client"}}},
    "checkpoints": {"algorithm": algorithm("scaffold"), "checkpoint": {"every": 1}},
}
CASES = {
    **{f"algorithm {name}": case for name, case in ALGORITHMS.items()},
    **{f"model {name}": merge({"model": {"name": name}}, case) for name, case in MODELS.items()},
    **{f"task {name}": case for name, case in TASKS.items()},
    **OTHER_CASES,
}
EQUAL_UP_TO_ROUNDING = ("model resnet8_gn", "model resnet18", "model resnet18_gn")
"""Where branches join, simulated tensors may have another memory layout, for which the CPU uses another kernel."""
WAIT_IN_EACH_STEP = ("task next_token", "task causal_lm", "model transformers")
"""The number of tokens that are learnt is known only on the device; transformers asks it whether rows are packed."""
EXAMPLES = {
    "model cnn",
    "model lenet5",
    "model vit_cifar",
    "model resnet8_gn",
    "model mlp",
    *(f"task {name}" for name in TASKS),
    *OTHER_CASES,
}
EXAMPLES |= {f"algorithm {name}" for name in representatives()}
"""A model for each kind of layer, and an algorithm for each hook."""


class NextToken(nn.Module):
    """A model that predicts the next token."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(outputs, 4), nn.Linear(4, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceComparison]:
    with small_models(tmp_path_factory.mktemp("gpu")) as comparison:
        yield comparison


class TestSameBits:
    @pytest.mark.parametrize("name", examples([name for name in CASES if name not in EQUAL_UP_TO_ROUNDING], EXAMPLES))
    def test_results_equal_the_cpus(self, comparison: DeviceComparison, name: str) -> None:
        assert_same_results(comparison.run(name, CASES[name]))

    @pytest.mark.parametrize("name", examples(EQUAL_UP_TO_ROUNDING, EXAMPLES))
    def test_results_equal_the_cpus_up_to_rounding(self, comparison: DeviceComparison, name: str) -> None:
        runs = comparison.run(name, CASES[name])
        cpu_model, gpu_model = (load_file(folder / "model.safetensors") for folder in (runs.cpu, runs.gpu))
        assert cpu_model.keys() == gpu_model.keys()
        for key, tensor in cpu_model.items():
            torch.testing.assert_close(gpu_model[key], tensor, rtol=1e-9, atol=1e-12, msg=key)

    def test_diagnostics_equal_the_cpus(self, comparison: DeviceComparison) -> None:
        runs = run_diagnostics(comparison)
        assert_same_results(runs)
        assert all(reproducible_records(runs.gpu)[-1]["diagnostics"][label] for label in DIAGNOSTICS)

    def test_the_diagnose_command_equals_the_cpus(self, comparison: DeviceComparison, tmp_path: Path) -> None:
        runs, values = run_diagnostics(comparison), []
        for run_folder, device in ((runs.cpu, contextlib.nullcontext), (runs.gpu, simulated_gpu.simulate_gpu)):
            copy = shutil.copytree(run_folder, tmp_path / run_folder.name)
            with device():
                assert diagnose([str(copy), "sharpness", "clients", "spectrum.top=1"]) == 0
            entries = map(json.loads, (copy / "diagnostics.jsonl").read_text().splitlines())
            values.append({entry["label"]: entry["values"] for entry in entries})
        assert values[0] == values[1] and values[0].keys() == {"sharpness", "clients", "spectrum"}

    def test_every_built_in_is_covered(self) -> None:
        assert set(ALGORITHMS) >= set(algorithms) and set(MODELS) == set(models)
        assert set(TASKS) == set(tasks) and set(DIAGNOSTICS) == set(diagnostics)


def assert_same_results(runs: DeviceRuns) -> None:
    assert model_hash(runs.gpu) == model_hash(runs.cpu)
    assert reproducible_records(runs.gpu) == reproducible_records(runs.cpu)
    assert runs.device.steps > 0


class TestWaits:
    @pytest.mark.parametrize("name", examples([name for name in CASES if name not in WAIT_IN_EACH_STEP], EXAMPLES))
    def test_the_host_never_waits_between_a_clients_first_and_last_step(
        self, comparison: DeviceComparison, name: str
    ) -> None:
        runs = comparison.run(name, CASES[name])
        assert all(c.last - c.first > 1 for c in runs.clients)
        assert {(w.what, w.where) for w in runs.waits_within_steps()} == set()

    @pytest.mark.parametrize(
        "name", examples([n for n in CASES if n not in (*WAIT_IN_EACH_STEP, "checkpoints")], EXAMPLES)
    )
    def test_the_host_waits_once_for_a_clients_result(self, comparison: DeviceComparison, name: str) -> None:
        for number, client in enumerate(comparison.run(name, CASES[name]).clients):
            is_first = number == 0
            *before, final = [
                wait for wait in client.waits if not (is_first and wait.where.startswith(FIRST_CALL_CHECK))
            ]
            assert final.where.startswith("fl_dist/federation/worker.py:_check_result:") and final.step == client.last
            assert [wait.where.rpartition(":")[0] for wait in before] == WAITS_BEFORE_STEPS.get(name, [])
            assert all(wait.step == client.first for wait in before)


FIRST_CALL_CHECK = "fl_dist/algorithms/hook_checks.py:_fingerprint:"
WAITS_BEFORE_STEPS = {"algorithm fedgf": ["fl_dist/algorithms/fedgf.py:begin"]}
"""Waits before the first step: whether FedGF's c is 1 decides on the passes of each step."""


def test_copies_hold_the_values_at_the_time_of_the_call() -> None:
    with simulated_gpu.simulate_gpu():
        gpu_tensor = torch.ones(3, device="cuda")
        transfer = HostTransfer(gpu_tensor.device)
        copy, other = transfer.snapshot(gpu_tensor), transfer.to_host(torch.zeros(1, device="cuda"))
        gpu_tensor += 1
        assert copy.isnan().all() and copy.is_pinned()
        transfer.synchronize()
        assert copy.tolist() == [1, 1, 1] and other.tolist() == [0]


def test_pinned_memory_counts_with_its_alignment(tmp_path: Path) -> None:
    """The limit holds one client of 1,000 bytes, 1,024 if pinned, or two in unpinned memory."""
    template = {"h": ((250,), torch.float32)}
    with simulated_gpu.simulate_gpu() as gpu:
        states = ClientStateStore(
            template, 0, LocalCollectives(), lambda c: None, 2_000, tmp_path, HostTransfer(gpu.cuda_device)
        )
        for client in range(2):
            states.store(client, Vars(h=torch.full((250,), float(client), device="cuda")))
        assert states._spilled == {1}
        before = len(gpu.waits)
        loaded = [states.load(client) for client in range(2)]
        assert len(gpu.waits) == before, "also from a mapped file"
        assert [state.h[0].item() for state in loaded if state is not None] == [0.0, 1.0]
    states = ClientStateStore(template, 0, LocalCollectives(), lambda c: None, 2_000, tmp_path)
    for client in range(2):
        states.store(client, Vars(h=torch.ones(250)))
    assert states._spilled == set()


class AdaptivePooling(nn.Sequential):
    """A model with a layer whose gradient CUDA sums in no fixed order."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        conv = nn.Conv2d(shape[0], 2, 3)
        super().__init__(conv, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, outputs))


class TestDeterminism:
    @pytest.mark.parametrize("policy", ["stop", "drop"])
    def test_a_nondeterministic_operation_is_named(
        self, comparison: DeviceComparison, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model, dropped = {"model": "tests.unit.test_gpu:AdaptivePooling"}, {"clients": {"on_failure": policy}}
        (tmp_path / "config.json").write_text(json.dumps(comparison.config(IMAGES | model | dropped)))
        with simulated_gpu.simulate_gpu():
            assert main([str(tmp_path / "config.json"), f"run.dir={tmp_path / 'run'}"]) == 1
        (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert "no deterministic kernel on a GPU (_adaptive_avg_pool2d_backward_cuda does" in error
        assert "; choose a model without it (docs/how-to/gpus.md lists" in error
        assert main([str(tmp_path / "config.json"), f"run.dir={tmp_path / 'cpu'}", "topology.device=cpu"]) == 0

    def test_torch_is_deterministic_during_a_run(self) -> None:
        def state() -> tuple[object, ...]:
            precisions = [torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision]
            legacy = [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
            fills = torch.utils.deterministic.fill_uninitialized_memory
            return *precisions, *legacy, torch.get_deterministic_debug_mode(), fills, torch.backends.cudnn.benchmark

        before = state()
        for precision in ("float64", "float32", "bf16"):
            with torch_settings(validate({"local": {"precision": precision}})):
                assert state() == ("ieee", "ieee", False, False, 2, False, False)
        with torch_settings(validate({"local": {"precision": "tf32"}})):
            assert state() == ("tf32", "tf32", True, True, 2, False, False)
        assert state() == before


class FailsToAllocate(nn.Linear):
    """In its second step an allocation fails, as of cuDNN's workspace, and it continues all the same."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(torch.Size(shape).numel(), outputs)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        self.gpu.failed_allocations += self.steps == 2
        return super().forward(x.flatten(1))

    gpu: simulated_gpu.SimulatedGpu


def test_an_algorithm_that_was_replaced_for_lack_of_memory_ends_the_run(
    comparison: DeviceComparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"model": "tests.unit.test_gpu:FailsToAllocate", "clients": {"on_failure": "drop"}}
    (tmp_path / "config.json").write_text(json.dumps(comparison.config(model)))
    with simulated_gpu.simulate_gpu() as gpu, mock.patch.object(FailsToAllocate, "gpu", gpu, create=True):
        gpu.failed_allocations = 3  # of an earlier run in this process
        assert main([str(tmp_path / "config.json"), f"run.dir={tmp_path / 'run'}"]) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "memory on the GPU ran out, and an operation continued with a slower algorithm" in error
    assert "; lower local.batch_size" in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_vectors_of_a_message_are_aligned_as_new_tensors() -> None:
    shapes = {"x": ((100,), torch.float32), "m": ((7,), torch.float64)}
    down = Downlink(shapes, torch.zeros(3), max_cohort=5, device=torch.device("cpu"))
    start = down.buffer.data_ptr()
    assert {(tensor.data_ptr() - start) % 512 for tensor in (down.vars.x, down.vars.m, down.buffers)} == {0}


def test_norms_take_few_kernels_on_a_gpu() -> None:
    entries = 2**20
    with simulated_gpu.simulate_gpu(), mock.patch.object(torch, "stack") as stack:
        assert float64_norm(torch.ones(entries, device="cuda")).item() == 2**10
    stack.assert_not_called()
    assert float64_norm(torch.ones(entries)).item() == 2**10


class TestPrecision:
    def test_tf32_is_refused_on_unsupported_devices(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = [*NO_WANDB, "local.precision=tf32", f"run.dir={tmp_path / 'run'}"]
        assert main([*arguments, "topology.device=cpu"]) == 2
        assert "local.precision is tf32, which this CPU does not have: use float32" in capsys.readouterr().err
        with simulated_gpu.simulate_gpu(), mock.patch.object(torch.cuda, "get_device_capability", return_value=(7, 0)):
            assert main(arguments) == 2
        assert "local.precision is tf32, which this GPU does not have: use float32" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
        assert main(["--check", *arguments]) == 0, "the machine that submits a job may have no GPU"

    @pytest.mark.parametrize("precision", ["tf32", "bf16"])
    def test_a_gpu_trains_with_lower_precision(
        self, comparison: DeviceComparison, precision: str, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps(comparison.config({"local": {"precision": precision}})))
        with simulated_gpu.simulate_gpu() as gpu:
            assert main([str(tmp_path / "config.json"), f"run.dir={tmp_path / 'run'}"]) == 0
        assert gpu.steps > 0

    @pytest.mark.parametrize("other", [True, False])
    def test_resuming_on_another_kind_of_device_gives_a_warning(
        self, comparison: DeviceComparison, other: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps(comparison.config({"checkpoint": {"every": 1}})))
        arguments = [str(tmp_path / "config.json"), f"run.dir={tmp_path / 'run'}"]
        with simulated_gpu.simulate_gpu():
            assert main([*arguments, "rounds=1"]) == 0
            assert other or main([*arguments, "rounds=2"]) == 0
        assert not other or main([*arguments, "rounds=2", "topology.device=cpu"]) == 0
        output, error = capsys.readouterr()
        warnings = [line for line in (output + error).splitlines() if line.startswith("warning: ")]
        warning = "warning: the run was on a simulated GPU and resumes on cpu; results may no longer be bit-identical"
        assert "resuming after round 1 of 2" in output
        assert warnings == [warning] * other


class TestSimulatedGpu:
    def test_mixing_devices_raises(self) -> None:
        with simulated_gpu.simulate_gpu():
            cpu_tensor, gpu_tensor = torch.ones(3), torch.ones(3, device="cuda")
            for mix in (
                lambda: cpu_tensor + gpu_tensor,
                lambda: gpu_tensor.add_(cpu_tensor),
                lambda: gpu_tensor.index_select(0, cpu_tensor.long()),
            ):
                with pytest.raises(RuntimeError, match="same device, but found cpu, cuda:0: tests/unit/test_gpu.py:"):
                    mix()
            assert (gpu_tensor * torch.tensor(2.0)).tolist() == [2, 2, 2]

    def test_mixing_gpus_raises(self) -> None:
        with simulated_gpu.simulate_gpu(2):
            first = torch.ones(3, device="cuda")
            torch.cuda.set_device(1)
            second = torch.ones(3, device="cuda")
            assert (str(first.device), str(second.device)) == ("cuda:0", "cuda:1")
            with pytest.raises(RuntimeError, match="found cuda:0, cuda:1"):
                first + second

    def test_waits_are_recorded_with_file_and_line(self) -> None:
        with simulated_gpu.simulate_gpu() as gpu:
            gpu_tensor = torch.ones(3, device="cuda")
            gpu_tensor += 1
            assert gpu.waits == []
            line = line_number() + 1
            float(gpu_tensor.sum())
        where = f"tests/unit/test_gpu.py:test_waits_are_recorded_with_file_and_line:{line}"
        assert gpu.waits == [("_local_scalar_dense", where, 0)]

    def test_copies_from_pinned_memory_do_not_wait(self) -> None:
        with simulated_gpu.simulate_gpu() as gpu:
            pinned = torch.arange(4.0).pin_memory()
            assert pinned.is_pinned() and pinned[1:].is_pinned() and not torch.ones(1).is_pinned()
            gpu_tensor = pinned.to("cuda:0", non_blocking=True)
            assert gpu.waits == []
            torch.arange(4.0).to("cuda:0", non_blocking=True)
            pinned.to("cuda:0")
            assert [w.what for w in gpu.waits] == ["host to device (pageable)", "host to device"]
            assert gpu_tensor.tolist() == [0, 1, 2, 3]

    def test_pinned_memory_must_not_change_during_a_copy(self) -> None:
        with simulated_gpu.simulate_gpu():
            pinned = torch.zeros(4, pin_memory=True)
            pinned.to("cuda:0", non_blocking=True)
            pinned.add_(1)
            with pytest.raises(RuntimeError, match="written to before the copy"):
                torch.cuda.synchronize()

    def test_copies_to_pinned_memory_are_complete_after_a_wait(self) -> None:
        with simulated_gpu.simulate_gpu() as gpu:
            gpu_tensor, side, event = torch.ones(2, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()
            with torch.cuda.stream(side):
                copy = gpu_tensor.to("cpu", non_blocking=True)
                event.record()
            gpu_tensor += 1
            assert gpu_tensor.sum().item() == 4  # a wait for another stream
            assert copy.isnan().all()
            event.synchronize()
            assert copy.tolist() == [1, 1]
            assert [w.what for w in gpu.waits] == ["_local_scalar_dense", "synchronize"]

    @pytest.mark.parametrize("ordered", [True, False])
    def test_a_round_trip_to_the_host_needs_stream_order_but_no_wait(self, ordered: bool) -> None:
        with simulated_gpu.simulate_gpu() as gpu:
            gpu_tensor, side = torch.ones(2, device="cuda"), torch.cuda.Stream()
            with torch.cuda.stream(side):
                copy = gpu_tensor.to("cpu", non_blocking=True)
            if ordered:
                torch.cuda.current_stream().wait_stream(side)
            back = copy.to("cuda:0", non_blocking=True)
            assert gpu.waits == []
            assert (back.tolist() == [1, 1]) == ordered

    def test_memory_is_counted(self) -> None:
        with simulated_gpu.simulate_gpu() as gpu:
            full = torch.zeros(1000, device="cuda")
            view = full[10:]
            assert torch.cuda.max_memory_allocated() == gpu.allocated == 4000
            full = full.double()
            assert (gpu.allocated, gpu.peak) == (12000, 12000)
            del view
            assert (gpu.allocated, gpu.peak) == (8000, 12000)

    def test_gpus_have_distinct_uuids(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ids = []
        for visible in ("0,1", "1"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            with simulated_gpu.simulate_gpu():
                ids.append([torch.cuda.get_device_properties(k).uuid for k in range(torch.cuda.device_count())])
        assert ids[1] == ids[0][1:] and len(set(ids[0])) == 2


def line_number() -> int:
    """The line number of the call."""
    return sys._getframe(1).f_lineno


def test_torchs_watchdog_and_its_monitor_never_end_a_rank() -> None:
    """torchrun asks for the watchdog; the monitor has a switch of its own."""
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    with simulated_gpu.simulate_gpu(), mock.patch.dict(os.environ, dict.fromkeys(names, "1")):
        assert select_backend(pick_device(Topology(), 0), oversubscribe=False) == "cpu:gloo,cuda:nccl"
        assert [os.environ[name] for name in names] == ["0", "0", "0"]
