"""The disk of the run folder: whether all nodes see it, its locks, its renames, and how long a sync takes."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fl_dist.common.files import write_atomically
from fl_dist.common.formatting import format_bytes
from fl_dist.doctor.checks import Check, Report, Status, find_error
from fl_dist.storage.folder_lock import is_locked

NAME, LOCK = "run folder", "lock"
MARKER = "marker"
SYNC_BYTES, SYNC_REPEATS = 1 << 20, 5
MAX_SYNC_SECONDS = 0.2
MIN_FREE_BYTES = 10**9


def measure_disk(folder: Path, write: Callable[[Path, bytes], None] = write_atomically) -> dict[str, Any]:
    """Replace a file several times, as each checkpoint does: whole, and synced to disk."""
    file, times = folder / "replaced", []
    for number in range(SYNC_REPEATS):
        content = bytes([number]) * SYNC_BYTES
        start = time.perf_counter()
        write(file, content)
        times.append(time.perf_counter() - start)
        if file.read_bytes() != content:
            return {"error": f"{file} does not hold what was written before its rename"}
    disk = os.statvfs(folder)
    return {"seconds": statistics.median(times), "free": disk.f_bavail * disk.f_frsize}


def measure_folder(folder: Path, token: str) -> dict[str, Any]:
    """From another process: whether the marker of rank 0 is there, and whether its lock is seen."""
    marker = folder / MARKER
    is_visible = marker.exists() and marker.read_text() == token
    return {"is_visible": is_visible, "is_locked": is_locked(folder)}


def check_disk(values: dict[str, Any], folder: Path) -> Check:
    if "error" in values:
        advice = "choose another run.dir, on a disk with room that you may write to"
        return Check(NAME, Status.FAILED, f"{folder}: {values['error']}", advice)
    shown = f"{folder}: a synced write of {format_bytes(SYNC_BYTES)} takes {1e3 * values['seconds']:.1f} ms"
    shown += f", {format_bytes(values['free'])} free"
    if values["seconds"] > MAX_SYNC_SECONDS:
        advice = "each checkpoint waits for the disk: choose a faster one, or raise checkpoint.every"
        return Check(NAME, Status.SLOW, shown, advice)
    if values["free"] < MIN_FREE_BYTES:
        return Check(NAME, Status.WARNING, shown, "make room: checkpoints and records need it")
    return Check(NAME, Status.OK, shown)


def check_lock(reports: Sequence[Report], folder: Path) -> Check:
    if failed := find_error(LOCK, reports, "choose a run.dir on a disk that all nodes see"):
        return failed
    if without_marker := [report.label for report in reports if not report.values["is_visible"]]:
        measured = f"{', '.join(without_marker)} cannot see {folder}"
        return Check(LOCK, Status.FAILED, measured, "choose a run.dir on a disk that all nodes share")
    if without_lock := [report.label for report in reports if not report.values["is_locked"]]:
        measured = f"the lock that rank 0 holds is not seen by {', '.join(without_lock)}"
        advice = "never start one run twice: this disk does not keep two jobs apart (NFS: mount it without local_lock)"
        return Check(LOCK, Status.WARNING, measured, advice)
    nodes = {report.host for report in reports}
    return Check(LOCK, Status.OK, f"held by one process, seen by others{' on every node' if len(nodes) > 1 else ''}")
