"""Tasks, models trained in part, pretrained weights, features and normalisation, against plain loops in float64.

The references are written from docs/algorithms.md and docs/yours.md alone: dictionaries of parameters, autograd, one
client after another. Whole clients are batches, so that no order of rows matters, unless a test says otherwise.
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
from tests.support.task_runs import (
    HALVES,
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
    class_rows,
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


# Models of which a part is trained


def class_loss(apply: Apply) -> Loss:
    return lambda w, rows: cross_entropy(apply(w, rows[0]), rows[1]).mean()


@pytest.mark.parametrize(
    ("patterns", "moving"),
    [
        (["layers.1.*"], ["layers.1.weight", "layers.1.bias"]),
        (["*.bias"], ["layers.0.bias", "layers.1.bias", "layers.2.bias"]),
        (["layers.0.weight", "layers.2*"], ["layers.0.weight", "layers.2.weight", "layers.2.bias"]),
    ],
)
@pytest.mark.parametrize("method", examples(["fedavg", "scaffold", "fedsam"], ["scaffold"]))
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
@pytest.mark.parametrize("method", examples(["fedavg", "scaffold", "fedsam"], ["scaffold"]))
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
