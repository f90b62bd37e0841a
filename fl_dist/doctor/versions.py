"""Versions of everything that a run depends on, and whether they go together."""

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

from fl_dist import __version__
from fl_dist.doctor.checks import Check, Report, Status, find_difference, find_error
from fl_dist.doctor.tools import run_tool

NAME = "versions"
TITLES = {
    "fl_dist": "fl_dist",
    "python": "Python",
    "torch": "torch",
    "cuda": "CUDA",
    "driver": "driver",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
    "slurm": "Slurm",
}
SLURM_GPU_VARIABLES = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
"""Set in jobs that have GPUs."""
MIN_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""The oldest driver for each CUDA."""


def measure_versions() -> dict[str, Any]:
    has_cuda = torch.version.cuda is not None
    return {
        "fl_dist": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "driver": run_tool("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "cudnn": str(torch.backends.cudnn.version() or "") if has_cuda else "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else "",
        "slurm": run_tool("sinfo", "--version").rpartition(" ")[2],
        "has_gpus": os.path.exists("/dev/nvidia0") or any(os.environ.get(name) for name in SLURM_GPU_VARIABLES),
        "visible_gpus": torch.cuda.device_count(),
    }


def check_versions(reports: Sequence[Report], uses_gpus: bool) -> Check:
    """`uses_gpus`: the configuration does not ask for CPUs."""
    if error := find_error(NAME, reports, "see the error above"):
        return error
    first = reports[0].values
    summary = ", ".join(f"{title} {first[key]}" for key, title in TITLES.items() if first[key])
    if difference := find_difference(reports, ("fl_dist", "python", "torch", "cuda", "cudnn", "nccl")):
        return Check(NAME, Status.FAILED, difference, "use one environment on all nodes")
    for report in reports:
        if uses_gpus and report.values["has_gpus"] and not report.values["visible_gpus"]:
            return _missing_gpus(report)
        if old := describe_old_driver(report.values["driver"], report.values["cuda"]):
            advice = "update the driver, or install torch for an older CUDA"
            return Check(NAME, Status.WARNING, f"{summary}; on {report.host}, {old}", advice)
    return Check(NAME, Status.OK, summary)


def describe_old_driver(driver: str, cuda: str) -> str:
    """Empty if the driver is new enough for this CUDA, or one of them is unknown."""
    needed, major = MIN_DRIVERS.get(cuda.partition(".")[0], 0), driver.partition(".")[0]
    is_old = major.isdecimal() and int(major) < needed
    return f"driver {driver} is older than {needed}, which CUDA {cuda} needs" if is_old else ""


def _missing_gpus(report: Report) -> Check:
    values = report.values
    if not values["cuda"]:
        measured = f"{report.label} has GPUs, but torch {values['torch']} is the build for CPUs"
        return Check(NAME, Status.FAILED, measured, "install torch with CUDA, or set topology.device=cpu")
    driver = describe_old_driver(values["driver"], values["cuda"]) or f"driver {values['driver'] or 'unknown'}"
    measured = f"{report.label} has GPUs, but torch {values['torch']} (CUDA {values['cuda']}) sees none; {driver}"
    advice = "check CUDA_VISIBLE_DEVICES and nvidia-smi; docs/start/gpu-node.md has the build for each driver"
    return Check(NAME, Status.FAILED, measured, advice)
