"""Diagnostics equal a plain version of them."""

import itertools
import json
import logging
import math
import re
import statistics
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fl_dist
from fl_dist.common.contract import Mistake
from fl_dist.config import load
from fl_dist.config.usage import help_lines
from fl_dist.core import Vars, unit
from fl_dist.diagnose import _told as told
from fl_dist.diagnose import main as diagnose
from fl_dist.diagnostics.base import Diagnostic, Moment, Planned, Unmeasurable, deviation
from fl_dist.diagnostics.clients import Clients
from fl_dist.diagnostics.hessian import Spectrum, Trace
from fl_dist.diagnostics.plane import Plane
from fl_dist.diagnostics.round import Directions, PerturbationDrift
from fl_dist.diagnostics.sharpness import Along, Lpf, Sharpness
from fl_dist.diagnostics.surface import Surface
from fl_dist.engine.client import ClientFailure, LocalTraining, Taps
from fl_dist.engine.flat import Flat
from fl_dist.engine.landscape import Landscape
from fl_dist.engine.measuring import _filtered, measured
from fl_dist.engine.tape import Tape
from fl_dist.engine.world import World
from fl_dist.machine.comm import Alone
from tests.support import reference_diagnostics as ref
from tests.support.quadratics import Few, diagonal, on

RHO, LR, STEPS, COHORT = 0.3, 0.5, 3, [0, 1, 3]
FEATURES, CLASSES, SIZES = 4, 3, (9, 14, 5, 22)


def write_data(file: Path) -> None:
    rng = np.random.default_rng(5)
    n = sum(SIZES)
    client = np.repeat(np.arange(len(SIZES)), SIZES)
    x, y = rng.normal(size=(n, FEATURES)), rng.integers(0, CLASSES, n)
    x += 1.5 * np.eye(CLASSES, FEATURES)[y] + 0.3 * client[:, None]
    np.savez(file, x_train=x, y_train=y, x_test=x[:20], y_test=y[:20], client=client)


@dataclass
class Case:
    """A run of one round whose every step can be followed by hand: whole-batch FedSAM in float64."""

    path: Path
    problem: ref.Problem
    x: Tensor
    paths: dict[int, list[tuple[Tensor, Tensor]]]
    ends: dict[int, Tensor]
    row: dict[str, Any]
    moment: Moment

    @property
    def new(self) -> Tensor:
        total = sum(SIZES[i] for i in COHORT)
        return self.x + 0.7 * sum(SIZES[i] / total * (end - self.x) for i, end in self.ends.items())


DIAGNOSTICS: dict[str, dict[str, Any]] = {
    "sharpness": {"rho": RHO},
    "deep": {"name": "sharpness", "rho": RHO, "steps": 6},
    "lpf": {"sigma": 0.2, "samples": 4},
    "along": {"reach": 3.0, "points": 4, "directions": 2},
    "spectrum": {"top": 4, "tolerance": 1e-10},
    "trace": {"samples": 5},
    "flatness_distance": {},
    "flatness_discrepancy": {"rho": RHO},
    "perturbation_drift": {},
    "directions": {},
    "clients": {},
    "surface": {"points": 3, "orthogonal": True},
}


def made_run(folder: Path, **changes: Any) -> tuple[fl_dist.Run, World, list[tuple[Tensor, Tensor]]]:
    """A run of whole batches in float64, the world that it was made in, and its clients' rows."""
    write_data(folder / "data.npz")
    config: dict[str, Any] = {
        "data": {"name": "npz", "path": str(folder / "data.npz")},
        "partition": "given",
        "model": {"name": "mlp", "hidden": [5]},
        "local": {"epochs": STEPS, "batch_size": "full", "lr": LR, "momentum": 0, "weight_decay": 0},
        "server": {"lr": 0.7},
        "evaluate": {"batch_size": 7},
        "monitor": {"wandb": {"mode": "disabled"}},
        "run": {"dir": str(folder / "run")},
        **changes,
    }
    config["local"]["precision"] = "float64"
    (folder / "config.json").write_text(json.dumps(config))
    made = fl_dist.run(folder / "config.json", quiet=True)
    world = World(load(str(folder / "config.json"), []), torch.device("cpu"))
    samples = world.samples
    return made, world, [(samples.data.x[rows], samples.data.y[rows]) for rows in samples.rows]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    made, world, clients = made_run(
        tmp_path_factory.mktemp("case"),
        rounds=1,
        clients={"total": len(SIZES), "per_round": 3, "schedule": [COHORT]},
        algorithm={"name": "fedsam", "rho": RHO},
        diagnostics={label: {"every": 1, **given} for label, given in DIAGNOSTICS.items()},
    )
    problem = ref.Problem(world.model.module, clients)
    x = packed(world, world.initial)
    paths, ends = {}, {}
    for i in COHORT:
        own = ref.Problem(world.model.module, [clients[i]])
        way = walked(own, x, LR, rho=RHO)
        paths[i], ends[i] = [(y, rising(own, y, RHO)) for y in way[:-1]], way[-1]
    unused: dict[str, Any] = dict.fromkeys(field.name for field in fields(Moment))
    moment = Moment(**(unused | {"x": world.initial, "pieces": world.model.views, "seed": 0}))
    return Case(made.path, problem, x, paths, ends, made.history[0]["diagnostics"], moment)


