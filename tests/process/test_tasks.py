"""Tasks, models trained in part, pretrained weights, features and normalisation, against plain loops in float64.

The references are written from the documents alone (algorithms.md, data.md): dictionaries of parameters, autograd, one
client after another. Batches are full, so that the order of rows does not matter, unless a test says otherwise.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.marks import examples
from tests.support.processes import ROOT, run_ranks
from tests.support.run_folder import model_hash
from tests.support.task_reference import (
    BODY_AND_HEAD,
    METHODS,
    RADIUS,
    SCHEDULE,
    Apply,
    Loss,
    Rows,
    Weights,
    arguments,
    assert_close,
    assert_measured,
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


# Partially trained models


def class_loss(apply: Apply) -> Loss:
    return lambda w, rows: cross_entropy(apply(w, rows[0]), rows[1]).mean()


@pytest.mark.parametrize(
    ("patterns", "trainable"),
    [
        (["layers.1.*"], ["layers.1.weight", "layers.1.bias"]),
        (["*.bias"], ["layers.0.bias", "layers.1.bias", "layers.2.bias"]),
        (["layers.0.weight", "layers.2*"], ["layers.0.weight", "layers.2.weight", "layers.2.bias"]),
    ],
)
@pytest.mark.parametrize("method", examples(["fedavg", "scaffold", "fedsam"], ["scaffold"]))
def test_only_trainable_parameters_change_and_are_sent(
    method: str, patterns: list[str], trainable: list[str], workspace: Path
) -> None:
    rng = np.random.default_rng(5)
    x, y, client = classification_rows(rng, 4)
    start = random_weights(mlp_shapes(4, 5, 4, 3), rng)
    model = {"name": "mlp", "hidden": [5, 4], "init": write_weights(workspace, start), "train": patterns}
    config = configuration(write_data(workspace, x, y, client), model=model, algorithm=METHODS[method])
    final, records, folder = run(workspace, config)
    clients, _ = split_by_client(torch.from_numpy(x), torch.from_numpy(y), client)
    expected = train(method, start, clients, class_loss(mlp), trainable=trainable)[-1]
    assert_close(final, expected)
    for name, value in start.items():
        assert final[name].equal(value) == (name not in trainable), name
    vectors = 2 if method == "scaffold" else 1
    size = 8 * vectors * sum(start[name].numel() for name in trainable)
    for record, cohort in zip(records, SCHEDULE, strict=True):
        assert record["bytes_down"] == record["bytes_up"] == size * len(cohort)
    command, distributed = arguments(workspace, config)
    codes, outputs = run_ranks(3, command)
    assert codes == [0, 0, 0], outputs
    assert model_hash(folder) == model_hash(distributed)


def test_frozen_weights_that_differ_between_ranks_stop_the_run(workspace: Path) -> None:
    """Frozen weights are never sent, so ranks would not become equal."""
    text = BODY_AND_HEAD.replace("self.body.requires_grad_(not freeze)", "self._differ()") + (
        "\n    def _differ(self) -> None:\n        import os\n\n"
        "        self.body.requires_grad_(False)\n"
        "        self.body.bias.fill_(float(os.environ['RANK']))\n"
    )
    rng = np.random.default_rng(9)
    x, y, client = classification_rows(rng, 4)
    model = {"name": f"{write_module(workspace, text)}:BodyAndHead"}
    command, _ = arguments(workspace, configuration(write_data(workspace, x, y, client), model=model))
    codes, outputs = run_ranks(2, command, PYTHONPATH=f"{ROOT}:{workspace}")
    assert all(codes), outputs
    assert "sees another model than rank 0" in outputs[0] and "Traceback" not in outputs[0]


BATCH_NORM_MODEL = """
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
BATCH_NORM_SHAPES = {
    "first.weight": (5, 4),
    "first.bias": (5,),
    "norm.weight": (5,),
    "norm.bias": (5,),
    "head.weight": (3, 5),
    "head.bias": (3,),
}


@pytest.mark.parametrize("patterns", [["head.*"], ["first.*", "head.*"]])
def test_frozen_batchnorm_keeps_and_uses_its_statistics(patterns: list[str], workspace: Path) -> None:
    rng = np.random.default_rng(10)
    x, y, client = classification_rows(rng, 4)
    start = random_weights(BATCH_NORM_SHAPES, rng)
    buffers = {
        "norm.running_mean": torch.tensor(rng.normal(size=5)),
        "norm.running_var": torch.tensor(rng.uniform(0.5, 2, size=5)),
        "norm.num_batches_tracked": torch.tensor(17),
    }
    model = {
        "name": f"{write_module(workspace, BATCH_NORM_MODEL)}:Normed",
        "init": write_weights(workspace, start | buffers),
        "train": patterns,
    }
    config = configuration(write_data(workspace, x, y, client), model=model)
    final, records, folder = run(workspace, config)

    def apply_model(w: Weights, x: Tensor) -> Tensor:
        x = x @ w["first.weight"].T + w["first.bias"]
        x = (x - buffers["norm.running_mean"]) / torch.sqrt(buffers["norm.running_var"] + 1e-5)
        return torch.tanh(x * w["norm.weight"] + w["norm.bias"]) @ w["head.weight"].T + w["head.bias"]

    for name, value in buffers.items():
        assert final.pop(name).double().equal(value.double()), name
    clients, test = split_by_client(torch.from_numpy(x), torch.from_numpy(y), client)
    trainable = [name for name in start if f"{name.split('.')[0]}.*" in patterns]
    models = train("fedavg", start, clients, class_loss(apply_model), trainable=trainable)
    assert_close(final, models[-1])
    assert_measured(records, [{"loss": float(class_loss(apply_model)(w, test))} for w in models])
    size = 8 * sum(start[name].numel() for name in trainable)
    assert [record["bytes_up"] for record in records] == [size * len(cohort) for cohort in SCHEDULE]
    assert [record["bytes_down"] for record in records] == [size * len(cohort) for cohort in SCHEDULE]
    command, distributed = arguments(workspace, config)
    codes, outputs = run_ranks(3, command, PYTHONPATH=f"{ROOT}:{workspace}")
    assert codes == [0, 0, 0], outputs
    assert model_hash(folder) == model_hash(distributed)


