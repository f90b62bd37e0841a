"""Every random draw of a run comes from (seed, purpose, round, client) alone, never from a rank or a position."""

import zlib

import numpy as np
import torch


def _sequence(seed: int, purpose: str, *where: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *where])


def generator(seed: int, purpose: str, *where: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, *where)))


def torch_seed(seed: int, purpose: str, *where: int) -> int:
    return int(_sequence(seed, purpose, *where).generate_state(1, np.uint64)[0] >> np.uint64(1))


def torch_generator(seed: int, purpose: str, *where: int) -> torch.Generator:
    """On the CPU, so that the bits do not depend on the device."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, *where))
