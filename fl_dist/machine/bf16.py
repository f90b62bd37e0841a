"""bfloat16 on CPUs: some announce matrix instructions (AMX) that end a process which uses them.

Virtual machines do so. A child process tries what training would do, and finds out whether it helps to keep oneDNN,
which reads its variable at its first use, from those instructions.
"""

import contextlib
import faulthandler
import os
import resource
import time

import torch
import torch.nn.functional as F

from fl_dist.config import Config, ConfigError

LIMIT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
PATIENCE = 60.0


def make_safe(config: Config) -> None:
    """Before training with bfloat16 on the CPU: see that it works here, if need be without AMX, or refuse."""
    on_cpu = config.topology.device == "cpu" or not torch.cuda.is_available()
    if config.local.precision != "bf16" or not on_cpu or _survives({}):
        return
    if not _survives(LIMIT):
        raise ConfigError(
            "local.precision is bf16, but this CPU ends a process that computes with it: use float32, or a GPU"
        )
    os.environ.update(LIMIT)


def compute() -> None:
    """Forward and backward passes of the kinds that models are made of."""
    with torch.autocast("cpu", torch.bfloat16):
        image = torch.ones(2, 16, 8, 8, requires_grad=True)
        hidden = F.conv2d(image, torch.ones(32, 16, 3, 3, requires_grad=True))
        logits = F.linear(hidden.flatten(1), torch.ones(32, 1152, requires_grad=True))
    logits.float().sum().backward()


def _survives(variables: dict[str, str]) -> bool:
    """Whether a child with these variables computes to its end. A fork: what this process has done before counts."""
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
    return _exit_status(child) == 0


def _exit_status(child: int) -> int:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    os.kill(child, 9)
    return os.waitpid(child, 0)[1]
