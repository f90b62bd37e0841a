"""Errors of the machine, not of a client: memory that ran out, a GPU that failed, operations without a kernel.

torch raises them as its own types, as plain RuntimeErrors, or as both, depending on its version: the message decides.
"""

import re
from typing import NamedTuple

import torch

from fl_dist.common.errors import error_location


class HardwareFailure(NamedTuple):
    """One way in which a machine fails."""

    summary: str
    remedy: str
    phrases: tuple[str, ...]
    """Parts of torch's messages."""
    types: tuple[type[BaseException], ...] = ()


OUT_OF_GPU_MEMORY = HardwareFailure(
    "not enough memory on the GPU",
    "lower local.batch_size, evaluate.batch_size or topology.data_memory, set local.precision=bf16, or start fewer "
    "ranks per GPU (fl-dist algorithms --memory: what each algorithm needs)",
    ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    (torch.OutOfMemoryError,),
)
UNSUPPORTED_GPU = HardwareFailure(
    "this build of torch cannot use the GPU",
    "install the build for this driver and GPU (docs/start/gpu-node.md), or set topology.device=cpu",
    (
        "NVIDIA driver on your system is too old",
        "Found no NVIDIA driver",
        "Unexpected error from cudaGetDeviceCount",
        "CUDA unknown error",
        "CUDA driver initialization failed",
        "CUDA driver version is insufficient",
        "No CUDA GPUs are available",
        "no kernel image is available",
        "unsupported display driver / cuda driver combination",
        "forward compatibility was attempted on non supported HW",
    ),
)
NONDETERMINISTIC = HardwareFailure(
    "this operation has no deterministic kernel on a GPU",
    "choose a model without it (docs/how-to/gpus.md lists the layers that have one), or set topology.device=cpu",
    ("does not have a deterministic implementation", "CUBLAS_WORKSPACE_CONFIG"),
)
NETWORK_FAILURE = HardwareFailure("the GPUs could not reach each other", "NCCL_DEBUG=INFO shows more", ("NCCL error",))
GPU_FAILURE = HardwareFailure(
    "the GPU failed",
    "CUDA_LAUNCH_BLOCKING=1 shows in which operation; if it is none of the model's, check nvidia-smi on that node",
    (
        "CUDA error",
        "CUDA driver error",
        "cuBLAS error",
        "CUBLAS_STATUS",
        "cuDNN error",
        "CUDNN_STATUS",
        "CUSOLVER_STATUS",
    ),
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else (),
)
OUT_OF_MEMORY = HardwareFailure(
    "not enough memory",
    "choose a smaller model, batch or data set",
    ("can't allocate memory", "out of memory", "Storage size calculation overflowed"),
    (MemoryError,),
)
HARDWARE_FAILURES = (
    OUT_OF_GPU_MEMORY,
    UNSUPPORTED_GPU,
    NONDETERMINISTIC,
    NETWORK_FAILURE,
    GPU_FAILURE,
    OUT_OF_MEMORY,
)
"""The first match counts."""
_DETAILS = re.compile(
    r"[.,]? (Including non-PyTorch|Process \d|Of the allocated|If reserved|but you set|Please (update|check))"
)
"""Where the details of torch's messages begin, which do not fit in one line."""


def classify(error: BaseException) -> HardwareFailure | None:
    """None for any other error, also for an error of this program that quotes such a message."""
    is_from_torch = isinstance(error, RuntimeError) and type(error).__module__.split(".")[0] in ("builtins", "torch")
    if not is_from_torch and not isinstance(error, MemoryError):
        return None
    text = str(error)
    matches = (f for f in HARDWARE_FAILURES if isinstance(error, f.types) or any(p in text for p in f.phrases))
    return next(matches, None)


def is_out_of_memory(error: BaseException) -> bool:
    return classify(error) in (OUT_OF_GPU_MEMORY, OUT_OF_MEMORY)


def is_local_failure(error: BaseException) -> bool:
    """Whether this rank itself failed, also in a collective; a broken connection may be another rank's fault."""
    return classify(error) not in (None, NETWORK_FAILURE)


def describe_hardware_error(error: BaseException) -> str | None:
    """What happened, in torch's words, and a remedy; None for any other error."""
    failure = classify(error)
    if failure is None:
        return None
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    reason = _DETAILS.split(first_line)[0].rstrip(".")
    return f"{failure.summary} ({reason}){error_location(error)}; {failure.remedy}"