def rising(own: ref.Problem, y: Tensor, rho: float) -> Tensor:
    gradient = ref.gradient(own, y)
    return rho * gradient / gradient.norm()


def walked(own: ref.Problem, x: Tensor, lr: float, rho: float = 0.0, dual: float = 0.0, h: Any = 0.0) -> list[Tensor]:
    """The points of a client's local training by FedAvg, FedSAM or FedDyn."""
    path = [x]
    for _ in range(STEPS):
        y = path[-1]
        path.append(y - lr * (ref.gradient(own, y + rising(own, y, rho)) + dual * (h + y - x)))
    return path


@dataclass
class Duals:
    """A run of FedDyn: what its rounds did, the one after its last too, followed by hand."""

    path: Path
    problem: ref.Problem
    rows: list[dict[str, Any]]
    models: list[Tensor]
    """Before each round."""
    updates: list[Tensor]
    servers: list[Tensor]
    """The server's dual variable after each round."""
    own: dict[int, Tensor]
    """The clients' dual variables after the run."""


DUAL, COHORTS = 0.5, [[0, 1, 3], [1, 2, 3], [0, 1, 2]]
METHODS = {"FedAvg": "fedavg", "FedSAM": {"name": "fedsam", "rho": RHO}, "FedDyn": {"name": "feddyn", "dual": DUAL}}


@pytest.fixture(scope="module")
def duals(tmp_path_factory: pytest.TempPathFactory) -> Duals:
    watched = {"directions": {"every": 1}, "plane": {"every": 2, "points": 3, "methods": METHODS}}
    watched["perturbation_drift"] = {"every": 2}
    made, world, clients = made_run(
        tmp_path_factory.mktemp("duals"),
        rounds=2,
        clients={"total": len(SIZES), "per_round": 3, "schedule": COHORTS},
        algorithm={"name": "feddyn", "dual": DUAL},
        diagnostics=watched,
    )
    problem, x = ref.Problem(world.model.module, clients), packed(world, world.initial)
    found = Duals(made.path, problem, [row["diagnostics"] for row in made.history], [x], [], [], {})
    h, own = torch.zeros_like(x), dict.fromkeys(range(len(SIZES)), torch.zeros_like(x))
    for index, cohort in enumerate(COHORTS):
        moved = {i: _moved(ref.client(problem, i), x, LR * 0.998**index, own[i]) for i in cohort}
        if index < made.config.rounds:
            own = own | {i: own[i] + delta for i, delta in moved.items()}
        update = sum(SIZES[i] * delta for i, delta in moved.items()) / sum(SIZES[i] for i in cohort)
        h = h + sum(moved.values()) / len(SIZES)
        x = x + 0.7 * update + h
        found.models.append(x)
        found.updates.append(update)
        found.servers.append(h)
    found.own = own
    return found


def _moved(own: ref.Problem, x: Tensor, lr: float, h: Tensor) -> Tensor:
    return walked(own, x, lr, dual=DUAL, h=h)[-1] - x


def packed(world: World, vector: Tensor) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in world.model.views(vector)])


def drawn(case: Case, purpose: str, k: int) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in case.moment.pieces(case.moment.noise(purpose, k))])


