"""Whether the data is found on every node, and how fast it is read."""

import time
from collections.abc import Sequence
from typing import Any

from fl_dist.common.formatting import format_bytes
from fl_dist.common.rows import count_bytes, slice_rows, tensors_of
from fl_dist.config import Config
from fl_dist.doctor.checks import Check, Report, Status, find_difference, find_error
from fl_dist.federation.client_rows import build_data

NAME = "data"
MAX_READ_BYTES = 1 << 28
"""Of rows in mapped files."""
MIN_MEGABYTES = 20.0
"""Per second."""
MIN_SLOW_SECONDS = 2.0
"""Less time than this is nothing that anybody waits for, however small the data."""


def measure_data(config: Config) -> dict[str, Any]:
    """Build the data set and read rows of it."""
    start = time.perf_counter()
    data = build_data(config)
    total = count_bytes(data.x_train)
    rows = max(1, MAX_READ_BYTES * len(data.y_train) // max(1, total))
    for tensor in tensors_of(slice_rows(data.x_train, slice(rows))):
        tensor.clone()
    seconds = time.perf_counter() - start
    read = min(total, MAX_READ_BYTES)
    return {
        "rows": [len(data.y_train), len(data.y_test)],
        "bytes": total + count_bytes(data.x_test),
        "seconds": seconds,
        "megabytes": read / seconds / 1e6,
    }


def check_data(reports: Sequence[Report], name: str) -> Check:
    advice = "put the files where the message says, on a disk that all nodes see (fl-dist data --help)"
    if error := find_error(NAME, reports, advice):
        return error
    if difference := find_difference(reports, ("rows", "bytes")):
        return Check(NAME, Status.FAILED, difference, "give all nodes the same files")
    slowest = min(reports, key=lambda report: float(report.values["megabytes"]))
    values = slowest.values
    rows = " + ".join(f"{count:,}" for count in values["rows"])
    summary = f"{name}: {rows} rows, {format_bytes(values['bytes'])}, read at {values['megabytes']:.0f} MB/s"
    if values["megabytes"] < MIN_MEGABYTES and values["seconds"] > MIN_SLOW_SECONDS:
        advice = "copy the data to the nodes' own disks, or store it as one .npz file"
        return Check(NAME, Status.SLOW, f"{summary} by {slowest.label}", advice)
    return Check(NAME, Status.OK, summary)
