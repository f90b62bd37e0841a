"""Milliseconds of a forward and backward pass of the configuration's model: by rank, precision and memory format."""

import contextlib
import copy
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_dist.algorithms.core import Batch
from fl_dist.common.errors import ConfigError, describe_error
from fl_dist.common.rows import count_rows, main_tensor, map_rows
from fl_dist.config import Config
from fl_dist.distributed import bf16
from fl_dist.distributed.devices import synchronizer
from fl_dist.distributed.tf32 import check_tf32_support, use_tf32
from fl_dist.doctor.checks import Check, Report, Status, find_error
from fl_dist.doctor.tools import median_seconds
from fl_dist.federation.client_data import IMAGE_FORMATS
from fl_dist.federation.experiment import Experiment
from fl_dist.models import CompiledModule, allow_first_order_kernels

NAME, VARIANTS, COMPILED = "local step", "local step, variants", "local step, compiled"
REPEATS = 10
MAX_RATIO = 1.5
"""Between the slowest and the median worker."""
MIN_GAIN = 0.7
"""Of the time: less is worth advice."""


def supported_precisions(config: Config, device: torch.device) -> list[str]:
    """What this device computes with. Before anything else does: see `bf16`."""
    names = ["float32"]
    with contextlib.suppress(ConfigError):
        check_tf32_support("tf32", device)
        names.append("tf32")
    with contextlib.suppress(ConfigError):
        local = config.local.model_copy(update={"precision": "bf16"})
        bf16.ensure_bf16_works(config.model_copy(update={"local": local}))
        names.append("bf16")
    return names


def measure_step(experiment: Experiment) -> dict[str, Any]:
    """In the configuration's own precision, without what the algorithm adds."""
    precision = experiment.config.local.precision
    return {"milliseconds": _time_step(experiment, experiment.model.module, precision), "precision": precision}


def measure_variants(experiment: Experiment, precisions: Sequence[str]) -> dict[str, Any]:
    """Each precision; of images, also in the other `local.memory_format`."""
    module: Any = copy.deepcopy(experiment.model.module).to(torch.float32)
    times = {name: _time_step(experiment, module, name) for name in precisions}
    if main_tensor(_batch(experiment)[0]).dim() == 4:
        other = next(name for name in IMAGE_FORMATS if name != experiment.config.local.memory_format)
        for name in precisions:
            times[f"{name} {other}"] = _time_step(experiment, module, name, IMAGE_FORMATS[other])
    return {"milliseconds": times}


def measure_compiled(experiment: Experiment) -> dict[str, Any]:
    """Without and with `local.compile`."""
    precision = experiment.config.local.precision
    module = copy.deepcopy(experiment.model.module).train()
    plain = _time_step(experiment, module, precision)
    allow_first_order_kernels(module, False)
    try:
        forward = CompiledModule(module, count_rows(_batch(experiment)[0]))
        compiled = _time_step(experiment, module, precision, forward=forward)
    except Exception as e:  # the compiler's own, of any kind
        return {"error": describe_error(e)}
    return {"plain": plain, "compiled": compiled}


def _batch(experiment: Experiment) -> Batch:
    data = experiment.client_data
    largest = max(range(len(data.counts)), key=data.counts.__getitem__)
    return next(iter(data.batches(largest, experiment.config.seed, 0)))


def _time_step(
    experiment: Experiment,
    module: Any,
    precision: str,
    image_format: torch.memory_format | None = None,
    forward: Callable[..., Tensor] | None = None,
) -> float:
    """`image_format`: unless it is the configured one; `forward`: other code of the module's forward pass."""
    task, (x, y) = experiment.task, _batch(experiment)
    dtype = next(module.parameters()).dtype
    x = map_rows(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, x)
    if image_format is not None:
        x = map_rows(lambda tensor: tensor.contiguous(memory_format=image_format), x)

    def step() -> None:
        with use_tf32(precision == "tf32"):
            outputs, targets = task.align(bf16.forward(forward or module, x, precision), y)
            task.loss(outputs, targets).backward()

    return 1e3 * median_seconds(step, synchronizer(main_tensor(x).device), REPEATS)


def check_step(reports: Sequence[Report]) -> Check:
    """`reports` of the workers, which measured at the same time."""
    if failed := find_error(NAME, reports, "fl-dist run --check CONFIG shows what the configuration means"):
        return failed
    times = [float(report.values["milliseconds"]) for report in reports]
    typical, slowest = statistics.median(times), max(times)
    shown = f"{typical:.3g} ms forward and backward in {reports[0].values['precision']}, all workers at once"
    if slowest > MAX_RATIO * typical:
        label = reports[times.index(slowest)].label
        advice = "each round waits for the slowest worker: look for other programs, heat or another clock on that node"
        return Check(NAME, Status.SLOW, f"{shown}; {label} needs {slowest:.3g} ms", advice)
    return Check(NAME, Status.OK, shown)


def check_variants(report: Report, precision: str) -> Check:
    if failed := find_error(VARIANTS, [report], "the model may not support them; training does not need them"):
        return failed._replace(status=Status.WARNING)
    times: dict[str, float] = report.values["milliseconds"]
    shown = ", ".join(f"{name} {time:.3g} ms" for name, time in times.items())
    best = min(times, key=times.__getitem__)
    if precision not in times or times[best] >= MIN_GAIN * times[precision]:
        return Check(VARIANTS, Status.OK, shown)
    name, _, memory_format = best.partition(" ")
    settings = [f"local.precision={name}"] if name != precision else []
    settings += [f"local.memory_format={memory_format}"] if memory_format else []
    advice = f"{' '.join(settings)} would be faster"
    return Check(VARIANTS, Status.OK, shown, advice if name == precision else f"{advice}, if its accuracy suffices")


def check_compiled(report: Report) -> Check:
    if failed := find_error(COMPILED, [report], "training does not need it; torch.compile needs a C++ compiler"):
        return failed._replace(status=Status.WARNING)
    plain, compiled = report.values["plain"], report.values["compiled"]
    advice = "local.compile=true would be faster" if compiled < MIN_GAIN * plain else ""
    return Check(COMPILED, Status.OK, f"{compiled:.3g} ms, {compiled / plain:.2f} × the plain {plain:.3g} ms", advice)
