"""A pretended GPU, for machines that have none: numbers in host memory behind tensors that say they are on "cuda:0".

What CUDA refuses raises here too: tensors of several devices in one operation, and, if kernels are to be deterministic,
operations that have none. Places where the host would wait for the device are listed, memory on the device is counted.
Copies from and to pinned memory, and collectives that are to be asynchronous, are over when somebody waits for them,
not before. gloo plays NCCL. The numbers are those of the CPU.

python -m tests.support.gpu [-m MODULE] ARGUMENTS   run fl_dist.main, or another module, and say what the device saw

PRETENDED_GPU=FOLDER           ranks of tests.support.processes run on it, and leave a report in the folder
PRETENDED_GPUS=4               GPUs of a node (8); CUDA_VISIBLE_DEVICES chooses among them; MIG-2-1 is a part of GPU 2
PRETENDED_NCCL=asynchronous    collectives return at once
PRETENDED_NCCL=silent          also, those that a lost rank broke never end, like kernels that wait for another GPU
PRETENDED_NCCL=hanging         also, aborting them never ends
"""

import contextlib
import json
import os
import runpy
import sys
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fl_dist.engine import exact
from fl_dist.engine.plan import Speeds
from tests.support import processes

WAITS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"),
    *("repeat_interleave", "bincount", "multinomial", "_linalg_eigh", "linalg_lstsq"),
}
"""Operations whose result, or its size, the host reads."""
UNSTEADY = {
    *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "avg_pool3d_backward"),
    *("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward"),
    *("fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "max_unpool2d", "max_unpool3d"),
    *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "_upsample_bilinear2d_aa_backward"),
    *("upsample_bicubic2d_backward", "_upsample_bicubic2d_aa_backward", "upsample_trilinear3d_backward"),
    *("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward"),
    *("nll_loss2d_forward", "nll_loss2d_backward", "_ctc_loss_backward"),
    *("grid_sampler_2d_backward", "grid_sampler_3d_backward", "put_", "histc", "median", "kthvalue", "cumsum"),
}
"""Operations for which CUDA has no deterministic kernel."""
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
"""Take positions in host memory, and copy them."""
STEP = "_fused_sgd_"
UNKNOWN_TO_NCCL = (torch.int16, torch.complex64, torch.complex128)
NCCL = ("asynchronous", "silent", "hanging")
"""Ways in which collectives may behave, each with those before it; without one, calls return when all is done."""
MEMORY = 80 * 10**9


class Wait(NamedTuple):
    """The host would wait for the device."""

    what: str
    where: str
    """file:function:line of this repository."""
    step: int
    """Local steps that the device had been given before."""


class OnGpu(Tensor):
    """To torch's C++ it is on "meta", which needs no driver; to Python it is on a GPU; `held` has the numbers."""

    held: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, held: Tensor, place: torch.device) -> "OnGpu":
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = Tensor._make_wrapper_subclass(cls, held.shape, device="meta", **layout)
        made.held, made.place = held, place
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ANSWERS:
            return ANSWERS[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("a tensor of the pretended GPU outlived it, or came to a thread that is older")

    def __repr__(self) -> str:
        return f"{self.held!r} on {self.place}"


def _point_at(tensor: OnGpu, data: OnGpu) -> None:
    """What assigning to `data` does: the same memory from now on."""
    if not isinstance(data, OnGpu):
        raise RuntimeError("the data of a tensor on a GPU cannot lie in host memory")
    tensor.held = data.held


def _no_numpy(tensor: OnGpu, **options: Any) -> None:
    raise TypeError(f"can't convert {tensor.place} device type tensor to numpy")


ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda t: t.place,
    Tensor.is_cuda.__get__: lambda t: True,
    Tensor.is_cpu.__get__: lambda t: False,
    Tensor.is_meta.__get__: lambda t: False,
    Tensor.get_device: lambda t: t.place.index,
    Tensor.data.__get__: lambda t: OnGpu(t.held, t.place),
    Tensor.data.__set__: _point_at,
    Tensor.data_ptr: lambda t: t.held.data_ptr(),
    Tensor.untyped_storage: lambda t: t.held.untyped_storage(),
    Tensor.tolist: lambda t: t.cpu().tolist(),
    Tensor.numpy: _no_numpy,
}
"""What "meta" would say otherwise."""


