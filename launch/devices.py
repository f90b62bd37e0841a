"""Which GPUs a launcher has for its ranks, and the words in which it says what it starts."""

import os

import torch

from fl_dist.common.words import counted


def visible_gpus(device: str) -> list[str]:
    """Those of this machine that ranks with that `topology.device` would see, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count() if device != "cpu" else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def placed(ranks: int, gpus: int, nodes: int = 1) -> str:
    """So many ranks, each node having so many of them and so many GPUs."""
    where = f"on {counted(nodes, 'node')}" if nodes > 1 else "on one machine"
    how = "one a GPU" if ranks <= gpus else f"sharing {counted(gpus, 'GPU')}" if gpus else "on the CPU"
    return f"{counted(nodes * ranks, 'rank')} {where}, {how}{' a node' if nodes > 1 and 0 < gpus < ranks else ''}"
