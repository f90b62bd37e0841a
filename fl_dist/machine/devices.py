"""Which device a rank computes on, and whether those of all ranks go together."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fl_dist.config import Topology


class Seat(NamedTuple):
    """Where a rank computes."""

    host: str
    kind: str
    name: str
    """Of its GPU, or part of a GPU: the same on every rank that sees it."""
    whole: str = ""
    """Of the GPU that it is a part of."""


def pick_device(topology: Topology, local_rank: int) -> torch.device:
    """The GPU of this local rank, of those that are visible to it; a launcher may show each rank only its own."""
    gpus = torch.cuda.device_count() if topology.device != "cpu" else 0
    if topology.device == "cuda" and not gpus:
        raise ValueError(
            "topology.device is cuda, but no GPU is visible: check CUDA_VISIBLE_DEVICES or use device auto"
        )
    return torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Which kind it is: the same for all of one model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def settle(device: torch.device) -> Callable[[], None]:
    """Waits until the device has done what it was given; copies on streams beside that are not waited for."""
    return torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None


@contextlib.contextmanager
def derivable(module: nn.Module) -> Iterator[None]:
    """Within it, recurrent layers can be derived in evaluation mode, and twice: those of cuDNN cannot."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.enabled
    # Not cudnn.flags, which also sets the precision of products, and forgets what it was.
    cudnn.enabled = before and not any(isinstance(layer, nn.RNNBase) for layer in module.modules())
    try:
        yield
    finally:
        cudnn.enabled = before


def seat(host: str, device: torch.device) -> Seat:
    if device.type != "cuda":
        return Seat(host, device.type, "")
    visible, gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), torch.cuda.get_device_properties(device)
    if not visible[0].startswith("MIG-"):
        return Seat(host, device.type, str(gpu.uuid))
    # Parts of one GPU may tell the number of the whole; a process sees one of them at a time.
    slot = [getattr(gpu, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return Seat(host, device.type, visible[0], str(gpu.uuid) if None in slot else ":".join(map(str, slot)))


def compare(seats: Sequence[Seat], oversubscribe: bool) -> None:
    """ValueError if some ranks have GPUs and others not, or if two share one without having been asked to."""
    first: dict[tuple[str, str], int] = {}
    for rank, own in enumerate(seats):
        if own.kind != seats[0].kind:
            without, with_ = (rank, 0) if own.kind == "cpu" else (0, rank)
            raise ValueError(
                f"rank {without} on {seats[without].host} sees no GPU, but rank {with_} on {seats[with_].host} does: "
                "ask for GPUs on every node, or set topology.device=cpu"
            )
        for gpu, how in ((own.name, "share one GPU"), (own.whole, "have parts of one GPU")):
            if gpu and (own.host, gpu) in first and not oversubscribe:
                raise ValueError(
                    f"ranks {first[own.host, gpu]} and {rank} {how} of {own.host}, which NCCL cannot connect: "
                    "start one rank a GPU, or set topology.oversubscribe=true to share GPUs over gloo"
                )
            first.setdefault((own.host, gpu), rank)