class Task:
    """Something that the device was asked to do, and that is over once the host has waited for it."""

    def __init__(
        self, finish: Callable[[], None], is_ready: Callable[[], bool] = lambda: True, writes: Tensor | None = None
    ) -> None:
        """`writes`: to what memory of the host."""
        self._finish, self.is_ready, self.writes, self._done = finish, is_ready, writes, False

    def finish(self) -> None:
        if not self._done:
            self._done = True
            self._finish()


class Stream:
    """Operations take effect at once, in the order in which they are given; only the host's view of them is late."""

    def __init__(self, gpu: "Gpu") -> None:
        self.gpu, self.device, self.tasks = gpu, gpu.place, list[Task]()

    def synchronize(self) -> None:
        self.gpu.wait("synchronize", self.tasks)

    def query(self) -> bool:
        return _finished_if_ready(self.tasks)

    def wait_stream(self, other: "Stream") -> None:
        self.tasks += other.tasks

    def wait_event(self, event: "Event") -> None:
        self.tasks += event.tasks

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.gpu)
        event.record(self)
        return event


class Event:
    def __init__(self, gpu: "Gpu", **options: Any) -> None:
        self.gpu, self.tasks, self._when = gpu, list[Task](), 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.tasks, self._when = list((stream or self.gpu.stream).tasks), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.stream).wait_event(self)

    def synchronize(self) -> None:
        self.gpu.wait("synchronize", self.tasks)

    def query(self) -> bool:
        return _finished_if_ready(self.tasks)

    def elapsed_time(self, later: "Event") -> float:
        return 1000 * (later._when - self._when)


def _finish(tasks: list[Task]) -> None:
    while tasks:
        tasks.pop(0).finish()


def _finished_if_ready(tasks: list[Task]) -> bool:
    ready = all(task.is_ready() for task in tasks)
    if ready:
        _finish(tasks)
    return ready


class Collective(Work):
    """As NCCL's: `wait` lets the stream wait, not the host, and errors come to light when the host waits."""

    def __init__(self, gpu: "Gpu", inner: Work, tensors: list[Tensor]) -> None:
        super().__init__()
        self.gpu, self.inner, self.error = gpu, inner, ""
        self.memory = {t.untyped_storage().data_ptr() for t in tensors}
        self.task = Task(self._finish, self.is_completed)

    def wait(self, timeout: Any = None) -> bool:
        self.gpu.stream.tasks.append(self.task)
        if timeout:  # only then NCCL makes the host wait
            self.gpu.wait("collective", [self.task])
        return True

    def is_completed(self) -> bool:
        if not self.inner.is_completed():
            return False
        self.settle()
        return not (self.error and self.gpu.silent)

    def is_success(self) -> bool:
        return self.is_completed() and not self.error

    def settle(self) -> None:
        """Let its numbers be there; what comes after it on the device needs them."""
        if self in self.gpu.flying:
            self.gpu.flying.remove(self)
            try:
                self.inner.wait()
            except RuntimeError as e:
                self.error = str(e)

    def _finish(self) -> None:
        self.settle()
        while self.error and self.gpu.silent:
            time.sleep(0.05)
        if self.error:
            raise RuntimeError(f"NCCL error: {self.error}")