# Features

MOON = """
import torch
from torch import Tensor, nn
from fl_dist.algorithms.core import Batch, Forward, Number, Part, Round, ModelOutput, Uploaded, Vars


class DoubleInTraining(nn.Module):
    \"\"\"Doubles its input in training: a deterministic dropout.\"\"\"

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class Net(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), DoubleInTraining(), nn.Tanh(), nn.Linear(5, 4))
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Moon(Part):
    \"\"\"Features close to those of the received model, far from those of the client's previous one.\"\"\"

    client = ("previous",)

    def __init__(self, *, layer: str, weight: float, temperature: float) -> None:
        self.layers, self.weight, self.temperature = (layer,), weight, temperature

    def client_init(self, s: Vars, r: Round) -> dict[str, Tensor]:
        return {"previous": s.x.clone()}

    def penalty(self, output: ModelOutput, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Number:
        (z,) = output.features.values()
        (received,) = forward(s.x, batch[0]).features.values()
        (previous,) = forward(i.previous, batch[0]).features.values()
        near = torch.cosine_similarity(z, received, 1) / self.temperature
        far = torch.cosine_similarity(z, previous, 1) / self.temperature
        return self.weight * torch.log(near.exp() + far.exp()).sub(near).mean()

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, Uploaded]:
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
    doubled = 2 * first if training else first
    second = torch.tanh(doubled) @ w["body.3.weight"].T + w["body.3.bias"]
    return {"body.0": first, "body.1": doubled, "body": second}[layer]


def moon_logits(w: Weights, x: Tensor, training: bool = True) -> Tensor:
    return torch.tanh(moon_features(w, x, training, "body")) @ w["head.weight"].T + w["head.bias"]


def similarity(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


@pytest.mark.parametrize("layer", ["body", "body.1"])
@pytest.mark.parametrize("method", examples(["fedavg", "scaffold", "fedsam"], ["scaffold"]))
def test_moon_as_a_part_equals_the_reference(method: str, layer: str, workspace: Path) -> None:
    """Li, He, Song: Model-Contrastive Federated Learning, 2021; alone, and with the parts of other methods."""
    rng = np.random.default_rng(13)
    x, y, client = classification_rows(rng, 4)
    start = random_weights(MOON_SHAPES, rng)
    name = write_module(workspace, MOON)
    chain: list[Any] = [{f"{name}:Moon": {"layer": layer, "weight": WEIGHT, "temperature": SHARPNESS}}]
    chain += {"fedavg": [], "scaffold": ["scaffold"], "fedsam": [{"sam": {"rho": RADIUS}}]}[method]
    config = configuration(
        write_data(workspace, x, y, client),
        model={"name": f"{name}:Net", "init": write_weights(workspace, start)},
        algorithm={"parts": chain},
    )
    final, records, folder = run(workspace, config)

    def contrastive_loss(w: Weights, rows: Rows, received: Weights, mean: Weights, own: Weights) -> Tensor:
        z = moon_features(w, rows[0], True, layer)
        z_glob, z_prev = (moon_features(teacher, rows[0], False, layer).detach() for teacher in (received, own))
        near, far = (torch.exp(similarity(z, other) / SHARPNESS) for other in (z_glob, z_prev))
        return WEIGHT * -torch.log(near / (near + far)).mean()

    clients, test = split_by_client(torch.from_numpy(x), torch.from_numpy(y), client)
    models = train(method, start, clients, class_loss(moon_logits), contrastive_loss)
    assert_close(final, models[-1])
    plain = class_loss(lambda w, x: moon_logits(w, x, training=False))
    assert_measured(records, [{"loss": float(plain(w, test))} for w in models])
    without_penalty = train(method, start, clients, class_loss(moon_logits))
    assert max(float((without_penalty[-1][n] - models[-1][n]).abs().max()) for n in start) > 1e-3, (
        "the penalty has no effect"
    )
    command, distributed = arguments(workspace, config)
    codes, outputs = run_ranks(3, command, PYTHONPATH=f"{ROOT}:{workspace}")
    assert codes == [0, 0, 0], outputs
    assert model_hash(folder) == model_hash(distributed)
