"""On a GPU, if only a pretended one: the bits of the CPU, no waits inside of local training, known memory, an end."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_dist.algorithms import algorithms
from fl_dist.algorithms.memory import needs
from fl_dist.config import Topology, validate
from fl_dist.core import Vars
from fl_dist.diagnose import main as diagnose
from fl_dist.diagnostics.base import diagnostics
from fl_dist.engine.state import ClientStates
from fl_dist.engine.worker import Worker
from fl_dist.execute import settings
from fl_dist.machine.comm import Alone, Cluster
from fl_dist.machine.copies import Copies
from fl_dist.machine.place import Place
from fl_dist.main import main
from fl_dist.models import blocks, models, resnet, vgg, vit
from fl_dist.tasks import tasks
from tests import gpu, harness
from tests.harness import SILENT, Settings, algorithm, merge
from tests.jobs import QUIET, Rank, model_hash, results, run, run_ranks, started_ranks
from tests.test_checkpoint import wait_for

SIZES = (4, 5, 7)
"""Rows of each client: with batches of 3, at least two steps an epoch."""
IMAGES, LARGER, LARGEST = ({"data": {"path": f"{side}.npz"}} for side in (8, 16, 32))
TEXT, NUMBERS = ({"data": {"path": f"{kind}.npz"}} for kind in ("text", "numbers"))
BATCH_NORM = {"name": "cnn", "norm": "batch", "dropout": 0.3}
EXACT = {"local": {"precision": "float64"}}

ALGORITHMS: dict[str, Settings] = {name: {"algorithm": algorithm(name)} for name in harness.CASES}
MODELS: dict[str, Settings] = {
    "cnn": IMAGES,
    "emnist_cnn": IMAGES,
    "fasttext": TEXT,
    "lenet5": LARGER,
    "mlp": {},
    "resnet8_gn": {**IMAGES, **EXACT},
    "resnet18": {**IMAGES, **EXACT},
    "resnet18_gn": {**IMAGES, **EXACT, "model": {"name": "resnet18_gn", "stem": "cifar"}},
    "timm": {**LARGER, "model": {"name": "tests.timm_here:timm", "model": "test_vit"}},
    "vgg11": LARGEST,
    "vit_cifar": IMAGES,
}
TASKS: dict[str, Settings] = {
    "classification": {},
    "regression": {**NUMBERS, "task": "regression"},
    "next_token": {**TEXT, "task": {"name": "next_token", "padding": 0}, "model": "tests.test_gpu:Letters"},
}
OTHERS: dict[str, Settings] = {
    "crop_flip": {**IMAGES, "augment": {"name": "crop_flip", "padding": 1}},
    "some crops": {**IMAGES, "augment": {"name": "crop_flip", "padding": 1, "share": 0.5}},
    "clipping": {"local": {"clip": 0.3}},
    "no padding": {**TEXT, "task": "next_token", "model": "tests.test_gpu:Letters"},
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
DIAGNOSTICS: dict[str, Settings] = {
    "sharpness": {"steps": 2},
    "lpf": {"samples": 2},
    "along": {"points": 3, "directions": 1},
    "spectrum": {"top": 1, "rows": 6},
    "trace": {"samples": 2},
    "flatness_distance": {},
    "flatness_discrepancy": {},
    "perturbation_drift": {},
    "directions": {},
    "clients": {},
    "surface": {"points": 3},
    "plane": {"points": 3},
}


class Letters(nn.Module):
    """A model of the next token."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(outputs, 4), nn.Linear(4, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens))


@dataclass
class Pair:
    """One configuration on both devices."""

    cpu: Path
    gpu: Path
    seen: gpu.Gpu
    clients: list["Watched"]

    def within_steps(self) -> list[gpu.Wait]:
        """Waits after a client's first step and before its last."""
        return [w for c in self.clients for w in c.waits if c.first < w.step < c.last]


class Watched(NamedTuple):
    """A client's round, from its variables on the host to its sums."""

    first: int
    """Steps that the device had been given before; and after."""
    last: int
    waits: list[gpu.Wait]


