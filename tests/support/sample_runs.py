"""Write run folders as training does, without training."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

PRIMARY_METRIC = {"name": "accuracy", "best": "max", "percent": True}
SECONDS = {"broadcast": 0.1, "local": 2.0, "reduce": 0.2, "server": 0.1, "evaluate": 0.6, "checkpoint": 0.05}
SECONDS |= {"total": 2.5}


def write_run(
    folder: Path,
    rounds: int = 6,
    done: int | None = None,
    level: float = 0.8,
    detailed: bool = True,
    stopped: str | None = None,
    **config: Any,
) -> Path:
    """A run with `done` of its rounds; finished if these are all, or if it stopped early."""
    folder.mkdir(parents=True)
    done = rounds if done is None else done
    (folder / "config.yaml").write_text(yaml.safe_dump(settings(rounds) | config))
    (folder / "run.json").write_text(
        json.dumps({"id": "0", "contents": {"data": "0"}, "facts": {"primary_metric": PRIMARY_METRIC}})
    )
    append_records(folder, *(round_record(k, level, detailed) for k in range(1, done + 1)))
    if done == rounds or stopped:
        (folder / "model.safetensors").touch()
    if stopped:
        (folder / "summary.json").write_text(json.dumps({"finished": True, "rounds": done, "stopped": stopped}))
    if detailed:
        (folder / "clients.json").write_text(json.dumps(clients()))
        write_lines(folder / "attempts.jsonl", attempt_record(0), attempt_record(3))
        write_lines(folder / "diagnostics.jsonl", plane_record(done))
    return folder


def settings(rounds: int) -> dict[str, Any]:
    return {
        **{"seed": 0, "rounds": rounds, "data": {"name": "digits"}, "partition": {"name": "dirichlet", "alpha": 0.1}},
        **{
            "model": {"name": "mlp"},
            "algorithm": {"name": "fedavg"},
            "local": {"lr": 0.1},
            "evaluate": {"final_window": 3},
        },
    }


def append_records(folder: Path, *records: dict[str, Any]) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def write_lines(file: Path, *lines: dict[str, Any]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def round_record(k: int, level: float = 0.8, detailed: bool = True) -> dict[str, Any]:
    score = level * (1 - math.exp(-k / 3))
    plain = {
        **{"round": k, "test_loss": 2.3 - 2 * score, "test_accuracy": round(score, 4), "train_loss": 2.3 - 2.1 * score},
        **{"clients": 4, "dropped": [], "bytes_down": 4 * 10**8, "bytes_up": 10**8, "forwards": 40, "backwards": 40},
        **{"lr": 0.1 * 0.99**k, "server_lr": 0.95**k, "method": {}},
        "seconds": SECONDS,
    }
    return plain | detailed_fields(k, level) if detailed else plain


def detailed_fields(k: int, level: float) -> dict[str, Any]:
    """The fields that only newer runs record."""
    workers = {"1": {"busy": 2.0, "share": 0.8}, "2": {"busy": 1.2 + 0.1 * (k % 4), "share": 0.5}}
    workers = {rank: worker | {"clients": 2, "memory": 5 * 10**8 + k} for rank, worker in workers.items()}
    measured = {"diagnostics": dict(diagnostics(k, level))} if k % 2 == 0 else {}
    return measured | {
        **{"time": 1.75e9 + 3 * k, "messages": 8, "method": {"momentum_norm": 1 / k}},
        "spread": {"loss_std": 0.2, "loss_min": 1 / k, "loss_max": 3 / k + 1, "norm_mean": 2 / k, "norm_std": 0.3 / k},
        "norms": {"update": 1.2 / k, "drift": 0.5 / k, "model": 10 + level * k},
        "seconds": SECONDS | ({"diagnostics": 30.0} if measured else {}),
        "workers": {"0": {"memory": 9 * 10**8, "evaluate": SECONDS["evaluate"]}} | workers,  # rank 0 does not train
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


def attempt_record(after: int) -> dict[str, Any]:
    versions = {"fl_dist": "0.2.0", "torch": "2.13.0"}
    start = {"time": 1.75e9 + 3 * after, "round": after, "ranks": 3, "hosts": ["node1", "node1", "node2"]}
    return start | {"device": "cpu", "versions": versions, "slurm_job": "4711"}


def plane_record(k: int) -> dict[str, Any]:
    """A trajectory across two surfaces, as the command for finished runs writes it."""
    places = [0.5 * j for j in range(-4, 5)]
    surfaces = {
        "client_loss": [[x * x + y * y for x in places] for y in places],
        "global_loss": [[(x - 1) ** 2 + (y - 0.5) ** 2 for x in places] for y in places],
    }
    paths = {"client 3": {"x": [-1.5, -0.5, 0.0], "y": [1.0, 0.5, 0.0], "rest": 0.01}}
    values = {"x": places, "y": places, **surfaces, "paths": paths}
    return {"round": k, "label": "trajectory", "settings": {"client": 3}, "values": values, "seconds": 1.0}
