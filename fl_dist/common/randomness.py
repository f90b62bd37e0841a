"""Every random draw of a run comes from (seed, purpose, round, client) alone, never from a rank or a position."""

import hashlib

import numpy as np
import torch


def torch_seed(seed: int, purpose: str, *where: int) -> int:
    """A well-mixed 63-bit number. (A hash takes two microseconds, numpy's SeedSequence thirty.)"""
    text = "/".join([str(seed), purpose, *map(str, where)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def generator(seed: int, purpose: str, *where: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(torch_seed(seed, purpose, *where)))


def torch_generator(seed: int, purpose: str, *where: int) -> torch.Generator:
    """On the CPU, so that the bits do not depend on the device."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, *where))


def seed_global(value: int, device: torch.device) -> None:
    """Seed the generators that layers such as dropout use. (torch.manual_seed takes a millisecond.)"""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
