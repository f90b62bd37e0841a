"""Run folders as training leaves them, made up in no time."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HEADLINE = {"name": "accuracy", "best": "max", "percent": True}
SECONDS = {"broadcast": 0.1, "local": 2.0, "reduce": 0.2, "server": 0.1, "evaluate": 0.6, "checkpoint": 0.05}
SECONDS |= {"total": 2.5}


def pretend(
    folder: Path, rounds: int = 6, done: int | None = None, level: float = 0.8, rich: bool = True, **config: Any
) -> Path:
    """A run that has done some of its rounds; it is finished if it has done all."""
    folder.mkdir(parents=True)
    done = rounds if done is None else done
    (folder / "config.yaml").write_text(yaml.safe_dump(settings(rounds) | config))
    (folder / "run.json").write_text(
        json.dumps({"id": "0", "contents": {"data": "0"}, "facts": {"headline": HEADLINE}})
    )
    append(folder, *(row(k, level, rich) for k in range(1, done + 1)))
    if done == rounds:
        (folder / "model.safetensors").touch()
    if rich:
        (folder / "clients.json").write_text(json.dumps(clients()))
        write_lines(folder / "attempts.jsonl", attempt(0), attempt(3))
        write_lines(folder / "diagnostics.jsonl", plane(done))
    return folder


def settings(rounds: int) -> dict[str, Any]:
    return {
        **{"seed": 0, "rounds": rounds, "data": {"name": "digits"}, "partition": {"name": "dirichlet", "alpha": 0.1}},
        **{"model": {"name": "mlp"}, "algorithm": {"name": "fedavg"}, "local": {"lr": 0.1}, "evaluate": {"last": 3}},
    }


def append(folder: Path, *rows: dict[str, Any]) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_lines(file: Path, *lines: dict[str, Any]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def row(k: int, level: float = 0.8, rich: bool = True) -> dict[str, Any]:
    score = level * (1 - math.exp(-k / 3))
    plain = {
        **{"round": k, "test_loss": 2.3 - 2 * score, "test_accuracy": round(score, 4), "train_loss": 2.3 - 2.1 * score},
        **{"clients": 4, "dropped": [], "bytes_down": 4 * 10**8, "bytes_up": 10**8, "forwards": 40, "backwards": 40},
        **{"lr": 0.1 * 0.99**k, "method": {}},
        "seconds": SECONDS,
    }
    return plain | more(k, level) if rich else plain


def more(k: int, level: float) -> dict[str, Any]:
    """What newer runs also say."""
    workers = {"1": {"busy": 2.0, "share": 0.8}, "2": {"busy": 1.2 + 0.1 * (k % 4), "share": 0.5}}
    workers = {rank: told | {"clients": 2, "memory": 5 * 10**8 + k} for rank, told in workers.items()}
    measured = {"diagnostics": dict(diagnostics(k, level))} if k % 2 == 0 else {}
    return measured | {
        **{"time": 1.75e9 + 3 * k, "messages": 8, "method": {"momentum_norm": 1 / k}},
        "spread": {"loss_std": 0.2, "loss_min": 1 / k, "loss_max": 3 / k + 1, "norm_mean": 2 / k, "norm_std": 0.3 / k},
        "norms": {"update": 1.2 / k, "drift": 0.5 / k, "model": 10 + level * k},
        "seconds": SECONDS | ({"diagnostics": 30.0} if measured else {}),
        "workers": {"0": {"memory": 9 * 10**8, "evaluate": SECONDS["evaluate"]}} | workers,  # which only serves
    }


def diagnostics(k: int, level: float) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "sharpness", {"sharpness": 40 * level / k, "loss": 1 / k, "gradient_norm": 0.3, "rho": 0.05}
    yield "spectrum", {"largest": 9.0, "eigenvalues": [9.0 * level / j for j in range(1, 11)], "rows": 500}
    radii = [0.1 * j for j in range(-5, 6)]
    yield "along", {"radii": radii, "random": [r * r for r in radii], "gradient": [2 * r * r for r in radii]}
    places = [0.25 * j for j in range(-4, 5)]
    yield "clients", {"mean": level, "classes": [level * j / 9 for j in range(10)]}
    yield "surface", {"x": places, "y": places, "loss": [[level * x * x + 3 * y * y for x in places] for y in places]}


def clients(total: int = 20, classes: int = 10) -> dict[str, Any]:
    counts = [[(7 * i * c + c * c + i) % 60 if (i + c) % 3 else 0 for c in range(classes)] for i in range(total)]
    return {"sizes": [sum(line) for line in counts], "classes": counts}


def attempt(after: int) -> dict[str, Any]:
    versions = {"fl_dist": "0.2.0", "torch": "2.13.0"}
    told = {"time": 1.75e9 + 3 * after, "round": after, "ranks": 3, "hosts": ["node1", "node1", "node2"]}
    return told | {"device": "cpu", "versions": versions, "slurm_job": "4711"}


def plane(k: int) -> dict[str, Any]:
    """A trajectory across two surfaces, as the command for finished runs writes it."""
    places = [0.5 * j for j in range(-4, 5)]
    surfaces = {
        "client_loss": [[x * x + y * y for x in places] for y in places],
        "global_loss": [[(x - 1) ** 2 + (y - 0.5) ** 2 for x in places] for y in places],
    }
    paths = {"client 3": {"x": [-1.5, -0.5, 0.0], "y": [1.0, 0.5, 0.0], "rest": 0.01}}
    values = {"x": places, "y": places, **surfaces, "paths": paths}
    return {"round": k, "label": "trajectory", "settings": {"client": 3}, "values": values, "seconds": 1.0}
