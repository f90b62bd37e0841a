"""Named moments at which a test may end the process; nothing happens, and nothing is spent, otherwise."""

import os
import signal

_armed, _, _count = os.environ.get("FL_DIST_FAULT", "").partition(":")
_left = int(_count or 1)


def _point(name: str) -> None:
    global _left
    if name == _armed:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _nothing(name: str) -> None:
    pass


point = _point if _armed else _nothing
