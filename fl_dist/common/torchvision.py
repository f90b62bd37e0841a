"""A torchvision that was built for another torch."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def without_broken_torchvision() -> Iterator[None]:
    """Hide it if it is broken: libraries that could do without it would fail with it."""
    if not _has_broken_torchvision():
        yield
        return
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torchvision"]


def _has_broken_torchvision() -> bool:
    if "torchvision" in sys.modules or (found := importlib.util.find_spec("torchvision")) is None:
        return False
    import torch

    try:
        for library in Path(str(found.origin)).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        return True
    return False
