"""Named moments at which a test may end the process; nothing happens, and nothing is spent, otherwise.

FL_DIST_FAULT=local:3@2      rank 2 kills itself when it passes the point `local` for the third time
"""

import os
import signal
from collections.abc import Callable


def _nothing(name: str) -> None:
    pass


def armed(spec: str) -> Callable[[str], None]:
    """The function that kills this process as the specification says."""
    what, _, rank = spec.partition("@")
    target, _, count = what.partition(":")
    left = int(count or 1) if os.environ.get("RANK", "0") == (rank or "0") else 0

    def point(name: str) -> None:
        nonlocal left
        if name == target:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return point


_spec = os.environ.get("FL_DIST_FAULT", "")
point = armed(_spec) if _spec else _nothing
