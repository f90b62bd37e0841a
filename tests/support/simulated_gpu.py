"""A simulated GPU: its tensors keep their values in host memory and report the device "cuda:0".

It raises where CUDA would: for tensors of several devices in one operation and, in deterministic mode, for operations
without a deterministic kernel. It records where the host would wait for the device and counts the device's memory.
Copies from and to pinned memory and asynchronous collectives take effect only after a wait.
gloo replaces NCCL. Results equal those of the CPU.

python -m tests.support.simulated_gpu [-m MODULE] ARGUMENTS   run a module and report

SIMULATED_GPU=FOLDER           ranks of tests.support.processes use it and write reports to FOLDER
SIMULATED_GPUS=4               GPUs per node (8); CUDA_VISIBLE_DEVICES selects; MIG-2-1 is a MIG slice of GPU 2
SIMULATED_NCCL=asynchronous    collectives return at once
SIMULATED_NCCL=silent          also, collectives broken by a lost rank never end, like real kernels
SIMULATED_DRIVER=TEXT          the driver cannot be used: choosing a GPU raises a RuntimeError of this text
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
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from fl_dist.federation import fixed_point
from fl_dist.federation.scheduling import WorkerSpeeds
from tests.support import processes

SYNCHRONIZING_OPS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"),
    *("repeat_interleave", "bincount", "multinomial", "_linalg_eigh", "linalg_lstsq"),
}
"""Operations after which the host reads the result or its size."""
NONDETERMINISTIC_OPS = {
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
INDEXING_OPS = ("index", "index_put", "index_put_", "_index_put_impl_")
"""Operations that accept index tensors in host memory, and copy them."""
OPTIMIZER_STEP_OPS = ("_fused_sgd_", "_fused_adamw_")
UNSUPPORTED_BY_NCCL = (torch.int16, torch.complex64, torch.complex128)
NCCL_MODES = ("asynchronous", "silent")
"""Each mode includes those before it; without a mode, collectives are synchronous."""
TOTAL_MEMORY = 80 * 10**9


class Wait(NamedTuple):
    """A point at which the host would wait for the device."""

    what: str
    where: str
    """file:function:line of this repository."""
    step: int
    """The number of local steps queued before."""


class GpuTensor(Tensor):
    """On "meta" for torch's C++, which needs no driver; on a GPU for Python. `host_tensor` holds the values."""

    host_tensor: Tensor
    cuda_device: torch.device

    @staticmethod
    def __new__(cls, host_tensor: Tensor, device: torch.device) -> "GpuTensor":
        layout = {"strides": host_tensor.stride(), "storage_offset": host_tensor.storage_offset()}
        created = Tensor._make_wrapper_subclass(
            cls, host_tensor.shape, device="meta", dtype=host_tensor.dtype, **layout
        )
        created.host_tensor, created.cuda_device = host_tensor, device
        return created

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TENSOR_OVERRIDES:
            return TENSOR_OVERRIDES[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("a tensor of the simulated GPU was used after its end, or in a thread started before it")

    def __repr__(self) -> str:
        return f"{self.host_tensor!r} on {self.cuda_device}"


def _set_data(tensor: GpuTensor, data: GpuTensor) -> None:
    """Implement assignment to `data`: share the memory of the new tensor."""
    if not isinstance(data, GpuTensor):
        raise RuntimeError("the data of a tensor on a GPU cannot lie in host memory")
    tensor.host_tensor = data.host_tensor


def _refuse_numpy(tensor: GpuTensor, **options: Any) -> None:
    raise TypeError(f"can't convert {tensor.cuda_device} device type tensor to numpy")


TENSOR_OVERRIDES: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda t: t.cuda_device,
    Tensor.is_cuda.__get__: lambda t: True,
    Tensor.is_cpu.__get__: lambda t: False,
    Tensor.is_meta.__get__: lambda t: False,
    Tensor.get_device: lambda t: t.cuda_device.index,
    Tensor.data.__get__: lambda t: GpuTensor(t.host_tensor, t.cuda_device),
    Tensor.data.__set__: _set_data,
    Tensor.data_ptr: lambda t: t.host_tensor.data_ptr(),
    Tensor.untyped_storage: lambda t: t.host_tensor.untyped_storage(),
    Tensor.tolist: lambda t: t.cpu().tolist(),
    Tensor.numpy: _refuse_numpy,
}
"""Attributes that would otherwise report "meta"."""