class TestAgainstThePlainVersion:
    def test_sharpness(self, case: Case) -> None:
        assert case.row["sharpness"]["sharpness"] == pytest.approx(ref.sharpness(case.problem, case.new, RHO), rel=1e-9)
        assert case.row["sharpness"]["loss"] == pytest.approx(ref.loss(case.problem, case.new), rel=1e-9)
        length = ref.gradient(case.problem, case.new).norm()
        assert case.row["sharpness"]["gradient_norm"] == pytest.approx(float(length), rel=1e-9)

    def test_sharpness_of_several_steps(self, case: Case) -> None:
        deep = case.row["deep"]["sharpness"]
        assert deep == pytest.approx(ref.sharpness(case.problem, case.new, RHO, 6), rel=1e-9)
        assert deep >= case.row["sharpness"]["sharpness"]

    def test_lpf(self, case: Case) -> None:
        noises = [0.2 * drawn(case, "lpf", k) for k in range(4)]
        assert case.row["lpf"]["lpf"] == pytest.approx(ref.lpf(case.problem, case.new, noises), rel=1e-9)

    def test_lines(self, case: Case) -> None:
        radii = [0.0, 1.0, 2.0, 3.0]
        lines = [ref.along(case.problem, case.new, drawn(case, "along", k), radii) for k in range(2)]
        steepest = ref.along(case.problem, case.new, ref.gradient(case.problem, case.new), radii)
        assert case.row["along"]["radii"] == radii
        assert case.row["along"]["random"] == pytest.approx(np.mean(lines, 0).tolist(), rel=1e-9)
        assert case.row["along"]["gradient"] == pytest.approx(steepest, rel=1e-9)

    def test_spectrum(self, case: Case) -> None:
        wanted = ref.eigenvalues(case.problem, case.new, 4)
        assert case.row["spectrum"]["eigenvalues"] == pytest.approx(wanted, rel=1e-8)
        assert case.row["spectrum"]["largest"] == case.row["spectrum"]["eigenvalues"][0]

    def test_trace(self, case: Case) -> None:
        signs = [case.moment.signs("trace", k) for k in range(5)]
        vectors = [torch.cat([p.reshape(-1) for p in case.moment.pieces(v)]) for v in signs]
        hessian = ref.hessian(case.problem, case.new)
        values = [float(v @ hessian @ v) for v in vectors]
        assert all(set(v.tolist()) == {-1.0, 1.0} for v in vectors)
        assert case.row["trace"]["trace"] == pytest.approx(np.mean(values), rel=1e-9)
        assert case.row["trace"]["error"] == pytest.approx(np.std(values, ddof=1) / math.sqrt(5), rel=1e-8)

    def test_flatness_distance(self, case: Case) -> None:
        ends = list(case.ends.values())
        assert case.row["flatness_distance"]["distance"] == pytest.approx(ref.flatness_distance(ends), rel=1e-9)
        assert case.row["flatness_distance"]["divergence"] == pytest.approx(ref.divergence(ends, case.new), rel=1e-9)

    def test_flatness_discrepancy(self, case: Case) -> None:
        wanted = ref.flatness_discrepancy(case.problem, case.new, case.ends, RHO)
        found = case.row["flatness_discrepancy"]
        assert found["discrepancy"] == pytest.approx(wanted, rel=1e-8)
        assert found["discrepancy"] == abs(found["global"] - found["local"])

    def test_perturbation_drift(self, case: Case) -> None:
        steps = {i: [path[0], path[STEPS // 2], path[STEPS - 1]] for i, path in case.paths.items()}
        wanted = ref.perturbation_drift(case.problem, case.x, steps, 0.7)
        assert case.row["perturbation_drift"] == {"drift": pytest.approx(wanted, rel=1e-9), "perturbing": 3}
        assert 0 < wanted < 1

    def test_directions(self, case: Case) -> None:
        gradient = ref.gradient(case.problem, case.x)
        wanted = np.mean([ref.cosine(path[0][1], gradient) for path in case.paths.values()])
        found, step = case.row["directions"], case.new - case.x
        assert found["cosine_perturbation"] == pytest.approx(wanted, rel=1e-9)
        assert found["norm_step"] == pytest.approx(float(step.norm()), rel=1e-9)
        assert found["norm_update"] == pytest.approx(float(step.norm()) / 0.7, rel=1e-9)
        assert found.keys() == {"cosine_perturbation", "norm_step", "norm_update"}

    def test_clients(self, case: Case) -> None:
        wanted, found = ref.client_accuracy(case.problem, case.new), dict(case.row["clients"])
        x, y = (torch.cat(all_)[:20] for all_ in zip(*case.problem.clients, strict=True))
        assert found.pop("classes") == ref.class_accuracy(case.problem, case.new, x, y, CLASSES)
        assert found == pytest.approx(wanted, rel=1e-12)

    def test_surface(self, case: Case) -> None:
        a, b = (drawn(case, "surface", k) for k in range(2))
        b = ref.orthogonal(a, b)
        a, b = (ref.filter_normalised(case.problem, case.new, v) for v in (a, b))
        grid = [-1.0, 0.0, 1.0]
        wanted = ref.surface(case.problem, case.new, a, b, grid, grid)
        assert case.row["surface"]["x"] == case.row["surface"]["y"] == grid
        for found, row in zip(case.row["surface"]["loss"], wanted, strict=True):
            assert found == pytest.approx(row, rel=1e-9)

    def test_the_command_measures_the_same_model(self, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose([str(case.path), "sharpness.rho=0.3", "spectrum.top=2"]) == 0
        entries = [json.loads(line) for line in (case.path / "diagnostics.jsonl").read_text().splitlines()]
        found = {entry["label"]: entry["values"] for entry in entries}
        assert found["sharpness"] == case.row["sharpness"]
        assert found["spectrum"]["eigenvalues"] == pytest.approx(case.row["spectrum"]["eigenvalues"][:2], rel=1e-3)
        assert [entry["round"] for entry in entries] == [1, 1]
        assert "sharpness.sharpness" in capsys.readouterr().out


MODELS = {
    "cnn": [1, 8, 8],
    "vit_cifar": [3, 32, 32],
    "lenet5": [3, 32, 32],
    "fasttext": [6],
}


@pytest.mark.parametrize("name", MODELS)
def test_products_are_the_change_of_the_gradient(name: str, tmp_path: Path) -> None:
    shape, rng, y = MODELS[name], np.random.default_rng(0), np.arange(4) % 3
    x = rng.integers(1, 9, (4, *shape)) if name == "fasttext" else rng.normal(size=(4, *shape))
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    words = [f"data={{name: npz, path: {tmp_path / 'd.npz'}}}", "clients.total=2", "clients.per_round=1"]
    words += [f"model={name}", "local.precision=float64", "partition=iid"]
    world = World(load(None, [*words, "evaluate.batch_size=3"]), torch.device("cpu"))
    landscape = Landscape(world, Alone(world.config.topology))
    landscape.open(world.initial_buffers, [], [], {})
    torch.manual_seed(0)
    w, v = world.initial, torch.randn_like(world.initial) * 1e-2
    step = 1e-7
    change = (landscape.gradient(w + step * v) - landscape.gradient(w - step * v)) / (2 * step)
    product = landscape.curvature(w, v)
    landscape.close()
    # Where a unit is switched on or off between the two points, the gradient jumps.
    close = torch.isclose(product, change, rtol=1e-3, atol=1e-3 * float(product.abs().max()))
    assert float(close.double().mean()) > 0.99
    assert float(product.abs().max()) > 0


@pytest.fixture
def landscape(tmp_path: Path) -> tuple[Landscape, Tensor, Tensor]:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(40, 3)), rng.normal(size=(40, 1))
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    words = [f"data={{name: npz, path: {tmp_path / 'd.npz'}}}", "clients.total=4", "clients.per_round=1"]
    words += ["task=regression", "model={name: mlp, hidden: []}", "local.precision=float64", "partition=iid"]
    world = World(load(None, [*words, "evaluate.batch_size=7"]), torch.device("cpu"))
    landscape = Landscape(world, Alone(world.config.topology))
    landscape.open(world.initial_buffers, [], [], {})
    return landscape, torch.from_numpy(x), torch.from_numpy(y)


class TestKnownAnswers:
    """A linear model with squared loss: its gradient and Hessian are known in closed form."""

    def test_of_all_and_of_some_rows(self, landscape: tuple[Landscape, Tensor, Tensor]) -> None:
        field, x, y = landscape
        world = field.world
        rows = field._chosen(11)
        assert len(rows) == len(set(rows.tolist())) == 11
        for chosen, which in ((torch.arange(40), 0), (rows, 11)):
            design = torch.cat([x[chosen], torch.ones(len(chosen), 1)], 1).double()
            w = torch.zeros_like(world.initial)
            weights = torch.arange(1.0, 5.0, dtype=torch.float64)
            weight, bias = world.model.views(w)
            weight.copy_(weights[:3].view(1, 3))
            bias.copy_(weights[3:])
            rest = design @ weights - y[chosen, 0]
            assert field.loss(w, which) == pytest.approx(float(rest.square().mean()), rel=1e-9)
            assert field.count(which) == len(chosen)
            wanted = 2 * design.T @ rest / len(chosen)
            assert torch.allclose(packed(world, field.gradient(w, which)), wanted, rtol=1e-9)
            v = torch.zeros_like(w)
            world.model.views(v)[0].fill_(1.0)
            direction = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
            hessian = 2 * design.T @ design / len(chosen)
            assert torch.allclose(packed(world, field.curvature(w, v, which)), hessian @ direction, rtol=1e-9)

    @pytest.mark.parametrize(("layer", "used"), [(nn.GRU(1, 1), False), (nn.Linear(1, 1), True)])
    def test_recurrent_layers_are_derived_without_cudnn(
        self, layer: nn.Module, used: bool, landscape: tuple[Landscape, Tensor, Tensor]
    ) -> None:
        field, seen = landscape[0], []
        world = field.world
        training = LocalTraining(world.model, world.twin, world.algorithm, world.samples, world.config.local, 0)
        for flat in (world.model, world.twin):
            flat.module.add_module("more", nn.Sequential(layer))
            flat.module.get_submodule("more").forward = lambda x: x  # type: ignore[method-assign]
            flat.module.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
        field.gradient(world.initial)
        training._full_gradient(0, Vars(x=world.initial))
        assert seen and set(seen) == {used}
        assert torch.backends.cudnn.enabled


class TestOnQuadratics:
    def test_sharpness(self) -> None:
        at = on(diagonal(1, 3), [1, 1])
        assert Sharpness(rho=math.sqrt(10)).measure(at) == pytest.approx(
            {"sharpness": 24, "loss": 2, "gradient_norm": math.sqrt(10), "rho": math.sqrt(10)}
        )
        bisector = unit(unit(torch.tensor([1.0, 3])) + unit(torch.tensor([1.0, 6]))).double() * math.sqrt(10)
        wanted = float(torch.tensor([1.0, 3]).double() @ bisector) + at.landscape.loss(bisector)
        assert Sharpness(rho=math.sqrt(10), steps=2).measure(at)["sharpness"] == pytest.approx(wanted)

    def test_lpf(self) -> None:
        at = on(diagonal(2, 2), [1, 0])
        noises = [at.noise("lpf", k) for k in range(3)]
        wanted = np.mean([float((at.x + 0.1 * e).square().sum()) for e in noises])
        assert Lpf(sigma=0.1, samples=3).measure(at) == pytest.approx({"lpf": wanted, "loss": 1.0})

    def test_along(self) -> None:
        at = on(diagonal(2, 2), [1, 0])
        found = Along(reach=2.0, points=3, directions=2).measure(at)
        assert found["gradient"] == pytest.approx([1, 4, 9])
        lines = [[float((at.x + unit(at.noise("along", k)) * r).square().sum()) for r in (0, 1, 2)] for k in range(2)]
        assert found["random"] == pytest.approx(np.mean(lines, 0).tolist())
        assert at.landscape.asked == 1 + 2 * 3

    @pytest.mark.parametrize(
        ("values", "top", "wanted"),
        [(range(1, 51), 3, [50, 49, 48]), ([1, 2, -100] * 20, 1, [2]), ([5, 3, 4], 2, [5, 4]), ([2, 1], 3, [2, 1])],
    )
    def test_spectrum(self, values: Any, top: int, wanted: list[float]) -> None:
        found = Spectrum(top=top, tolerance=1e-10).measure(on(diagonal(*values), [0.0] * len(values)))
        assert found["eigenvalues"] == pytest.approx(wanted)
        assert found["largest"] == found["eigenvalues"][0]
        assert (found["converged"], found["rows"]) == (len(wanted), 7)

    @pytest.mark.parametrize(("size", "top", "products"), [(200, 20, 1), (200, 20, 50), (200, 2, 9), (9, 8, 5)])
    def test_a_spectrum_that_does_not_converge_is_told(self, size: int, top: int, products: int) -> None:
        at = on(diagonal(*range(size)), [0.0] * size)
        with pytest.raises(Unmeasurable, match=f"of {top} eigenvalues after") as told:
            Spectrum(top=top, products=products, tolerance=1e-10, rows=3).measure(at)
        found = told.value.found
        assert found["largest"] is None
        assert found["converged"] == len(found["eigenvalues"]) < top
        assert found["products"] <= products
        assert found["rows"] == 3

    def test_a_spectrum_that_breaks_off_draws_nothing_from_the_system(self) -> None:
        """Of a matrix of rank 2: after three steps there is no further direction, and a new one is drawn."""
        at = on(diagonal(5, 3.1, *[0] * 58), [0.0] * 60)
        found = [Spectrum(top=4, tolerance=1e-10).measure(at) for _ in range(3)]
        assert found[0] == found[1] == found[2]

    def test_a_spectrum_of_nothing(self) -> None:
        with pytest.raises(Unmeasurable, match="Lanczos"):
            Spectrum().measure(on(torch.zeros(30, 30), [0.0] * 30))

    def test_trace(self) -> None:
        found = Trace(samples=3).measure(on(diagonal(4, 3, -2), [0, 0, 0]))
        assert found == {"trace": 5.0, "error": 0.0, "rows": 7}

    def test_surface(self) -> None:
        """Four weights of two filters, and a normalisation of two by one."""

        def pieces(v: Tensor) -> list[Tensor]:
            return [v[:4].view(2, 2), v[4:].view(2, 1)]

        at = on(diagonal(2, 2, 2, 2, 2, 2), [3, 4, 0, 1, 9, 9], pieces=pieces, filtered=[True, False])
        for direction in Surface(points=3).directions(at):
            assert direction[:2].norm() == pytest.approx(5)
            assert direction[2:4].norm() == pytest.approx(1)
            assert not direction[4:].any()
        found, (a, b) = Surface(points=3).measure(at), Surface().directions(at)
        assert found["loss"][0][2] == pytest.approx(float((at.x + a - b).square().sum()))

    def test_plane(self) -> None:
        ends = {"fedavg": [3.0, 0, 1], "fedsam": [1.0, 1, 3], "fedprox": [2.0, 4, 1]}
        ways = iter([torch.tensor([[1.0, 0, 1], end]).double().unbind() for end in ends.values()])
        at = on(diagonal(2, 2, 2), [1, 0, 1], walk=lambda algorithm, client: list(next(ways)), cohort=[5, 2])
        found = Plane(methods={name: name for name in ends}, points=2).measure(at)
        assert found["client"] == 5
        assert found["paths"]["fedavg"] == {"x": [0, 2], "y": [0, 0], "rest": 0}
        assert found["paths"]["fedsam"] == {"x": [0, 0], "y": [0, 1], "rest": 2}
        assert found["paths"]["fedprox"] == {"x": [0, 1], "y": [0, 4], "rest": 0}
        assert (found["x"], found["y"]) == ([-0.5, 2.5], [-1, 5])
        assert found["global_loss"] == [[0.5**2 + 2, 3.5**2 + 2], [0.5**2 + 26, 3.5**2 + 26]]

    @pytest.mark.parametrize(
        ("values", "better", "wanted"),
        [
            ([3.0, math.inf, 1.0], "min", {"mean": None, "std": None, "best": 1.0, "worst": None}),
            ([math.nan, 0.5, 0.25], "max", {"mean": None, "std": None, "best": 0.5, "worst": None}),
            ([math.inf, -math.inf, 2.0], "max", {"mean": None, "std": None, "best": None, "worst": None}),
            ([1e304, 3e304], "min", {"mean": 2e304, "std": None, "best": 1e304, "worst": 3e304}),
            ([1.0, 3.0], "max", {"mean": 2.0, "std": 1.0, "best": 3.0, "worst": 1.0}),
        ],
    )
    def test_clients(self, values: list[float], better: str, wanted: dict[str, Any]) -> None:
        at = on(diagonal(1), [0], better=better)
        at.landscape.clients, at.landscape.classes = lambda w: values, lambda w: []
        assert measured([Planned("clients", 1, Clients())], at, 1)["clients"] == wanted | {"classes": []}

    def test_clients_that_do_not_perturb_do_not_count(self) -> None:
        marks = {f"y{k}": [[1.0, 0]] * 3 for k in range(3)}
        deltas = {
            "delta0": [[1.0, 0], [0, 0], [0, 2.0]],
            "delta1": [[0, 0], [0, 0], [-2.0, 0]],
            "delta2": [[0.0, 0]] * 3,
        }
        at = on(diagonal(1, 1), [1, 0], locals=Few(**marks, **deltas), server=Vars(), did={}, before={})
        wanted = (0 + math.sqrt(2) + 2) / 3 / 2
        assert PerturbationDrift().measure(at) == {"drift": pytest.approx(wanted), "perturbing": 2}
        assert Directions().measure(at) == {"cosine_perturbation": pytest.approx(0.5)}
        flat = on(diagonal(0, 0), [1, 0], locals=at.locals, server=Vars(), did={}, before={})
        assert Directions().measure(flat) == {"cosine_perturbation": 0.0}


class Gives(Diagnostic):
    def __init__(self, given: Any) -> None:
        self.given = given

    def measure(self, at: Moment) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


def found_of(given: Any) -> Any:
    return measured([Planned("mine", 1, Gives(given))], on(diagonal(1), [0]), 3)["mine"]


class TestWhatDiagnosticsGive:
    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            (np.float32(0.5), 0.5),
            (np.array([[1.0, np.inf]]), [[1.0, None]]),
            (torch.tensor(2.0), 2.0),
            ((1, torch.tensor([3.0, math.nan])), [1, [3.0, None]]),
            ({"x": [None, math.inf]}, {"x": [None, None]}),
        ],
    )
    def test_numbers_of_all_kinds(self, given: Any, wanted: Any) -> None:
        assert found_of({"value": given}) == {"value": wanted}
        assert json.loads(json.dumps(found_of({"value": given}))) == {"value": wanted}

    def test_what_is_no_number(self) -> None:
        with pytest.raises(Mistake, match="diagnostic mine gave a str as value; numbers or lists of numbers"):
            found_of({"value": "high"})
        with pytest.raises(Mistake, match="diagnostic mine gave nothing; numbers by name"):
            found_of(None)

    @pytest.mark.parametrize(
        ("failure", "wanted"),
        [
            (Unmeasurable("the gradient is not finite"), {}),
            (Unmeasurable("1 of 2 eigenvalues", {"converged": 1}), {"converged": 1}),
            (ClientFailure("training diverged"), {}),
        ],
    )
    def test_what_cannot_be_measured_is_told_and_ends_nothing(
        self, failure: Exception, wanted: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging.getLogger("fl_dist"), "propagate", True)
        assert found_of(failure) == wanted
        assert f"round 3: mine could not be measured: {failure}" in caplog.text


def test_parameters_of_normalisations_are_no_filters() -> None:
    layers = [nn.Linear(3, 4), nn.LayerNorm([2, 2]), nn.BatchNorm1d(4), nn.Conv1d(2, 2, 1)]
    assert _filtered(Flat(nn.Sequential(*layers))) == [True, False] + 4 * [False] + [True, False]


def test_local_training_is_not_charged_for_its_tape(landscape: tuple[Landscape, Tensor, Tensor]) -> None:
    class Slow(Tape):
        def step(self, number: int, w: Tensor) -> None:
            self.seconds += 1000.0

    world = landscape[0].world
    training = LocalTraining(world.model, world.twin, world.algorithm, world.samples, world.config.local, 0, 900.0)
    s, r = Vars(x=world.initial), world.round(0, 1, 0)
    training.run(0, s, world.initial_buffers, Vars(), r, Slow(()))
    assert training.seconds < 0


def test_targets_beyond_what_a_metric_holds_end_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(40, 3)), 1e5 * np.repeat([1.0, 1e-9], 20)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y, client=np.repeat([0, 1], 20))
    config: dict[str, Any] = {
        "rounds": 2,
        "data": {"name": "npz", "path": str(tmp_path / "d.npz")},
        "partition": "given",
        "task": "regression",
        "clients": {"total": 2, "per_round": 2},
        "model": {"name": "mlp", "hidden": []},
        "local": {"lr": 1e-9},
        "monitor": {"wandb": {"mode": "disabled"}},
        "run": {"dir": str(tmp_path / "run")},
    }
    made = fl_dist.run(config | {"diagnostics": {"clients": {"every": 1}}}, quiet=True)
    for row in made.history:
        found = row["diagnostics"]["clients"]
        assert (found["mean"], found["std"], found["worst"], found["classes"]) == (None, None, None, [])
        assert 0 < found["best"] < 10


