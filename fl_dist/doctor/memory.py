"""The memory that a worker and rank 0 need for the configuration, against what is available."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fl_dist.algorithms.memory_needs import FLOAT_BYTES, memory_needs
from fl_dist.common.formatting import format_bytes
from fl_dist.distributed.memory import peak_device_bytes, resident_bytes
from fl_dist.doctor.checks import Check, Report, Status, find_error
from fl_dist.doctor.tools import read_system_file
from fl_dist.federation.experiment import Experiment

NAME = "memory"
MAX_SHARE = 0.9
"""Of the available memory; the rest is for peaks that were not measured."""


def measure_memory(experiment: Experiment, is_worker: bool) -> dict[str, Any]:
    """After a local step was measured: what this process holds, and the vectors of the algorithm in addition."""
    needs, device = memory_needs(experiment.algorithm, experiment.optimizer), experiment.device
    element = experiment.model.vector.element_size() / FLOAT_BYTES
    vectors = round(experiment.model.size * element * (needs.worker if is_worker else needs.server))
    is_gpu = device.type == "cuda"
    in_use = peak_device_bytes(device) if is_gpu else resident_bytes()
    available = torch.cuda.get_device_properties(device).total_memory if is_gpu else host_memory()
    return {"needed": in_use + vectors, "vectors": vectors, "available": available, "is_gpu": is_gpu}


def host_memory() -> int:
    """Bytes of this machine, or of the control group that limits this process (as Slurm's do)."""
    total = int(read_system_file("/proc/meminfo").split()[1]) * 1024
    return min([total, *map(int, filter(str.isdecimal, _group_limits()))])


def _group_limits() -> list[str]:
    limits = []
    for line in read_system_file("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root, name = ("", "memory.max") if not controllers else ("memory", "memory.limit_in_bytes")
            base = Path("/sys/fs/cgroup", root)
            folders = [base / path.lstrip("/"), *(base / path.lstrip("/")).parents]
            limits += [read_system_file(folder / name) for folder in folders if base in (folder, *folder.parents)]
    return limits


def check_memory(reports: Sequence[Report], has_dedicated_server: bool) -> Check:
    """Of each GPU, or of all ranks of a node on CPUs."""
    if error := find_error(NAME, reports, "see docs/how-to/memory.md"):
        return error
    needed: dict[str, int] = defaultdict(int)
    available: dict[str, int] = {}
    for report in reports:
        owner = f"the GPU of {report.label}" if report.values["is_gpu"] else report.host
        needed[owner] += report.values["needed"]
        available[owner] = report.values["available"]
    worst = max(needed, key=lambda owner: needed[owner] / available[owner])
    each = [f"a worker needs {format_bytes(reports[-1].values['needed'])}"]
    each += [f"rank 0 {format_bytes(reports[0].values['needed'])}"] if has_dedicated_server else []
    summary = f"{', '.join(each)}; {format_bytes(needed[worst])} of {format_bytes(available[worst])} on {worst}"
    if needed[worst] > available[worst]:
        advice = "choose a smaller batch or model, fewer ranks per node, or lower topology.data_memory"
        return Check(NAME, Status.FAILED, summary, advice)
    if needed[worst] > MAX_SHARE * available[worst]:
        return Check(NAME, Status.WARNING, summary, "it is tight: lower local.batch_size or topology.data_memory")
    return Check(NAME, Status.OK, summary)
