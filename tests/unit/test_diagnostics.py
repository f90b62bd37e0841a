"""Diagnostics equal their plain references."""

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
from fl_dist.algorithms.core import Vars, unit_vector
from fl_dist.common.hook_contract import HookContractError
from fl_dist.common.vector_math import standard_deviation
from fl_dist.config import load
from fl_dist.config.help import help_lines
from fl_dist.diagnose import main as diagnose
from fl_dist.diagnose_command import _format_results as format_results
from fl_dist.diagnostics.base import (
    Diagnostic,
    DiagnosticContext,
    MeasurementError,
    ScheduledDiagnostic,
)
from fl_dist.diagnostics.clients import Clients
from fl_dist.diagnostics.hessian import Spectrum, Trace
from fl_dist.diagnostics.plane import LocalPathPlane
from fl_dist.diagnostics.round import Directions, PerturbationDrift
from fl_dist.diagnostics.sharpness import LossAlongDirections, Lpf, Sharpness
from fl_dist.diagnostics.surface import Surface
from fl_dist.distributed.process_group import single_process_group
from fl_dist.federation.client_state import ClientStateStore
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.flat_model import FlatModel
from fl_dist.federation.local_training import ClientFailedError, LocalTraining
from fl_dist.federation.loss_oracle import LossOracle
from fl_dist.federation.oracle_worker import OracleWorker
from fl_dist.federation.round_diagnostics import _has_filters, run_diagnostics
from fl_dist.federation.trajectory_recorder import TrajectoryRecorder
from fl_dist.models import LayerOutputs
from tests.support import reference_diagnostics as ref
from tests.support.quadratic_loss import FixedClients, diagonal, quadratic_context

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
    """A run of one round of full-batch FedSAM in float64, with every step recomputed."""

    path: Path
    problem: ref.Problem
    x: Tensor
    paths: dict[int, list[tuple[Tensor, Tensor]]]
    ends: dict[int, Tensor]
    record: dict[str, Any]
    context: DiagnosticContext

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
    "surface_of_client": {"name": "surface", "points": 3, "client": 2},
    "surface_of_local": {"name": "surface", "points": 3, "of": "local", "client": COHORT[1]},
    "surface_of_first": {"name": "surface", "points": 3, "of": "local", "on": "test"},
    "surface_of_absent": {"name": "surface", "points": 3, "of": "local", "client": 2},
}


def run_full_batch(folder: Path, **changes: Any) -> tuple[fl_dist.Run, Experiment, list[tuple[Tensor, Tensor]]]:
    """A full-batch run in float64, its experiment, and its clients' rows."""
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
    run = fl_dist.run(folder / "config.json", quiet=True)
    experiment = Experiment(load(str(folder / "config.json"), []), torch.device("cpu"))
    samples = experiment.client_data
    return run, experiment, [(samples.data.x[rows], samples.data.y[rows]) for rows in samples.rows]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    run, experiment, clients = run_full_batch(
        tmp_path_factory.mktemp("case"),
        rounds=1,
        clients={"total": len(SIZES), "per_round": 3, "schedule": [COHORT]},
        algorithm={"name": "fedsam", "rho": RHO},
        diagnostics={label: {"every": 1, **settings} for label, settings in DIAGNOSTICS.items()},
    )
    problem = ref.Problem(experiment.model.module, clients)
    x = flatten(experiment, experiment.initial)
    paths, ends = {}, {}
    for i in COHORT:
        client_problem = ref.Problem(experiment.model.module, [clients[i]])
        path = local_path(client_problem, x, LR, rho=RHO)
        paths[i], ends[i] = [(y, sam_perturbation(client_problem, y, RHO)) for y in path[:-1]], path[-1]
    unused: dict[str, Any] = dict.fromkeys(oracle.name for oracle in fields(DiagnosticContext))
    context = DiagnosticContext(
        **(unused | {"x": experiment.initial, "parameter_views": experiment.model.views, "seed": 0})
    )
    return Case(run.path, problem, x, paths, ends, run.history[0]["diagnostics"], context)


def sam_perturbation(client_problem: ref.Problem, y: Tensor, rho: float) -> Tensor:
    gradient = ref.gradient(client_problem, y)
    return rho * gradient / gradient.norm()


def local_path(
    client_problem: ref.Problem, x: Tensor, lr: float, rho: float = 0.0, dual: float = 0.0, h: Any = 0.0
) -> list[Tensor]:
    """The iterates of a client's local training by FedAvg, FedSAM or FedDyn."""
    path = [x]
    for _ in range(STEPS):
        y = path[-1]
        path.append(
            y - lr * (ref.gradient(client_problem, y + sam_perturbation(client_problem, y, rho)) + dual * (h + y - x))
        )
    return path


@dataclass
class FedDynRun:
    """A run of FedDyn with its rounds, and the one after the last, recomputed."""

    path: Path
    problem: ref.Problem
    records: list[dict[str, Any]]
    models: list[Tensor]
    """The model before each round."""
    updates: list[Tensor]
    server_duals: list[Tensor]
    """The server's dual variable after each round."""
    client_duals: dict[int, Tensor]
    """The clients' dual variables after the run."""


DUAL, COHORTS = 0.5, [[0, 1, 3], [1, 2, 3], [0, 1, 2]]
METHODS = {"FedAvg": "fedavg", "FedSAM": {"name": "fedsam", "rho": RHO}, "FedDyn": {"name": "feddyn", "dual": DUAL}}


