"""Tasks, models trained in part, pretrained weights, features and normalisation, against plain loops in float64.

The references are written from docs/algorithms.md and docs/yours.md alone: dictionaries of parameters, autograd, one
client after another. Whole clients are batches, so that no order of rows matters, unless a test says otherwise.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_dist.common.randomness import torch_generator
from fl_dist.main import main
from tests.support.processes import ROOT
from tests.support.run_folder import model_hash
from tests.support.task_runs import (
    DISTILL,
    HALVES,
    LOCAL,
    METHODS,
    SCHEDULE,
    SIZES,
    TEMPERATURE,
    Apply,
    Loss,
    Rows,
    Settings,
    Weights,
    arguments,
    assert_close,
    assert_measured,
    class_rows,
    clients_of_rows,
    configuration,
    cross_entropy,
    mlp,
    mlp_shapes,
    module,
    random_weights,
    run,
    split,
    train,
    write_data,
    write_weights,
)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a user, whose modules leave no trace on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # ranks run this copy, whichever is installed
    return tmp_path


def refused(folder: Path, config: Settings, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line by which a run ends."""
    capsys.readouterr()
    assert main(arguments(folder, config)[0]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    return line


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
