"""Tasks, partially trained models, pretrained weights, features and normalisation, against plain loops in float64.

The references are written from the documents alone (algorithms.md, data.md): dictionaries of parameters, autograd, one
client after another. Batches are full, so that the order of rows does not matter, unless a test says otherwise.
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
from tests.support.task_reference import (
    BODY_AND_HEAD,
    DISTILL,
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
    assign_clients,
    classification_rows,
    configuration,
    cross_entropy,
    mlp,
    mlp_shapes,
    random_weights,
    run,
    split_by_client,
    train,
    write_data,
    write_module,
    write_weights,
)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's working folder; sys.path is restored afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # ranks import this copy, whichever is installed
    return tmp_path


def error_line(folder: Path, config: Settings, capsys: pytest.CaptureFixture[str]) -> str:
    """The error line of a run."""
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
    """Errors on both sides of Huber's threshold; each client has its own offset. One column is a plain vector."""
    client = assign_clients(rng)
    x = rng.normal(size=(len(client) + 7, 4))
    y = 1.2 * rng.normal(size=(len(x), columns)) + x[:, :1]
    y[: len(client)] += 0.5 * client[:, None]
    return x, y[:, 0] if columns == 1 else y, client


def regression(kind: str, apply: Apply) -> tuple[Loss, Callable[[Weights, Rows], dict[str, float]]]:
    """The loss of a batch, and the metrics."""

    def error(w: Weights, rows: Rows) -> Tensor:
        x, y = rows
        return apply(w, x) - (y[:, None] if y.ndim == 1 else y)

    def metrics(w: Weights, rows: Rows) -> dict[str, float]:
        e = error(w, rows)
        loss, rmse, mae = ERRORS[kind](e).mean(), e.square().mean().sqrt(), e.abs().mean()
        return {"loss": float(loss), "rmse": float(rmse), "mae": float(mae)}

    return lambda w, rows: ERRORS[kind](error(w, rows)).mean(), metrics


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("kind", list(ERRORS))
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_regression_follows_the_formula(method: str, kind: str, columns: int, workspace: Path) -> None:
    rng = np.random.default_rng(1)
    x, y, client = regression_rows(rng, columns)
    start = random_weights(mlp_shapes(4, 5, columns), rng)
    final, records, _ = run(
        workspace,
        configuration(
            write_data(workspace, x, y, client),
            task={"name": "regression", "loss": kind},
            model={"name": "mlp", "hidden": [5], "init": write_weights(workspace, start)},
            algorithm=METHODS[method],
        ),
    )
    clients, test = split_by_client(torch.from_numpy(x), torch.from_numpy(y), client)
    loss, metrics = regression(kind, mlp)
    models = train(method, start, clients, loss)
    assert_close(final, models[-1])
    assert_measured(records, [metrics(w, test) for w in models])


# Tokens

VOCABULARY, LENGTH, PADDING = 7, 6, 2
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
    "embed.weight": (VOCABULARY, 4),
    "read.weight_ih_l0": (12, 4),
    "read.weight_hh_l0": (12, 4),
    "read.bias_ih_l0": (12,),
    "read.bias_hh_l0": (12,),
    "head.weight": (VOCABULARY, 4),
    "head.bias": (VOCABULARY,),
}


def gru_reference(w: Weights, tokens: Tensor) -> Tensor:
    """A GRU, token by token."""
    h, outputs = torch.zeros(len(tokens), 4, dtype=torch.float64), []
    for k in range(tokens.shape[1]):
        file_weights = w["embed.weight"][tokens[:, k]] @ w["read.weight_ih_l0"].T + w["read.bias_ih_l0"]
        recurrent = h @ w["read.weight_hh_l0"].T + w["read.bias_hh_l0"]
        (r_in, z_in, n_in), (r_h, z_h, n_h) = file_weights.chunk(3, 1), recurrent.chunk(3, 1)
        reset, update = torch.sigmoid(r_in + r_h), torch.sigmoid(z_in + z_h)
        h = (1 - update) * torch.tanh(n_in + reset * n_h) + update * h
        outputs.append(h @ w["head.weight"].T + w["head.bias"])
    return torch.stack(outputs, 1)