@pytest.fixture(scope="module")
def feddyn_run(tmp_path_factory: pytest.TempPathFactory) -> FedDynRun:
    diagnostics_config = {"directions": {"every": 1}, "plane": {"every": 2, "points": 3, "methods": METHODS}}
    diagnostics_config["perturbation_drift"] = {"every": 2}
    run, experiment, clients = run_full_batch(
        tmp_path_factory.mktemp("duals"),
        rounds=2,
        clients={"total": len(SIZES), "per_round": 3, "schedule": COHORTS},
        algorithm={"name": "feddyn", "dual": DUAL},
        diagnostics=diagnostics_config,
    )
    problem, x = ref.Problem(experiment.model.module, clients), flatten(experiment, experiment.initial)
    recomputed = FedDynRun(run.path, problem, [record["diagnostics"] for record in run.history], [x], [], [], {})
    h, client_duals = torch.zeros_like(x), dict.fromkeys(range(len(SIZES)), torch.zeros_like(x))
    for index, cohort in enumerate(COHORTS):
        local_updates = {i: local_update(ref.client(problem, i), x, LR * 0.998**index, client_duals[i]) for i in cohort}
        if index < run.config.rounds:
            client_duals = client_duals | {i: client_duals[i] + delta for i, delta in local_updates.items()}
        update = sum(SIZES[i] * delta for i, delta in local_updates.items()) / sum(SIZES[i] for i in cohort)
        h = h + sum(local_updates.values()) / len(SIZES)
        x = x + 0.7 * update + h
        recomputed.models.append(x)
        recomputed.updates.append(update)
        recomputed.server_duals.append(h)
    recomputed.client_duals = client_duals
    return recomputed


def local_update(client_problem: ref.Problem, x: Tensor, lr: float, h: Tensor) -> Tensor:
    return local_path(client_problem, x, lr, dual=DUAL, h=h)[-1] - x


def flatten(experiment: Experiment, vector: Tensor) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in experiment.model.views(vector)])


def draw_noise(case: Case, purpose: str, k: int) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in case.context.parameter_views(case.context.noise(purpose, k))])


