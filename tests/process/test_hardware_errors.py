"""Promise: a hardware error is not a client failure; it ends all ranks quickly, with the driver's message."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_dist.distributed.failures import RankLostError, error_line, needs_traceback
from fl_dist.distributed.hardware_errors import classify
from tests.support.marks import examples, timing
from tests.support.processes import NO_WANDB, run_ranks, start_ranks
from tests.support.waiting import wait_for

ALLOCATION = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.50 GiB is free"
)
OUT_OF_MEMORY = (
    f"{ALLOCATION}. Including non-PyTorch memory, this process has 77.6 GiB memory in use. Of the allocated memory"
)
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
ERRORS: dict[str, BaseException] = {
    "memory": torch.OutOfMemoryError(OUT_OF_MEMORY),
    "accelerator": torch.AcceleratorError(ILLEGAL),
    "plain": RuntimeError(ILLEGAL),
}
ILLEGAL_ACCESS = (
    "the GPU failed (CUDA error: an illegal memory access was encountered) (test_hardware_errors.py, line {}); "
)
MESSAGES = {
    "memory": f"not enough memory on the GPU ({ALLOCATION}) "
    "(test_hardware_errors.py, line {}); lower local.batch_size",
    "accelerator": ILLEGAL_ACCESS,
    "plain": ILLEGAL_ACCESS,
}
EXIT_TIMEOUT_SECONDS = 30.0
"""The allowed time from the error to the exit of all ranks."""
SETTINGS = (
    *NO_WANDB,
    "rounds=1000",
    "clients={total: 4, per_round: 4}",
    "local={epochs: 1, batch_size: 64}",
    "partition=iid",
)


class FailsInLocalStep(nn.Linear):
    """Raises on rank 1 in the eighth local step."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(torch.Size(shape).numel(), outputs)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        if self.steps == 8 and os.environ["RANK"] == "1":
            Path(os.environ["FAILED"]).touch()
            raise ERRORS[os.environ["ERROR"]]  # local step
        return super().forward(x.flatten(1))


class FailsInReduce(FailsInLocalStep):
    """The error appears in a collective."""

    def forward(self, x: Tensor) -> Tensor:
        def fail(*arguments: Any, **options: Any) -> None:
            Path(os.environ["FAILED"]).touch()
            raise ERRORS[os.environ["ERROR"]]  # collective

        if os.environ["RANK"] == "1":
            torch.distributed.reduce = torch.distributed.gather = fail
        return super(FailsInLocalStep, self).forward(x.flatten(1))


def line_number(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


def wait_for_exit(folder: Path, arguments: list[str], error: str, **env: str) -> tuple[list[int | None], list[str]]:
    """Exit codes and error lines of three ranks, which must end in time."""
    failed = folder / "failed"
    with start_ranks(3, arguments, ERROR=error, FAILED=str(failed), **env) as ranks:
        wait_for(failed.exists, "the failure")
        start_time = time.monotonic()
        codes = [rank.wait() for rank in ranks]
        assert time.monotonic() - start_time < EXIT_TIMEOUT_SECONDS
        return codes, [text for rank in ranks for text in rank.output().splitlines() if text.startswith("error: ")]


@timing
@pytest.mark.parametrize(
    ("error", "policy", "nccl"),
    examples(
        [
            ("memory", "drop", None),
            ("accelerator", "retry", None),
            ("memory", "retry", ""),
            ("plain", "drop", "silent"),
        ],
        [("memory", "drop", None), ("plain", "drop", "silent")],
    ),
)
def test_in_local_training_it_ends_all_ranks_under_any_failure_policy(
    error: str, policy: str, nccl: str | None, tmp_path: Path
) -> None:
    on_gpu = {} if nccl is None else {"SIMULATED_GPU": str(tmp_path), "SIMULATED_NCCL": nccl}
    settings = [
        "model=tests.process.test_hardware_errors:FailsInLocalStep",
        f"clients.on_failure={policy}",
        f"run.dir={tmp_path / 'run'}",
    ]
    codes, errors = wait_for_exit(tmp_path, [*SETTINGS, *settings], error, **on_gpu)
    assert codes == [1, 1, 1]
    (message,) = errors
    assert (
        message.startswith("error: rank 1 on ")
        and f" failed: {MESSAGES[error].format(line_number('local step'))}" in message
    )


@timing
@pytest.mark.parametrize(("error", "nccl"), [("accelerator", None), ("plain", "silent")])
def test_in_a_collective_it_is_not_reported_as_a_lost_connection(error: str, nccl: str | None, tmp_path: Path) -> None:
    on_gpu = {} if nccl is None else {"SIMULATED_GPU": str(tmp_path), "SIMULATED_NCCL": nccl}
    settings = ["model=tests.process.test_hardware_errors:FailsInReduce", f"run.dir={tmp_path / 'run'}"]
    codes, errors = wait_for_exit(tmp_path, [*SETTINGS, *settings], error, **on_gpu)
    assert codes == [1, 1, 1]
    (message,) = errors
    assert f" failed: {MESSAGES[error].format(line_number('collective'))}" in message


@timing
def test_a_broken_connection_is_reported_alike_on_all_ranks(tmp_path: Path) -> None:
    settings = ["model=tests.process.test_hardware_errors:FailsInReduce", f"run.dir={tmp_path / 'run'}"]
    env = {"ERROR": "network", "FAILED": str(tmp_path / "failed")}
    codes, _ = run_ranks(3, [*SETTINGS, *settings], **env)
    logs = [(tmp_path / "run" / "logs" / f"rank{rank}.log").read_text() for rank in range(3)]
    assert codes == [1, 1, 1]
    assert all(
        "ERROR the connection between the ranks broke: NCCL error: remote process exited" in log for log in logs
    ), logs


ERRORS["network"] = RuntimeError("NCCL error: remote process exited or there was a network error")


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (torch.OutOfMemoryError(OUT_OF_MEMORY), "not enough memory on the GPU ("),
        (torch.AcceleratorError("CUDA error: out of memory"), "not enough memory on the GPU ("),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "not enough memory on the",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), "the GPU failed ("),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "the GPU failed (cuDNN error"),
        (
            RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error"),
            "the GPUs could not reach each",
        ),
        (
            RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update your GPU"),
            "this build of torch cannot use the GPU (The NVIDIA driver on your system is too old (found version "
            "11040)); install the build for this driver and GPU (docs/start/gpu-node.md)",
        ),
        (
            torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel"),
            "this build of torch cannot use the GPU (CUDA error: no kernel image",
        ),
        (
            RuntimeError(
                "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
                "NumCudaDevices() that might have already set an error? Error 803: system has unsupported display "
                "driver / cuda driver combination"
            ),
            "this build of torch cannot use the GPU (",
        ),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "not enough memory ("),
        (MemoryError(), "not enough memory (MemoryError); choose a smaller model, batch or data set"),
        (
            RuntimeError("put_cuda does not have a deterministic implementation, but you set 'x'. You can"),
            "this operation has no deterministic kernel on a GPU (put_cuda does not have a "
            "deterministic implementation); choose a model without it",
        ),
    ],
)
def test_hardware_errors_come_with_advice(error: BaseException, start: str) -> None:
    assert error_line(error).startswith(start)
    assert needs_traceback(error) != ("memory" in start)


@pytest.mark.parametrize(
    "error", [RankLostError(ILLEGAL), ValueError(ILLEGAL), RuntimeError("mat1 and mat2 do not fit")]
)
def test_other_errors_are_not_classified_as_hardware(error: Exception) -> None:
    assert classify(error) is None