def token_rows(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Client 0 has no padding, client 3 mostly padding; one row begins with padding, one contains some."""
    client = assign_clients(rng)
    tokens = rng.choice([k for k in range(VOCABULARY) if k != PADDING], size=(len(client) + 8, LENGTH + 1))
    tokens[0, 0] = VOCABULARY - 1  # the largest id determines the vocabulary
    for row, owner in zip(tokens, [*client, 0, 3, 1, 0, 3, 3, 2, 1], strict=True):
        missing = min(rng.integers(owner, 2 * owner, endpoint=True), LENGTH - 1)
        row[len(row) - missing :] = PADDING
    tokens[np.flatnonzero(client == 2)[0], :2] = PADDING
    tokens[np.flatnonzero(client == 1)[0], 2] = PADDING
    return tokens, client


def unpadded(w: Weights, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and targets of all positions whose target is not padding."""
    logits, target = gru_reference(w, tokens[:, :-1]), tokens[:, 1:]
    return logits[target != PADDING], target[target != PADDING]


def token_loss(w: Weights, rows: Rows) -> Tensor:
    return cross_entropy(*unpadded(w, rows[0])).mean()


def token_distillation(w: Weights, rows: Rows, received: Weights, mean: Weights, own: Weights) -> Tensor:
    """FedGMT's distillation from the averaged model, at every position without padding."""
    student, _ = unpadded(w, rows[0])
    teacher, _ = unpadded(mean, rows[0])
    log_p, log_q = (torch.log_softmax(logits / TEMPERATURE, 1) for logits in (teacher.detach(), student))
    return DISTILL * TEMPERATURE**2 * (log_p.exp() * (log_p - log_q)).sum(1).mean()


def token_measures(w: Weights, tokens: Tensor) -> dict[str, float]:
    logits, target = unpadded(w, tokens)
    loss = float(cross_entropy(logits, target).mean())
    accuracy = float((logits.argmax(1) == target).double().mean())
    return {"loss": loss, "accuracy": accuracy, "perplexity": float(np.exp(loss))}


def token_settings(workspace: Path, tokens: np.ndarray, client: np.ndarray, start: Weights) -> Settings:
    return configuration(
        write_data(workspace, tokens, np.zeros((len(tokens), 0)), client),
        task={"name": "next_token", "padding": PADDING},
        model={"name": f"{write_module(workspace, READER)}:Reader", "init": write_weights(workspace, start)},
    )


@pytest.mark.parametrize("method", ["fedavg", "fedgmt", "mimelite", "scaffold"])
def test_every_token_without_padding_has_the_same_weight(method: str, workspace: Path) -> None:
    rng = np.random.default_rng(2)
    tokens, client = token_rows(rng)
    start = random_weights(READER_SHAPES, rng)
    shares = [float((tokens[: len(client)][client == i] == PADDING).mean()) for i in range(len(SIZES))]
    assert shares[0] == 0 and len(set(shares)) == len(shares)
    final, records, _ = run(
        workspace, token_settings(workspace, tokens, client, start) | {"algorithm": METHODS[method]}
    )
    ids = torch.from_numpy(tokens)
    clients, (test, _) = split_by_client(ids, ids, client)
    models = train(method, start, clients, token_loss, token_distillation if method == "fedgmt" else None)
    assert_close(final, models[-1])
    assert_measured(records, [token_measures(w, test) for w in models])


@pytest.mark.parametrize("method", ["fedavg", "fedgmt", "mimelite"])
def test_batches_with_unequal_padding_follow_the_formula(method: str, workspace: Path) -> None:
    """A batch is the mean over its own tokens; a full gradient is over all tokens, however they are batched."""
    rng = np.random.default_rng(3)
    tokens, client = token_rows(rng)
    start = random_weights(READER_SHAPES, rng)
    config = token_settings(workspace, tokens, client, start)
    final, records, _ = run(
        workspace, config | {"seed": 5, "local": LOCAL | {"batch_size": 2}, "algorithm": METHODS[method]}
    )

    def batches_of_two(t: int, i: int, n: int) -> list[Tensor]:
        order = torch_generator(5, "batches", t, i)
        return [pair for _ in range(LOCAL["epochs"]) for pair in torch.randperm(n, generator=order).split(2)]

    ids = torch.from_numpy(tokens)
    clients, (test, _) = split_by_client(ids, ids, client)
    extra_loss = token_distillation if method == "fedgmt" else None
    models = train(method, start, clients, token_loss, extra_loss, batches=batches_of_two)
    assert_close(final, models[-1])
    assert_measured(records, [token_measures(w, test) for w in models])


def test_tokens_need_no_targets_in_their_file(workspace: Path) -> None:
    rng = np.random.default_rng(4)
    tokens, client = token_rows(rng)
    config = token_settings(workspace, tokens, client, random_weights(READER_SHAPES, rng))
    without = config | {"data": {"name": "npz", "path": str(write_data(workspace, tokens, None, client))}}
    _, _, one = run(workspace, config)
    _, _, other = run(workspace, without)
    assert model_hash(one) == model_hash(other)


@pytest.mark.parametrize(("method", "down", "up"), [("fedgmt", 2, 1), ("mimelite", 2, 2)])
def test_teachers_and_full_gradients_of_a_partially_trained_model(
    method: str, down: int, up: int, workspace: Path
) -> None:
    """Also if only half of a layer is trained."""
    rng = np.random.default_rng(15)
    tokens, client = token_rows(rng)
    start = random_weights(READER_SHAPES, rng)
    config = token_settings(workspace, tokens, client, start) | {"algorithm": METHODS[method]}
    config["model"]["train"] = ["read.*_hh_l0", "head.*"]
    trainable = ["read.weight_hh_l0", "read.bias_hh_l0", "head.weight", "head.bias"]
    final, records, _ = run(workspace, config)
    ids = torch.from_numpy(tokens)
    clients, (test, _) = split_by_client(ids, ids, client)
    extra_loss = token_distillation if method == "fedgmt" else None
    models = train(method, start, clients, token_loss, extra_loss, trainable)
    assert_close(final, models[-1])
    assert_measured(records, [token_measures(w, test) for w in models])
    assert all(final[name].equal(value) for name, value in start.items() if name not in trainable)
    size = 8 * sum(start[name].numel() for name in trainable)
    for record, cohort in zip(records, SCHEDULE, strict=True):
        assert (record["bytes_down"], record["bytes_up"]) == (size * down * len(cohort), size * up * len(cohort))


def test_message_sizes_are_proportional_to_the_trained_parameters(workspace: Path) -> None:
    rng = np.random.default_rng(6)
    x, y, client = classification_rows(rng, 16)
    shapes = mlp_shapes(16, 64, 64, 3)
    init = write_weights(workspace, random_weights(shapes, rng))
    sent = {}
    for name, patterns in (("all", None), ("biases", ["*.bias"])):
        model = {"name": "mlp", "hidden": [64, 64], "init": init, "train": patterns}
        _, records, _ = run(workspace, configuration(write_data(workspace, x, y, client), model=model))
        sent[name] = [(record["bytes_down"], record["bytes_up"]) for record in records]
    parameters = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    share = sum(n for name, n in parameters.items() if "bias" in name) / sum(parameters.values())
    assert 0.015 < share < 0.03
    for (down, up), (some_down, some_up) in zip(sent["all"], sent["biases"], strict=True):
        print(f"trained {share:.4f} of the parameters: {some_down / down:.4f} down, {some_up / up:.4f} up")
        assert some_down / down == some_up / up == pytest.approx(share, rel=1e-12)


def test_a_module_may_freeze_its_own_parameters(workspace: Path) -> None:
    rng = np.random.default_rng(7)
    x, y, client = classification_rows(rng, 4)
    data, name = write_data(workspace, x, y, client), write_module(workspace, BODY_AND_HEAD)
    by_itself = run(workspace, configuration(data, model={"name": f"{name}:BodyAndHead", "freeze": True}))
    by_name = run(workspace, configuration(data, model={"name": f"{name}:BodyAndHead", "train": ["head.*"]}))
    assert model_hash(by_itself[2]) == model_hash(by_name[2])
    assert [record["bytes_up"] for record in by_itself[1]] == [record["bytes_up"] for record in by_name[1]]


def test_a_pattern_without_a_match_is_refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(8)
    x, y, client = classification_rows(rng, 4)
    model = {"name": "mlp", "hidden": [5], "train": ["layers.0.*", "haed.*"]}
    line = error_line(workspace, configuration(write_data(workspace, x, y, client), model=model), capsys)
    assert line.startswith("error: model.train: no parameter is named 'haed.*'") and "layers.1.weight" in line


# Pretrained weights


def test_pretrained_weights_replace_tensors_of_the_same_name_and_shape(workspace: Path) -> None:
    rng = np.random.default_rng(11)
    x, y, client = classification_rows(rng, 4)
    data = write_data(workspace, x, y, client)

    def config(**model: Any) -> Settings:
        return configuration(data, seed=3, model={"name": "mlp", "hidden": [5]} | model)

    # Frozen parts keep their initial values: two runs give the whole initial model of this seed.
    first = {
        name: v for name, v in run(workspace, config(train=["layers.1.*"]))[0].items() if name.startswith("layers.0")
    }
    first |= {
        name: v for name, v in run(workspace, config(train=["layers.0.*"]))[0].items() if name.startswith("layers.1")
    }
    file_weights = random_weights(
        {"layers.0.weight": (5, 4), "layers.1.weight": (10, 5), "layers.1.bias": (3,), "elsewhere.bias": (5,)}, rng
    )
    matching = {name: file_weights[name] for name in ("layers.0.weight", "layers.1.bias")}
    _, _, expected = run(workspace, config(init=write_weights(workspace, first | matching)))
    _, _, final = run(workspace, config(pretrained=write_weights(workspace, file_weights)))
    _, _, without = run(workspace, config())
    assert model_hash(final) == model_hash(expected) != model_hash(without)
    # A part that is neither trained nor in the file keeps its initial values.
    frozen, _, _ = run(workspace, config(pretrained=write_weights(workspace, file_weights), train=["layers.1.weight"]))
    for name in ("layers.0.weight", "layers.0.bias", "layers.1.bias"):
        assert frozen[name].equal((first | matching)[name]), name


def test_pretrained_weights_without_a_match_are_refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(12)
    x, y, client = classification_rows(rng, 4)
    file_weights = write_weights(workspace, random_weights({"layers.0.weight": (4, 5), "other.bias": (3,)}, rng))
    model = {"name": "mlp", "hidden": [5], "pretrained": file_weights}
    line = error_line(workspace, configuration(write_data(workspace, x, y, client), model=model), capsys)
    assert line.startswith(f"error: model.pretrained {file_weights} shares no tensor by name and shape with the model")
    assert "'other.bias'" in line and "'layers.1.bias'" in line


# Normalisation


def make_rows(kind: str, rng: np.random.Generator, n: int) -> np.ndarray:
    """Rows whose channels differ in mean and deviation."""
    if kind == "features":
        return rng.normal(size=(n, 3)) * [0.2, 1.0, 7.0] + [5.0, 0.0, -1.0]
    images = rng.normal(size=(n, 2, 4, 4)) * np.array([10.0, 40.0])[:, None, None] + np.array([[[60.0]], [[140.0]]])
    return images.clip(0, 255).astype(np.uint8) if kind == "bytes" else images


@pytest.mark.parametrize("how", ["auto", "explicit"])
@pytest.mark.parametrize(("kind", "model"), [("bytes", "cnn"), ("images", "cnn"), ("features", "mlp")])
def test_normalisation_equals_manual_scaling(kind: str, model: str, how: str, workspace: Path) -> None:
    rng = np.random.default_rng(14)
    client = assign_clients(rng)
    y = rng.integers(3, size=len(client) + 7)
    x = make_rows(kind, rng, len(y))
    scaled = x / 255 if kind == "bytes" else x
    axes = (0,) if kind == "features" else (0, 2, 3)
    if how == "auto":
        mean, std = (f(scaled[: len(client)], axis=axes) for f in (np.mean, np.std))
        settings: Settings = {"normalise": "auto"}
    else:
        mean, std = rng.normal(size=scaled.shape[1]), rng.uniform(0.2, 3, size=scaled.shape[1])
        settings = {"mean": mean.tolist(), "std": std.tolist()}
    shape = (1, -1) if kind == "features" else (1, -1, 1, 1)
    by_hand = (scaled - mean.reshape(shape)) / std.reshape(shape)
    raw = write_data(workspace, x, y, client)
    final, records, _ = run(
        workspace,
        configuration(
            raw,
            data={"name": "npz", "path": str(raw), **settings},
            model={"name": model},
        ),
    )
    expected, expected_rows, _ = run(
        workspace, configuration(write_data(workspace, by_hand, y, client), model={"name": model})
    )
    assert_close(final, expected)
    assert_measured(records, [{"loss": r["test_loss"], "accuracy": r["test_accuracy"]} for r in expected_rows])
    other, _, _ = run(workspace, configuration(raw, model={"name": model}))
    assert any(float((other[name] - value).abs().max()) > 1e-4 for name, value in expected.items()), (
        "normalisation has no effect"
    )