class Gpu(TorchDispatchMode):
    """One GPU, and what was seen of it."""

    def __init__(self, index: int = 0, nccl: str = "") -> None:
        super().__init__()
        self.place = torch.device("cuda", index)
        self.asynchronous, self.silent, self.hanging = (nccl in NCCL[kind:] for kind in range(3))
        self.backend = "nccl"
        self.waits: list[Wait] = []
        self.collectives: Counter[tuple[str, str, str]] = Counter()
        """By group, operation and type."""
        self.flying: list[Collective] = []
        self.steps = self.live = self.peak = 0
        self.stream = self.main = Stream(self)
        self.streams = weakref.WeakSet([self.main])
        self._known: dict[int, weakref.ref[Any]] = {}
        self._pinned: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skipping it would import it."""
        return False

    @property
    def places(self) -> Counter[tuple[str, str]]:
        """How often the host would wait, by what and where."""
        return Counter((wait.what, wait.where) for wait in self.waits)

    def report(self) -> dict[str, Any]:
        waits, collectives = self.places.most_common(), self.collectives.most_common()
        return {"waits": waits, "collectives": collectives, "steps": self.steps, "peak": self.peak}

    def wait(self, what: str, tasks: list[Task]) -> None:
        if threading.current_thread() is threading.main_thread():  # others may wait while it goes on
            self.waits.append(Wait(what, _where(), self.steps))
        _finish(tasks)

    def synchronize(self, device: Any = None) -> None:
        for stream in list(self.streams):
            stream.synchronize()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name.split("::")[1]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        gpu, host = _sorted(tensors)
        self.steps += name == STEP
        if func.namespace == "c10d":
            return self._collective(func, name, args, kwargs)
        if name in ("is_pinned", "_pin_memory") or kwargs.get("pin_memory"):
            return self._pin(func, name, args, kwargs)
        place = kwargs.get("device")
        there = bool(gpu) if place is None else torch.device(place).type != "cpu"  # "meta" in autograd
        if place is not None:
            kwargs["device"] = torch.device("cpu")
        self._settle(gpu)
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, kwargs, there)
        if name == "_fused_sdp_choice":
            return SDPBackend.MATH.value
        if gpu:
            self._check(name, tensors, gpu, host)
        return self._run(func, args, kwargs, there)

    def _check(self, name: str, tensors: list[Tensor], gpu: list[OnGpu], host: list[Tensor]) -> None:
        """Raise where CUDA would refuse, and note a wait where it would wait."""
        if name in UNSTEADY and gpu[0].is_floating_point() and torch.get_deterministic_debug_mode() == 2:
            set_so = "but you set 'torch.use_deterministic_algorithms(True)'. You can turn off determinism"
            raise RuntimeError(f"{name}_cuda does not have a deterministic implementation, {set_so} just for it.")
        places = {t.place for t in gpu}
        # Numbers in host memory may be operands, but not results.
        wrong = [t for t in host if t.dim() or (t is tensors[0] and name.endswith("_")) or name in ("cat", "stack")]
        copied = wrong and (name in INDEXING or name.startswith("_foreach_copy")) and wrong[0] is not tensors[0]
        if len(places) > 1 or (wrong and not copied):
            found = ", ".join(sorted({*map(str, places), *(str(t.device) for t in wrong)}))
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {found}: {_where()}")
        masks = name in INDEXING and any(t.dtype in (torch.bool, torch.uint8) for t in gpu[1:])
        if copied or masks or name in WAITS:
            self.wait(name, self.stream.tasks)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any, there: bool) -> Any:
        """Between host and device: a wait, unless it is asked not to be and the host's side is pinned."""
        source = args[1] if name == "copy_" else args[0]
        there = isinstance(args[0], OnGpu) if name == "copy_" else there
        quick = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if isinstance(source, OnGpu) == there:
            return self._run(func, args, kwargs, there)
        if there:
            if quick and self._is_pinned(source):
                self._deliver(source)
                self.stream.tasks.append(_unchanged(source))
            else:
                self.wait("host to device" + " (pageable)" * bool(quick), self.stream.tasks)
            return self._run(func, args, kwargs, there)
        if quick and (name == "_to_copy" or self._is_pinned(args[0])):
            return self._copy_later(func, args, kwargs, keep=name == "_to_copy")
        self.wait("device to host", self.stream.tasks)
        return self._run(func, args, kwargs, there)

    def _deliver(self, source: Tensor) -> None:
        """What comes from host memory is what this stream, or one that it waits for, was to bring there before."""
        memory = source.untyped_storage().data_ptr()
        for task in self.stream.tasks:
            if task.writes is not None and task.writes.untyped_storage().data_ptr() == memory:
                task.finish()

    def _copy_later(self, func: Any, args: Any, kwargs: Any, keep: bool) -> Tensor:
        """Whoever looks before it is over sees nonsense."""
        out = self._run(func, args, kwargs, False)
        value = out.clone()
        out.fill_(float("nan") if out.is_floating_point() else 85)
        self.stream.tasks.append(Task(lambda: (out.copy_(value), None)[1], writes=out))
        return self._note_pinned(out) if keep else out

    def _pin(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "is_pinned":
            return not isinstance(args[0], OnGpu) and self._is_pinned(args[0])
        if name == "_pin_memory" and isinstance(args[0], OnGpu):
            raise RuntimeError("cannot pin memory of a GPU, only dense CPU tensors can be pinned")
        made = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs | {"pin_memory": False})
        return self._note_pinned(made)

    def _note_pinned(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[id(storage)] = weakref.ref(storage)
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        known = self._pinned.get(id(storage))
        return known is not None and known() is storage

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        gpu, host = _sorted([t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
        group = self.backend if gpu else "gloo"
        if group == "nccl" and (host or any(t.dtype in UNKNOWN_TO_NCCL for t in gpu)):
            raise RuntimeError(f"NCCL cannot {name} this: {[(t.dtype, t.device) for t in gpu + host]}")
        self.collectives[group, name.strip("_"), str((gpu + host)[0].dtype).removeprefix("torch.")] += 1
        self._settle(gpu)
        out = self._run(func, args, kwargs, bool(gpu))
        if group != "nccl" or not self.asynchronous:
            return out
        *rest, work = out if isinstance(out, tuple) else (out,)
        self.flying.append(Collective(self, Work.unbox(work), [t.held for t in gpu]))
        boxed = self.flying[-1].boxed()
        return (*rest, boxed) if rest else boxed

    def _settle(self, gpu: list[OnGpu]) -> None:
        """What the device does with memory comes after the collectives that it was given before."""
        for work in list(self.flying):
            if work.memory & {t.held.untyped_storage().data_ptr() for t in gpu}:
                work.settle()

    def _run(self, func: Any, args: Any, kwargs: Any, there: bool) -> Any:
        known = {id(t.held): t for t in tree_leaves((args, kwargs)) if isinstance(t, OnGpu)}
        args, kwargs = tree_map(lambda t: t.held if isinstance(t, OnGpu) else t, (args, kwargs))

        def placed(t: Any) -> Any:
            if not there or not isinstance(t, Tensor):
                return t
            return known[id(t)] if id(t) in known else self._placed(t)

        return tree_map(placed, func(*args, **kwargs))

    def _placed(self, held: Tensor) -> OnGpu:
        """The tensor on this GPU; its memory counts until the last that refers to it is gone."""
        storage = held.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self._known or self._known[key]() is not storage:
            self._known[key] = weakref.ref(storage, lambda _: self._freed(key, size))
            self.live += size
            self.peak = max(self.peak, self.live)
        return OnGpu(held, self.place)

    def _freed(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size


def _sorted(tensors: list[Tensor]) -> tuple[list[OnGpu], list[Tensor]]:
    """Those on the device, and those in host memory."""
    return [t for t in tensors if isinstance(t, OnGpu)], [t for t in tensors if not isinstance(t, OnGpu)]


def _unchanged(source: Tensor) -> Task:
    """A copy from pinned memory that nobody may write to before it is over."""
    version = source._version

    def finish() -> None:
        if source._version != version:
            raise RuntimeError("pinned memory was written to before the copy from it was over")

    return Task(finish)


def _where() -> str:
    frame: Any = sys._getframe(2)
    while frame and not _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{Path(frame.f_code.co_filename).relative_to(processes.ROOT)}:{frame.f_code.co_name}:{frame.f_lineno}"


def _is_ours(file: str) -> bool:
    return file.startswith(str(processes.ROOT)) and "site-packages" not in file and file != __file__


@contextlib.contextmanager
def pretended(gpus: int = 8, nccl: str = "") -> Iterator[Gpu]:
    """Within it, this process and the threads that it starts have a GPU."""
    visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")))
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made in host memory, then moved
    gpu = Gpu(0, nccl)
    try:
        # torch looks at the stream before it asks the tensor.
        recorded = mock.patch.object(Tensor, "record_stream", create=True)
        with _cuda(gpu, visible), _distributed(gpu), _threads(gpu), recorded, gpu:
            yield gpu
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _cuda(gpu: Gpu, visible: list[str]) -> Any:
    """torch.cuda as far as a program may ask it."""

    def nothing(*arguments: Any) -> None:
        pass

    def set_device(device: Any) -> None:
        gpu.place = _device(device)

    def properties(device: Any = None) -> SimpleNamespace:
        place = gpu.place if device is None else _device(device)
        whole = int(visible[place.index or 0].removeprefix("MIG-").partition("-")[0])
        slot = {"pci_domain_id": 0, "pci_bus_id": whole, "pci_device_id": 0}
        own = uuid.UUID(int=whole + 1)  # of parts too
        return SimpleNamespace(name="a pretended GPU", uuid=own, total_memory=MEMORY, major=9, minor=0, **slot)

    @contextlib.contextmanager
    def stream(wanted: Stream | None) -> Iterator[None]:
        before, gpu.stream = gpu.stream, wanted or gpu.stream
        try:
            yield
        finally:
            gpu.stream = before

    def new_stream(*arguments: Any, **options: Any) -> Stream:
        made = Stream(gpu)
        gpu.streams.add(made)
        return made

    def reset_peak(device: Any = None) -> None:
        gpu.peak = gpu.live

    return mock.patch.multiple(
        torch.cuda,
        _lazy_init=nothing,
        is_available=lambda: bool(visible),
        is_initialized=lambda: True,
        device_count=lambda: len(visible),
        set_device=set_device,
        current_device=lambda: gpu.place.index,
        manual_seed=nothing,
        manual_seed_all=nothing,
        get_device_properties=properties,
        get_device_name=lambda device=None: properties(device).name,
        get_device_capability=lambda device=None: (9, 0),
        is_bf16_supported=lambda *arguments: True,
        mem_get_info=lambda device=None: (MEMORY - gpu.live, MEMORY),
        memory_allocated=lambda device=None: gpu.live,
        max_memory_allocated=lambda device=None: gpu.peak,
        reset_peak_memory_stats=reset_peak,
        empty_cache=nothing,
        synchronize=gpu.synchronize,
        Stream=new_stream,
        stream=stream,
        current_stream=lambda device=None: gpu.stream,
        default_stream=lambda device=None: gpu.main,
        Event=lambda **options: Event(gpu, **options),
    )


def _device(named: Any) -> torch.device:
    return torch.device("cuda", named) if isinstance(named, int) else torch.device(named)


@contextlib.contextmanager
def _distributed(gpu: Gpu) -> Iterator[None]:
    """gloo carries what is NCCL's, which is not in every build of torch and needs GPUs."""
    start, end, abort = dist.init_process_group, dist.destroy_process_group, dist.ProcessGroup.abort

    def started(backend: str = "cpu:gloo,cuda:nccl", *arguments: Any, device_id: Any = None, **options: Any) -> None:
        gpu.backend = "nccl" if "nccl" in backend else "gloo"
        start("gloo", *arguments, **options)

    def ended(group: Any = None) -> None:
        while gpu.flying:  # NCCL waits for its kernels
            with contextlib.suppress(RuntimeError):
                gpu.flying[0].task.finish()
        end(group)

    def aborted(group: Any) -> None:
        while gpu.hanging:
            time.sleep(1)
        gpu.flying.clear()
        for stream in gpu.streams:
            stream.tasks.clear()
        abort(group)

    group = mock.patch.object(dist.ProcessGroup, "abort", aborted)
    with mock.patch.multiple(dist, init_process_group=started, destroy_process_group=ended), group:
        yield


def _threads(gpu: Gpu) -> Any:
    """Modes belong to a thread; a GPU does not."""
    run = threading.Thread.run

    def run_on_gpu(thread: threading.Thread) -> None:
        with gpu:
            run(thread)

    return mock.patch.object(threading.Thread, "run", run_on_gpu)


def reporting(main: Callable[[list[str]], int], folder: str) -> Callable[[list[str]], int]:
    """The program, each time on a new GPU, of which a line is written to the file of this rank."""

    def on_gpu(arguments: list[str]) -> int:
        rank = os.environ.get("RANK", "0")
        # This GPU's seconds place nobody; sums in smaller pieces than a real one's have the same bits.
        chunks = mock.patch.dict(exact.CHUNK, cuda=CHUNK)
        with of_environment() as gpu, mock.patch.object(Speeds, "observe"), chunks:
            try:
                return main(arguments)
            finally:
                with open(Path(folder, f"rank{rank}.jsonl"), "a") as file:
                    file.write(json.dumps(gpu.report()) + "\n")

    return on_gpu


def of_environment() -> contextlib.AbstractContextManager[Gpu]:
    return pretended(int(os.environ.get("PRETENDED_GPUS", "8")), os.environ.get("PRETENDED_NCCL", ""))


def reports(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Of each run that the rank made."""
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


HIDDEN, FEATURES, CLASSES, CHUNK = (1_600, 1_920), 64, 10, 1 << 15
"""Two widths of a model, beyond that from which the memory for conversions no longer grows: in pieces of CHUNK."""


def peaks(folder: Path, algorithms: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The most that a worker and rank 0 need of their GPUs, by algorithm, in bytes for each parameter more."""
    x, y = np.zeros((2 * CLASSES, FEATURES), np.float32), np.arange(2 * CLASSES) % CLASSES
    data = folder / "data.npz"
    np.savez(data, x_train=x, y_train=y, x_test=x[:1], y_test=y[:1], client=y % 2)
    small = [*processes.QUIET, "rounds=2", f"data={{name: npz, path: {data}}}", "partition=given"]
    small += ["clients={total: 2, per_round: 2}", "checkpoint.every=0"]
    small += ["task=classification", "local={epochs: 1, batch_size: 5}", "evaluate.batch_size=1"]
    runs = [
        [*small, f"algorithm.name={name}", f"model={{name: mlp, hidden: [{width}]}}", f"run.dir={folder / name}{width}"]
        for name in algorithms
        for width in HIDDEN
    ]
    codes, outputs = processes.run_ranks(2, *runs, timeout=200, PRETENDED_GPU=str(folder))
    assert not any(codes), outputs
    more = (HIDDEN[1] - HIDDEN[0]) * (FEATURES + 1 + CLASSES)
    found = [[report["peak"] for report in reports(folder, rank)] for rank in (0, 1)]
    server, worker = ([(b - a) / more for a, b in zip(seen[::2], seen[1::2], strict=True)] for seen in found)
    return dict(zip(algorithms, zip(worker, server, strict=True), strict=True))


def main(argv: Sequence[str]) -> int:
    module, arguments = (argv[1], argv[2:]) if argv[:1] == ["-m"] else ("fl_dist.main", argv)
    with of_environment() as gpu, mock.patch.object(sys, "argv", [module, *arguments]):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            say(gpu)
    return 0


def say(gpu: Gpu) -> None:
    """On the error stream, which programs leave to such words."""
    lines = [f"{n:6} waits: {what} at {where}" for (what, where), n in gpu.places.most_common()]
    lines += [f"{n:6} collectives: {' '.join(key)}" for key, n in gpu.collectives.most_common()]
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank} on {gpu.place}, {gpu.steps} steps, {gpu.peak:,} bytes", *lines, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    from tests.support import gpu as itself  # one module, however it was started

    sys.exit(itself.main(sys.argv[1:]))
