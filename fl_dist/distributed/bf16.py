"""bfloat16: by autocast. Some CPUs announce matrix instructions (AMX) that kill a process which uses them.

Virtual machines do so. A child process tries what training would do, and then again without these instructions; oneDNN
reads its environment variable at its first use.
"""

import contextlib
import faulthandler
import os
import resource
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_dist.common.rows import Rows, call_module, main_tensor
from fl_dist.config import Config, ConfigError

WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
TRIAL_TIMEOUT_SECONDS = 60.0


def ensure_bf16_works(config: Config) -> None:
    """Before training with bfloat16 on the CPU."""
    on_cpu = config.topology.device == "cpu" or not torch.cuda.is_available()
    if config.local.precision == "bf16" and on_cpu:
        ensure_cpu_has_bf16()


def ensure_weights_work(module: nn.Module, device: torch.device) -> None:
    """Before computing with weights in bfloat16 on the CPU."""
    if device.type == "cpu" and any(p.dtype == torch.bfloat16 for p in module.parameters()):
        ensure_cpu_has_bf16()


def ensure_cpu_has_bf16() -> None:
    """Disable AMX if it does not work here; ConfigError if bfloat16 does not work without it either."""
    if _can_compute({}):
        return
    if not _can_compute(WITHOUT_AMX):
        raise ConfigError(
            "this CPU kills a process that computes with bfloat16: "
            "set local.precision (and model.dtype) to float32, or use a GPU"
        )
    os.environ.update(WITHOUT_AMX)


def forward(module: Callable[..., Tensor], x: Rows, precision: str) -> Tensor:
    """The module's output; with bf16 its products are in bfloat16, and its output is in float32."""
    if precision != "bf16":
        outputs: Tensor = call_module(module, x)
        return outputs
    with torch.autocast(main_tensor(x).device.type, torch.bfloat16):
        outputs = call_module(module, x)
        return outputs.float()


def compute() -> None:
    """Forward and backward passes of the usual kinds of layers."""
    with torch.autocast("cpu", torch.bfloat16):
        image = torch.ones(2, 16, 8, 8, requires_grad=True)
        hidden = F.conv2d(image, torch.ones(32, 16, 3, 3, requires_grad=True))
        logits = F.linear(hidden.flatten(1), torch.ones(32, 1152, requires_grad=True))
    logits.float().sum().backward()


def _can_compute(variables: dict[str, str]) -> bool:
    """Whether a child with these variables survives. A fork, because what this process did before matters."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.environ.update(variables)
            torch.set_num_threads(1)
            compute()
            os._exit(0)
        os._exit(1)
    return _wait_status(child) == 0


def _wait_status(child: int) -> int:
    deadline = time.monotonic() + TRIAL_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.005)
    os.kill(child, 9)
    return os.waitpid(child, 0)[1]
