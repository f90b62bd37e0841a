"""Between ranks: names that resolve, collectives that are right to the bit, and how fast they are."""

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_dist.distributed.collectives import Collectives
from fl_dist.distributed.devices import synchronizer
from fl_dist.doctor.checks import Check, Report, Status, find_error
from fl_dist.doctor.tools import median_seconds, read_system_file

ADDRESS, BROADCAST, REDUCE = "address of rank 0", "broadcast", "reduce"
MESSAGE_ENTRIES = 1 << 22
REPEATS = 3
MIN_LINK_SHARE = 0.1
"""Of what the fastest link of the nodes should give; less means that another one is used."""
INTERFACE_ADVICE = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the fast interface (ip -br addr lists them)"


def resolve(host: str) -> dict[str, Any]:
    """The address of rank 0 from here, and whether this machine's own name leads to loopback only."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError as e:
        return {"error": f"{host!r} does not resolve ({e.strerror or e})"}
    return {"host": host, "addresses": sorted(addresses), "own": _own_address()}


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def check_address(reports: Sequence[Report]) -> Check:
    advice = "the nodes need each other's names: ask the administrator, or add them to /etc/hosts"
    if error := find_error(ADDRESS, reports, advice):
        return error
    values, nodes = reports[0].values, {report.host for report in reports}
    summary = f"{values['host']} is {', '.join(values['addresses'])}"
    own_addresses = {report.label: report.values["own"] for report in reports}
    on_loopback = [label for label, own in own_addresses.items() if not own or own.startswith("127.")]
    if len(nodes) > 1 and on_loopback:
        measured = f"{summary}; the own name of {on_loopback[0]} leads to no address that others reach"
        return Check(ADDRESS, Status.WARNING, measured, INTERFACE_ADVICE)
    return Check(ADDRESS, Status.OK, f"{summary}, on every node" if len(nodes) > 1 else summary)


def measure_collectives(
    collectives: Collectives, rank: int, size: int, device: torch.device, entries: int = MESSAGE_ENTRIES
) -> dict[str, Any]:
    """Whether both messages of a round arrive as they should, and GB/s."""
    patterns = [_pattern(number, size, entries) for number in range(size if rank == 0 else 1)]
    received = (patterns[0] if rank == 0 else torch.zeros_like(patterns[0])).to(device, copy=True)
    total = _pattern(rank, size, entries).to(device)
    collectives.broadcast(received)
    collectives.reduce(total)
    is_right = {
        BROADCAST: torch.equal(received.cpu(), patterns[0]),
        REDUCE: rank != 0 or torch.equal(total.cpu(), torch.stack(patterns).sum(0)),
    }
    synchronize = synchronizer(device)
    seconds = {
        BROADCAST: median_seconds(lambda: collectives.broadcast(received), synchronize, REPEATS),
        REDUCE: median_seconds(lambda: collectives.reduce(total), synchronize, REPEATS),
    }
    speeds = {name: 8e-9 * entries / time for name, time in seconds.items()}
    return {"is_right": is_right, "gigabytes": speeds, "links": link_speeds()}


def _pattern(rank: int, size: int, entries: int) -> Tensor:
    """Numbers that differ between ranks and use all bits of a sum."""
    limit = 2**62 // size
    return torch.randint(-limit, limit, (entries,), generator=torch.Generator().manual_seed(rank))


def link_speeds(root: Path = Path("/sys/class")) -> dict[str, float]:
    """GB/s of the network interfaces that are up, as the kernel knows them."""
    speeds = {}
    for interface in root.glob("net/*"):
        megabits = read_system_file(interface / "speed")
        if read_system_file(interface / "operstate") == "up" and megabits.isdecimal():
            speeds[interface.name] = int(megabits) / 8e3
    for port in root.glob("infiniband/*/ports/*"):
        if match := re.match(r"(\d+) Gb/sec", read_system_file(port / "rate")):
            speeds[port.parts[-3]] = int(match[1]) / 8
    return speeds


def check_collectives(reports: Sequence[Report]) -> list[Check]:
    """One check per collective."""
    advice = "ranks cannot exchange messages: check firewalls; " + INTERFACE_ADVICE
    if error := find_error(f"{BROADCAST}, {REDUCE}", reports, advice):
        return [error]
    return [_check_collective(name, reports) for name in (BROADCAST, REDUCE)]


def _check_collective(name: str, reports: Sequence[Report]) -> Check:
    if wrong := [report.label for report in reports if not report.values["is_right"][name]]:
        measured = f"wrong numbers on {', '.join(wrong)}"
        return Check(name, Status.FAILED, measured, "runs here cannot be trusted: update torch, NCCL and the driver")
    if len(reports) == 1:
        return Check(name, Status.OK, "one process, nothing to send")
    slowest = min(report.values["gigabytes"][name] for report in reports)
    links = {link: speed for report in reports for link, speed in report.values["links"].items()}
    summary = f"right to the bit, {slowest:.2g} GB/s"
    if len({report.host for report in reports}) == 1:
        return Check(name, Status.OK, f"{summary} within one node")
    speeds = ", ".join(f"{link} {speed:.3g} GB/s" for link, speed in sorted(links.items()))
    summary += f" (links: {speeds or 'unknown'})"
    if slowest < MIN_LINK_SHARE * max(links.values(), default=0.0):
        return Check(name, Status.SLOW, summary, INTERFACE_ADVICE)
    return Check(name, Status.OK, summary)
