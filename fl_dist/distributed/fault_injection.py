"""Fault injection for tests: named points at which a process can be disturbed. Without faults a point costs nothing.

FL_DIST_FAULT=local:3@2              rank 2 kills itself when it passes the point `local` for the third time
FL_DIST_FAULT=sync:1@1=sleep:7       rank 1 sleeps 7 s at its first sync to disk
FL_DIST_FAULT=local:3@1=stop         rank 1 is stopped at its third client, as by a debugger
FL_DIST_FAULT=sync:2=fail,local:9    rank 0's second sync fails, and at its ninth client it kills itself
FL_DIST_FAULT=step:*@1=sleep:0.1     rank 1 sleeps before each local step
FL_DIST_FAULT=broadcast:6=hold:FILE  rank 0 waits at its sixth broadcast while the file exists
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable


def parse_faults(specs: str) -> Callable[[str], None]:
    """The function `point` for these faults; without any it does nothing."""
    faults = [_parse_fault(spec) for spec in specs.split(",") if spec]

    def point(name: str) -> None:
        for fault in faults:
            fault(name)

    return point


def _parse_fault(spec: str) -> Callable[[str], None]:
    trigger, _, action = spec.partition("=")
    place, _, rank = trigger.partition("@")
    target, _, count = place.partition(":")
    is_this_rank, is_always = os.environ.get("RANK", "0") == (rank or "0"), count == "*"
    remaining = 0 if is_always else int(count or 1)

    def point(name: str) -> None:
        nonlocal remaining
        if is_this_rank and name == target:
            remaining -= 1
            if is_always or remaining == 0:
                _inject(action)

    return point


def _inject(action: str) -> None:
    kind, _, argument = action.partition(":")
    if kind == "sleep":
        time.sleep(float(argument))
    elif kind == "hold":
        _wait_while_exists(argument)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "fail":
        raise OSError(errno.EIO, "injected fault")
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_while_exists(file: str) -> None:
    """Note in the file that the point was reached, and wait until somebody deletes it."""
    with contextlib.suppress(FileNotFoundError), open(file, "r+") as marker:
        marker.write("held\n")
    while os.path.exists(file):
        time.sleep(0.01)


point = parse_faults(os.environ.get("FL_DIST_FAULT", ""))