class Task:
    """Asynchronous work of the device; it takes effect when the host waits for it."""

    def __init__(
        self, finish: Callable[[], None], is_ready: Callable[[], bool] = lambda: True, writes: Tensor | None = None
    ) -> None:
        """`writes`: the host tensor that the task writes to."""
        self._finish, self.is_ready, self.writes, self._done = finish, is_ready, writes, False

    def finish(self) -> None:
        if not self._done:
            self._done = True
            self._finish()


class Stream:
    """Operations take effect at once, in order; only the host sees their results late."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self.gpu, self.device, self.tasks = gpu, gpu.cuda_device, list[Task]()

    def synchronize(self) -> None:
        self.gpu.wait("synchronize", self.tasks)

    def query(self) -> bool:
        return _finish_if_ready(self.tasks)

    def wait_stream(self, other: "Stream") -> None:
        self.tasks += other.tasks

    def wait_event(self, event: "Event") -> None:
        self.tasks += event.tasks

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.gpu)
        event.record(self)
        return event


class Event:
    def __init__(self, gpu: "SimulatedGpu", **options: Any) -> None:
        self.gpu, self.tasks, self._when = gpu, list[Task](), 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.tasks, self._when = list((stream or self.gpu.stream).tasks), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.stream).wait_event(self)

    def synchronize(self) -> None:
        self.gpu.wait("synchronize", self.tasks)

    def query(self) -> bool:
        return _finish_if_ready(self.tasks)

    def elapsed_time(self, later: "Event") -> float:
        return 1000 * (later._when - self._when)


def _finish_all(tasks: list[Task]) -> None:
    while tasks:
        tasks.pop(0).finish()


def _finish_if_ready(tasks: list[Task]) -> bool:
    ready = all(task.is_ready() for task in tasks)
    if ready:
        _finish_all(tasks)
    return ready


class Collective(Work):
    """Like NCCL's: `wait` makes the stream wait, not the host; errors appear when the host waits."""

    def __init__(self, gpu: "SimulatedGpu", work: Work, tensors: list[Tensor]) -> None:
        super().__init__()
        self.gpu, self.work, self.error = gpu, work, ""
        self.memory = {t.untyped_storage().data_ptr() for t in tensors}
        self.task = Task(self._finish, self.is_completed)

    def wait(self, timeout: Any = None) -> bool:
        self.gpu.stream.tasks.append(self.task)
        if timeout:  # only then NCCL makes the host wait
            self.gpu.wait("collective", [self.task])
        return True

    def is_completed(self) -> bool:
        if not self.work.is_completed():
            return False
        self.complete()
        return not (self.error and self.gpu.silent)

    def is_success(self) -> bool:
        return self.is_completed() and not self.error

    def complete(self) -> None:
        """Make its result available to later operations on the device."""
        if self in self.gpu.pending:
            self.gpu.pending.remove(self)
            try:
                self.work.wait()
            except RuntimeError as e:
                self.error = str(e)

    def _finish(self) -> None:
        self.complete()
        while self.error and self.gpu.silent:
            time.sleep(0.05)
        if self.error:
            raise RuntimeError(f"NCCL error: {self.error}")


