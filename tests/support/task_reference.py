"""Small runs of each task, and plain float64 training loops with the same results."""

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fl_dist.main import main
from tests.support.run_folder import read_records

Settings = dict[str, Any]
Weights = dict[str, Tensor]
Rows = tuple[Tensor, Tensor]
Apply = Callable[[Weights, Tensor], Tensor]
Loss = Callable[[Weights, Rows], Tensor]
ExtraLoss = Callable[[Weights, Rows, Weights, Weights, Weights], Tensor]
"""A loss term: current weights, rows, received model, averaged model, the client's previous model."""

SIZES = (3, 5, 6, 8)
SCHEDULE = [[0, 2, 3], [1, 3], [0, 1, 2], [0, 2, 3]]
LOCAL = {
    "epochs": 3,
    "batch_size": "full",
    "lr": 0.1,
    "lr_decay": 0.9,
    "momentum": 0.6,
    "weight_decay": 0.03,
    "clip": 1.5,
    "precision": "float64",
}
MIX, DUAL, DISTILL, TEMPERATURE, EMA, RADIUS = 0.4, 0.3, 1.5, 2.0, 0.7, 0.2
METHODS: dict[str, Settings] = {
    "fedavg": {"name": "fedavg"},
    "scaffold": {"name": "scaffold"},
    "mimelite": {"name": "mimelite", "mix": MIX},
    "fedgmt": {"name": "fedgmt", "dual": DUAL, "distill": DISTILL, "temperature": TEMPERATURE, "ema_decay": EMA},
    "fedsam": {"name": "fedsam", "rho": RADIUS},
}
TOLERANCE = 1e-9
file_numbers = itertools.count()


def write_module(folder: Path, text: str) -> str:
    """Write a user module under a name that no test has imported yet."""
    name = f"user_tasks{next(file_numbers)}"
    (folder / f"{name}.py").write_text(text)
    return name


