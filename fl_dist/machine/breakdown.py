"""Errors that are the machine's and no client's: memory that ran out, a GPU that failed, what kernels cannot do.

torch tells them by its own types, by plain RuntimeErrors, or by both, as its version likes it: words decide.
"""

import re
from typing import NamedTuple

import torch

from fl_dist.common.imports import origin


class Kind(NamedTuple):
    """One way in which a machine fails."""

    what: str
    remedy: str
    words: tuple[str, ...]
    types: tuple[type[BaseException], ...] = ()


def _torchs(name: str) -> tuple[type[BaseException], ...]:
    """A type that not every version of torch has."""
    return (getattr(torch, name),) if hasattr(torch, name) else ()


GPU_MEMORY = Kind(
    "not enough memory on the GPU",
    "lower local.batch_size, evaluate.batch_size or topology.data_memory, set local.precision=bf16, or start fewer "
    "ranks a GPU (python -m fl_dist.algorithms --memory: what each algorithm needs)",
    ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    _torchs("OutOfMemoryError"),
)
UNSTEADY = Kind(
    "this operation has no kernel that gives the same bits each time on a GPU",
    "choose a model without it (docs/gpu.md says which layers have one), or set topology.device=cpu",
    ("does not have a deterministic implementation", "CUBLAS_WORKSPACE_CONFIG"),
)
NETWORK = Kind("the GPUs could not reach each other", "NCCL_DEBUG=INFO says more", ("NCCL error",))
GPU = Kind(
    "the GPU failed",
    "CUDA_LAUNCH_BLOCKING=1 shows in which operation; if it is none of the model's, look at nvidia-smi on that node",
    (
        "CUDA error",
        "CUDA driver error",
        "cuBLAS error",
        "CUBLAS_STATUS",
        "cuDNN error",
        "CUDNN_STATUS",
        "CUSOLVER_STATUS",
    ),
    _torchs("AcceleratorError"),
)
MEMORY = Kind(
    "not enough memory",
    "choose a smaller model, batch or data set",
    ("can't allocate memory", "out of memory", "Storage size calculation overflowed"),
    (MemoryError,),
)
ONCE = Kind(
    "the CPU's fastest layout of images cannot be derived twice",
    "set model.blocks=false",
    ("expects MKL-DNN tensor", "but got Mkldnn"),
)
KINDS = (GPU_MEMORY, UNSTEADY, NETWORK, GPU, MEMORY, ONCE)
"""The first that fits counts."""
_MORE = re.compile(r"[.,]? (Including non-PyTorch|Process \d|Of the allocated|If reserved|but you set)")
"""Where torch begins to tell what nobody can use in one line."""


def kind(error: BaseException) -> Kind | None:
    """None for an error of another sort, and for those of this program that repeat such words."""
    of_torch = isinstance(error, RuntimeError) and type(error).__module__.split(".")[0] in ("builtins", "torch")
    if not of_torch and not isinstance(error, MemoryError):
        return None
    said = str(error)
    return next((k for k in KINDS if isinstance(error, k.types) or any(words in said for words in k.words)), None)


def lacks_memory(error: BaseException) -> bool:
    return kind(error) in (GPU_MEMORY, MEMORY)


def is_own(error: BaseException) -> bool:
    """Of this rank itself, also where ranks talk: not a word about a connection, which may be another's fault."""
    return kind(error) not in (None, NETWORK)


def advice(error: BaseException) -> str | None:
    """What happened, in torch's own words, and what may be done about it; None for an error of another sort."""
    found = kind(error)
    if found is None:
        return None
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{found.what} ({_MORE.split(said)[0].rstrip('.')}){origin(error)}; {found.remedy}"
