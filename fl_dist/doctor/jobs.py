"""Short jobs of the doctor: a child process on each of the first ranks, connected as the ranks of a run are."""

import socket
from typing import Any

from fl_dist.doctor.children import Outcome, Target, rank_variables, run_child
from fl_dist.doctor.ranks import Ranks

ANSWER_MARGIN_SECONDS = 30.0
SILENT = Outcome(None, 0.0, "", {})
"""Of a rank whose doctor did not answer."""


def run_job(ranks: Ranks, size: int, target: Target, argument: Any, seconds: float, faults: str = "") -> list[Outcome]:
    """Run the target on the first `size` ranks. On rank 0, how each child ended; empty on other ranks."""
    port = ranks.broadcast(_free_port() if ranks.rank == 0 else None)
    outcome = None
    if ranks.rank < size:
        variables = rank_variables(ranks.rank, ranks.hosts[:size], ranks.info.host, port)
        outcome = run_child(target, argument, variables | ({"FL_DIST_FAULT": faults} if faults else {}), seconds)
    answers = ranks.gather(outcome, seconds + ANSWER_MARGIN_SECONDS)[:size]
    return [SILENT if answer is None else Outcome(*answer) for answer in answers]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
