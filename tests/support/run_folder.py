"""Read run folders."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fl_dist.storage.checkpoint import newest_checkpoint_round


def model_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The complete records of a run, which may be in progress."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def reproducible_records(folder: Path) -> list[dict[str, Any]]:
    """The records without times and worker statistics, which differ between two runs of one config."""
    return [
        {k: v for k, v in record.items() if k not in ("seconds", "time", "workers")} for record in read_records(folder)
    ]


def count_records(folder: Path) -> int:
    """The number of rounds reported."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def newest_saved_round(folder: Path) -> int:
    """The round of the newest checkpoint; 0 before the first."""
    return newest_checkpoint_round(folder / "checkpoint")


def assert_same_run(folder: Path, other: Path) -> None:
    """Two runs have the same model and the same numbers in every round."""
    assert model_hash(folder) == model_hash(other)
    assert reproducible_records(folder) == reproducible_records(other)
