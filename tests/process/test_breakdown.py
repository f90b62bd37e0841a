"""Promise: what the machine cannot do is no client's failure; it ends all ranks, soon, in the machine's own words."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_dist.execute import is_bug, one_line
from fl_dist.machine.breakdown import kind
from fl_dist.machine.meeting import Lost
from fl_dist.machine.wire import Wire
from tests.support.marks import examples, timing
from tests.support.processes import QUIET, run_ranks, started_ranks
from tests.support.waiting import wait_for

TRIED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.50 GiB is free"
)
OUT_OF_MEMORY = (
    f"{TRIED}. Including non-PyTorch memory, this process has 77.6 GiB memory in use. Of the allocated memory"
)
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
ERRORS: dict[str, BaseException] = {
    "memory": torch.OutOfMemoryError(OUT_OF_MEMORY),
    "accelerator": torch.AcceleratorError(ILLEGAL),
    "plain": RuntimeError(ILLEGAL),
}
ILLEGAL_ACCESS = "the GPU failed (CUDA error: an illegal memory access was encountered) (test_breakdown.py, line {}); "
TOLD = {
    "memory": f"not enough memory on the GPU ({TRIED}) (test_breakdown.py, line {{}}); lower local.batch_size",
    "accelerator": ILLEGAL_ACCESS,
    "plain": ILLEGAL_ACCESS,
}
SECONDS = 30.0
"""From the error to the end of all ranks."""
SETTINGS = (
    *QUIET,
    "rounds=1000",
    "clients={total: 4, per_round: 4}",
    "local={epochs: 1, batch_size: 64}",
    "partition=iid",
)


class Breaks(nn.Linear):
    """Raises on rank 1, some local steps after the first."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(torch.Size(shape).numel(), outputs)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        if self.steps == 8 and os.environ["RANK"] == "1":
            Path(os.environ["BROKEN"]).touch()
            raise ERRORS[os.environ["ERROR"]]  # here
        return super().forward(x.flatten(1))


class BreaksReduce(Breaks):
    """The error comes to light where ranks talk."""

    def forward(self, x: Tensor) -> Tensor:
        def broken(*arguments: Any, **options: Any) -> None:
            Path(os.environ["BROKEN"]).touch()
            raise ERRORS[os.environ["ERROR"]]  # there

        if os.environ["RANK"] == "1":
            torch.distributed.reduce = Wire.reduce = broken
        return super(Breaks, self).forward(x.flatten(1))


def line(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


def ended(folder: Path, arguments: list[str], error: str, **env: str) -> tuple[list[int | None], list[str]]:
    """Codes and error lines of three ranks that ended in time."""
    broken = folder / "broken"
    with started_ranks(3, arguments, ERROR=error, BROKEN=str(broken), **env) as ranks:
        wait_for(broken.exists, "the breakdown")
        began = time.monotonic()
        codes = [rank.wait() for rank in ranks]
        assert time.monotonic() - began < SECONDS
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
def test_in_local_training_it_ends_all_whatever_the_policy(
    error: str, policy: str, nccl: str | None, tmp_path: Path
) -> None:
    on_gpu = {} if nccl is None else {"PRETENDED_GPU": str(tmp_path), "PRETENDED_NCCL": nccl}
    own = ["model=tests.process.test_breakdown:Breaks", f"clients.on_failure={policy}", f"run.dir={tmp_path / 'run'}"]
    codes, errors = ended(tmp_path, [*SETTINGS, *own], error, **on_gpu)
    assert codes == [1, 1, 1]
    (told,) = errors
    assert told.startswith("error: rank 1 on ") and f" failed: {TOLD[error].format(line('here'))}" in told


@timing
@pytest.mark.parametrize(("error", "nccl"), [("accelerator", None), ("plain", "silent")])
def test_where_ranks_talk_it_is_not_called_a_lost_connection(error: str, nccl: str | None, tmp_path: Path) -> None:
    on_gpu = {} if nccl is None else {"PRETENDED_GPU": str(tmp_path), "PRETENDED_NCCL": nccl}
    own = ["model=tests.process.test_breakdown:BreaksReduce", f"run.dir={tmp_path / 'run'}"]
    codes, errors = ended(tmp_path, [*SETTINGS, *own], error, **on_gpu)
    assert codes == [1, 1, 1]
    (told,) = errors
    assert f" failed: {TOLD[error].format(line('there'))}" in told


@timing
def test_a_connection_that_breaks_for_no_known_reason_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    own = ["model=tests.process.test_breakdown:BreaksReduce", f"run.dir={tmp_path / 'run'}"]
    words = {"ERROR": "network", "BROKEN": str(tmp_path / "broken")}
    codes, _ = run_ranks(3, [*SETTINGS, *own], **words)
    logs = [(tmp_path / "run" / "logs" / f"rank{rank}.log").read_text() for rank in range(3)]
    assert codes == [1, 1, 1]
    assert all("ERROR the ranks lost touch: NCCL error: remote process exited" in log for log in logs), logs


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
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "not enough memory ("),
        (MemoryError(), "not enough memory (MemoryError); choose a smaller model, batch or data set"),
        (
            RuntimeError("put_cuda does not have a deterministic implementation, but you set 'x'. You can"),
            "this operation has no kernel that gives the same bits each time on a GPU (put_cuda does not have a "
            "deterministic implementation); choose a model without it",
        ),
    ],
)
def test_it_is_told_with_advice(error: BaseException, start: str) -> None:
    assert one_line(error).startswith(start)
    assert is_bug(error) != ("memory" in start)


@pytest.mark.parametrize("error", [Lost(ILLEGAL), ValueError(ILLEGAL), RuntimeError("mat1 and mat2 do not fit")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert kind(error) is None