class Reader(nn.Module):
    """Scores of the next token at every place."""

    def __init__(self, vocabulary: int, outputs: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 3), nn.Linear(3, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def test_tokens_are_not_the_classes_of_their_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 9, (40, 5)), np.arange(40) % 4
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    config: dict[str, Any] = {
        "rounds": 1,
        "data": {"name": "npz", "path": str(tmp_path / "d.npz")},
        "clients": {"total": 2, "per_round": 2},
        "monitor": {"wandb": {"mode": "disabled"}},
        "diagnostics": {"clients": {"every": 1}},
    }
    tokens = {"task": "next_token", "model": "tests.unit.test_diagnostics:Reader"}
    for kind, classes in (({"model": "fasttext"}, 4), (tokens, 0)):
        made = fl_dist.run(config | kind, quiet=True, run={"dir": str(tmp_path / str(classes))})
        found = made.history[0]["diagnostics"]["clients"]
        assert len(found["classes"]) == classes
        assert found["mean"] > 0


def test_the_deviation_of_finite_numbers_is_the_usual_one() -> None:
    values = np.random.default_rng(0).normal(size=101).tolist()
    assert deviation(values) == pytest.approx(statistics.pstdev(values), rel=1e-14)


def test_taps_leave_nothing_behind() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    taps = Taps(module, ["0"])
    assert module[0]._forward_hooks
    taps.remove()
    assert not module[0]._forward_hooks