class Lab:
    """Runs each configuration once a device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pairs: dict[str, Pair] = {}

    def config(self, changes: Settings) -> Settings:
        base = {
            **{"seed": 3, "rounds": 2, "data": {"name": "npz", "path": "rows.npz"}, "partition": {"name": "given"}},
            **{"model": {"name": "mlp", "hidden": [8]}, "clients": {"total": len(SIZES), "per_round": 2}},
            **{"local": {"epochs": 2, "batch_size": 3, "lr": 0.1}, "evaluate": {"batch_size": 4}},
            **{"algorithm": {"name": "fedavg"}, "checkpoint": {"every": 0}, "monitor": SILENT},
        }
        config = merge(base, changes)
        config["data"]["path"] = str(self.folder / config["data"]["path"])
        return config

    def pair(self, name: str, changes: Settings) -> Pair:
        if name not in self._pairs:
            file = self.folder / f"{name}.json"
            file.write_text(json.dumps(self.config(changes)))
            here, there = self.folder / f"{name} on cpu", self.folder / f"{name} on gpu"
            # The CPU's own kernels, of attention and on blocks of channels, are none of CUDA's.
            with sdpa_kernel(SDPBackend.MATH), mock.patch.object(blocks, "_is_known", return_value=False):
                assert main([str(file), f"run.dir={here}", "topology.device=cpu"]) == 0
            with gpu.pretended() as seen, watched(seen) as clients:
                assert main([str(file), f"run.dir={there}", "topology.device=cuda"]) == 0
            self._pairs[name] = Pair(here, there, seen, clients)
        return self._pairs[name]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("gpu")
    write_data(folder)
    # The published widths would take minutes.
    vggs = mock.patch.object(vgg, "LAYERS", ((4,), (4,), (4, 4), (4, 4), (4, 4)))
    resnets, vits = mock.patch.object(resnet, "EIGHTEEN", [(64, 1), (128, 1)]), mock.patch.object(vit, "DIM", 16)
    with vggs, resnets, vits:
        yield Lab(folder)


def write_data(folder: Path) -> None:
    rng, n = np.random.default_rng(5), sum(SIZES)
    client, y = np.repeat(np.arange(len(SIZES)), SIZES), rng.integers(0, 3, n)
    rest = {"y_train": y, "y_test": y[:6], "client": client}

    def write(name: str, x: np.ndarray, **changes: np.ndarray) -> None:
        np.savez(folder / f"{name}.npz", **{"x_train": x, "x_test": x[:6]} | rest | changes)

    x = rng.normal(size=(n, 6)) + np.eye(3, 6)[y]
    write("rows", x)
    write("numbers", x, y_train=x[:, :2].sum(1), y_test=x[:6, :2].sum(1))
    write("text", rng.integers(0, 9, (n, 6)))
    for side in (8, 16, 32):
        write(str(side), rng.integers(0, 256, (n, 3, side, side)).astype(np.uint8))
    many = np.repeat(x, 400, 0)
    unequal = np.where(np.arange(len(many)) < 2, np.arange(len(many)), 2)
    write("unequal", many, y_train=np.repeat(y, 400), client=unequal)


@contextlib.contextmanager
def watched(seen: gpu.Gpu) -> Iterator[list[Watched]]:
    """Notes the device's steps and the host's waits of each client."""
    clients, whole = list[Watched](), Worker._client

    def run(self: Worker, *arguments: Any) -> None:
        first, before = seen.steps, len(seen.waits)
        whole(self, *arguments)
        clients.append(Watched(first, seen.steps, seen.waits[before:]))

    with mock.patch.object(Worker, "_client", run):
        yield clients


class TestSameBits:
    @pytest.mark.parametrize("name", [name for name in CASES if name not in ROUNDED])
    def test_as_on_the_cpu(self, lab: Lab, name: str) -> None:
        assert_same(lab.pair(name, CASES[name]))

    @pytest.mark.parametrize("name", ROUNDED)
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


def diagnosed(lab: Lab) -> Pair:
    last = {label: {"every": 3, **settings} for label, settings in DIAGNOSTICS.items()}
    return lab.pair("diagnostics", {"algorithm": algorithm("fedsam"), "diagnostics": last, "rounds": 3})


def assert_same(pair: Pair) -> None:
    assert model_hash(pair.gpu) == model_hash(pair.cpu)
    assert results(pair.gpu) == results(pair.cpu)
    assert pair.seen.steps > 0


class TestWaits:
    # How many tokens are no padding is not known before they are there: one wait a step.
    @pytest.mark.parametrize("name", [name for name in CASES if name != "task next_token"])
    def test_none_between_the_first_and_the_last_step_of_a_client(self, lab: Lab, name: str) -> None:
        pair = lab.pair(name, CASES[name])
        assert all(c.last - c.first > 1 for c in pair.clients)
        assert {(w.what, w.where) for w in pair.within_steps()} == set()

    @pytest.mark.parametrize("name", [name for name in CASES if name not in ("task next_token", "saves")])
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


def test_memory_is_what_the_table_says(tmp_path: Path) -> None:
    """Of all algorithms: that of a model on the device, and that of a round of the chain on a stand-in."""
    told = {name: needs(algorithms.build(name, {})) for name in algorithms}
    measured = gpu.peaks(tmp_path, list(algorithms))
    assert {name: tuple(map(round, both)) for name, both in measured.items()} == told
    assert told["fedavg"].worker <= 30 and told["fedavg"].server <= 40


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
        model, dropped = {"model": "tests.test_gpu:Pools"}, {"clients": {"on_failure": policy}}
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

    def test_no_compiler_is_imported_for_it(self, tmp_path: Path) -> None:
        code = (
            "import sys; from fl_dist.main import main; code = main(sys.argv[1:]); "
            "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules]); sys.exit(code)"
        )
        settings = [*QUIET, "rounds=1", "clients={total: 4, per_round: 1}", "local.epochs=1", f"run.dir={tmp_path}"]
        code, output = run([sys.executable, "-c", code, *settings])
        assert (code, output.splitlines()[-1]) == (0, "[]"), output


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
                with pytest.raises(RuntimeError, match="same device, but found cpu, cuda:0: tests/test_gpu.py:"):
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
        where = f"tests/test_gpu.py:test_lists_waits_with_file_and_line:{line}"
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


JOB = {"algorithm": algorithm("scaffold"), "rounds": 4, "clients": {"schedule": [[0, 1], [2, 3], [0, 2], [0, 3]]}}
"""Two of the last pairs have met one worker before, so that the variables of one have to move."""


@pytest.fixture(scope="module", params=["", "asynchronous"])
def ranks(lab: Lab, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the GPUs of a server and two workers saw, whose bits are those of one process on the CPU."""
    job = merge(JOB, {"clients": {"total": 4, "per_round": 2}, "partition": {"name": "iid"}})
    alone = lab.pair("alone", job)
    folder = lab.folder / f"ranks {request.param}"
    folder.mkdir()
    arguments = [str(lab.folder / "alone.json"), f"run.dir={folder / 'run'}", "evaluate.where=server"]
    codes, outputs = run_ranks(3, arguments, PRETENDED_GPU=str(folder), PRETENDED_NCCL=request.param)
    assert not any(codes), outputs
    assert model_hash(folder / "run") == model_hash(alone.cpu)
    assert results(folder / "run") == results(alone.cpu)
    return [gpu.reports(folder, rank)[0] for rank in range(3)]


