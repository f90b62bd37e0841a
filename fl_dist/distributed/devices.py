"""Which device a rank computes on, and whether the devices of all ranks fit together."""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fl_dist.common.errors import UserError
from fl_dist.config import Topology


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


def pick_device(topology: Topology, local_rank: int) -> torch.device:
    """The GPU of this local rank among the visible ones; a launcher may show each rank only its own."""
    gpus = torch.cuda.device_count() if topology.device != "cpu" else 0
    if topology.device == "cuda" and not gpus:
        raise DeviceError(
            "topology.device is cuda, but no GPU is visible: check CUDA_VISIBLE_DEVICES or use device auto"
        )
    return torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The model of the GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has finished its work, except for copies on other streams."""
    return torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None


def device_slot(host: str, device: torch.device) -> DeviceSlot:
    if device.type != "cuda":
        return DeviceSlot(host, device.type, "")
    visible, gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), torch.cuda.get_device_properties(device)
    if not visible[0].startswith("MIG-"):
        return DeviceSlot(host, device.type, str(gpu.uuid))
    # Parts of one GPU may report the UUID of the part or of the GPU; a process sees one part at a time.
    pci = [getattr(gpu, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return DeviceSlot(host, device.type, visible[0], str(gpu.uuid) if None in pci else ":".join(map(str, pci)))


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
