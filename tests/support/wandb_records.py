"""What an offline record of W&B holds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.processes import environment


def records(run: Path) -> list[Path]:
    """One an attempt, the newest last."""
    return sorted((run / "wandb").glob("offline-run-*"))


def entries(record: Path, **env: str) -> list[dict[str, Any]]:
    """Each has a type: run, history, stats, ..., and at the end exit."""
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(record)]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment(**env))
    assert shown.returncode == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]


def of(kind: str, found: list[dict[str, Any]]) -> list[Any]:
    return [entry[kind] for entry in found if entry["type"] == kind]
