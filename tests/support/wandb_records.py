"""Read offline records of W&B."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.processes import environment


def offline_records(run: Path) -> list[Path]:
    """One per attempt, the newest last."""
    return sorted((run / "wandb").glob("offline-run-*"))


def read_entries(record: Path, **env: str) -> list[dict[str, Any]]:
    """The entries of a record; each has a type: run, history, stats, ..., and finally exit."""
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(record)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(**env))
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def select_entries(kind: str, entries: list[dict[str, Any]]) -> list[Any]:
    return [entry[kind] for entry in entries if entry["type"] == kind]
