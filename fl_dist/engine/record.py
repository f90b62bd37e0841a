"""A round as a row of metrics.jsonl."""

import time
from typing import Any

from fl_dist.engine.outcome import Outcome

Row = dict[str, Any]
UNTESTED: Row = {"test_loss": None, "test_accuracy": None}
"""What a row says of its model on the test set if it was not evaluated, or if the task has no accuracy."""


def new_row(outcome: Outcome, lr: float, seconds: dict[str, float], host: list[int], device: list[int]) -> Row:
    """What is known after the server step; `host` and `device`: bytes of memory by rank."""
    row: Row = {"round": outcome.index + 1, "time": round(time.time(), 3), **UNTESTED}
    facts = vars(outcome)
    row |= {"train_loss": facts["train_loss"], "clients": len(outcome.survivors), "dropped": outcome.dropped}
    row |= {k: facts[k] for k in ("bytes_down", "bytes_up", "messages", "forwards", "backwards")}
    row |= {"lr": lr, "method": outcome.reports, "spread": outcome.spread, "norms": outcome.norms}
    return row | {"seconds": seconds, "workers": _by_rank(outcome, seconds["total"], host, device)}


def add_test(row: Row, metrics: dict[str, float], seconds: float, ranks: int) -> None:
    """What the first `ranks` ranks found of the round's model on the test set; some may have come since the round.

    Nothing inside of the row is changed, only replaced: a save may be writing what it was.
    """
    took = {"evaluate": round(seconds, 6)}
    ranked = {str(rank): row["workers"].get(str(rank), {}) | took for rank in range(ranks)}
    row |= metrics | {"seconds": row["seconds"] | took, "workers": row["workers"] | ranked}


def untested(row: Row) -> Row:
    """The row as it was before its model was evaluated."""
    rest = {k: v for k, v in row.items() if not k.startswith("test_")}
    return {"round": rest["round"], **UNTESTED, **rest}


def _by_rank(outcome: Outcome, total: float, host: list[int], device: list[int]) -> dict[str, dict[str, float]]:
    """What each rank did in the round, and its bytes of memory."""
    ranks: dict[str, dict[str, float]] = {}
    for rank, (own, on_device) in enumerate(zip(host, device, strict=True)):
        did = outcome.workers.get(rank, {})
        shares = {"share": round(did["busy"] / total, 6)} if did else {}
        ranks[str(rank)] = did | shares | {"memory": own} | ({"device_memory": on_device} if on_device else {})
    return ranks
