"""One rank as torchrun starts it: `fl_dist.main`, with an outcome that torchrun cannot tell apart.

For torchrun every exit code but 0 is a failure to be repeated. A run that was interrupted, is misconfigured or failed
by itself has said its last word: its code goes to a file, and torchrun sees a rank that is done.
"""

import os
import signal
import sys
from types import FrameType

from fl_dist.common import terminal
from fl_dist.machine.signals import HANDLED, REQUEUE, end_with_parent
from launch.node import BAD_CONFIG, FirstError, find_node

FINAL = (0, BAD_CONFIG, REQUEUE)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(REQUEUE)


def run_main(arguments: list[str]) -> int:
    """The exit code of main; a signal that comes before main listens ends the rank at once."""
    try:
        for number in HANDLED:
            signal.signal(number, _leave)
        from fl_dist.main import main  # seconds of imports, in which signals may come

        return main(arguments)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1
    finally:
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)


def run() -> int:
    node, rank = find_node(), int(os.environ["LOCAL_RANK"])
    assert node is not None
    end_with_parent()
    node.enter(rank)
    with FirstError() as error:
        code = REQUEUE if node.stopped else run_main(sys.argv[1:])
    # Of a rank that has ended the launcher says how; of a server that was stopped nobody else would say anything.
    if os.environ["RANK"] == os.environ["LOCAL_RANK"] == "1" and 0 in error.ranks and node.lives(0):
        terminal.complain(f"{error.message}; start the same command to resume")
    node.leave(rank, code, final=code == BAD_CONFIG or (code not in FINAL and not error.passes))
    # A rank whose server has failed for good may only have seen that it was gone.
    return 0 if code in FINAL or node.final else code


if __name__ == "__main__":
    terminal.prepare()
    sys.exit(run())
