"""Which device a rank computes on, and whether the devices of all ranks fit together."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fl_dist.common.errors import UserError
from fl_dist.config import Topology

FIRST_GPU = Path("/dev/nvidia0")


class DeviceError(UserError):
    """Devices that are missing or cannot be used together."""


class DeviceSlot(NamedTuple):
    """Where a rank computes."""

    host: str
    device_type: str
    gpu: str
    """The GPU, or the part of a GPU, as every rank that sees it names it."""
    parent_gpu: str = ""
    """The GPU that a part belongs to."""
    kind: str = ""
    """What decides which kernels run: GPUs that differ in it may compute other bits."""
    visible_gpus: int = 0


def pick_device(topology: Topology, local_rank: int) -> torch.device:
    """The GPU of this local rank among the visible ones; a launcher may show each rank only its own."""
    gpus = torch.cuda.device_count() if topology.device != "cpu" else 0
    if topology.device == "cuda" and not gpus:
        raise DeviceError(
            "topology.device is cuda, but no GPU is visible: check CUDA_VISIBLE_DEVICES or use device auto"
        )
    if topology.device == "auto" and not gpus and (reason := _describe_missing_gpu()):
        raise DeviceError(
            f"{reason}, but torch {torch.__version__} sees none: install a build of torch for its driver "
            "(docs/start/gpu-node.md), or set topology.device=cpu to train on the CPU"
        )
    return torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")


def _describe_missing_gpu() -> str:
    """Why this process should have a GPU; empty if it need not."""
    if os.environ.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0"):
        return "Slurm allocated GPUs"
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # on purpose
    return "this machine has a GPU" if FIRST_GPU.exists() and not is_hidden else ""


def device_name(device: torch.device) -> str:
    """The model of the GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has finished its work, except for copies on other streams."""
    return torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None


def device_slot(host: str, device: torch.device) -> DeviceSlot:
    if device.type != "cuda":
        return DeviceSlot(host, device.type, "", kind=_cpu_kind())
    visible, gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), torch.cuda.get_device_properties(device)
    slot = DeviceSlot(host, device.type, str(gpu.uuid), "", _gpu_kind(device), torch.cuda.device_count())
    if not visible[0].startswith("MIG-"):
        return slot
    # Parts of one GPU may report the UUID of the part or of the GPU; a process sees one part at a time.
    pci = [getattr(gpu, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return slot._replace(gpu=visible[0], parent_gpu=str(gpu.uuid) if None in pci else ":".join(map(str, pci)))


def _gpu_kind(device: torch.device) -> str:
    """Parts of a GPU have its name, but fewer multiprocessors."""
    gpu, cudnn = torch.cuda.get_device_properties(device), torch.backends.cudnn.version()
    return f"{gpu.name} with {gpu.multi_processor_count} multiprocessors, torch {torch.__version__}, cuDNN {cudnn}"


def _cpu_kind() -> str:
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def check_device_slots(slots: Sequence[DeviceSlot], oversubscribe: bool) -> None:
    """DeviceError if only some ranks have GPUs, or if two ranks share one without topology.oversubscribe."""
    first_ranks: dict[tuple[str, str], int] = {}
    for rank, slot in enumerate(slots):
        if slot.device_type != slots[0].device_type:
            without, with_ = (rank, 0) if slot.device_type == "cpu" else (0, rank)
            raise DeviceError(
                f"rank {without} on {slots[without].host} sees no GPU, but rank {with_} on {slots[with_].host} does: "
                "ask for GPUs on every node, or set topology.device=cpu"
            )
        for gpu, problem in ((slot.gpu, "share one GPU"), (slot.parent_gpu, "have parts of one GPU")):
            first = first_ranks.setdefault((slot.host, gpu), rank)
            if gpu and first != rank and not oversubscribe:
                raise DeviceError(
                    f"ranks {first} and {rank} {problem} of {slot.host}, which NCCL cannot connect: "
                    "start one rank per GPU, or set topology.oversubscribe=true to share GPUs over gloo"
                )


def describe_device_problems(slots: Sequence[DeviceSlot], oversubscribe: bool) -> list[str]:
    """What does not prevent a run, but its speed or its promise of the same bits."""
    problems = []
    other = next((rank for rank, slot in enumerate(slots) if slot.kind != slots[0].kind), None)
    if other is not None:
        problems.append(
            f"rank 0 computes on {slots[0].kind}, but rank {other} on {slots[other].host} on {slots[other].kind}: "
            "results may depend on which rank trains which client; request nodes of one kind"
        )
    first, has_neighbours = slots[0], sum(slot.host == slots[0].host for slot in slots) > 1
    if first.visible_gpus == 1 and not first.parent_gpu and has_neighbours and not oversubscribe:
        problems.append(
            "each rank sees only its own GPU, so NCCL may use PCIe instead of NVLink within a node: request GPUs with "
            "--gpus-per-node instead of --gpus-per-task, or start the ranks with srun --gpu-bind=none"
        )
    return problems