class SimulatedGpu(TorchDispatchMode):
    """One GPU, with counts of its waits, collectives, steps and memory."""

    def __init__(self, index: int = 0, nccl: str = "") -> None:
        super().__init__()
        self.cuda_device = torch.device("cuda", index)
        self.asynchronous, self.silent = (nccl in NCCL_MODES[kind:] for kind in range(2))
        self.backend = "nccl"
        self.waits: list[Wait] = []
        self.collectives: Counter[tuple[str, str, str]] = Counter()
        """By group, operation and type."""
        self.pending: list[Collective] = []
        self.steps = self.allocated = self.peak = self.failed_allocations = 0
        self.stream = self.main = Stream(self)
        self.streams = weakref.WeakSet([self.main])
        self._allocations: dict[int, weakref.ref[Any]] = {}
        self._pinned: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skipping dynamo would import it."""
        return False

    @property
    def wait_counts(self) -> Counter[tuple[str, str]]:
        """How often the host would wait, by operation and caller."""
        return Counter((wait.what, wait.where) for wait in self.waits)

    def report(self) -> dict[str, Any]:
        waits, collectives = self.wait_counts.most_common(), self.collectives.most_common()
        return {"waits": waits, "collectives": collectives, "steps": self.steps, "peak": self.peak}

    def wait(self, what: str, tasks: list[Task]) -> None:
        if threading.current_thread() is threading.main_thread():  # waits of other threads do not block it
            self.waits.append(Wait(what, _caller(), self.steps))
        _finish_all(tasks)

    def synchronize(self, device: Any = None) -> None:
        for stream in list(self.streams):
            stream.synchronize()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name.split("::")[1]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        gpu, host = _split_by_device(tensors)
        self.steps += name in OPTIMIZER_STEP_OPS
        if func.namespace == "c10d":
            return self._collective(func, name, args, kwargs)
        if name in ("is_pinned", "_pin_memory") or kwargs.get("pin_memory"):
            return self._pin(func, name, args, kwargs)
        device = kwargs.get("device")
        on_gpu = bool(gpu) if device is None else torch.device(device).type != "cpu"  # "meta" in autograd
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        self._complete_collectives(gpu)
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, kwargs, on_gpu)
        if name == "_fused_sdp_choice":
            return SDPBackend.MATH.value
        if gpu:
            self._check(name, tensors, gpu, host)
        return self._run(func, args, kwargs, on_gpu)

    def _check(self, name: str, tensors: list[Tensor], gpu: list[GpuTensor], host: list[Tensor]) -> None:
        """Raise where CUDA would refuse, and note a wait where it would wait."""
        if name in NONDETERMINISTIC_OPS and gpu[0].is_floating_point() and torch.get_deterministic_debug_mode() == 2:
            hint = "but you set 'torch.use_deterministic_algorithms(True)'. You can turn off determinism"
            raise RuntimeError(f"{name}_cuda does not have a deterministic implementation, {hint} just for it.")
        devices = {t.cuda_device for t in gpu}
        # Numbers in host memory may be operands, but not results.
        wrong = [t for t in host if t.dim() or (t is tensors[0] and name.endswith("_")) or name in ("cat", "stack")]
        copies = wrong and (name in INDEXING_OPS or name.startswith("_foreach_copy")) and wrong[0] is not tensors[0]
        if len(devices) > 1 or (wrong and not copies):
            peaks_by_rank = ", ".join(sorted({*map(str, devices), *(str(t.device) for t in wrong)}))
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found {peaks_by_rank}: {_caller()}"
            )
        has_mask = name in INDEXING_OPS and any(t.dtype in (torch.bool, torch.uint8) for t in gpu[1:])
        if copies or has_mask or name in SYNCHRONIZING_OPS:
            self.wait(name, self.stream.tasks)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any, on_gpu: bool) -> Any:
        """A copy between host and device: a wait, unless it is non-blocking and the host memory is pinned."""
        source = args[1] if name == "copy_" else args[0]
        on_gpu = isinstance(args[0], GpuTensor) if name == "copy_" else on_gpu
        non_blocking = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if isinstance(source, GpuTensor) == on_gpu:
            return self._run(func, args, kwargs, on_gpu)
        if on_gpu:
            if non_blocking and self._is_pinned(source):
                self._finish_copies_to(source)
                self.stream.tasks.append(_check_unchanged(source))
            else:
                self.wait("host to device" + " (pageable)" * bool(non_blocking), self.stream.tasks)
            return self._run(func, args, kwargs, on_gpu)
        if non_blocking and (name == "_to_copy" or self._is_pinned(args[0])):
            return self._copy_asynchronously(func, args, kwargs, keep=name == "_to_copy")
        self.wait("device to host", self.stream.tasks)
        return self._run(func, args, kwargs, on_gpu)

    def _finish_copies_to(self, source: Tensor) -> None:
        """Finish earlier copies of this stream, or of one it waits for, to the memory that is read now."""
        memory = source.untyped_storage().data_ptr()
        for task in self.stream.tasks:
            if task.writes is not None and task.writes.untyped_storage().data_ptr() == memory:
                task.finish()

    def _copy_asynchronously(self, func: Any, args: Any, kwargs: Any, keep: bool) -> Tensor:
        """The target holds garbage until the copy is finished."""
        out = self._run(func, args, kwargs, False)
        value = out.clone()
        out.fill_(float("nan") if out.is_floating_point() else 85)
        self.stream.tasks.append(Task(lambda: (out.copy_(value), None)[1], writes=out))
        return self._mark_pinned(out) if keep else out

    def _pin(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "is_pinned":
            return not isinstance(args[0], GpuTensor) and self._is_pinned(args[0])
        if name == "_pin_memory" and isinstance(args[0], GpuTensor):
            raise RuntimeError("cannot pin memory of a GPU, only dense CPU tensors can be pinned")
        created = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs | {"pin_memory": False})
        return self._mark_pinned(created)

    def _mark_pinned(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[id(storage)] = weakref.ref(storage)
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        reference = self._pinned.get(id(storage))
        return reference is not None and reference() is storage

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        gpu, host = _split_by_device([t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
        group = self.backend if gpu else "gloo"
        if group == "nccl" and (host or any(t.dtype in UNSUPPORTED_BY_NCCL for t in gpu)):
            raise RuntimeError(f"NCCL cannot {name} this: {[(t.dtype, t.device) for t in gpu + host]}")
        self.collectives[group, name.strip("_"), str((gpu + host)[0].dtype).removeprefix("torch.")] += 1
        self._complete_collectives(gpu)
        out = self._run(func, args, kwargs, bool(gpu))
        if group != "nccl" or not self.asynchronous:
            return out
        *rest, work = out if isinstance(out, tuple) else (out,)
        self.pending.append(Collective(self, Work.unbox(work), [t.host_tensor for t in gpu]))
        boxed = self.pending[-1].boxed()
        return (*rest, boxed) if rest else boxed

    def _complete_collectives(self, gpu: list[GpuTensor]) -> None:
        """Complete the pending collectives on the memory of these tensors."""
        for work in list(self.pending):
            if work.memory & {t.host_tensor.untyped_storage().data_ptr() for t in gpu}:
                work.complete()

    def _run(self, func: Any, args: Any, kwargs: Any, on_gpu: bool) -> Any:
        gpu_tensors = {id(t.host_tensor): t for t in tree_leaves((args, kwargs)) if isinstance(t, GpuTensor)}
        args, kwargs = tree_map(lambda t: t.host_tensor if isinstance(t, GpuTensor) else t, (args, kwargs))

        def to_gpu(t: Any) -> Any:
            if not on_gpu or not isinstance(t, Tensor):
                return t
            return gpu_tensors[id(t)] if id(t) in gpu_tensors else self._to_gpu(t)

        return tree_map(to_gpu, func(*args, **kwargs))

    def _to_gpu(self, host_tensor: Tensor) -> GpuTensor:
        """The tensor on this GPU; its memory counts until its last reference is gone."""
        storage = host_tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self._allocations or self._allocations[key]() is not storage:
            self._allocations[key] = weakref.ref(storage, lambda _: self._free(key, size))
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
        return GpuTensor(host_tensor, self.cuda_device)

    def _free(self, key: int, size: int) -> None:
        del self._allocations[key]
        self.allocated -= size


def _split_by_device(tensors: list[Tensor]) -> tuple[list[GpuTensor], list[Tensor]]:
    """The tensors on the device, and those in host memory."""
    return [t for t in tensors if isinstance(t, GpuTensor)], [t for t in tensors if not isinstance(t, GpuTensor)]


def _check_unchanged(source: Tensor) -> Task:
    """A copy from pinned memory; raises if that memory is written to before the copy is finished."""
    version = source._version

    def finish() -> None:
        if source._version != version:
            raise RuntimeError("pinned memory was written to before the copy from it had finished")

    return Task(finish)


def _caller() -> str:
    frame: Any = sys._getframe(2)
    while frame and not _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{Path(frame.f_code.co_filename).relative_to(processes.ROOT)}:{frame.f_code.co_name}:{frame.f_lineno}"


def _is_ours(file: str) -> bool:
    return file.startswith(str(processes.ROOT)) and "site-packages" not in file and file != __file__


@contextlib.contextmanager
def simulate_gpu(gpus: int = 8, nccl: str = "") -> Iterator[SimulatedGpu]:
    """Give this process, and the threads it starts, a simulated GPU."""
    visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")))
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") creates it in host memory, then copies
    gpu = SimulatedGpu(0, nccl)
    try:
        # torch checks the stream before it calls the tensor's method.
        recorded = mock.patch.object(Tensor, "record_stream", create=True)
        with _patch_cuda(gpu, visible), _patch_distributed(gpu), _patch_threads(gpu), recorded, gpu:
            yield gpu
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _patch_cuda(gpu: SimulatedGpu, visible: list[str]) -> Any:
    """Patch the functions of torch.cuda that programs use."""

    def nothing(*arguments: Any) -> None:
        pass

    def set_device(device: Any) -> None:
        if "SIMULATED_DRIVER" in os.environ:
            raise RuntimeError(os.environ["SIMULATED_DRIVER"])
        gpu.cuda_device = _device(device)

    def properties(device: Any = None) -> SimpleNamespace:
        device = gpu.cuda_device if device is None else _device(device)
        gpu_index = int(visible[device.index or 0].removeprefix("MIG-").partition("-")[0])
        fields: dict[str, Any] = {"pci_domain_id": 0, "pci_bus_id": gpu_index, "pci_device_id": 0}
        gpu_uuid = uuid.UUID(int=gpu_index + 1)  # MIG slices report it too
        fields |= {"uuid": gpu_uuid, "total_memory": TOTAL_MEMORY, "multi_processor_count": 132}
        return SimpleNamespace(name="a simulated GPU", major=9, minor=0, **fields)

    @contextlib.contextmanager
    def stream(selected: Stream | None) -> Iterator[None]:
        before, gpu.stream = gpu.stream, selected or gpu.stream
        try:
            yield
        finally:
            gpu.stream = before

    def new_stream(*arguments: Any, **options: Any) -> Stream:
        created = Stream(gpu)
        gpu.streams.add(created)
        return created

    def reset_peak(device: Any = None) -> None:
        gpu.peak = gpu.allocated

    return mock.patch.multiple(
        torch.cuda,
        _lazy_init=nothing,
        is_available=lambda: bool(visible),
        is_initialized=lambda: True,
        device_count=lambda: len(visible),
        set_device=set_device,
        current_device=lambda: gpu.cuda_device.index,
        manual_seed=nothing,
        manual_seed_all=nothing,
        get_device_properties=properties,
        get_device_name=lambda device=None: properties(device).name,
        get_device_capability=lambda device=None: (9, 0),
        is_bf16_supported=lambda *arguments: True,
        mem_get_info=lambda device=None: (TOTAL_MEMORY - gpu.allocated, TOTAL_MEMORY),
        memory_allocated=lambda device=None: gpu.allocated,
        max_memory_allocated=lambda device=None: gpu.peak,
        reset_peak_memory_stats=reset_peak,
        memory_stats=lambda device=None: {"num_ooms": gpu.failed_allocations},
        empty_cache=nothing,
        synchronize=gpu.synchronize,
        Stream=new_stream,
        stream=stream,
        current_stream=lambda device=None: gpu.stream,
        default_stream=lambda device=None: gpu.main,
        Event=lambda **options: Event(gpu, **options),
    )


def _device(device: Any) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


@contextlib.contextmanager
def _patch_distributed(gpu: SimulatedGpu) -> Iterator[None]:
    """Let gloo replace NCCL, which needs GPUs and is not in every build of torch."""
    init, destroy = dist.init_process_group, dist.destroy_process_group

    def init_process_group(
        backend: str = "cpu:gloo,cuda:nccl", *arguments: Any, device_id: Any = None, **options: Any
    ) -> None:
        gpu.backend = "nccl" if "nccl" in backend else "gloo"
        init("gloo", *arguments, **options)

    def destroy_process_group(group: Any = None) -> None:
        while gpu.pending:  # NCCL waits for its kernels too
            with contextlib.suppress(RuntimeError):
                gpu.pending[0].task.finish()
        destroy(group)

    with mock.patch.multiple(dist, init_process_group=init_process_group, destroy_process_group=destroy_process_group):
        yield


def _patch_threads(gpu: SimulatedGpu) -> Any:
    """Enter the dispatch mode in every new thread: modes are per thread, a GPU is not."""
    run = threading.Thread.run

    def run_on_gpu(thread: threading.Thread) -> None:
        with gpu:
            run(thread)

    return mock.patch.object(threading.Thread, "run", run_on_gpu)


def with_report(main: Callable[[list[str]], int], folder: str) -> Callable[[list[str]], int]:
    """Wrap main: each call uses a new GPU and appends its report to the file of this rank."""

    def on_gpu(arguments: list[str]) -> int:
        rank = os.environ.get("RANK", "0")
        # Times of this GPU must not affect scheduling; the chunk size does not change the bits of sums.
        chunks = mock.patch.dict(fixed_point.CHUNK_SIZES, cuda=CHUNK)
        with simulate_from_environment() as gpu, mock.patch.object(WorkerSpeeds, "observe"), chunks:
            try:
                return main(arguments)
            finally:
                with open(Path(folder, f"rank{rank}.jsonl"), "a") as file:
                    file.write(json.dumps(gpu.report()) + "\n")

    return on_gpu


def simulate_from_environment() -> contextlib.AbstractContextManager[SimulatedGpu]:
    return simulate_gpu(int(os.environ.get("SIMULATED_GPUS", "8")), os.environ.get("SIMULATED_NCCL", ""))


def read_reports(folder: Path, rank: int) -> list[dict[str, Any]]:
    """One report per run of the rank."""
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


HIDDEN, FEATURES, CLASSES, CHUNK = (400, 480), 256, 10, 1 << 15
"""Two widths of a model, both large enough that the buffer for conversions, of CHUNK entries, has its full size.

