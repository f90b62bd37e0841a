"""Which rank computes on what, whether all devices are alike, and what is between them."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fl_dist.common.formatting import format_bytes, pluralize
from fl_dist.distributed.devices import synchronizer
from fl_dist.doctor.checks import Check, Report, Status, find_difference, find_error
from fl_dist.doctor.tools import median_seconds, read_system_file, run_tool

NAME, LINKS, COPIES = "devices", "GPU links", "host copies"
ALIKE = ("type", "model", "processors", "memory", "capability")
"""What has to be the same for the same kernels and so the same bits."""
COPY_BYTES = 1 << 26
MIN_PINNED_GIGABYTES = 3.0
"""Per second; PCIe 3 with 8 lanes gives 6 to 7."""


def measure_device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        model = re.search(r"model name\s*: (.*)", read_system_file("/proc/cpuinfo"))
        name, capability = model[1].strip() if model else "CPU", torch.backends.cpu.get_cpu_capability()
        return {"type": "cpu", "model": name, "capability": capability, "cores": len(os.sched_getaffinity(0))}
    gpu = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "model": gpu.name,
        "processors": gpu.multi_processor_count,
        "memory": gpu.total_memory,
        "capability": f"{gpu.major}.{gpu.minor}",
        "links": parse_links(run_tool("nvidia-smi", "topo", "-m")),
        "copies": measure_copies(device),
    }


def measure_copies(device: torch.device) -> dict[str, float]:
    """GB/s from host memory to the GPU."""
    speeds = {}
    for kind, is_pinned in (("pinned", True), ("pageable", False)):
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        seconds = median_seconds(partial(host.to, device, non_blocking=True), synchronizer(device), 5)
        speeds[kind] = COPY_BYTES / seconds / 1e9
    return speeds


def parse_links(topology: str) -> list[str]:
    """The kinds of links between GPUs in the matrix of `nvidia-smi topo -m`, e.g. NV12, PIX, SYS."""
    rows = [line.split() for line in topology.splitlines() if re.match(r"GPU\d+\s", line)]
    return sorted({cell for row in rows for cell in row[1 : len(rows) + 1]} - {"X"})


def check_devices(reports: Sequence[Report], threads: int, has_dedicated_server: bool) -> Check:
    if failed := find_error(NAME, reports, "see the error; nvidia-smi on that node shows its GPUs"):
        return failed
    first, hosts = reports[0].values, Counter(report.host for report in reports)
    placement = f"{pluralize(len(reports), 'rank')} on {pluralize(len(hosts), 'node')}"
    shown = f"{placement}, each on {_describe(first)}"
    if different := find_difference(reports, ALIKE):
        advice = "other devices have other kernels: ask for one kind of node (--constraint) to keep the same bits"
        return Check(NAME, Status.FAILED if first["type"] == "cuda" else Status.WARNING, different, advice)
    workers = reports[int(has_dedicated_server) :]
    if first["type"] == "cpu" and (problem := _describe_oversubscription(workers, threads)):
        advice = "start fewer ranks, lower topology.threads, or ask for more CPUs per task"
        return Check(NAME, Status.SLOW, f"{shown}; {problem}", advice)
    return Check(NAME, Status.OK, shown)


def _describe_oversubscription(workers: Sequence[Report], threads: int) -> str:
    """The first node whose workers have more threads than cores; empty if there is none."""
    for host, count in Counter(report.host for report in workers).items():
        cores = next(report.values["cores"] for report in workers if report.host == host)
        if count * threads > cores:
            return f"on {host}, {count} workers of {pluralize(threads, 'thread')} share {pluralize(cores, 'core')}"
    return ""


def _describe(values: dict[str, Any]) -> str:
    if values["type"] == "cpu":
        return f"a CPU, {values['model']}, {values['capability']}"
    return f"{values['model']}, {values['processors']} SMs, {format_bytes(values['memory'])}"


def check_links(reports: Sequence[Report]) -> list[Check]:
    """Of ranks with GPUs."""
    links = {report.host: report.values["links"] for report in reports if report.values.get("links")}
    shown = [f"{host}: {', '.join(map(_name_link, kinds))}" for host, kinds in links.items()]
    return [Check(LINKS, Status.OK, "; ".join(shown))] if shown else []


def _name_link(kind: str) -> str:
    return f"NVLink ({kind})" if kind.startswith("NV") else f"PCIe ({kind})"


def check_copies(reports: Sequence[Report]) -> list[Check]:
    """Of ranks with GPUs; the slowest counts."""
    measured = [(report.values["copies"], report.label) for report in reports if "copies" in report.values]
    if not measured:
        return []
    copies, label = min(measured, key=lambda pair: pair[0]["pinned"])
    shown = f"{copies['pinned']:.1f} GB/s pinned, {copies['pageable']:.1f} GB/s not pinned ({label}, the slowest)"
    if copies["pinned"] < MIN_PINNED_GIGABYTES:
        return [Check(COPIES, Status.SLOW, shown, "check PCIe lanes (nvidia-smi -q) and that the CPU is not busy")]
    return [Check(COPIES, Status.OK, shown)]
