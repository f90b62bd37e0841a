"""What a run folder holds."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fl_dist.storage.checkpoint import newest_round


def model_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, which may be going on: of what is just being written, none."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def results(folder: Path) -> list[dict[str, Any]]:
    """The metrics without what may differ between two runs of one config: times, and what each rank did."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "time", "workers")} for row in metrics(folder)]


def rows(folder: Path) -> int:
    """Rounds that the run has reported."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def saved(folder: Path) -> int:
    """The round of the newest save; 0 before the first."""
    return newest_round(folder / "checkpoint")


def assert_same(folder: Path, other: Path) -> None:
    """Two runs have the same model and the same numbers in every round."""
    assert model_hash(folder) == model_hash(other)
    assert results(folder) == results(other)