class TestWords:
    @pytest.mark.parametrize(
        ("words", "wanted"),
        [
            (["diagnostics={sharpnes: {}}"], "unknown diagnostic 'sharpnes'; did you mean 'sharpness'?"),
            (["diagnostics={sharpness: {rhoo: 1}}"], "unknown key diagnostics.sharpness.rhoo"),
            (["diagnostics={sharpness: {rho: -1}}"], "diagnostics.sharpness.rho"),
            (["diagnostics={sharpness: {every: 0}}"], "diagnostics.sharpness.every"),
            (["diagnostics={sharpness: 3}"], "diagnostics.sharpness must be a mapping such as {every: 10}"),
        ],
    )
    def test_mistakes(self, words: list[str], wanted: str) -> None:
        with pytest.raises(ValueError, match=".") as error:
            load(None, words)
        assert wanted in str(error.value)

    def test_what_is_no_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose([str(tmp_path / "none")]) == 2
        assert "neither the folder of a run nor a diagnostic" in capsys.readouterr().err

    def test_data_that_changed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_data(tmp_path / "d.npz")
        data = {"name": "npz", "path": str(tmp_path / "d.npz")}
        quick: dict[str, Any] = {"rounds": 1, "clients": {"total": 4, "per_round": 2}, "model": "mlp", "data": data}
        quick |= {"partition": "given", "monitor": {"wandb": {"mode": "disabled"}}}
        made = fl_dist.run(quick, quiet=True, run={"dir": str(tmp_path / "run")})
        arrays = dict(np.load(tmp_path / "d.npz"))
        np.savez(tmp_path / "d.npz", **(arrays | {"y_train": arrays["y_train"][::-1]}))
        assert diagnose([str(made.path), "sharpness"]) == 2
        assert "was made with another data than there is now" in capsys.readouterr().err

    def test_why_something_could_not_be_measured(self, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
        handlers = list(logging.getLogger("fl_dist").handlers)
        for words, wanted in ((["spectrum.products=2"], ["0 of 1 eigenvalues after 2 products"]), (["trace"], [])):
            assert diagnose([str(case.path), *words]) == 0
            told = [f"warning: round 1: spectrum could not be measured: {why}" for why in wanted]
            assert capsys.readouterr().err.splitlines() == told
        assert logging.getLogger("fl_dist").handlers == handlers

    def test_methods_and_clients_of_a_plane(self) -> None:
        for given, wanted in (
            ("{methods: {a: fedavg, b: {name: fedsam, rhoo: 1}}}", "unknown key diagnostics.plane.methods.b.rhoo"),
            ("{methods: {a: fedavg, b: fedavgg}}", "diagnostics.plane.methods.b: unknown algorithm 'fedavgg'"),
            (
                "{methods: {a: fedavg, b: {parts: [sam, sam]}}}",
                "diagnostics.plane.methods.b: parts sam and sam exclude",
            ),
            ("{methods: {a: fedavg, b: {parts: [fedsam]}}}", "diagnostics.plane.methods.b.parts.0: fedsam is an algor"),
            ("{client: 10}", "diagnostics.plane.client is 10; there are clients 0 to 9"),
        ):
            with pytest.raises(ValueError, match=re.escape(wanted)):
                load(None, ["clients.total=10", f"diagnostics={{plane: {given}}}"])
        checked = load(None, ["diagnostics={plane: {methods: {a: fedavg, b: fedsam}}}"]).diagnostics["plane"]
        assert checked["methods"] == {"a": {"name": "fedavg"}, "b": {"name": "fedsam", "rho": 0.05}}

    def test_the_default_of_methods_fits_its_column(self) -> None:
        assert [line for line in help_lines() if "plane.methods" in line and "null" in line]
        assert not [line for line in help_lines() if "\n" in line]

    @pytest.mark.parametrize("word", ["runs/lr=0.1", "lr=0.1", "runs/none", "sharpnes"])
    def test_words_that_are_nothing(self, word: str, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose([str(case.path), word]) == 2
        assert f"{word} is neither the folder of a run nor a diagnostic" in capsys.readouterr().err

    @pytest.mark.parametrize(("file", "wanted"), [("a.bmp", "is not a picture"), ("a.png", "nothing to draw")])
    def test_pictures_that_cannot_be(
        self, file: str, wanted: str, case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        what = "surface" if file == "a.bmp" else "sharpness"
        assert diagnose([str(case.path), what, "--picture", str(tmp_path / file)]) == 2
        said = capsys.readouterr()
        assert wanted in said.err
        assert not said.out

    def test_ones_own_in_a_package(self, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "pkg_of_mine").mkdir()
        (tmp_path / "pkg_of_mine" / "sub.py").write_text(
            "from fl_dist.diagnostics.base import Diagnostic\n"
            "class Free(Diagnostic):\n"
            "    def __init__(self, *, factor: float = 1.0) -> None:\n"
            "        self.factor = factor\n"
            "    def measure(self, at):\n"
            "        return {'first': at.x[:1] * 0 + self.factor}\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        for words, factor in ((["pkg_of_mine.sub:Free"], 1.0), (["pkg_of_mine.sub:Free.factor=2.0"], 2.0)):
            assert diagnose([str(case.path), *words]) == 0
            entry = last_entry(case.path)
            assert (entry["label"], entry["values"]) == ("sub:Free", {"first": [factor]})
            assert entry["settings"]["name"] == "pkg_of_mine.sub:Free"

    def test_runs_of_one_name_that_measured_different_things(self) -> None:
        def entry(round_: int, label: str, **values: float) -> dict[str, Any]:
            return {"round": round_, "label": label, "values": values, "seconds": 0.5}

        found = {
            "a/run": [entry(4, "sharpness", loss=1.0), entry(5, "directions", norm_h=2.0)],
            "b/run": [entry(7, "trace", trace=3.0), entry(7, "sharpness", loss=4.0)],
            "c/other": [entry(9, "clients", mean=5.0)],
        }
        lines = [line.split() for line in told(found)]
        assert lines[0] == ["a/run", "b/run", "other"]
        assert lines[1:5] == [
            ["sharpness.loss", "1", "4", "–"],
            ["directions.norm_h", "2", "–", "–"],
            ["trace.trace", "–", "3", "–"],
            ["clients.mean", "–", "–", "5"],
        ]
        assert [" ".join(line) for line in lines if line[0] == "after"] == [
            "after round 4: sharpness",
            "after round 5: directions",
            "after round 7: trace, sharpness",
            "after round 9: clients",
        ]


class TestRoundsOfFedDyn:
    def test_lengths_and_cosines(self, duals: Duals) -> None:
        assert diagnose([str(duals.path), "directions"]) == 0
        entry = last_entry(duals.path)
        assert entry["round"] == 3
        steps = [after - x for x, after in itertools.pairwise(duals.models)]
        for k, found in enumerate([duals.rows[0]["directions"], duals.rows[1]["directions"], entry["values"]]):
            h, did = duals.servers[k], {"step": steps, "update": duals.updates}
            wanted = {f"norm_{name}": float(of[k].norm()) for name, of in did.items()} | {"norm_h": float(h.norm())}
            wanted |= {f"cosine_{name}_h": ref.cosine(of[k], h) for name, of in did.items()}
            if k:
                wanted |= {f"cosine_{name}_before": ref.cosine(of[k], of[k - 1]) for name, of in did.items()}
            assert found.pop("cosine_perturbation") is None
            assert found == pytest.approx(wanted, rel=1e-9)
        assert duals.rows[1]["perturbation_drift"] == {"drift": None, "perturbing": 0}

    def test_the_plane_of_local_training(self, duals: Duals) -> None:
        """In the run and by the command; the client is one of the last round, and has its dual variable."""
        assert diagnose([str(duals.path), "plane.points=3", f"plane.methods={json.dumps(METHODS)}"]) == 0
        found = duals.rows[1]["plane"]
        assert last_entry(duals.path)["values"] == found
        assert found["client"] == 1
        x, own, lr = duals.models[2], ref.client(duals.problem, 1), LR * 0.998**2
        paths = {
            "FedAvg": walked(own, x, lr),
            "FedSAM": walked(own, x, lr, rho=RHO),
            "FedDyn": walked(own, x, lr, dual=DUAL, h=duals.own[1]),
        }
        u, v = ref.plane(x, paths["FedAvg"][-1], paths["FedDyn"][-1])
        assert list(found["paths"]) == list(paths)
        for label, path in paths.items():
            xs, ys, rests = zip(*(ref.coordinates(x, u, v, w) for w in path), strict=True)
            assert found["paths"][label]["x"] == pytest.approx(xs, abs=1e-9)
            assert found["paths"][label]["y"] == pytest.approx(ys, abs=1e-9)
            assert found["paths"][label]["rest"] == pytest.approx(max(rests), abs=1e-9)
        assert found["paths"]["FedSAM"]["rest"] > 1e-3
        for name, problem in (("client_loss", own), ("global_loss", duals.problem)):
            wanted = ref.surface(problem, x, u, v, found["x"], found["y"])
            np.testing.assert_allclose(found[name], wanted, rtol=1e-8)
        for axis in ("x", "y"):
            places = [place for path in found["paths"].values() for place in path[axis]]
            assert found[axis][0] < min(places) < max(places) < found[axis][-1]


def last_entry(run: Path) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((run / "diagnostics.jsonl").read_text().splitlines()[-1])
    return entry


def test_pictures_of_what_was_measured(case: Case, tmp_path: Path) -> None:
    for suffix in ("png", "pdf"):
        file = tmp_path / f"loss.{suffix}"
        words = ["surface.points=3", "along.points=3", "plane.points=3", "--picture", str(file)]
        assert diagnose([str(case.path), *words]) == 0
        assert file.stat().st_size > 5000
