"""One rank as torchrun starts it: `fl_dist.main`, with an outcome that torchrun cannot tell apart.

For torchrun every exit code but 0 is a failure to be repeated. A run that was interrupted or is misconfigured has said
its last word: its code goes to a file, and torchrun sees a rank that is done.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from fl_dist import terminal
from fl_dist.signals import HANDLED, REQUEUE

OUTCOMES = "FL_DIST_OUTCOMES"
"""Environment variable: the folder where the ranks of a node leave their process ids and exit codes."""
STOP = "stop"
"""File in that folder: a stop was asked for, nothing is to be started again."""
BAD_CONFIG = 2
FINAL = (0, BAD_CONFIG, REQUEUE)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies: no rank outlives its launcher."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(REQUEUE)


def _run() -> int:
    """The exit code of main; a signal that comes before main listens ends the rank at once."""
    try:
        for number in HANDLED:
            signal.signal(number, _leave)
        from fl_dist.main import main  # seconds of imports, in which signals may come

        return main(sys.argv[1:])
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1
    finally:
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)


def run() -> int:
    outcomes = Path(os.environ[OUTCOMES])
    rank = os.environ["LOCAL_RANK"]
    end_with_parent()
    (outcomes / f"{rank}.pid").write_text(str(os.getpid()))
    code = REQUEUE if (outcomes / STOP).exists() else _run()
    (outcomes / f"{rank}.pid").unlink()
    (outcomes / f"{rank}.code").write_text(str(code))
    return 0 if code in FINAL else code


if __name__ == "__main__":
    terminal.prepare()
    sys.exit(run())