def assign_clients(rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(np.repeat(np.arange(len(SIZES)), SIZES))


def write_data(folder: Path, x: np.ndarray, y: np.ndarray | None, client: np.ndarray) -> Path:
    """Write the rows; those beyond the clients' rows are test rows."""
    path, n = folder / f"data{next(file_numbers)}.npz", len(client)
    targets = {} if y is None else {"y_train": y[:n], "y_test": y[n:]}
    np.savez(path, x_train=x[:n], x_test=x[n:], client=client, **targets)
    return path


def write_weights(folder: Path, weights: Weights) -> str:
    path = folder / f"weights{next(file_numbers)}.safetensors"
    save_file({name: value.contiguous() for name, value in weights.items()}, path)
    return str(path)


def configuration(data: Path, /, **changes: Any) -> Settings:
    return {
        "rounds": len(SCHEDULE),
        "data": {"name": "npz", "path": str(data)},
        "partition": {"name": "given"},
        "clients": {"total": len(SIZES), "schedule": SCHEDULE},
        "local": LOCAL,
        "evaluate": {"batch_size": 3},
        "checkpoint": {"every": 0},
        "monitor": {"wandb": {"mode": "disabled"}},
        "algorithm": METHODS["fedavg"],
    } | changes


def arguments(folder: Path, config: Settings) -> tuple[list[str], Path]:
    """The command line of a run, and its folder."""
    run = folder / f"run{next(file_numbers)}"
    run.with_suffix(".json").write_text(json.dumps(config))
    return [str(run.with_suffix(".json")), f"run.dir={run}"], run


def run(folder: Path, config: Settings) -> tuple[Weights, list[Settings], Path]:
    """The final model, the records and the folder of a run in this process."""
    line, run_folder = arguments(folder, config)
    assert main(line) == 0
    return load_file(run_folder / "model.safetensors"), read_records(run_folder), run_folder


def assert_close(actual: Weights, expected: Weights) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == torch.float64 and actual[name].shape == value.shape
        assert float((actual[name] - value).abs().max()) < TOLERANCE, name


def assert_measured(rows: list[Settings], expected: list[dict[str, float]]) -> None:
    """Every round, every number."""
    assert len(rows) == len(expected) == len(SCHEDULE)
    for row, values in zip(rows, expected, strict=True):
        for name, value in values.items():
            assert abs(row[f"test_{name}"] - value) < TOLERANCE, (row["round"], name)


def random_weights(shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> Weights:
    return {name: torch.tensor(0.5 * rng.normal(size=shape)) for name, shape in shapes.items()}


def mlp_shapes(*sizes: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for k, (a, b) in enumerate(itertools.pairwise(sizes)):
        shapes |= {f"layers.{k}.weight": (b, a), f"layers.{k}.bias": (b,)}
    return shapes


def mlp(w: Weights, x: Tensor) -> Tensor:
    depth, x = len(w) // 2, x.flatten(1)
    for k in range(depth):
        x = x @ w[f"layers.{k}.weight"].T + w[f"layers.{k}.bias"]
        x = torch.tanh(x) if k < depth - 1 else x
    return x


def split_by_client(x: Tensor, y: Tensor, client: np.ndarray) -> tuple[list[Rows], Rows]:
    """The rows of each client, and the test rows."""
    rows_by_client = [torch.from_numpy(np.flatnonzero(client == i)) for i in range(len(SIZES))]
    return [(x[rows], y[rows]) for rows in rows_by_client], (x[len(client) :], y[len(client) :])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each row."""
    return torch.logsumexp(logits, 1) - logits[torch.arange(len(labels)), labels]


def gradient(loss: Callable[[Weights], Tensor], w: Weights, trainable: Iterable[str]) -> Weights:
    """The gradient with respect to the trainable parameters."""
    leaves = {name: value.clone().requires_grad_() if name in trainable else value for name, value in w.items()}
    names = [name for name in w if name in trainable]
    return dict(zip(names, torch.autograd.grad(loss(leaves), [leaves[name] for name in names]), strict=True))


def norm(v: Weights) -> float:
    return float(sum(value.square().sum() for value in v.values()) ** 0.5)


def full_batches(t: int, i: int, n: int) -> list[Tensor]:
    return [torch.arange(n)] * LOCAL["epochs"]


def train(
    method: str,
    start: Weights,
    clients: list[Rows],
    loss: Loss,
    extra_loss: ExtraLoss | None = None,
    trainable: Iterable[str] | None = None,
    batches: Callable[[int, int, int], list[Tensor]] = full_batches,
) -> list[Weights]:
    """The model after each round, by the rules of docs/reference/algorithms.md."""
    trainable = list(start) if trainable is None else list(trainable)
    zero = {name: torch.zeros_like(start[name]) for name in trainable}
    x, c, m, h_bar, e = dict(start), zero, zero, zero, dict(start)
    c_i, h_i, last = [zero] * len(clients), [zero] * len(clients), [None] * len(clients)
    models = []
    for t, cohort in enumerate(SCHEDULE):
        eta = LOCAL["lr"] * LOCAL["lr_decay"] ** t
        total = sum(len(clients[i][0]) for i in cohort)
        p = {i: len(clients[i][0]) / total for i in cohort}
        d, c_change, full = {}, {}, {}
        for i in cohort:
            previous = x if last[i] is None else last[i]
            y, buf, steps = dict(x), zero, 0
            for indices in batches(t, i, len(clients[i][0])):
                rows = tuple(part[indices] for part in clients[i])

                def objective(
                    w: Weights, rows: Any = rows, previous: Weights = previous, x: Weights = x, e: Any = e
                ) -> Tensor:
                    return loss(w, rows) + (0 if extra_loss is None else extra_loss(w, rows, x, e, previous))

                g = gradient(objective, y, trainable)
                if method == "fedsam":
                    length = norm(g)
                    q = y | {n: y[n] + RADIUS * g[n] / length for n in trainable}
                    g = gradient(objective, q, trainable)
                if method == "scaffold":
                    r = {n: g[n] - c_i[i][n] + c[n] for n in trainable}
                elif method == "mimelite":
                    r = {n: MIX * g[n] + (1 - MIX) * m[n] for n in trainable}
                elif method == "fedgmt":
                    r = {n: g[n] + DUAL * h_i[i][n] for n in trainable}
                else:
                    r = g
                factor = min(1.0, LOCAL["clip"] / norm(r))
                buf = {n: LOCAL["momentum"] * buf[n] + factor * r[n] + LOCAL["weight_decay"] * y[n] for n in trainable}
                y = y | {n: y[n] - eta * buf[n] for n in trainable}
                steps += 1
            d[i], last[i] = {n: y[n] - x[n] for n in trainable}, y
            if method == "scaffold":
                c_change[i] = {n: -c[n] - d[i][n] / (eta * steps) for n in trainable}
                c_i[i] = {n: c_i[i][n] + c_change[i][n] for n in trainable}
            if method == "mimelite":
                full[i] = gradient(lambda w, i=i: loss(w, clients[i]), x, trainable)
            if method == "fedgmt":
                h_i[i] = {n: h_i[i][n] + d[i][n] for n in trainable}
        x = x | {n: x[n] + sum(p[i] * d[i][n] for i in cohort) for n in trainable}
        if method == "scaffold":
            c = {n: c[n] + sum(c_change[i][n] for i in cohort) / len(clients) for n in trainable}
        if method == "mimelite":
            m = {n: (1 - MIX) * m[n] + MIX * sum(p[i] * full[i][n] for i in cohort) for n in trainable}
        if method == "fedgmt":
            h_bar = {n: h_bar[n] + sum(d[i][n] for i in cohort) / len(clients) for n in trainable}
            x = x | {n: x[n] + h_bar[n] for n in trainable}
            e = e | {n: EMA * e[n] + (1 - EMA) * x[n] for n in trainable}
        models.append(x)
    return models


def classification_rows(rng: np.random.Generator, features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    client = assign_clients(rng)
    y = rng.integers(3, size=len(client) + 7)
    y[-1] = 2
    return rng.normal(size=(len(y), features)) + 0.5 * y[:, None], y, client


BODY_AND_HEAD = """
from torch import Tensor, nn

class BodyAndHead(nn.Module):
    def __init__(self, outputs: int, *, freeze: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, outputs)
        self.body.requires_grad_(not freeze)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())
"""