A hidden unit has so many parameters that its activations, 4 bytes per row of a batch, hardly count.
"""


def measure_peaks(folder: Path, cases: Mapping[str, Sequence[str]]) -> dict[str, tuple[float, float]]:
    """Peak GPU memory of a worker and of rank 0, by case (overrides), in bytes per additional parameter."""
    x, y = np.zeros((2 * CLASSES, FEATURES), np.float32), np.arange(2 * CLASSES) % CLASSES
    data = folder / "data.npz"
    np.savez(data, x_train=x, y_train=y, x_test=x[:1], y_test=y[:1], client=y % 2)
    small = [*processes.NO_WANDB, "rounds=2", f"data={{name: npz, path: {data}}}", "partition=given"]
    small += ["clients={total: 2, per_round: 2}", "checkpoint.every=0"]
    small += ["task=classification", "local={epochs: 1, batch_size: 5}", "evaluate.batch_size=1"]
    runs = [
        [*small, *overrides, f"model={{name: mlp, hidden: [{width}]}}", f"run.dir={folder / name}{width}"]
        for name, overrides in cases.items()
        for width in HIDDEN
    ]
    codes, outputs = processes.run_ranks(2, *runs, timeout=200, SIMULATED_GPU=str(folder))
    assert not any(codes), outputs
    parameters = (HIDDEN[1] - HIDDEN[0]) * (FEATURES + 1 + CLASSES)
    peaks_by_rank = [[report["peak"] for report in read_reports(folder, rank)] for rank in (0, 1)]
    server, worker = (
        [(b - a) / parameters for a, b in zip(peaks[::2], peaks[1::2], strict=True)] for peaks in peaks_by_rank
    )
    return dict(zip(cases, zip(worker, server, strict=True), strict=True))


def main(argv: Sequence[str]) -> int:
    module, arguments = (argv[1], argv[2:]) if argv[:1] == ["-m"] else ("fl_dist.main", argv)
    with simulate_from_environment() as gpu, mock.patch.object(sys, "argv", [module, *arguments]):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            print_report(gpu)
    return 0


def print_report(gpu: SimulatedGpu) -> None:
    """Print the report to stderr."""
    lines = [f"{n:6} waits: {what} at {where}" for (what, where), n in gpu.wait_counts.most_common()]
    lines += [f"{n:6} collectives: {' '.join(key)}" for key, n in gpu.collectives.most_common()]
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank} on {gpu.cuda_device}, {gpu.steps} steps, {gpu.peak:,} bytes", *lines, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    from tests.support import simulated_gpu  # not as __main__: one copy of the module

    sys.exit(simulated_gpu.main(sys.argv[1:]))
