"""On a GPU, if only a pretended one: the bits of the CPU, no waits inside of local training, known memory, an end."""

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
from fl_dist.config import Topology, validate
from fl_dist.core import Vars
from fl_dist.diagnose import main as diagnose
from fl_dist.diagnostics.base import diagnostics
from fl_dist.engine.state import ClientStates
from fl_dist.execute import settings
from fl_dist.machine.comm import Alone, Cluster
from fl_dist.machine.copies import Copies
from fl_dist.machine.place import Place
from fl_dist.main import main
from fl_dist.models import models
from fl_dist.tasks import tasks
from tests.support import gpu
from tests.support.gpu_runs import (
    ALGORITHMS,
    DIAGNOSTICS,
    Lab,
    Pair,
    diagnosed,
    small_models,
)
from tests.support.harness import Settings, algorithm, merge, representatives
from tests.support.marks import examples
from tests.support.processes import QUIET
from tests.support.run_folder import model_hash, results

IMAGES, LARGER, LARGEST = ({"data": {"path": f"{side}.npz"}} for side in (8, 16, 32))
TEXT, NUMBERS = ({"data": {"path": f"{kind}.npz"}} for kind in ("text", "numbers"))
BATCH_NORM = {"name": "cnn", "norm": "batch", "dropout": 0.3}
EXACT = {"local": {"precision": "float64"}}
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
    "vgg11": LARGEST,
    "vit_cifar": IMAGES,
}
TASKS: dict[str, Settings] = {
    "classification": {},
    "regression": {**NUMBERS, "task": "regression"},
    "next_token": {**TEXT, "task": {"name": "next_token", "padding": 0}, "model": "tests.unit.test_gpu:Letters"},
}
OTHERS: dict[str, Settings] = {
    "crop_flip": {**IMAGES, "augment": {"name": "crop_flip", "padding": 1}},
    "some crops": {**IMAGES, "augment": {"name": "crop_flip", "padding": 1, "share": 0.5}},
    "clipping": {"local": {"clip": 0.3}},
    "no padding": {**TEXT, "task": "next_token", "model": "tests.unit.test_gpu:Letters"},
    "float32 reduce": {"comm": {"reduce": "float32"}},
    "two words": {"server": {"weighting": "samples"}, "data": {"path": "unequal.npz"}},
    "batch norm": {**IMAGES, "model": BATCH_NORM, "algorithm": algorithm("fedsam")},
    "rows beyond memory": {**IMAGES, "topology": {"data_memory": 0}},
    "saves": {"algorithm": algorithm("scaffold"), "checkpoint": {"every": 1}},
}
CASES = {
    **{f"algorithm {name}": case for name, case in ALGORITHMS.items()},
    **{f"model {name}": merge({"model": {"name": name}}, case) for name, case in MODELS.items()},
    **{f"task {name}": case for name, case in TASKS.items()},
    **OTHERS,
}
ROUNDED = ("model resnet8_gn", "model resnet18", "model resnet18_gn")
"""Where paths join, gradients of pretended tensors may lie otherwise in memory; for that the CPU has another kernel."""
CHOSEN = {
    "model cnn",
    "model lenet5",
    "model vit_cifar",
    "model resnet8_gn",
    "model mlp",
    *(f"task {name}" for name in TASKS),
    *OTHERS,
}
CHOSEN |= {f"algorithm {name}" for name in representatives()}
"""A model of each kind of layers, and an algorithm for each hook."""


