"""Which GPUs a launcher has for its ranks, and how it describes what it starts."""

import os

import torch

from fl_dist.common.formatting import pluralize


def visible_gpus(device: str) -> list[str]:
    """The GPUs of this machine that ranks with that `topology.device` see, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count() if device != "cpu" else 0
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",")[:count] if names else [str(number) for number in range(count)]


def describe_placement(ranks: int, gpus: int, nodes: int = 1) -> str:
    """`ranks` and `gpus` are per node."""
    hosts = f"on {pluralize(nodes, 'node')}" if nodes > 1 else "on one machine"
    if not gpus:
        devices = "on the CPU"
    elif ranks <= gpus:
        devices = "one per GPU"
    else:
        devices = f"sharing {pluralize(gpus, 'GPU')}{' per node' if nodes > 1 else ''}"
    return f"{pluralize(nodes * ranks, 'rank')} {hosts}, {devices}"
