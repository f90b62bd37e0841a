"""Named moments at which a test may end the process; nothing happens, and nothing is spent, otherwise.

    FL_DIST_FAULT=local:3@2      rank 2 kills itself when it passes the point `local` for the third time
"""

import os
import signal

_spec, _, _rank = os.environ.get("FL_DIST_FAULT", "").partition("@")
_name, _, _count = _spec.partition(":")
_left = int(_count or 1)


def _point(name: str) -> None:
    global _left
    if name == _name and os.environ.get("RANK", "0") == (_rank or "0"):
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _nothing(name: str) -> None:
    pass


point = _point if _name else _nothing