class Letters(nn.Module):
    """A model of the next token."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(outputs, 4), nn.Linear(4, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with small_models(tmp_path_factory.mktemp("gpu")) as lab:
        yield lab


class TestSameBits:
    @pytest.mark.parametrize("name", examples([name for name in CASES if name not in ROUNDED], CHOSEN))
    def test_as_on_the_cpu(self, lab: Lab, name: str) -> None:
        assert_same(lab.pair(name, CASES[name]))

    @pytest.mark.parametrize("name", examples(ROUNDED, CHOSEN))
    def test_as_on_the_cpu_but_for_rounding(self, lab: Lab, name: str) -> None:
        pair = lab.pair(name, CASES[name])
        here, there = (load_file(folder / "model.safetensors") for folder in (pair.cpu, pair.gpu))
        assert here.keys() == there.keys()
        for key, tensor in here.items():
            torch.testing.assert_close(there[key], tensor, rtol=1e-9, atol=1e-12, msg=key)

    def test_diagnostics(self, lab: Lab) -> None:
        pair = diagnosed(lab)
        assert_same(pair)
        assert all(results(pair.gpu)[-1]["diagnostics"][label] for label in DIAGNOSTICS)

    def test_diagnostics_of_a_run_that_is_there(self, lab: Lab, tmp_path: Path) -> None:
        pair, found = diagnosed(lab), []
        for there, device in ((pair.cpu, contextlib.nullcontext), (pair.gpu, gpu.pretended)):
            here = shutil.copytree(there, tmp_path / there.name)
            with device():
                assert diagnose([str(here), "sharpness", "clients", "spectrum.top=1"]) == 0
            entries = map(json.loads, (here / "diagnostics.jsonl").read_text().splitlines())
            found.append({entry["label"]: entry["values"] for entry in entries})
        assert found[0] == found[1] and found[0].keys() == {"sharpness", "clients", "spectrum"}

    def test_nothing_that_is_built_in_is_left_out(self) -> None:
        assert set(ALGORITHMS) >= set(algorithms) and set(MODELS) == set(models)
        assert set(TASKS) == set(tasks) and set(DIAGNOSTICS) == set(diagnostics)


def assert_same(pair: Pair) -> None:
    assert model_hash(pair.gpu) == model_hash(pair.cpu)
    assert results(pair.gpu) == results(pair.cpu)
    assert pair.seen.steps > 0


class TestWaits:
    # How many tokens are no padding is not known before they are there: one wait a step.
    @pytest.mark.parametrize("name", examples([name for name in CASES if name != "task next_token"], CHOSEN))
    def test_none_between_the_first_and_the_last_step_of_a_client(self, lab: Lab, name: str) -> None:
        pair = lab.pair(name, CASES[name])
        assert all(c.last - c.first > 1 for c in pair.clients)
        assert {(w.what, w.where) for w in pair.within_steps()} == set()

    @pytest.mark.parametrize(
        "name", examples([name for name in CASES if name not in ("task next_token", "saves")], CHOSEN)
    )
    def test_the_host_looks_at_what_a_client_made_once(self, lab: Lab, name: str) -> None:
        for client in lab.pair(name, CASES[name]).clients:
            *before, look = client.waits
            assert look.where.startswith("fl_dist/engine/worker.py:_judged:") and look.step == client.last
            assert [wait.where.rpartition(":")[0] for wait in before] == BEFORE.get(name, [])
            assert all(wait.step == client.first for wait in before)


BEFORE = {"algorithm fedgf": ["fl_dist/algorithms/fedgf.py:begin"]}
"""Looks before the first step: whether FedGF's c is 1 decides on a pass of each step."""


def test_copies_arrive_as_the_tensors_were() -> None:
    with gpu.pretended():
        there = torch.ones(3, device="cuda")
        copies = Copies(there.device)
        copy, other = copies.snapshot(there), copies.of(torch.zeros(1, device="cuda"))
        there += 1
        assert copy.isnan().all() and copy.is_pinned()
        copies.arrive()
        assert copy.tolist() == [1, 1, 1] and other.tolist() == [0]


def test_pinned_memory_counts_as_what_it_takes(tmp_path: Path) -> None:
    """Room for one client of 1,000 bytes, which take 1,024, or for two in memory that is not pinned."""
    template = {"h": ((250,), torch.float32)}
    with gpu.pretended() as seen:
        states = ClientStates(template, Alone(Topology()), lambda c: None, 2_000, tmp_path, Copies(seen.place))
        for client in range(2):
            states.store(client, Vars(h=torch.full((250,), float(client), device="cuda")))
        assert states._mapped == {1}
        before = len(seen.waits)
        loaded = [states.load(client) for client in range(2)]
        assert len(seen.waits) == before, "also from a mapped file"
        assert [kept.h[0].item() for kept in loaded if kept is not None] == [0.0, 1.0]
    states = ClientStates(template, Alone(Topology(device="cpu")), lambda c: None, 2_000, tmp_path)
    for client in range(2):
        states.store(client, Vars(h=torch.ones(250)))
    assert states._mapped == set()