class TestAgainstReference:
    def test_sharpness(self, case: Case) -> None:
        assert case.record["sharpness"]["sharpness"] == pytest.approx(
            ref.sharpness(case.problem, case.new, RHO), rel=1e-9
        )
        assert case.record["sharpness"]["loss"] == pytest.approx(ref.loss(case.problem, case.new), rel=1e-9)
        length = ref.gradient(case.problem, case.new).norm()
        assert case.record["sharpness"]["gradient_norm"] == pytest.approx(float(length), rel=1e-9)

    def test_sharpness_with_several_ascent_steps(self, case: Case) -> None:
        several_steps = case.record["deep"]["sharpness"]
        assert several_steps == pytest.approx(ref.sharpness(case.problem, case.new, RHO, 6), rel=1e-9)
        assert several_steps >= case.record["sharpness"]["sharpness"]

    def test_lpf(self, case: Case) -> None:
        noises = [0.2 * draw_noise(case, "lpf", k) for k in range(4)]
        assert case.record["lpf"]["lpf"] == pytest.approx(ref.lpf(case.problem, case.new, noises), rel=1e-9)

    def test_loss_along_directions(self, case: Case) -> None:
        radii = [0.0, 1.0, 2.0, 3.0]
        lines = [ref.along(case.problem, case.new, draw_noise(case, "along", k), radii) for k in range(2)]
        steepest = ref.along(case.problem, case.new, ref.gradient(case.problem, case.new), radii)
        assert case.record["along"]["radii"] == radii
        assert case.record["along"]["random"] == pytest.approx(np.mean(lines, 0).tolist(), rel=1e-9)
        assert case.record["along"]["gradient"] == pytest.approx(steepest, rel=1e-9)

    def test_spectrum(self, case: Case) -> None:
        expected = ref.eigenvalues(case.problem, case.new, 4)
        assert case.record["spectrum"]["eigenvalues"] == pytest.approx(expected, rel=1e-8)
        assert case.record["spectrum"]["largest"] == case.record["spectrum"]["eigenvalues"][0]

    def test_trace(self, case: Case) -> None:
        signs = [case.context.signs("trace", k) for k in range(5)]
        vectors = [torch.cat([p.reshape(-1) for p in case.context.parameter_views(v)]) for v in signs]
        hessian = ref.hessian(case.problem, case.new)
        values = [float(v @ hessian @ v) for v in vectors]
        assert all(set(v.tolist()) == {-1.0, 1.0} for v in vectors)
        assert case.record["trace"]["trace"] == pytest.approx(np.mean(values), rel=1e-9)
        assert case.record["trace"]["error"] == pytest.approx(np.std(values, ddof=1) / math.sqrt(5), rel=1e-8)

    def test_flatness_distance(self, case: Case) -> None:
        ends = list(case.ends.values())
        assert case.record["flatness_distance"]["distance"] == pytest.approx(ref.flatness_distance(ends), rel=1e-9)
        assert case.record["flatness_distance"]["divergence"] == pytest.approx(ref.divergence(ends, case.new), rel=1e-9)

    def test_flatness_discrepancy(self, case: Case) -> None:
        expected = ref.flatness_discrepancy(case.problem, case.new, case.ends, RHO)
        result = case.record["flatness_discrepancy"]
        assert result["discrepancy"] == pytest.approx(expected, rel=1e-8)
        assert result["discrepancy"] == abs(result["global"] - result["local"])

    def test_perturbation_drift(self, case: Case) -> None:
        steps = {i: [path[0], path[STEPS // 2], path[STEPS - 1]] for i, path in case.paths.items()}
        expected = ref.perturbation_drift(case.problem, case.x, steps, 0.7)
        assert case.record["perturbation_drift"] == {"drift": pytest.approx(expected, rel=1e-9), "perturbing": 3}
        assert 0 < expected < 1

    def test_directions(self, case: Case) -> None:
        gradient = ref.gradient(case.problem, case.x)
        expected = np.mean([ref.cosine(path[0][1], gradient) for path in case.paths.values()])
        result, step = case.record["directions"], case.new - case.x
        assert result["cosine_perturbation"] == pytest.approx(expected, rel=1e-9)
        assert result["norm_step"] == pytest.approx(float(step.norm()), rel=1e-9)
        assert result["norm_update"] == pytest.approx(float(step.norm()) / 0.7, rel=1e-9)
        assert result.keys() == {"cosine_perturbation", "norm_step", "norm_update"}

    def test_clients(self, case: Case) -> None:
        expected, result = ref.client_accuracy(case.problem, case.new), dict(case.record["clients"])
        x, y = (torch.cat(all_)[:20] for all_ in zip(*case.problem.clients, strict=True))
        assert result.pop("classes") == ref.class_accuracy(case.problem, case.new, x, y, CLASSES)
        assert result == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize(
        ("label", "client", "is_local"), [("surface_of_client", 2, False), ("surface_of_local", COHORT[1], True)]
    )
    def test_surface_of_a_client(self, case: Case, label: str, client: int, is_local: bool) -> None:
        problem, centre = ref.client(case.problem, client), case.ends[client] if is_local else case.new
        a, b = (ref.filter_normalised(case.problem, centre, draw_noise(case, "surface", k)) for k in range(2))
        result = case.record[label]
        assert result["client"] == client
        expected = ref.surface(problem, centre, a, b, result["x"], result["y"])
        np.testing.assert_allclose(result["loss"], expected, rtol=1e-8)

    def test_surface_of_a_local_model_on_the_test_rows(self, case: Case) -> None:
        x, y = (torch.cat(all_)[:20] for all_ in zip(*case.problem.clients, strict=True))
        result = case.record["surface_of_first"]
        assert result["client"] == COHORT[0]
        assert result["loss"][1][1] == pytest.approx(
            ref.loss(ref.Problem(case.problem.module, [(x, y)]), case.ends[COHORT[0]]), rel=1e-9
        )

    def test_surface_of_a_client_that_did_not_train_is_not_measured(self, case: Case) -> None:
        assert not case.record["surface_of_absent"]

    def test_surface(self, case: Case) -> None:
        a, b = (draw_noise(case, "surface", k) for k in range(2))
        b = ref.orthogonal(a, b)
        a, b = (ref.filter_normalised(case.problem, case.new, v) for v in (a, b))
        grid = [-1.0, 0.0, 1.0]
        expected = ref.surface(case.problem, case.new, a, b, grid, grid)
        assert case.record["surface"]["x"] == case.record["surface"]["y"] == grid
        for result, record in zip(case.record["surface"]["loss"], expected, strict=True):
            assert result == pytest.approx(record, rel=1e-9)

    def test_the_command_gives_the_same_values(self, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose([str(case.path), "sharpness.rho=0.3", "spectrum.top=2"]) == 0
        entries = [json.loads(line) for line in (case.path / "diagnostics.jsonl").read_text().splitlines()]
        result = {entry["label"]: entry["values"] for entry in entries}
        assert result["sharpness"] == case.record["sharpness"]
        assert result["spectrum"]["eigenvalues"] == pytest.approx(case.record["spectrum"]["eigenvalues"][:2], rel=1e-3)
        assert [entry["round"] for entry in entries] == [1, 1]
        assert "sharpness.sharpness" in capsys.readouterr().out


MODELS = {
    "cnn": [1, 8, 8],
    "vit_cifar": [3, 32, 32],
    "lenet5": [3, 32, 32],
    "fasttext": [6],
}


def open_oracle(experiment: Experiment) -> LossOracle:
    group = single_process_group(experiment.config.topology)
    states = ClientStateStore(experiment.template, group.rank, group.collectives, lambda client: None)
    worker = OracleWorker(experiment, group, states)
    worker.open(experiment.initial_buffers, [], {})
    return LossOracle(worker)


@pytest.mark.parametrize("name", MODELS)
def test_hessian_vector_products_equal_finite_differences(name: str, tmp_path: Path) -> None:
    shape, rng, y = MODELS[name], np.random.default_rng(0), np.arange(4) % 3
    x = rng.integers(1, 9, (4, *shape)) if name == "fasttext" else rng.normal(size=(4, *shape))
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    arguments = [f"data={{name: npz, path: {tmp_path / 'd.npz'}}}", "clients.total=2", "clients.per_round=1"]
    arguments += [f"model={name}", "local.precision=float64", "partition=iid"]
    experiment = Experiment(load(None, [*arguments, "evaluate.batch_size=3"]), torch.device("cpu"))
    loss_oracle = open_oracle(experiment)
    torch.manual_seed(0)
    w, v = experiment.initial, torch.randn_like(experiment.initial) * 1e-2
    step = 1e-7
    change = (loss_oracle.gradient(w + step * v) - loss_oracle.gradient(w - step * v)) / (2 * step)
    product = loss_oracle.hessian_vector_product(w, v)
    # The gradient jumps where a unit is switched on or off between the two points.
    close = torch.isclose(product, change, rtol=1e-3, atol=1e-3 * float(product.abs().max()))
    assert float(close.double().mean()) > 0.99
    assert float(product.abs().max()) > 0


@pytest.fixture
def loss_oracle(tmp_path: Path) -> tuple[LossOracle, Tensor, Tensor]:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(40, 3)), rng.normal(size=(40, 1))
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    arguments = [f"data={{name: npz, path: {tmp_path / 'd.npz'}}}", "clients.total=4", "clients.per_round=1"]
    arguments += ["task=regression", "model={name: mlp, hidden: []}", "local.precision=float64", "partition=iid"]
    experiment = Experiment(load(None, [*arguments, "evaluate.batch_size=7"]), torch.device("cpu"))
    loss_oracle = open_oracle(experiment)
    return loss_oracle, torch.from_numpy(x), torch.from_numpy(y)


class TestKnownAnswers:
    """A linear model with squared loss: its gradient and Hessian are known in closed form."""

    def test_the_oracle_is_exact_on_all_and_on_some_rows(self, loss_oracle: tuple[LossOracle, Tensor, Tensor]) -> None:
        oracle, x, y = loss_oracle
        experiment = oracle.experiment
        rows = oracle.worker.rows.select(11)
        assert len(rows) == len(set(rows.tolist())) == 11
        for chosen, row_count in ((torch.arange(40), 0), (rows, 11)):
            design = torch.cat([x[chosen], torch.ones(len(chosen), 1)], 1).double()
            w = torch.zeros_like(experiment.initial)
            weights = torch.arange(1.0, 5.0, dtype=torch.float64)
            weight, bias = experiment.model.views(w)
            weight.copy_(weights[:3].view(1, 3))
            bias.copy_(weights[3:])
            residuals = design @ weights - y[chosen, 0]
            assert oracle.loss(w, row_count) == pytest.approx(float(residuals.square().mean()), rel=1e-9)
            assert oracle.count(row_count) == len(chosen)
            expected = 2 * design.T @ residuals / len(chosen)
            assert torch.allclose(flatten(experiment, oracle.gradient(w, row_count)), expected, rtol=1e-9)
            v = torch.zeros_like(w)
            experiment.model.views(v)[0].fill_(1.0)
            direction = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
            hessian = 2 * design.T @ design / len(chosen)
            assert torch.allclose(
                flatten(experiment, oracle.hessian_vector_product(w, v, row_count)), hessian @ direction, rtol=1e-9
            )

    @pytest.mark.parametrize(("layer", "used"), [(nn.GRU(1, 1), False), (nn.Linear(1, 1), True)])
    def test_recurrent_layers_are_differentiated_without_cudnn(
        self, layer: nn.Module, used: bool, loss_oracle: tuple[LossOracle, Tensor, Tensor]
    ) -> None:
        oracle, cudnn_states = loss_oracle[0], []
        experiment = oracle.experiment
        training = LocalTraining(experiment, experiment.algorithm, experiment.client_data)
        for flat in (experiment.model, experiment.eval_model):
            flat.module.add_module("more", nn.Sequential(layer))
            flat.module.get_submodule("more").forward = lambda x: x  # type: ignore[method-assign]
            flat.module.register_forward_hook(lambda *_: cudnn_states.append(torch.backends.cudnn.enabled))
        oracle.gradient(experiment.initial)
        training._full_gradient(0, Vars(x=experiment.initial))
        assert cudnn_states and set(cudnn_states) == {used}
        assert torch.backends.cudnn.enabled


class TestOnQuadratics:
    def test_sharpness(self) -> None:
        context = quadratic_context(diagonal(1, 3), [1, 1])
        assert Sharpness(rho=math.sqrt(10)).measure(context) == pytest.approx(
            {"sharpness": 24, "loss": 2, "gradient_norm": math.sqrt(10), "rho": math.sqrt(10)}
        )
        bisector = unit_vector(
            unit_vector(torch.tensor([1.0, 3])) + unit_vector(torch.tensor([1.0, 6]))
        ).double() * math.sqrt(10)
        expected = float(torch.tensor([1.0, 3]).double() @ bisector) + context.loss_oracle.loss(bisector)
        assert Sharpness(rho=math.sqrt(10), steps=2).measure(context)["sharpness"] == pytest.approx(expected)

    def test_lpf(self) -> None:
        context = quadratic_context(diagonal(2, 2), [1, 0])
        noises = [context.noise("lpf", k) for k in range(3)]
        expected = np.mean([float((context.x + 0.1 * e).square().sum()) for e in noises])
        assert Lpf(sigma=0.1, samples=3).measure(context) == pytest.approx({"lpf": expected, "loss": 1.0})

    def test_along(self) -> None:
        context = quadratic_context(diagonal(2, 2), [1, 0])
        result = LossAlongDirections(reach=2.0, points=3, directions=2).measure(context)
        assert result["gradient"] == pytest.approx([1, 4, 9])
        lines = [
            [float((context.x + unit_vector(context.noise("along", k)) * r).square().sum()) for r in (0, 1, 2)]
            for k in range(2)
        ]
        assert result["random"] == pytest.approx(np.mean(lines, 0).tolist())
        assert context.loss_oracle.loss_calls == 1 + 2 * 3

    @pytest.mark.parametrize(
        ("values", "top", "expected"),
        [(range(1, 51), 3, [50, 49, 48]), ([1, 2, -100] * 20, 1, [2]), ([5, 3, 4], 2, [5, 4]), ([2, 1], 3, [2, 1])],
    )
    def test_spectrum(self, values: Any, top: int, expected: list[float]) -> None:
        result = Spectrum(top=top, tolerance=1e-10).measure(quadratic_context(diagonal(*values), [0.0] * len(values)))
        assert result["eigenvalues"] == pytest.approx(expected)
        assert result["largest"] == result["eigenvalues"][0]
        assert (result["converged"], result["rows"]) == (len(expected), 7)

    @pytest.mark.parametrize(("size", "top", "products"), [(200, 20, 1), (200, 20, 50), (200, 2, 9), (9, 8, 5)])
    def test_a_spectrum_that_does_not_converge_is_an_error(self, size: int, top: int, products: int) -> None:
        context = quadratic_context(diagonal(*range(size)), [0.0] * size)
        with pytest.raises(MeasurementError, match=f"of {top} eigenvalues after") as error:
            Spectrum(top=top, products=products, tolerance=1e-10, rows=3).measure(context)
        result = error.value.partial_values
        assert result["largest"] is None
        assert result["converged"] == len(result["eigenvalues"]) < top
        assert result["products"] <= products
        assert result["rows"] == 3

    def test_a_spectrum_with_a_breakdown_uses_no_system_randomness(self) -> None:
        """A matrix of rank 2: after three steps there is no further direction, and a new one is drawn."""
        context = quadratic_context(diagonal(5, 3.1, *[0] * 58), [0.0] * 60)
        result = [Spectrum(top=4, tolerance=1e-10).measure(context) for _ in range(3)]
        assert result[0] == result[1] == result[2]

    def test_the_spectrum_of_a_zero_matrix_is_an_error(self) -> None:
        with pytest.raises(MeasurementError, match="Lanczos"):
            Spectrum().measure(quadratic_context(torch.zeros(30, 30), [0.0] * 30))

    def test_trace(self) -> None:
        result = Trace(samples=3).measure(quadratic_context(diagonal(4, 3, -2), [0, 0, 0]))
        assert result == {"trace": 5.0, "error": 0.0, "rows": 7}

    def test_surface(self) -> None:
        """Four weights in two filters, and a normalisation layer of shape two by one."""

        def pieces(v: Tensor) -> list[Tensor]:
            return [v[:4].view(2, 2), v[4:].view(2, 1)]

        context = quadratic_context(
            diagonal(2, 2, 2, 2, 2, 2), [3, 4, 0, 1, 9, 9], parameter_views=pieces, has_filters=[True, False]
        )
        for direction in Surface(points=3).directions(context):
            assert direction[:2].norm() == pytest.approx(5)
            assert direction[2:4].norm() == pytest.approx(1)
            assert not direction[4:].any()
        result, (a, b) = Surface(points=3).measure(context), Surface().directions(context)
        assert result["loss"][0][2] == pytest.approx(float((context.x + a - b).square().sum()))

    def test_plane(self) -> None:
        ends = {"fedavg": [3.0, 0, 1], "fedsam": [1.0, 1, 3], "fedprox": [2.0, 4, 1]}
        path_iterator = iter([torch.tensor([[1.0, 0, 1], end]).double().unbind() for end in ends.values()])
        context = quadratic_context(
            diagonal(2, 2, 2),
            [1, 0, 1],
            train_client=lambda algorithm, client: list(next(path_iterator)),
            cohort=[5, 2],
        )
        result = LocalPathPlane(methods={name: name for name in ends}, points=2).measure(context)
        assert result["client"] == 5
        assert result["paths"]["fedavg"] == {"x": [0, 2], "y": [0, 0], "rest": 0}
        assert result["paths"]["fedsam"] == {"x": [0, 0], "y": [0, 1], "rest": 2}
        assert result["paths"]["fedprox"] == {"x": [0, 1], "y": [0, 4], "rest": 0}
        assert (result["x"], result["y"]) == ([-0.5, 2.5], [-1, 5])
        assert result["global_loss"] == [[0.5**2 + 2, 3.5**2 + 2], [0.5**2 + 26, 3.5**2 + 26]]

    @pytest.mark.parametrize(
        ("values", "better", "expected"),
        [
            ([3.0, math.inf, 1.0], "min", {"mean": None, "std": None, "best": 1.0, "worst": None}),
            ([math.nan, 0.5, 0.25], "max", {"mean": None, "std": None, "best": 0.5, "worst": None}),
            ([math.inf, -math.inf, 2.0], "max", {"mean": None, "std": None, "best": None, "worst": None}),
            ([1e304, 3e304], "min", {"mean": 2e304, "std": None, "best": 1e304, "worst": 3e304}),
            ([1.0, 3.0], "max", {"mean": 2.0, "std": 1.0, "best": 3.0, "worst": 1.0}),
        ],
    )
    def test_clients(self, values: list[float], better: str, expected: dict[str, Any]) -> None:
        context = quadratic_context(diagonal(1), [0], best_is=better)
        context.loss_oracle.clients, context.loss_oracle.classes = lambda w, on: values, lambda w: []
        # Of so few clients the worst tenth is the worst one.
        expected |= {"worst_tenth": expected["worst"], "classes": []}
        assert run_diagnostics([ScheduledDiagnostic("clients", 1, Clients())], context, 1)["clients"] == expected

    def test_clients_without_perturbation_do_not_count(self) -> None:
        points = {f"y{k}": [[1.0, 0]] * 3 for k in range(3)}
        deltas = {
            "delta0": [[1.0, 0], [0, 0], [0, 2.0]],
            "delta1": [[0, 0], [0, 0], [-2.0, 0]],
            "delta2": [[0.0, 0]] * 3,
        }
        context = quadratic_context(
            diagonal(1, 1),
            [1, 0],
            locals=FixedClients(**points, **deltas),
            server=Vars(),
            last_step={},
            previous_step={},
        )
        expected = (0 + math.sqrt(2) + 2) / 3 / 2
        assert PerturbationDrift().measure(context) == {"drift": pytest.approx(expected), "perturbing": 2}
        assert Directions().measure(context) == {"cosine_perturbation": pytest.approx(0.5)}
        flat = quadratic_context(
            diagonal(0, 0), [1, 0], locals=context.locals, server=Vars(), last_step={}, previous_step={}
        )
        assert Directions().measure(flat) == {"cosine_perturbation": 0.0}


class FixedDiagnostic(Diagnostic):
    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def measure(self, context: DiagnosticContext) -> Any:
        if isinstance(self.settings, Exception):
            raise self.settings
        return self.settings


def measure_fixed(settings: Any) -> Any:
    return run_diagnostics(
        [ScheduledDiagnostic("fixed", 1, FixedDiagnostic(settings))], quadratic_context(diagonal(1), [0]), 3
    )["fixed"]


class TestReturnValues:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (np.float32(0.5), 0.5),
            (np.array([[1.0, np.inf]]), [[1.0, None]]),
            (torch.tensor(2.0), 2.0),
            ((1, torch.tensor([3.0, math.nan])), [1, [3.0, None]]),
            ({"x": [None, math.inf]}, {"x": [None, None]}),
        ],
    )
    def test_values_become_json_numbers(self, value: Any, expected: Any) -> None:
        assert measure_fixed({"value": value}) == {"value": expected}
        assert json.loads(json.dumps(measure_fixed({"value": value}))) == {"value": expected}

    def test_values_that_are_not_numbers_are_refused(self) -> None:
        with pytest.raises(
            HookContractError, match="diagnostic fixed gave a str as value; numbers or lists of numbers"
        ):
            measure_fixed({"value": "high"})
        with pytest.raises(HookContractError, match="diagnostic fixed gave nothing; numbers by name"):
            measure_fixed(None)

    @pytest.mark.parametrize(
        ("failure", "expected"),
        [
            (MeasurementError("the gradient is not finite"), {}),
            (MeasurementError("1 of 2 eigenvalues", {"converged": 1}), {"converged": 1}),
            (ClientFailedError("training diverged"), {}),
        ],
    )
    def test_a_failed_measurement_is_a_warning(
        self, failure: Exception, expected: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging.getLogger("fl_dist"), "propagate", True)
        assert measure_fixed(failure) == expected
        assert f"round 3: fixed could not be measured: {failure}" in caplog.text


def test_parameters_of_normalisation_layers_are_not_filters() -> None:
    layers = [nn.Linear(3, 4), nn.LayerNorm([2, 2]), nn.BatchNorm1d(4), nn.Conv1d(2, 2, 1)]
    assert _has_filters(FlatModel(nn.Sequential(*layers))) == [True, False] + 4 * [False] + [True, False]


def test_local_seconds_exclude_trajectory_recording(loss_oracle: tuple[LossOracle, Tensor, Tensor]) -> None:
    class SlowRecorder(TrajectoryRecorder):
        def step(self, number: int, w: Tensor) -> None:
            self.seconds += 1000.0

    experiment = loss_oracle[0].experiment
    training = LocalTraining(experiment, experiment.algorithm, experiment.client_data, 900.0)
    s, r = Vars(x=experiment.initial), experiment.round(0, 1, 0)
    training.run(0, s, experiment.initial_buffers, Vars(), r, SlowRecorder(()))
    assert training.seconds < 0


def test_metrics_that_overflow_are_null(tmp_path: Path) -> None:
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
    run = fl_dist.run(config | {"diagnostics": {"clients": {"every": 1}}}, quiet=True)
    for record in run.history:
        result = record["diagnostics"]["clients"]
        assert (result["mean"], result["std"], result["worst"], result["classes"]) == (None, None, None, [])
        assert 0 < result["best"] < 10


class NextToken(nn.Module):
    """Scores of the next token at every position."""

    def __init__(self, vocabulary: int, outputs: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 3), nn.Linear(3, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def test_next_token_tasks_have_no_class_accuracies(tmp_path: Path) -> None:
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
    tokens = {"task": "next_token", "model": "tests.unit.test_diagnostics:NextToken"}
    for kind, classes in (({"model": "fasttext"}, 4), (tokens, 0)):
        run = fl_dist.run(config | kind, quiet=True, run={"dir": str(tmp_path / str(classes))})
        result = run.history[0]["diagnostics"]["clients"]
        assert len(result["classes"]) == classes
        assert result["mean"] > 0


def test_the_standard_deviation_equals_that_of_statistics() -> None:
    values = np.random.default_rng(0).normal(size=101).tolist()
    assert standard_deviation(values) == pytest.approx(statistics.pstdev(values), rel=1e-14)


def test_layer_outputs_remove_their_hooks() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    layer_outputs = LayerOutputs(module, ["0"])
    assert module[0]._forward_hooks
    layer_outputs.remove()
    assert not module[0]._forward_hooks


class TestArguments:
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["diagnostics={sharpnes: {}}"], "unknown diagnostic 'sharpnes'; did you mean 'sharpness'?"),
            (["diagnostics={sharpness: {rhoo: 1}}"], "unknown key diagnostics.sharpness.rhoo"),
            (["diagnostics={sharpness: {rho: -1}}"], "diagnostics.sharpness.rho"),
            (["diagnostics={sharpness: {every: 0}}"], "diagnostics.sharpness.every"),
            (["diagnostics={sharpness: 3}"], "diagnostics.sharpness must be a mapping such as {every: 10}"),
        ],
    )
    def test_invalid_settings_are_refused(self, overrides: list[str], message: str) -> None:
        with pytest.raises(ValueError, match=".") as error:
            load(None, overrides)
        assert message in str(error.value)

    def test_a_path_that_is_not_a_run_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose([str(tmp_path / "none")]) == 2
        assert "neither the folder of a run nor a diagnostic" in capsys.readouterr().err

    def test_changed_data_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_data(tmp_path / "d.npz")
        data = {"name": "npz", "path": str(tmp_path / "d.npz")}
        config: dict[str, Any] = {"rounds": 1, "clients": {"total": 4, "per_round": 2}, "model": "mlp", "data": data}
        config |= {"partition": "given", "monitor": {"wandb": {"mode": "disabled"}}}
        run = fl_dist.run(config, quiet=True, run={"dir": str(tmp_path / "run")})
        arrays = dict(np.load(tmp_path / "d.npz"))
        np.savez(tmp_path / "d.npz", **(arrays | {"y_train": arrays["y_train"][::-1]}))
        assert diagnose([str(run.path), "sharpness"]) == 2
        assert "was made with another data than there is now" in capsys.readouterr().err

    def test_a_failed_measurement_of_the_command_is_explained(
        self, case: Case, capsys: pytest.CaptureFixture[str]
    ) -> None:
        handlers = list(logging.getLogger("fl_dist").handlers)
        for arguments, expected in (
            (["spectrum.products=2"], ["0 of 1 eigenvalues after 2 products"]),
            (["trace"], []),
        ):
            assert diagnose([str(case.path), *arguments]) == 0
            warnings = [f"warning: round 1: spectrum could not be measured: {why}" for why in expected]
            assert capsys.readouterr().err.splitlines() == warnings
        assert logging.getLogger("fl_dist").handlers == handlers

    def test_methods_and_client_of_a_plane_are_checked(self) -> None:
        for settings, expected in (
            ("{methods: {a: fedavg, b: {name: fedsam, rhoo: 1}}}", "unknown key diagnostics.plane.methods.b.rhoo"),
            ("{methods: {a: fedavg, b: fedavgg}}", "diagnostics.plane.methods.b: unknown algorithm 'fedavgg'"),
            (
                "{methods: {a: fedavg, b: {parts: [sam, sam]}}}",
                "diagnostics.plane.methods.b: parts sam and sam exclude",
            ),
            ("{methods: {a: fedavg, b: {parts: [fedsam]}}}", "diagnostics.plane.methods.b.parts.0: fedsam is an algor"),
            ("{client: 10}", "diagnostics.plane.client is 10; there are clients 0 to 9"),
            ("{name: surface, client: 10}", "diagnostics.plane.client is 10; there are clients 0 to 9"),
        ):
            with pytest.raises(ValueError, match=re.escape(expected)):
                load(None, ["clients.total=10", f"diagnostics={{plane: {settings}}}"])
        plane = load(None, ["diagnostics={plane: {methods: {a: fedavg, b: fedsam}}}"]).diagnostics["plane"]
        assert plane["methods"] == {"a": {"name": "fedavg"}, "b": {"name": "fedsam", "rho": 0.05}}

    def test_help_shows_the_default_of_methods(self) -> None:
        assert [line for line in help_lines() if "plane.methods" in line and "null" in line]
        assert not [line for line in help_lines() if "\n" in line]

    def test_a_long_list_is_shown_by_its_ends(self, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose([str(case.path), "surface.points=3", "along.points=6"]) == 0
        output, radii = capsys.readouterr().out, last_entry(case.path)["values"]["radii"]
        assert re.search(rf"^along\.radii +{radii[0]:.4g} \.\.\. {radii[-1]:.4g} \(6 numbers\)$", output, re.MULTILINE)
        assert re.search(r"^surface\.loss +\[3 x 3 numbers\]$", output, re.MULTILINE)

    @pytest.mark.parametrize("word", ["runs/lr=0.1", "lr=0.1", "runs/none", "sharpnes"])
    def test_unknown_arguments_are_refused(self, word: str, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose([str(case.path), word]) == 2
        assert f"{word} is neither the folder of a run nor a diagnostic" in capsys.readouterr().err

    @pytest.mark.parametrize(("file", "expected"), [("a.bmp", "is not an image file"), ("a.png", "nothing to draw")])
    def test_invalid_plot_requests_are_refused(
        self, file: str, expected: str, case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        diagnostic = "surface" if file == "a.bmp" else "sharpness"
        assert diagnose([str(case.path), diagnostic, "--picture", str(tmp_path / file)]) == 2
        output = capsys.readouterr()
        assert expected in output.err
        assert not output.out

    def test_a_user_diagnostic_may_be_in_a_package(
        self, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "user_package").mkdir()
        (tmp_path / "user_package" / "sub.py").write_text(
            "from fl_dist.diagnostics.base import Diagnostic\n"
            "class Free(Diagnostic):\n"
            "    def __init__(self, *, factor: float = 1.0) -> None:\n"
            "        self.factor = factor\n"
            "    def measure(self, at):\n"
            "        return {'first': at.x[:1] * 0 + self.factor}\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        for arguments, factor in ((["user_package.sub:Free"], 1.0), (["user_package.sub:Free.factor=2.0"], 2.0)):
            assert diagnose([str(case.path), *arguments]) == 0
            entry = last_entry(case.path)
            assert (entry["label"], entry["values"]) == ("sub:Free", {"first": [factor]})
            assert entry["settings"]["name"] == "user_package.sub:Free"

    def test_runs_with_the_same_name_are_listed_separately(self) -> None:
        def entry(round_: int, label: str, **values: float) -> dict[str, Any]:
            return {"round": round_, "label": label, "values": values, "seconds": 0.5}

        result = {
            "a/run": [entry(4, "sharpness", loss=1.0), entry(5, "directions", norm_h=2.0)],
            "b/run": [entry(7, "trace", trace=3.0), entry(7, "sharpness", loss=4.0)],
            "c/other": [entry(9, "clients", mean=5.0)],
        }
        lines = [line.split() for line in format_results(result)]
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
    def test_norms_and_cosines_equal_the_reference(self, feddyn_run: FedDynRun) -> None:
        assert diagnose([str(feddyn_run.path), "directions"]) == 0
        entry = last_entry(feddyn_run.path)
        assert entry["round"] == 3
        steps = [after - x for x, after in itertools.pairwise(feddyn_run.models)]
        for k, result in enumerate(
            [feddyn_run.records[0]["directions"], feddyn_run.records[1]["directions"], entry["values"]]
        ):
            h, vectors = feddyn_run.server_duals[k], {"step": steps, "update": feddyn_run.updates}
            expected = {f"norm_{name}": float(history[k].norm()) for name, history in vectors.items()} | {
                "norm_h": float(h.norm())
            }
            expected |= {f"cosine_{name}_h": ref.cosine(history[k], h) for name, history in vectors.items()}
            if k:
                expected |= {
                    f"cosine_{name}_before": ref.cosine(history[k], history[k - 1]) for name, history in vectors.items()
                }
            assert result.pop("cosine_perturbation") is None
            assert result == pytest.approx(expected, rel=1e-9)
        assert feddyn_run.records[1]["perturbation_drift"] == {"drift": None, "perturbing": 0}

    def test_the_plane_of_local_paths_equals_the_reference(self, feddyn_run: FedDynRun) -> None:
        """In the run and by the command; the client took part in the last round and has its dual variable."""
        assert diagnose([str(feddyn_run.path), "plane.points=3", f"plane.methods={json.dumps(METHODS)}"]) == 0
        result = feddyn_run.records[1]["plane"]
        assert last_entry(feddyn_run.path)["values"] == result
        assert result["client"] == 1
        x, client_problem, lr = feddyn_run.models[2], ref.client(feddyn_run.problem, 1), LR * 0.998**2
        paths = {
            "FedAvg": local_path(client_problem, x, lr),
            "FedSAM": local_path(client_problem, x, lr, rho=RHO),
            "FedDyn": local_path(client_problem, x, lr, dual=DUAL, h=feddyn_run.client_duals[1]),
        }
        u, v = ref.plane(x, paths["FedAvg"][-1], paths["FedDyn"][-1])
        assert list(result["paths"]) == list(paths)
        for label, path in paths.items():
            xs, ys, rests = zip(*(ref.coordinates(x, u, v, w) for w in path), strict=True)
            assert result["paths"][label]["x"] == pytest.approx(xs, abs=1e-9)
            assert result["paths"][label]["y"] == pytest.approx(ys, abs=1e-9)
            assert result["paths"][label]["rest"] == pytest.approx(max(rests), abs=1e-9)
        assert result["paths"]["FedSAM"]["rest"] > 1e-3
        for name, problem in (("client_loss", client_problem), ("global_loss", feddyn_run.problem)):
            expected = ref.surface(problem, x, u, v, result["x"], result["y"])
            np.testing.assert_allclose(result[name], expected, rtol=1e-8)
        for axis in ("x", "y"):
            positions = [position for path in result["paths"].values() for position in path[axis]]
            assert result[axis][0] < min(positions) < max(positions) < result[axis][-1]


def last_entry(run: Path) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((run / "diagnostics.jsonl").read_text().splitlines()[-1])
    return entry


def test_measurements_are_plotted(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in ("png", "pdf"):
        file = tmp_path / f"loss.{suffix}"
        arguments = ["surface.points=3", "along.points=3", "plane.points=3", "--picture", str(file)]
        assert diagnose([str(case.path), *arguments]) == 0
        assert file.stat().st_size > 5000
        assert capsys.readouterr().out.endswith(f"\npicture: {file}\n")