def test_variables_that_come_from_another_rank_reach_the_gpu_without_a_wait(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        slow = [(what, where) for (what, where), _ in seen["waits"] if what.startswith("host to device")]
        assert not [where for _, where in slow if where.startswith(("fl_dist/machine/", "fl_dist/engine/state"))], slow


def test_diagnostics_of_several_gpus(lab: Lab, tmp_path: Path) -> None:
    alone = diagnosed(lab)
    arguments = [str(lab.folder / "diagnostics.json"), f"run.dir={tmp_path / 'run'}"]
    codes, outputs = run_ranks(3, arguments, PRETENDED_GPU=str(tmp_path), PRETENDED_NCCL="asynchronous")
    assert not any(codes), outputs
    assert results(tmp_path / "run") == results(alone.cpu)


def test_models_and_sums_go_from_gpu_to_gpu_and_client_state_between_hosts(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        found = {tuple(key): n for key, n in seen["collectives"]}
        assert {key[1:]: n for key, n in found.items() if key[0] == "nccl"} == {
            ("allreduce", "float32"): 1,  # the first, which connects
            ("broadcast", "uint8"): 5,
            ("reduce", "int64"): 4,
        }
    connecting = {("gloo", "allreduce", "float32")}
    moved = [{tuple(key) for key, _ in seen["collectives"] if key[0] == "gloo"} - connecting for seen in ranks]
    assert moved[0] == set()
    assert moved[1] | moved[2] == {("gloo", "send", "uint8"), ("gloo", "recv", "uint8")}


def test_torchs_own_thread_does_not_end_a_rank_whatever_torchrun_asks_for() -> None:
    with gpu.pretended(), mock.patch.dict(os.environ, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}):
        backend = Cluster.__new__(Cluster)._choose_device(Place(0, 2, 0, 2, "127.0.0.1", 1), Topology())
        assert (backend, os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("cpu:gloo,cuda:nccl", "0")


@pytest.mark.parametrize(("name", "models"), [("scaffold", 0), ("fedacg", 2)])
def test_all_gpus_evaluate_what_went_down_or_what_follows_it(lab: Lab, tmp_path: Path, name: str, models: int) -> None:
    """Two ranks have a batch, the third none. Clients of FedACG do not start from the server's model."""
    alone = lab.pair(f"algorithm {name}", ALGORITHMS[name])
    arguments = [str(lab.folder / f"algorithm {name}.json"), f"run.dir={tmp_path / 'run'}", "evaluate.where=workers"]
    codes, outputs = run_ranks(3, arguments, PRETENDED_GPU=str(tmp_path), PRETENDED_NCCL="asynchronous")
    assert not any(codes), outputs
    assert model_hash(tmp_path / "run") == model_hash(alone.cpu)
    assert results(tmp_path / "run") == results(alone.cpu)
    for rank in range(3):
        found = {tuple(key): n for key, n in gpu.reports(tmp_path, rank)[0]["collectives"]}
        assert found["nccl", "reduce", "int64"] == 2 + 2
        assert found["nccl", "broadcast", "uint8"] == 3
        assert found.get(("nccl", "broadcast", "float32"), 0) == models


class TestPlacement:
    """Ranks whose launcher shows each of them what it wants."""

    def run(self, lab: Lab, folder: Path, visible: list[str], *more: str) -> tuple[list[int | None], str, Path]:
        alone = lab.pair("algorithm scaffold", ALGORITHMS["scaffold"])
        arguments = [str(lab.folder / "algorithm scaffold.json"), f"run.dir={folder / 'run'}", *more]
        own = [{"CUDA_VISIBLE_DEVICES": shown, "LOCAL_RANK": "0"} for shown in visible]
        codes, (output, *_) = run_ranks(len(visible), arguments, own=own, PRETENDED_GPU=str(folder))
        return codes, output, alone.cpu

    @pytest.mark.parametrize(
        ("visible", "more", "group"),
        [
            (["2", "5", "0"], (), "nccl"),
            (["MIG-0-1", "MIG-1-1", "MIG-4-7"], (), "nccl"),
            (["3", "3", "3"], ("topology.oversubscribe=true",), "gloo"),
            (["MIG-0-1", "MIG-0-2"], ("topology.oversubscribe=true",), "gloo"),
            (["1"], (), "nccl"),
        ],
        ids=str,
    )
    def test_what_goes_together_has_the_bits_of_the_cpu(
        self, lab: Lab, visible: list[str], more: tuple[str, ...], group: str, tmp_path: Path
    ) -> None:
        codes, output, alone = self.run(lab, tmp_path, visible, *more)
        assert not any(codes), output
        assert model_hash(tmp_path / "run") == model_hash(alone)
        for rank in range(len(visible)):
            (seen,) = gpu.reports(tmp_path, rank)
            sums = {tuple(key) for key, _ in seen["collectives"] if key[1] == "reduce"}
            assert sums == {(group, "reduce", "int64")}
            assert seen["steps"] > 0 or rank == 0

    @pytest.mark.parametrize(
        ("visible", "words"),
        [
            (["2", "5", "5"], r"ranks 1 and 2 share one GPU of \S+, which NCCL cannot connect: start one rank a GPU"),
            (["MIG-0-1", "MIG-0-2"], r"ranks 0 and 1 have parts of one GPU of \S+, which NCCL cannot connect: start"),
            (["2", "", "5"], r"rank 1 on \S+ sees no GPU, but rank 0 on \S+ does: ask for GPUs on every node"),
            (["", "4"], r"rank 0 on \S+ sees no GPU, but rank 1 on \S+ does: ask for GPUs on every node"),
        ],
        ids=str,
    )
    def test_what_does_not_is_refused_in_one_line(
        self, lab: Lab, visible: list[str], words: str, tmp_path: Path
    ) -> None:
        codes, output, _ = self.run(lab, tmp_path, visible)
        assert 0 not in codes and None not in codes
        (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
        assert re.search(words, line)
        assert "Traceback" not in output and not (tmp_path / "run" / "metrics.jsonl").exists()


SECONDS = 10.0
"""From the death of a rank to a word about it, and from that to the end of all."""
LOST = r"^error: rank 1 on \S+ was lost \(.*\) in round 1, whose clients were \d"
STUCK = r"^error: rank 1 on \S+ is stuck: no progress for 3 s \(comm.timeout\) in round 1, client \d"


@contextlib.contextmanager
def endless_round(lab: Lab, folder: Path, fault: str, nccl: str, *more: str) -> Iterator[list[Rank]]:
    """A server and two workers, of which one is disturbed in the middle of steps that would never end."""
    config = lab.config({"local": {"epochs": 10**6}, "clients": {"per_round": 3}})
    (folder / "config.json").write_text(json.dumps(config))
    arguments = [str(folder / "config.json"), f"run.dir={folder / 'run'}", *more]
    with started_ranks(3, arguments, FL_DIST_FAULT=fault, PRETENDED_GPU=str(folder), PRETENDED_NCCL=nccl) as ranks:
        yield ranks


def assert_said(server: Rank, words: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not (found := re.search(words, server.output(), re.MULTILINE)) and time.monotonic() < end:
        time.sleep(0.05)
    assert found, server.output()


@pytest.mark.parametrize(("nccl", "seconds"), [("asynchronous", SECONDS), ("silent", 15.0), ("hanging", 25.0)])
def test_a_killed_worker_is_named_and_everybody_ends(lab: Lab, tmp_path: Path, nccl: str, seconds: float) -> None:
    with endless_round(lab, tmp_path, "step:9@1", nccl) as (server, killed, other):
        assert killed.wait(60) == -signal.SIGKILL
        assert_said(server, LOST, seconds)
        for rank in (server, other):
            assert rank.wait(SECONDS) == 1


@pytest.mark.parametrize(("action", "words"), [("stop", LOST), ("sleep:100", STUCK)])
def test_a_stopped_or_stuck_worker_is_named_too(lab: Lab, tmp_path: Path, action: str, words: str) -> None:
    with endless_round(lab, tmp_path, f"step:9@1={action}", "asynchronous", "comm.timeout=3") as (server, stuck, other):
        log = tmp_path / "run" / "logs" / "rank1.log"
        wait_for(lambda: stuck.stopped if action == "stop" else log.exists())
        assert_said(server, words, 15)
        for rank in (server, other, *([stuck] if action != "stop" else [])):
            assert rank.wait(SECONDS) == 1


@pytest.mark.parametrize("action", ["", "=stop"])
def test_without_their_server_workers_end(lab: Lab, tmp_path: Path, action: str) -> None:
    """Which is in the middle of steps of its own."""
    shared = "topology.server=shared"
    with endless_round(lab, tmp_path, f"step:9@0{action}", "asynchronous", shared) as (server, *others):
        wait_for(lambda: server.stopped)
        for rank in others:
            assert rank.wait(15 + SECONDS) == 1
    for rank in (1, 2):
        log = (tmp_path / "run" / "logs" / f"rank{rank}.log").read_text()
        assert re.search(r"rank 0 on \S+, the server, was lost \(.*\) in round 1, whose clients were \d", log), log
