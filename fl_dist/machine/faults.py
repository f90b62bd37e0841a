"""Named moments at which a test may disturb the process; nothing happens, and nothing is spent, otherwise.

FL_DIST_FAULT=local:3@2              rank 2 kills itself when it passes the point `local` for the third time
FL_DIST_FAULT=sync:1@1=sleep:7       rank 1 sleeps 7 s at its first sync to disk
FL_DIST_FAULT=local:3@1=stop         rank 1 is stopped at its third client, as by a debugger
FL_DIST_FAULT=sync:2=fail,local:9    rank 0's second sync fails, and at its ninth client it kills itself
FL_DIST_FAULT=step:*@1=sleep:0.1     rank 1 sleeps before each local step
FL_DIST_FAULT=broadcast:6=hold:FILE  rank 0 waits at its sixth broadcast for as long as the file exists
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable


def _nothing(name: str) -> None:
    pass


def armed(specs: str) -> Callable[[str], None]:
    """The function that disturbs this process as the specifications say."""
    faults = [_fault(spec) for spec in specs.split(",")]

    def point(name: str) -> None:
        for fault in faults:
            fault(name)

    return point


def _fault(spec: str) -> Callable[[str], None]:
    where, _, action = spec.partition("=")
    what, _, rank = where.partition("@")
    target, _, count = what.partition(":")
    mine, always = os.environ.get("RANK", "0") == (rank or "0"), count == "*"
    left = 0 if always else int(count or 1)

    def point(name: str) -> None:
        nonlocal left
        if mine and name == target:
            left -= 1
            if always or left == 0:
                _act(action)

    return point


def _act(action: str) -> None:
    kind, _, argument = action.partition(":")
    if kind == "sleep":
        time.sleep(float(argument))
    elif kind == "hold":
        _hold(argument)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "fail":
        raise OSError(errno.EIO, "a fault was asked for")
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def _hold(file: str) -> None:
    """Say in the file that the point was reached, and wait until somebody deletes it."""
    with contextlib.suppress(FileNotFoundError), open(file, "r+") as said:
        said.write("held\n")
    while os.path.exists(file):
        time.sleep(0.01)


_spec = os.environ.get("FL_DIST_FAULT", "")
point = armed(_spec) if _spec else _nothing