class Pools(nn.Sequential):
    """A model with a layer whose gradient CUDA adds up in no fixed order."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        conv = nn.Conv2d(shape[0], 2, 3)
        super().__init__(conv, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, outputs))


class TestSameBitsEachTime:
    @pytest.mark.parametrize("policy", ["stop", "drop"])
    def test_an_operation_that_cannot_promise_it_is_named(
        self, lab: Lab, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model, dropped = {"model": "tests.unit.test_gpu:Pools"}, {"clients": {"on_failure": policy}}
        (tmp_path / "config.json").write_text(json.dumps(lab.config(IMAGES | model | dropped)))
        with gpu.pretended():
            assert main([str(tmp_path / "config.json"), f"run.dir={tmp_path / 'run'}"]) == 1
        (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert "no kernel that gives the same bits each time on a GPU (_adaptive_avg_pool2d_backward_cuda does" in error
        assert "; choose a model without it (docs/gpu.md says" in error
        assert main([str(tmp_path / "config.json"), f"run.dir={tmp_path / 'cpu'}", "topology.device=cpu"]) == 0

    def test_torch_is_told_so_for_as_long_as_a_run_takes(self) -> None:
        def state() -> tuple[object, ...]:
            named = [torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision]
            legacy = [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
            fills = torch.utils.deterministic.fill_uninitialized_memory
            return *named, *legacy, torch.get_deterministic_debug_mode(), fills, torch.backends.cudnn.benchmark

        before = state()
        for precision in ("float64", "float32", "bf16"):
            with settings(validate({"local": {"precision": precision}})):
                assert state() == ("ieee", "ieee", False, False, 2, False, False)
        with settings(validate({"local": {"precision": "tf32"}})):
            assert state() == ("tf32", "tf32", True, True, 2, False, False)
        assert state() == before


class TestPrecision:
    def test_tf32_is_refused_where_there_is_none(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = [*QUIET, "local.precision=tf32", f"run.dir={tmp_path / 'run'}"]
        assert main([*words, "topology.device=cpu"]) == 2
        assert "local.precision is tf32, which this CPU does not have: use float32" in capsys.readouterr().err
        with gpu.pretended(), mock.patch.object(torch.cuda, "get_device_capability", return_value=(7, 0)):
            assert main(words) == 2
        assert "local.precision is tf32, which this GPU does not have: use float32" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
        assert main(["--check", *words]) == 0, "where a job is submitted there may be no GPU"

    @pytest.mark.parametrize("precision", ["tf32", "bf16"])
    def test_a_gpu_trains_with_less(self, lab: Lab, precision: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(lab.config({"local": {"precision": precision}})))
        with gpu.pretended() as seen:
            assert main([str(tmp_path / "config.json"), f"run.dir={tmp_path / 'run'}"]) == 0
        assert seen.steps > 0

    @pytest.mark.parametrize("other", [True, False])
    def test_another_kind_of_device_is_a_warning_on_resumption(
        self, lab: Lab, other: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps(lab.config({"checkpoint": {"every": 1}})))
        words = [str(tmp_path / "config.json"), f"run.dir={tmp_path / 'run'}"]
        with gpu.pretended():
            assert main([*words, "rounds=1"]) == 0
            assert other or main([*words, "rounds=2"]) == 0
        assert not other or main([*words, "rounds=2", "topology.device=cpu"]) == 0
        output, error = capsys.readouterr()
        warnings = [line for line in (output + error).splitlines() if line.startswith("warning: ")]
        moved = "warning: the run was on a pretended GPU so far and goes on on cpu: from here on its bits may be others"
        assert "resuming after round 1 of 2" in output
        assert warnings == [moved] * other


class TestThePretendedGpu:
    def test_refuses_to_mix_devices(self) -> None:
        with gpu.pretended():
            here, there = torch.ones(3), torch.ones(3, device="cuda")
            for mix in (lambda: here + there, lambda: there.add_(here), lambda: there.index_select(0, here.long())):
                with pytest.raises(RuntimeError, match="same device, but found cpu, cuda:0: tests/unit/test_gpu.py:"):
                    mix()
            assert (there * torch.tensor(2.0)).tolist() == [2, 2, 2]

    def test_refuses_to_mix_gpus(self) -> None:
        with gpu.pretended(2):
            first = torch.ones(3, device="cuda")
            torch.cuda.set_device(1)
            second = torch.ones(3, device="cuda")
            assert (str(first.device), str(second.device)) == ("cuda:0", "cuda:1")
            with pytest.raises(RuntimeError, match="found cuda:0, cuda:1"):
                first + second

    def test_lists_waits_with_file_and_line(self) -> None:
        with gpu.pretended() as seen:
            there = torch.ones(3, device="cuda")
            there += 1
            assert seen.waits == []
            line = here() + 1
            float(there.sum())
        where = f"tests/unit/test_gpu.py:test_lists_waits_with_file_and_line:{line}"
        assert seen.waits == [("_local_scalar_dense", where, 0)]

    def test_copies_from_pinned_memory_are_no_waits(self) -> None:
        with gpu.pretended() as seen:
            pinned = torch.arange(4.0).pin_memory()
            assert pinned.is_pinned() and pinned[1:].is_pinned() and not torch.ones(1).is_pinned()
            there = pinned.to("cuda:0", non_blocking=True)
            assert seen.waits == []
            torch.arange(4.0).to("cuda:0", non_blocking=True)
            pinned.to("cuda:0")
            assert [w.what for w in seen.waits] == ["host to device (pageable)", "host to device"]
            assert there.tolist() == [0, 1, 2, 3]

    def test_pinned_memory_must_not_change_under_a_copy(self) -> None:
        with gpu.pretended():
            pinned = torch.zeros(4, pin_memory=True)
            pinned.to("cuda:0", non_blocking=True)
            pinned.add_(1)
            with pytest.raises(RuntimeError, match="written to before the copy"):
                torch.cuda.synchronize()

    def test_copies_to_pinned_memory_are_there_after_a_wait(self) -> None:
        with gpu.pretended() as seen:
            there, side, done = torch.ones(2, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()
            with torch.cuda.stream(side):
                copy = there.to("cpu", non_blocking=True)
                done.record()
            there += 1
            assert there.sum().item() == 4  # of another stream
            assert copy.isnan().all()
            done.synchronize()
            assert copy.tolist() == [1, 1]
            assert [w.what for w in seen.waits] == ["_local_scalar_dense", "synchronize"]

    @pytest.mark.parametrize("ordered", [True, False])
    def test_a_way_to_the_host_and_back_needs_an_order_and_no_wait(self, ordered: bool) -> None:
        with gpu.pretended() as seen:
            there, side = torch.ones(2, device="cuda"), torch.cuda.Stream()
            with torch.cuda.stream(side):
                copy = there.to("cpu", non_blocking=True)
            if ordered:
                torch.cuda.current_stream().wait_stream(side)
            back = copy.to("cuda:0", non_blocking=True)
            assert seen.waits == []
            assert (back.tolist() == [1, 1]) == ordered

    def test_counts_memory(self) -> None:
        with gpu.pretended() as seen:
            whole = torch.zeros(1000, device="cuda")
            part = whole[10:]
            assert torch.cuda.max_memory_allocated() == seen.live == 4000
            whole = whole.double()
            assert (seen.live, seen.peak) == (12000, 12000)
            del part
            assert (seen.live, seen.peak) == (8000, 12000)

    def test_tells_of_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ids = []
        for visible in ("0,1", "1"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            with gpu.pretended():
                ids.append([torch.cuda.get_device_properties(k).uuid for k in range(torch.cuda.device_count())])
        assert ids[1] == ids[0][1:] and len(set(ids[0])) == 2


def here() -> int:
    """The line of the call."""
    return sys._getframe(1).f_lineno


def test_torchs_own_thread_does_not_end_a_rank_whatever_torchrun_asks_for() -> None:
    with gpu.pretended(), mock.patch.dict(os.environ, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}):
        backend = Cluster.__new__(Cluster)._choose_device(Place(0, 2, 0, 2, "127.0.0.1", 1), Topology())
        assert (backend, os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("cpu:gloo,cuda:nccl", "0")
