"""Tasks, models trained in part, pretrained weights, features and normalisation, against plain loops in float64.

The references are written from docs/algorithms.md and docs/yours.md alone: dictionaries of parameters, autograd, one
client after another. Whole clients are batches, so that no order of rows matters, unless a test says otherwise.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fl_dist.common.randomness import torch_generator
from fl_dist.main import main
from tests.jobs import ROOT, metrics, model_hash, run_ranks

Settings = dict[str, Any]
Weights = dict[str, Tensor]
Rows = tuple[Tensor, Tensor]
Apply = Callable[[Weights, Tensor], Tensor]
Loss = Callable[[Weights, Rows], Tensor]
Lesson = Callable[[Weights, Rows, Weights, Weights, Weights], Tensor]
"""A term of the loss: at these weights, on these rows, with the received model, the mean one, the client's last one."""

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
numbers = itertools.count()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a user, whose modules leave no trace on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # ranks run this copy, whichever is installed
    return tmp_path


def module(folder: Path, text: str) -> str:
    """A module of the user's under a name that no test has imported yet."""
    name = f"tasks_own{next(numbers)}"
    (folder / f"{name}.py").write_text(text)
    return name


def clients_of_rows(rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(np.repeat(np.arange(len(SIZES)), SIZES))


def write_data(folder: Path, x: np.ndarray, y: np.ndarray | None, client: np.ndarray) -> Path:
    """All rows that have no client are test rows."""
    path, n = folder / f"data{next(numbers)}.npz", len(client)
    targets = {} if y is None else {"y_train": y[:n], "y_test": y[n:]}
    np.savez(path, x_train=x[:n], x_test=x[n:], client=client, **targets)
    return path


def write_weights(folder: Path, weights: Weights) -> str:
    path = folder / f"weights{next(numbers)}.safetensors"
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
    """The command line of a run, and where it leaves its results."""
    run = folder / f"run{next(numbers)}"
    run.with_suffix(".json").write_text(json.dumps(config))
    return [str(run.with_suffix(".json")), f"run.dir={run}"], run


def run(folder: Path, config: Settings) -> tuple[Weights, list[Settings], Path]:
    """The final model, the rows of the metrics and the folder of a run in this process."""
    line, made = arguments(folder, config)
    assert main(line) == 0
    return load_file(made / "model.safetensors"), metrics(made), made


def refused(folder: Path, config: Settings, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line by which a run ends."""
    capsys.readouterr()
    assert main(arguments(folder, config)[0]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    return line


def assert_close(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == torch.float64 and found[name].shape == value.shape
        assert float((found[name] - value).abs().max()) < TOLERANCE, name


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


def split(x: Tensor, y: Tensor, client: np.ndarray) -> tuple[list[Rows], Rows]:
    """The rows of each client, and the test rows, which are those behind all clients'."""
    mine = [torch.from_numpy(np.flatnonzero(client == i)) for i in range(len(SIZES))]
    return [(x[rows], y[rows]) for rows in mine], (x[len(client) :], y[len(client) :])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Of each row."""
    return torch.logsumexp(logits, 1) - logits[torch.arange(len(labels)), labels]


def gradient(loss: Callable[[Weights], Tensor], w: Weights, moving: Iterable[str]) -> Weights:
    """With respect to the parameters that move."""
    leaves = {name: value.clone().requires_grad_() if name in moving else value for name, value in w.items()}
    wanted = [name for name in w if name in moving]
    return dict(zip(wanted, torch.autograd.grad(loss(leaves), [leaves[name] for name in wanted]), strict=True))


def norm(v: Weights) -> float:
    return float(sum(value.square().sum() for value in v.values()) ** 0.5)


def whole(t: int, i: int, n: int) -> list[Tensor]:
    return [torch.arange(n)] * LOCAL["epochs"]


def train(
    method: str,
    start: Weights,
    clients: list[Rows],
    loss: Loss,
    lesson: Lesson | None = None,
    moving: Iterable[str] | None = None,
    batches: Callable[[int, int, int], list[Tensor]] = whole,
) -> list[Weights]:
    """The model after each round, by the rules of docs/algorithms.md."""
    moving = list(start) if moving is None else list(moving)
    zero = {name: torch.zeros_like(start[name]) for name in moving}
    x, c, m, h_bar, e = dict(start), zero, zero, zero, dict(start)
    c_i, h_i, last = [zero] * len(clients), [zero] * len(clients), [None] * len(clients)
    models = []
    for t, cohort in enumerate(SCHEDULE):
        eta = LOCAL["lr"] * LOCAL["lr_decay"] ** t
        total = sum(len(clients[i][0]) for i in cohort)
        p = {i: len(clients[i][0]) / total for i in cohort}
        d, c_change, full = {}, {}, {}
        for i in cohort:
            own = x if last[i] is None else last[i]
            y, buf, steps = dict(x), zero, 0
            for chosen in batches(t, i, len(clients[i][0])):
                rows = tuple(part[chosen] for part in clients[i])

                def objective(w: Weights, rows: Any = rows, own: Weights = own, x: Weights = x, e: Any = e) -> Tensor:
                    return loss(w, rows) + (0 if lesson is None else lesson(w, rows, x, e, own))

                g = gradient(objective, y, moving)
                if method == "fedsam":
                    length = norm(g)
                    q = y | {n: y[n] + RADIUS * g[n] / length for n in moving}
                    g = gradient(objective, q, moving)
                if method == "scaffold":
                    r = {n: g[n] - c_i[i][n] + c[n] for n in moving}
                elif method == "mimelite":
                    r = {n: MIX * g[n] + (1 - MIX) * m[n] for n in moving}
                elif method == "fedgmt":
                    r = {n: g[n] + DUAL * h_i[i][n] for n in moving}
                else:
                    r = g
                factor = min(1.0, LOCAL["clip"] / norm(r))
                buf = {n: LOCAL["momentum"] * buf[n] + factor * r[n] + LOCAL["weight_decay"] * y[n] for n in moving}
                y = y | {n: y[n] - eta * buf[n] for n in moving}
                steps += 1
            d[i], last[i] = {n: y[n] - x[n] for n in moving}, y
            if method == "scaffold":
                c_change[i] = {n: -c[n] - d[i][n] / (eta * steps) for n in moving}
                c_i[i] = {n: c_i[i][n] + c_change[i][n] for n in moving}
            if method == "mimelite":
                full[i] = gradient(lambda w, i=i: loss(w, clients[i]), x, moving)
            if method == "fedgmt":
                h_i[i] = {n: h_i[i][n] + d[i][n] for n in moving}
        x = x | {n: x[n] + sum(p[i] * d[i][n] for i in cohort) for n in moving}
        if method == "scaffold":
            c = {n: c[n] + sum(c_change[i][n] for i in cohort) / len(clients) for n in moving}
        if method == "mimelite":
            m = {n: (1 - MIX) * m[n] + MIX * sum(p[i] * full[i][n] for i in cohort) for n in moving}
        if method == "fedgmt":
            h_bar = {n: h_bar[n] + sum(d[i][n] for i in cohort) / len(clients) for n in moving}
            x = x | {n: x[n] + h_bar[n] for n in moving}
            e = e | {n: EMA * e[n] + (1 - EMA) * x[n] for n in moving}
        models.append(x)
    return models


# Regression


def squared(error: Tensor) -> Tensor:
    return error**2


def huber(error: Tensor) -> Tensor:
    return torch.where(error.abs() <= 1, 0.5 * error**2, error.abs() - 0.5)


ERRORS = {"mse": squared, "mae": torch.abs, "huber": huber}


def regression_rows(rng: np.random.Generator, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Errors on both sides of Huber's bend; each client leans to another side. One column is a plain vector."""
    client = clients_of_rows(rng)
    x = rng.normal(size=(len(client) + 7, 4))
    y = 1.2 * rng.normal(size=(len(x), columns)) + x[:, :1]
    y[: len(client)] += 0.5 * client[:, None]
    return x, y[:, 0] if columns == 1 else y, client


def regression(kind: str, apply: Apply) -> tuple[Loss, Callable[[Weights, Rows], dict[str, float]]]:
    """The loss of a batch, and what is measured."""

    def error(w: Weights, rows: Rows) -> Tensor:
        x, y = rows
        return apply(w, x) - (y[:, None] if y.ndim == 1 else y)

    def measured(w: Weights, rows: Rows) -> dict[str, float]:
        e = error(w, rows)
        of_loss, rmse, mae = ERRORS[kind](e).mean(), e.square().mean().sqrt(), e.abs().mean()
        return {"loss": float(of_loss), "rmse": float(rmse), "mae": float(mae)}

    return lambda w, rows: ERRORS[kind](error(w, rows)).mean(), measured


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("kind", list(ERRORS))
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_regression_is_the_formula(method: str, kind: str, columns: int, desk: Path) -> None:
    rng = np.random.default_rng(1)
    x, y, client = regression_rows(rng, columns)
    start = random_weights(mlp_shapes(4, 5, columns), rng)
    found, rows, _ = run(
        desk,
        configuration(
            write_data(desk, x, y, client),
            task={"name": "regression", "loss": kind},
            model={"name": "mlp", "hidden": [5], "init": write_weights(desk, start)},
            algorithm=METHODS[method],
        ),
    )
    clients, test = split(torch.from_numpy(x), torch.from_numpy(y), client)
    loss, measured = regression(kind, mlp)
    models = train(method, start, clients, loss)
    assert_close(found, models[-1])
    assert_measured(rows, [measured(w, test) for w in models])


# Tokens

WORDS, LENGTH, PADDING = 7, 6, 2

READER = """
from torch import Tensor, nn

class Reader(nn.Module):
    def __init__(self, outputs: int, *, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(outputs, width)
        self.read = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.read(self.embed(tokens))[0])
"""
READER_SHAPES = {
    "embed.weight": (WORDS, 4),
    "read.weight_ih_l0": (12, 4),
    "read.weight_hh_l0": (12, 4),
    "read.bias_ih_l0": (12,),
    "read.bias_hh_l0": (12,),
    "head.weight": (WORDS, 4),
    "head.bias": (WORDS,),
}


def reader(w: Weights, tokens: Tensor) -> Tensor:
    """The gates of a GRU one token after another."""
    h, outputs = torch.zeros(len(tokens), 4, dtype=torch.float64), []
    for k in range(tokens.shape[1]):
        given = w["embed.weight"][tokens[:, k]] @ w["read.weight_ih_l0"].T + w["read.bias_ih_l0"]
        kept = h @ w["read.weight_hh_l0"].T + w["read.bias_hh_l0"]
        (r_in, z_in, n_in), (r_h, z_h, n_h) = given.chunk(3, 1), kept.chunk(3, 1)
        reset, update = torch.sigmoid(r_in + r_h), torch.sigmoid(z_in + z_h)
        h = (1 - update) * torch.tanh(n_in + reset * n_h) + update * h
        outputs.append(h @ w["head.weight"].T + w["head.bias"])
    return torch.stack(outputs, 1)


def sentences(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Client 0 has whole rows, client 3 hardly any tokens; one row begins with padding, one holds some."""
    client = clients_of_rows(rng)
    tokens = rng.choice([k for k in range(WORDS) if k != PADDING], size=(len(client) + 8, LENGTH + 1))
    tokens[0, 0] = WORDS - 1  # the largest id decides how many there are
    for row, owner in zip(tokens, [*client, 0, 3, 1, 0, 3, 3, 2, 1], strict=True):
        missing = min(rng.integers(owner, 2 * owner, endpoint=True), LENGTH - 1)
        row[len(row) - missing :] = PADDING
    tokens[np.flatnonzero(client == 2)[0], :2] = PADDING
    tokens[np.flatnonzero(client == 1)[0], 2] = PADDING
    return tokens, client


def counted(w: Weights, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and targets of all positions whose target is not padding."""
    logits, target = reader(w, tokens[:, :-1]), tokens[:, 1:]
    return logits[target != PADDING], target[target != PADDING]


def token_loss(w: Weights, rows: Rows) -> Tensor:
    return cross_entropy(*counted(w, rows[0])).mean()


def token_lesson(w: Weights, rows: Rows, received: Weights, mean: Weights, own: Weights) -> Tensor:
    """FedGMT's distillation from the mean model, at every position that counts."""
    student, _ = counted(w, rows[0])
    teacher, _ = counted(mean, rows[0])
    log_p, log_q = (torch.log_softmax(logits / TEMPERATURE, 1) for logits in (teacher.detach(), student))
    return DISTILL * TEMPERATURE**2 * (log_p.exp() * (log_p - log_q)).sum(1).mean()


def token_measures(w: Weights, tokens: Tensor) -> dict[str, float]:
    logits, target = counted(w, tokens)
    loss = float(cross_entropy(logits, target).mean())
    right = float((logits.argmax(1) == target).double().mean())
    return {"loss": loss, "accuracy": right, "perplexity": float(np.exp(loss))}


def token_settings(desk: Path, tokens: np.ndarray, client: np.ndarray, start: Weights) -> Settings:
    return configuration(
        write_data(desk, tokens, np.zeros((len(tokens), 0)), client),
        task={"name": "next_token", "padding": PADDING},
        model={"name": f"{module(desk, READER)}:Reader", "init": write_weights(desk, start)},
    )


@pytest.mark.parametrize("method", ["fedavg", "fedgmt", "mimelite", "scaffold"])
def test_tokens_that_count_weigh_the_same_wherever_they_stand(method: str, desk: Path) -> None:
    rng = np.random.default_rng(2)
    tokens, client = sentences(rng)
    start = random_weights(READER_SHAPES, rng)
    shares = [float((tokens[: len(client)][client == i] == PADDING).mean()) for i in range(len(SIZES))]
    assert shares[0] == 0 and len(set(shares)) == len(shares)
    found, rows, _ = run(desk, token_settings(desk, tokens, client, start) | {"algorithm": METHODS[method]})
    ids = torch.from_numpy(tokens)
    clients, (test, _) = split(ids, ids, client)
    models = train(method, start, clients, token_loss, token_lesson if method == "fedgmt" else None)
    assert_close(found, models[-1])
    assert_measured(rows, [token_measures(w, test) for w in models])


@pytest.mark.parametrize("method", ["fedavg", "fedgmt", "mimelite"])
def test_tokens_in_batches_of_unequal_padding(method: str, desk: Path) -> None:
    """A batch is the mean of its own tokens; a full gradient is that of all tokens, whatever pieces it is made of."""
    rng = np.random.default_rng(3)
    tokens, client = sentences(rng)
    start = random_weights(READER_SHAPES, rng)
    config = token_settings(desk, tokens, client, start)
    found, rows, _ = run(desk, config | {"seed": 5, "local": LOCAL | {"batch_size": 2}, "algorithm": METHODS[method]})

    def pairs(t: int, i: int, n: int) -> list[Tensor]:
        order = torch_generator(5, "batches", t, i)
        return [two for _ in range(LOCAL["epochs"]) for two in torch.randperm(n, generator=order).split(2)]

    ids = torch.from_numpy(tokens)
    clients, (test, _) = split(ids, ids, client)
    lesson = token_lesson if method == "fedgmt" else None
    models = train(method, start, clients, token_loss, lesson, batches=pairs)
    assert_close(found, models[-1])
    assert_measured(rows, [token_measures(w, test) for w in models])


def test_tokens_need_no_targets_in_their_file(desk: Path) -> None:
    rng = np.random.default_rng(4)
    tokens, client = sentences(rng)
    config = token_settings(desk, tokens, client, random_weights(READER_SHAPES, rng))
    without = config | {"data": {"name": "npz", "path": str(write_data(desk, tokens, None, client))}}
    _, _, one = run(desk, config)
    _, _, other = run(desk, without)
    assert model_hash(one) == model_hash(other)


# Models of which a part is trained


def class_loss(apply: Apply) -> Loss:
    return lambda w, rows: cross_entropy(apply(w, rows[0]), rows[1]).mean()


def class_rows(rng: np.random.Generator, features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    client = clients_of_rows(rng)
    y = rng.integers(3, size=len(client) + 7)
    y[-1] = 2
    return rng.normal(size=(len(y), features)) + 0.5 * y[:, None], y, client


@pytest.mark.parametrize(
    ("patterns", "moving"),
    [
        (["layers.1.*"], ["layers.1.weight", "layers.1.bias"]),
        (["*.bias"], ["layers.0.bias", "layers.1.bias", "layers.2.bias"]),
        (["layers.0.weight", "layers.2*"], ["layers.0.weight", "layers.2.weight", "layers.2.bias"]),
    ],
)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedsam"])
def test_only_what_is_to_be_trained_moves_and_travels(
    method: str, patterns: list[str], moving: list[str], desk: Path
) -> None:
    rng = np.random.default_rng(5)
    x, y, client = class_rows(rng, 4)
    start = random_weights(mlp_shapes(4, 5, 4, 3), rng)
    model = {"name": "mlp", "hidden": [5, 4], "init": write_weights(desk, start), "train": patterns}
    config = configuration(write_data(desk, x, y, client), model=model, algorithm=METHODS[method])
    found, rows, made = run(desk, config)
    clients, _ = split(torch.from_numpy(x), torch.from_numpy(y), client)
    expected = train(method, start, clients, class_loss(mlp), moving=moving)[-1]
    assert_close(found, expected)
    for name, value in start.items():
        assert found[name].equal(value) == (name not in moving), name
    vectors = 2 if method == "scaffold" else 1
    size = 8 * vectors * sum(start[name].numel() for name in moving)
    for row, cohort in zip(rows, SCHEDULE, strict=True):
        assert row["bytes_down"] == row["bytes_up"] == size * len(cohort)
    line, distributed = arguments(desk, config)
    codes, outputs = run_ranks(3, line)
    assert codes == [0, 0, 0], outputs
    assert model_hash(made) == model_hash(distributed)


@pytest.mark.parametrize(("method", "down", "up"), [("fedgmt", 2, 1), ("mimelite", 2, 2)])
def test_teachers_and_full_gradients_of_a_model_that_is_trained_in_part(
    method: str, down: int, up: int, desk: Path
) -> None:
    """Also when half of a layer moves and the rest of it does not."""
    rng = np.random.default_rng(15)
    tokens, client = sentences(rng)
    start = random_weights(READER_SHAPES, rng)
    config = token_settings(desk, tokens, client, start) | {"algorithm": METHODS[method]}
    config["model"]["train"] = ["read.*_hh_l0", "head.*"]
    moving = ["read.weight_hh_l0", "read.bias_hh_l0", "head.weight", "head.bias"]
    found, rows, _ = run(desk, config)
    ids = torch.from_numpy(tokens)
    clients, (test, _) = split(ids, ids, client)
    lesson = token_lesson if method == "fedgmt" else None
    models = train(method, start, clients, token_loss, lesson, moving)
    assert_close(found, models[-1])
    assert_measured(rows, [token_measures(w, test) for w in models])
    assert all(found[name].equal(value) for name, value in start.items() if name not in moving)
    size = 8 * sum(start[name].numel() for name in moving)
    for row, cohort in zip(rows, SCHEDULE, strict=True):
        assert (row["bytes_down"], row["bytes_up"]) == (size * down * len(cohort), size * up * len(cohort))


def test_a_fiftieth_of_a_model_costs_a_fiftieth_of_the_messages(desk: Path) -> None:
    rng = np.random.default_rng(6)
    x, y, client = class_rows(rng, 16)
    shapes = mlp_shapes(16, 64, 64, 3)
    init = write_weights(desk, random_weights(shapes, rng))
    sent = {}
    for name, patterns in (("whole", None), ("biases", ["*.bias"])):
        model = {"name": "mlp", "hidden": [64, 64], "init": init, "train": patterns}
        _, rows, _ = run(desk, configuration(write_data(desk, x, y, client), model=model))
        sent[name] = [(row["bytes_down"], row["bytes_up"]) for row in rows]
    parameters = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    share = sum(n for name, n in parameters.items() if "bias" in name) / sum(parameters.values())
    assert 0.015 < share < 0.03
    for (down, up), (some_down, some_up) in zip(sent["whole"], sent["biases"], strict=True):
        print(f"trained {share:.4f} of the parameters: {some_down / down:.4f} down, {some_up / up:.4f} up")
        assert some_down / down == some_up / up == pytest.approx(share, rel=1e-12)


HALVES = """
from torch import Tensor, nn

class Halves(nn.Module):
    def __init__(self, outputs: int, *, freeze: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, outputs)
        self.body.requires_grad_(not freeze)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())
"""


def test_a_module_may_say_itself_what_is_trained(desk: Path) -> None:
    rng = np.random.default_rng(7)
    x, y, client = class_rows(rng, 4)
    data, name = write_data(desk, x, y, client), module(desk, HALVES)
    by_itself = run(desk, configuration(data, model={"name": f"{name}:Halves", "freeze": True}))
    by_name = run(desk, configuration(data, model={"name": f"{name}:Halves", "train": ["head.*"]}))
    assert model_hash(by_itself[2]) == model_hash(by_name[2])
    assert [row["bytes_up"] for row in by_itself[1]] == [row["bytes_up"] for row in by_name[1]]


def test_a_pattern_that_names_nothing_is_refused(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(8)
    x, y, client = class_rows(rng, 4)
    model = {"name": "mlp", "hidden": [5], "train": ["layers.0.*", "haed.*"]}
    line = refused(desk, configuration(write_data(desk, x, y, client), model=model), capsys)
    assert line.startswith("error: model.train: no parameter is named 'haed.*'") and "layers.1.weight" in line


def test_frozen_weights_that_differ_between_ranks_stop_the_run(desk: Path) -> None:
    """Nothing sends them, so nothing else would make them equal."""
    text = HALVES.replace("self.body.requires_grad_(not freeze)", "self._differ()") + (
        "\n    def _differ(self) -> None:\n        import os\n\n"
        "        self.body.requires_grad_(False)\n"
        "        self.body.bias.fill_(float(os.environ['RANK']))\n"
    )
    rng = np.random.default_rng(9)
    x, y, client = class_rows(rng, 4)
    model = {"name": f"{module(desk, text)}:Halves"}
    line, _ = arguments(desk, configuration(write_data(desk, x, y, client), model=model))
    codes, outputs = run_ranks(2, line, PYTHONPATH=f"{ROOT}:{desk}")
    assert all(codes), outputs
    assert "sees another model than rank 0" in outputs[0] and "Traceback" not in outputs[0]


NORMED = """
from torch import Tensor, nn

class Normed(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)).tanh())
"""
NORMED_SHAPES = {
    "first.weight": (5, 4),
    "first.bias": (5,),
    "norm.weight": (5,),
    "norm.bias": (5,),
    "head.weight": (3, 5),
    "head.bias": (3,),
}


@pytest.mark.parametrize("patterns", [["head.*"], ["first.*", "head.*"]])
def test_batchnorm_that_is_not_trained_keeps_its_statistics_and_uses_them(patterns: list[str], desk: Path) -> None:
    rng = np.random.default_rng(10)
    x, y, client = class_rows(rng, 4)
    start = random_weights(NORMED_SHAPES, rng)
    buffers = {
        "norm.running_mean": torch.tensor(rng.normal(size=5)),
        "norm.running_var": torch.tensor(rng.uniform(0.5, 2, size=5)),
        "norm.num_batches_tracked": torch.tensor(17),
    }
    model = {"name": f"{module(desk, NORMED)}:Normed", "init": write_weights(desk, start | buffers), "train": patterns}
    config = configuration(write_data(desk, x, y, client), model=model)
    found, rows, made = run(desk, config)

    def normed(w: Weights, x: Tensor) -> Tensor:
        x = x @ w["first.weight"].T + w["first.bias"]
        x = (x - buffers["norm.running_mean"]) / torch.sqrt(buffers["norm.running_var"] + 1e-5)
        return torch.tanh(x * w["norm.weight"] + w["norm.bias"]) @ w["head.weight"].T + w["head.bias"]

    for name, value in buffers.items():
        assert found.pop(name).double().equal(value.double()), name
    clients, test = split(torch.from_numpy(x), torch.from_numpy(y), client)
    moving = [name for name in start if f"{name.split('.')[0]}.*" in patterns]
    models = train("fedavg", start, clients, class_loss(normed), moving=moving)
    assert_close(found, models[-1])
    assert_measured(rows, [{"loss": float(class_loss(normed)(w, test))} for w in models])
    size = 8 * sum(start[name].numel() for name in moving)
    assert [row["bytes_up"] for row in rows] == [size * len(cohort) for cohort in SCHEDULE]
    assert [row["bytes_down"] for row in rows] == [size * len(cohort) for cohort in SCHEDULE]
    line, distributed = arguments(desk, config)
    codes, outputs = run_ranks(3, line, PYTHONPATH=f"{ROOT}:{desk}")
    assert codes == [0, 0, 0], outputs
    assert model_hash(made) == model_hash(distributed)


# Weights from elsewhere


def test_pretrained_weights_replace_what_has_their_name_and_shape(desk: Path) -> None:
    rng = np.random.default_rng(11)
    x, y, client = class_rows(rng, 4)
    data = write_data(desk, x, y, client)

    def config(**model: Any) -> Settings:
        return configuration(data, seed=3, model={"name": "mlp", "hidden": [5]} | model)

    # What is not trained ends as it began: two runs show the whole first model of this seed.
    first = {name: v for name, v in run(desk, config(train=["layers.1.*"]))[0].items() if name.startswith("layers.0")}
    first |= {name: v for name, v in run(desk, config(train=["layers.0.*"]))[0].items() if name.startswith("layers.1")}
    given = random_weights(
        {"layers.0.weight": (5, 4), "layers.1.weight": (10, 5), "layers.1.bias": (3,), "elsewhere.bias": (5,)}, rng
    )
    taken = {name: given[name] for name in ("layers.0.weight", "layers.1.bias")}
    _, _, expected = run(desk, config(init=write_weights(desk, first | taken)))
    _, _, found = run(desk, config(pretrained=write_weights(desk, given)))
    _, _, without = run(desk, config())
    assert model_hash(found) == model_hash(expected) != model_hash(without)
    # A part that is neither trained nor given is the one of the seed.
    frozen, _, _ = run(desk, config(pretrained=write_weights(desk, given), train=["layers.1.weight"]))
    for name in ("layers.0.weight", "layers.0.bias", "layers.1.bias"):
        assert frozen[name].equal((first | taken)[name]), name


def test_pretrained_weights_of_which_nothing_fits_are_refused(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(12)
    x, y, client = class_rows(rng, 4)
    given = write_weights(desk, random_weights({"layers.0.weight": (4, 5), "other.bias": (3,)}, rng))
    model = {"name": "mlp", "hidden": [5], "pretrained": given}
    line = refused(desk, configuration(write_data(desk, x, y, client), model=model), capsys)
    assert line.startswith(f"error: model.pretrained {given} shares no tensor by name and shape with the model")
    assert "'other.bias'" in line and "'layers.1.bias'" in line


# Features

MOON = """
import torch
from torch import Tensor, nn
from fl_dist.core import Batch, Forward, Number, Part, Round, Seen, Sent, Vars


class Twofold(nn.Module):
    \"\"\"Twice as loud in training: dropout without chance.\"\"\"

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class Net(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), Twofold(), nn.Tanh(), nn.Linear(5, 4))
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Moon(Part):
    \"\"\"Features near those of the received model, far from those of the client's last one.\"\"\"

    client = ("previous",)

    def __init__(self, *, layer: str, weight: float, temperature: float) -> None:
        self.layers, self.weight, self.temperature = (layer,), weight, temperature

    def client_init(self, s: Vars, r: Round) -> dict[str, Tensor]:
        return {"previous": s.x.clone()}

    def penalty(self, seen: Seen, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Number:
        (z,) = seen.features.values()
        (received,) = forward(s.x, batch[0]).features.values()
        (previous,) = forward(i.previous, batch[0]).features.values()
        near = torch.cosine_similarity(z, received, 1) / self.temperature
        far = torch.cosine_similarity(z, previous, 1) / self.temperature
        return self.weight * torch.log(near.exp() + far.exp()).sub(near).mean()

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, Sent]:
        i.previous.copy_(s.x + delta)
        return {}
"""
MOON_SHAPES = {
    "body.0.weight": (5, 4),
    "body.0.bias": (5,),
    "body.3.weight": (4, 5),
    "body.3.bias": (4,),
    "head.weight": (3, 4),
    "head.bias": (3,),
}
WEIGHT, SHARPNESS = 2.0, 0.5


def moon_features(w: Weights, x: Tensor, training: bool, layer: str) -> Tensor:
    first = x @ w["body.0.weight"].T + w["body.0.bias"]
    louder = 2 * first if training else first
    second = torch.tanh(louder) @ w["body.3.weight"].T + w["body.3.bias"]
    return {"body.0": first, "body.1": louder, "body": second}[layer]


def moon_logits(w: Weights, x: Tensor, training: bool = True) -> Tensor:
    return torch.tanh(moon_features(w, x, training, "body")) @ w["head.weight"].T + w["head.bias"]


def similarity(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


@pytest.mark.parametrize("layer", ["body", "body.1"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedsam"])
def test_moon_as_a_part_is_moon(method: str, layer: str, desk: Path) -> None:
    """Li, He, Song: Model-Contrastive Federated Learning, 2021; alone, and with the parts of other methods."""
    rng = np.random.default_rng(13)
    x, y, client = class_rows(rng, 4)
    start = random_weights(MOON_SHAPES, rng)
    name = module(desk, MOON)
    chain: list[Any] = [{f"{name}:Moon": {"layer": layer, "weight": WEIGHT, "temperature": SHARPNESS}}]
    chain += {"fedavg": [], "scaffold": ["scaffold"], "fedsam": [{"sam": {"rho": RADIUS}}]}[method]
    config = configuration(
        write_data(desk, x, y, client),
        model={"name": f"{name}:Net", "init": write_weights(desk, start)},
        algorithm={"parts": chain},
    )
    found, rows, made = run(desk, config)

    def lesson(w: Weights, rows: Rows, received: Weights, mean: Weights, own: Weights) -> Tensor:
        z = moon_features(w, rows[0], True, layer)
        z_glob, z_prev = (moon_features(teacher, rows[0], False, layer).detach() for teacher in (received, own))
        near, far = (torch.exp(similarity(z, other) / SHARPNESS) for other in (z_glob, z_prev))
        return WEIGHT * -torch.log(near / (near + far)).mean()

    clients, test = split(torch.from_numpy(x), torch.from_numpy(y), client)
    models = train(method, start, clients, class_loss(moon_logits), lesson)
    assert_close(found, models[-1])
    plain = class_loss(lambda w, x: moon_logits(w, x, training=False))
    assert_measured(rows, [{"loss": float(plain(w, test))} for w in models])
    alone = train(method, start, clients, class_loss(moon_logits))
    assert max(float((alone[-1][n] - models[-1][n]).abs().max()) for n in start) > 1e-3, "the penalty acts"
    line, distributed = arguments(desk, config)
    codes, outputs = run_ranks(3, line, PYTHONPATH=f"{ROOT}:{desk}")
    assert codes == [0, 0, 0], outputs
    assert model_hash(made) == model_hash(distributed)


# Normalisation


def spread(kind: str, rng: np.random.Generator, n: int) -> np.ndarray:
    """Rows whose channels differ in place and width."""
    if kind == "features":
        return rng.normal(size=(n, 3)) * [0.2, 1.0, 7.0] + [5.0, 0.0, -1.0]
    images = rng.normal(size=(n, 2, 4, 4)) * np.array([10.0, 40.0])[:, None, None] + np.array([[[60.0]], [[140.0]]])
    return images.clip(0, 255).astype(np.uint8) if kind == "bytes" else images


@pytest.mark.parametrize("how", ["auto", "explicit"])
@pytest.mark.parametrize(("kind", "model"), [("bytes", "cnn"), ("images", "cnn"), ("features", "mlp")])
def test_normalising_equals_doing_so_by_hand(kind: str, model: str, how: str, desk: Path) -> None:
    rng = np.random.default_rng(14)
    client = clients_of_rows(rng)
    y = rng.integers(3, size=len(client) + 7)
    x = spread(kind, rng, len(y))
    scaled = x / 255 if kind == "bytes" else x
    axes = (0,) if kind == "features" else (0, 2, 3)
    if how == "auto":
        mean, std = (f(scaled[: len(client)], axis=axes) for f in (np.mean, np.std))
        settings: Settings = {"normalise": "auto"}
    else:
        mean, std = rng.normal(size=scaled.shape[1]), rng.uniform(0.2, 3, size=scaled.shape[1])
        settings = {"mean": mean.tolist(), "std": std.tolist()}
    along = (1, -1) if kind == "features" else (1, -1, 1, 1)
    by_hand = (scaled - mean.reshape(along)) / std.reshape(along)
    raw = write_data(desk, x, y, client)
    found, rows, _ = run(
        desk,
        configuration(
            raw,
            data={"name": "npz", "path": str(raw), **settings},
            model={"name": model},
        ),
    )
    expected, expected_rows, _ = run(desk, configuration(write_data(desk, by_hand, y, client), model={"name": model}))
    assert_close(found, expected)
    assert_measured(rows, [{"loss": r["test_loss"], "accuracy": r["test_accuracy"]} for r in expected_rows])
    other, _, _ = run(desk, configuration(raw, model={"name": model}))
    assert any(float((other[name] - value).abs().max()) > 1e-4 for name, value in expected.items()), "it acts"
