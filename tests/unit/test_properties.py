"""Invariants between algorithms, of their state and of every part; a wrong sign or a leak breaks one of them.

The tests over all algorithms cover every registered one; a new algorithm needs an entry in `CASES`.
"""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from fl_dist import config as configuration
from fl_dist.algorithms import algorithms, build, parts
from fl_dist.algorithms.core import Algorithm, ModelOutput, Part, Round, Vars
from fl_dist.algorithms.fedasam import Asam
from fl_dist.algorithms.feddyn import Dual
from fl_dist.algorithms.fedgf import Interpolate
from fl_dist.algorithms.fedgmt import ClientTrajectory, Teacher
from fl_dist.algorithms.fedlesam import Lesam
from fl_dist.algorithms.fednsam import MomentumPerturb
from fl_dist.algorithms.fedntd import NotTrue
from fl_dist.algorithms.fedprox import Prox
from fl_dist.algorithms.fedsam import Sam
from fl_dist.algorithms.fedsmoo import CorrectedSam
from fl_dist.algorithms.fedspeed import MixedSam
from fl_dist.common.yaml_reader import read_yaml
from fl_dist.config import ConfigError
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.flat_model import FlatModel
from fl_dist.main import main
from tests.support import reference
from tests.support.harness import (
    CASES,
    CLASSES,
    FEATURES,
    FULL_PARTICIPATION,
    HIDDEN,
    SCHEDULE,
    SIZES,
    Run,
    Settings,
    TrainingHarness,
    algorithm,
    record_client_models,
    representatives,
    run,
)
from tests.support.marks import examples

CLOSE = {"rtol": 0, "atol": 1e-10}
LAYERS = [FEATURES, *HIDDEN, CLASSES]
FULL = {"clients": {"schedule": FULL_PARTICIPATION}}
PLAIN = {"batch_size": "full", "momentum": 0.0, "weight_decay": 0.0, "clip": None}
"""Full batches and plain gradient steps."""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> TrainingHarness:
    return TrainingHarness(tmp_path_factory.mktemp("harness"))


def chain(*chosen: Settings) -> Settings:
    return {"parts": list(chosen)}


REDUCTIONS: list[tuple[Settings, Settings, Settings]] = [
    (algorithm("fedsam", rho=0.0), algorithm("fedavg"), {}),
    (algorithm("fedlesam", rho=0.0), algorithm("fedavg"), {}),
    (algorithm("fedspeed", rho=0.0), algorithm("feddyn"), {}),
    (algorithm("fedsmoo", rho=0.0), algorithm("feddyn"), {}),
    (algorithm("fedlesam_d", rho=0.0), algorithm("feddyn"), {}),
    (algorithm("fedgamma", rho=0.0), algorithm("scaffold"), {}),
    (algorithm("fedlesam_s", rho=0.0), algorithm("scaffold"), {}),
    (algorithm("mofedsam", rho=0.0), algorithm("fedcm"), {}),
    (algorithm("mofedsam", mix=1.0), algorithm("fedsam"), {}),
    (algorithm("fedcm", mix=1.0), algorithm("fedavg"), {}),
    (algorithm("mimelite", mix=1.0), algorithm("fedavg"), {}),
    (algorithm("fedgf", threshold=1e9), algorithm("fedsam"), {}),
    (algorithm("fedgf", threshold=1e9, rho=0.0), algorithm("fedavg"), {}),
    (algorithm("fedgf", share=0.0), algorithm("fedsam"), {}),
    (algorithm("fedgf", share=1.0), algorithm("fedgf", threshold=0.0), {}),
    (algorithm("fednsam", lookahead=0.0, rho=0.0), algorithm("fedavg"), {}),
    (algorithm("fednsam", rho=0.0), algorithm("fedavg_nesterov"), {}),
    (algorithm("fedacg", prox_w=0.0), algorithm("fedavg_nesterov"), {}),
    (algorithm("fedsam_nesterov", rho=0.0), algorithm("fedavg_nesterov"), {}),
    (algorithm("fednsam", form="A"), algorithm("fednsam"), {"local": {"weight_decay": 0.0}}),
    (algorithm("fednsam", lookahead=0.0), algorithm("fedlesam"), FULL),
    (algorithm("fednsam", lookahead=0.0), algorithm("fedlesam", direction="last_update"), {}),
    (algorithm("fednsam_minus_nesterov", reading="ii"), algorithm("fedlesam", direction="last_update"), {}),
    (algorithm("fedlesam", direction="last_update"), algorithm("fedlesam"), FULL),
    (algorithm("fednsam_minus_nesterov", rho=0.0), algorithm("fedavgm"), {}),
    (algorithm("fednsam_s", lookahead=0.0, rho=0.0), algorithm("scaffold"), {}),
    (algorithm("fednsam_d", lookahead=0.0, rho=0.0), algorithm("feddyn"), {}),
    (algorithm("fedavgm", server_momentum=0.0), algorithm("fedavg"), {}),
    (algorithm("fedacg", lookahead=0.0, prox_w=0.0), algorithm("fedavg"), {}),
    (algorithm("fedacg", lookahead=0.0, prox_w=0.25), algorithm("fedprox", prox=0.5), {}),
    (algorithm("fedprox", prox=0.0), algorithm("fedavg"), {}),
    (algorithm("fedadam", beta1=0.0, beta2=1.0, tau=0.05, server_lr=0.1), algorithm("fedavg"), {}),
    (algorithm("fedntd", distill=0.0), algorithm("fedavg"), {}),
    (algorithm("fedrobust", ascent_lr=0.0), algorithm("fedavg"), {}),
    (algorithm("fedgmt", distill=0.0), chain({"dual": {"weight": 0.3, "prox": False}}), {}),
    (algorithm("fedgmt_v2", distill=0.0), algorithm("fedgmt", distill=0.0), {}),
    (algorithm("fedgmt_v2"), algorithm("fedgmt"), FULL),
    (algorithm("fedgmt_v2", first_teacher="initial"), algorithm("fedgmt"), FULL),
    (algorithm("fedgmt_v2", elapsed=True), algorithm("fedgmt"), FULL),
    (algorithm("scaffold", control="gradients"), algorithm("scaffold"), {"local": PLAIN | {"batch_size": 4}}),
    (chain({"trajectory": {"distill": 0.0}}), algorithm("fedavg"), {}),
    (chain({"sam": {"rho": 0.3}}, {"scaffold": {}}), algorithm("fedgamma"), {}),
    (chain(), algorithm("fedavg"), {}),
]


def describe(settings: Settings) -> str:
    changed = {k: v for k, v in settings.items() if k != "name" and v != CASES["fedavg"].hyper.get(k)}
    hyper = CASES[settings["name"]].hyper if "name" in settings else {}
    text = ",".join(f"{k}={v}" for k, v in changed.items() if hyper.get(k) != v)
    return f"{settings.get('name', 'chain')}({text})"


class TestReductions:
    @pytest.mark.parametrize(
        ("special", "known", "changes"), REDUCTIONS, ids=[f"{describe(a)}-is-{describe(b)}" for a, b, _ in REDUCTIONS]
    )
    def test_a_special_case_equals_the_other_algorithm(
        self, harness: TrainingHarness, special: Settings, known: Settings, changes: Settings
    ) -> None:
        first_run, other = (harness.run(harness.config(settings, **changes)) for settings in (special, known))
        np.testing.assert_allclose(first_run.x, other.x, **CLOSE)

    def test_fedasam_with_a_scale_of_1_equals_fedsam(self, harness: TrainingHarness) -> None:
        original = Experiment.round

        def unscaled(self: Experiment, *where: Any) -> Round:
            r = original(self, *where)
            return dataclasses.replace(r, get_weight_mask=lambda: torch.zeros_like(r.is_weight))

        with mock.patch.object(Experiment, "round", unscaled):
            special = run(harness.config(algorithm("fedasam")), harness.folder / "unscaled")
        np.testing.assert_allclose(special.x, harness.run(harness.config(algorithm("fedsam"))).x, **CLOSE)

    def test_fednsam_forms_differ_with_weight_decay(self, harness: TrainingHarness) -> None:
        first_run, other = (harness.run(harness.config(algorithm("fednsam", form=form))) for form in "AB")
        assert np.abs(first_run.x - other.x).max() > 1e-3

    def test_fedgmt_without_distillation_is_not_feddyn(self, harness: TrainingHarness) -> None:
        first_run = harness.run(harness.config(algorithm("fedgmt", distill=0.0)))
        assert np.abs(first_run.x - harness.run(harness.config(algorithm("feddyn"))).x).max() > 1e-3

    @pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedntd", "fedsam", "fedgamma"])
    def test_equal_clients_with_one_step_equal_central_training(self, harness: TrainingHarness, name: str) -> None:
        """Gradient descent or SAM on the one data set that all clients have."""
        x, y = harness.x[:11], harness.y[:11]
        path = harness.folder / "equal.npz"
        np.savez(
            path, x_train=np.tile(x, (3, 1)), y_train=np.tile(y, 3), x_test=x, y_test=y, client=np.arange(33) // 11
        )
        clients = {"total": 3, "schedule": [[0, 1, 2]] * 4}
        config = harness.config(algorithm(name), data={"path": str(path)}, clients=clients, local=PLAIN | {"epochs": 1})
        w, rho = harness.initial_vector, 0.3 if name in ("fedsam", "fedgamma") else 0.0
        for t in range(4):
            g = reference.ce_gradient(w, x, y, LAYERS)
            w = w - 0.2 * 0.9**t * reference.ce_gradient(w + rho * reference.u(g), x, y, LAYERS)
        np.testing.assert_allclose(harness.run(config).x, w, **CLOSE)


class TestTeachers:
    @pytest.mark.parametrize("name", ["fedgmt", "fedgmt_v2", "fedntd"])
    def test_a_teacher_equal_to_the_student_has_no_effect(self, harness: TrainingHarness, name: str) -> None:
        def after(steps: int, distill: float) -> np.ndarray:
            local = PLAIN | {"epochs": steps}
            return harness.run(harness.config(algorithm(name, distill=distill), rounds=1, local=local)).x

        np.testing.assert_allclose(after(1, 5.0), after(1, 0.0), **CLOSE)
        assert np.abs(after(2, 5.0) - after(2, 0.0)).max() > 1e-3

    @pytest.mark.parametrize("first", ["received", "initial"])
    def test_client_teachers_follow_the_servers_under_full_participation(
        self, harness: TrainingHarness, first: str
    ) -> None:
        server = harness.run_with_state(algorithm("fedgmt"), **FULL).server("ema")
        client_values = harness.run_with_state(algorithm("fedgmt_v2", first_teacher=first), **FULL).clients("e_i")
        used = np.concatenate([harness.initial_vector[None], server[:-1]])
        np.testing.assert_allclose(client_values, np.repeat(used[:, None], len(SIZES), axis=1), **CLOSE)

    def test_the_servers_teacher_is_the_average_of_all_models(self, harness: TrainingHarness) -> None:
        result = harness.run_with_state(algorithm("fedgmt"))
        x, alpha = np.concatenate([harness.initial_vector[None], result.server("x")]), 0.7
        for end, ema in enumerate(result.server("ema"), start=1):
            past = sum(alpha ** (end - i) * (x[i] - x[i + 1]) for i in range(end))
            np.testing.assert_allclose(ema, x[end] + past, **CLOSE)


def algorithms_with(variable: str) -> list[str]:
    return [name for name in algorithms if variable in build({"name": name}).client]


class TestState:
    @pytest.mark.parametrize("name", algorithms_with("h_i"))
    def test_the_servers_dual_is_the_mean_over_all_clients(self, harness: TrainingHarness, name: str) -> None:
        result = harness.run_with_state(algorithm(name))
        np.testing.assert_allclose(result.server("h"), result.clients("h_i", unset=0.0).mean(axis=1), **CLOSE)

    @pytest.mark.parametrize("name", algorithms_with("c_i"))
    @pytest.mark.parametrize("control", ["option2", "gradients"])
    def test_the_servers_control_is_the_mean_over_all_clients(
        self, harness: TrainingHarness, name: str, control: str
    ) -> None:
        result = harness.run_with_state(algorithm(name, control=control))
        np.testing.assert_allclose(result.server("c"), result.clients("c_i", unset=0.0).mean(axis=1), **CLOSE)

    @pytest.mark.parametrize("name", ["scaffold", "fedgamma", "fedlesam_s"])
    def test_with_full_participation_the_control_is_the_mean_step(self, harness: TrainingHarness, name: str) -> None:
        local, server = {"batch_size": "full"}, {"weighting": "uniform"}
        result = harness.run_with_state(algorithm(name), **FULL, local=local, server=server)
        x = np.concatenate([harness.initial_vector[None], result.server("x")])
        eta = 0.2 * 0.9 ** np.arange(len(x) - 1)
        np.testing.assert_allclose(result.server("c"), -np.diff(x, axis=0) / (2 * eta[:, None]), **CLOSE)

    def test_feddyn_equals_its_multiplier_form(self, harness: TrainingHarness) -> None:
        config = harness.config(algorithm("feddyn"), local=PLAIN, server={"weighting": "uniform"})
        x, beta = harness.initial_vector, 0.3
        multipliers = np.zeros((len(SIZES), x.size))
        for t, cohort in enumerate(SCHEDULE):
            ends = []
            for i in cohort:
                w = x
                for _ in range(2):
                    w = w - 0.2 * 0.9**t * (harness.gradient(i, w) - multipliers[i] + beta * (w - x))
                multipliers[i] = multipliers[i] - beta * (w - x)
                ends.append(w)
            x = np.mean(ends, axis=0) - multipliers.mean(axis=0) / beta
        np.testing.assert_allclose(harness.run(config).x, x, **CLOSE)

    @pytest.mark.parametrize("name", ["feddyn", "scaffold"])
    def test_the_limit_is_stationary_for_the_uniform_mean_of_the_losses(
        self, harness: TrainingHarness, name: str
    ) -> None:
        """Also with sample weights, because c and h are uniform means."""
        linear = {"name": "mlp", "hidden": [], "init": str(harness.write_init(np.zeros(FEATURES * 3 + 3), []))}
        local = PLAIN | {"epochs": 5, "lr": 0.3, "lr_decay": 1.0}
        long_run = {"rounds": 110, "clients": {"schedule": FULL_PARTICIPATION[:1] * 110}, "evaluate": {"every": 110}}
        settings = algorithm(name, dual=0.5) if name == "feddyn" else algorithm(name)
        result = harness.run_with_state(settings, model=linear, local=local, **long_run)
        gradients = np.array([harness.gradient(i, result.x, hidden=[]) for i in range(len(SIZES))])
        close = {"rtol": 0, "atol": 1e-5}
        np.testing.assert_allclose(gradients.mean(axis=0), 0, **close)
        assert np.abs(np.average(gradients, axis=0, weights=SIZES)).max() > 0.05
        if name == "feddyn":
            np.testing.assert_allclose(result.server("h")[-1], 0, **close)
            np.testing.assert_allclose(0.5 * result.clients("h_i")[-1], -gradients, **close)
        else:
            np.testing.assert_allclose(result.clients("c_i")[-1], gradients, **close)

    @pytest.mark.parametrize(
        "name",
        [
            "fedavgm",
            "fedacg",
            "fedavg_nesterov",
            "fedsam_nesterov",
            "fednsam",
            "fednsam_minus_nesterov",
            "fednsam_s",
        ],
    )
    def test_the_model_moves_by_the_momentum(self, harness: TrainingHarness, name: str) -> None:
        result = harness.run_with_state(algorithm(name))
        x = np.concatenate([harness.initial_vector[None], result.server("x")])
        np.testing.assert_allclose(np.diff(x, axis=0), result.server("m"), **CLOSE)

    @pytest.mark.parametrize("name", ["fedacg", "fedavg_nesterov", "fedsam_nesterov", "fednsam", "fednsam_s"])
    def test_a_lookahead_ends_at_the_mean_of_the_local_models(self, harness: TrainingHarness, name: str) -> None:
        with record_client_models() as trainings:
            result = run(harness.config(algorithm(name)), harness.folder / f"recorded-{name}")
        ends = {client: result.remove_padding(end) for index, client, _, end in trainings if index == len(SCHEDULE) - 1}
        mean = np.average(list(ends.values()), axis=0, weights=[SIZES[client] for client in ends])
        np.testing.assert_allclose(result.x, mean, **CLOSE)

    def test_fedcm_with_one_step_averages_gradients(self, harness: TrainingHarness) -> None:
        result = harness.run_with_state(algorithm("fedcm"), **FULL, local=PLAIN | {"epochs": 1})
        x = [harness.initial_vector, *result.server("x")]
        direction = np.zeros_like(harness.initial_vector)
        for k, after in enumerate(result.server("direction")):
            gradients = [harness.gradient(i, x[k]) for i in range(len(SIZES))]
            direction = 0.4 * np.average(gradients, axis=0, weights=SIZES) + 0.6 * direction
            np.testing.assert_allclose(after, direction, **CLOSE)

    def test_fedsmoo_keeps_its_global_perturbation_at_the_radius(self, harness: TrainingHarness) -> None:
        norms = np.linalg.norm(harness.run_with_state(algorithm("fedsmoo")).server("s"), axis=1)
        np.testing.assert_allclose(norms, 0.3, **CLOSE)

    @pytest.mark.parametrize(("threshold", "expected"), [(0.0, [1, 1, 1, 1]), (1e9, [0, 0, 0, 0])])
    def test_fedgf_at_extreme_thresholds(self, harness: TrainingHarness, threshold: float, expected: list[int]) -> None:
        assert harness.run_with_state(algorithm("fedgf", threshold=threshold)).server("share").tolist() == expected

    def test_fedgf_averages_the_last_indicators(self, harness: TrainingHarness) -> None:
        """Over all indicators so far, up to the window."""
        shares = harness.run_with_state(algorithm("fedgf")).server("share")
        window = np.sort(harness.run_with_state(algorithm("fedgf")).server("window"), axis=1)
        for k, c in enumerate(shares):
            values = [v for v in window[k] if not np.isnan(v)]
            assert len(values) == min(3, k + 1)
            assert set(values) <= {0.0, 1.0}
            assert c == pytest.approx(np.mean(values))
        assert 0 < shares[-1] < 1

    def test_fedgf_at_c_1_takes_every_gradient_at_the_perturbed_global_model(self, harness: TrainingHarness) -> None:
        result = harness.run_with_state(algorithm("fedgf", threshold=0.0), **FULL, local=PLAIN)
        x = [harness.initial_vector, *result.server("x")]
        for k in range(1, len(SCHEDULE)):
            point = x[k] + 0.25 * reference.u(x[k - 1] - x[k])
            g = reference.ce_gradient(point, harness.x, harness.y, LAYERS)
            np.testing.assert_allclose(x[k + 1], x[k] - 2 * 0.2 * 0.9**k * g, **CLOSE)


class TestClientOrder:
    """No state of one client may leak into the next."""

    @pytest.mark.parametrize("name", examples(algorithms, representatives()))
    def test_a_reversed_schedule_gives_the_same_bits(self, harness: TrainingHarness, name: str) -> None:
        reversed_schedule = {"clients": {"schedule": [cohort[::-1] for cohort in SCHEDULE]}}
        assert (
            harness.run(harness.config(algorithm(name), **reversed_schedule)).sha
            == harness.run(harness.config(algorithm(name))).sha
        )

    @pytest.mark.parametrize("name", examples(algorithms, representatives()))
    def test_renumbered_clients_give_the_same_bits(self, harness: TrainingHarness, name: str) -> None:
        """With full batches there is no randomness; the clients run in another order."""
        last = len(SIZES) - 1
        other = {
            "data": {"path": str(harness.write_data("renumbered", harness.x, last - harness.client))},
            "clients": {"schedule": [[last - client for client in cohort] for cohort in SCHEDULE]},
        }
        full = {"local": {"batch_size": "full"}}
        first_run, two = (harness.run(harness.config(algorithm(name), **full, **changes)) for changes in ({}, other))
        assert first_run.sha == two.sha


class TestBatchNorm:
    """Only the first gradient of a batch updates running statistics; teachers and full gradients never do."""

    MODEL = {"name": "cnn", "norm": "batch"}

    @pytest.mark.parametrize("name", examples(algorithms, representatives()))
    def test_each_batch_updates_the_statistics_once(self, harness: TrainingHarness, name: str) -> None:
        once = {"rounds": 2, "clients": {"schedule": [[4], [4]]}, "local": {"epochs": 1}, "model": self.MODEL}
        buffers = harness.run(harness.image_config(algorithm(name), **once)).buffers
        assert {int(v) for n, v in buffers.items() if n.endswith("num_batches_tracked")} == {2 * 3}

    @pytest.mark.parametrize("name", examples(algorithms, representatives()))
    def test_a_first_step_gives_the_statistics_of_fedavg(self, harness: TrainingHarness, name: str) -> None:
        """In the first step every algorithm first takes the gradient at the model itself."""
        local = {"epochs": 1, "batch_size": "full"}
        once = {"rounds": 1, "clients": {"schedule": [[3]]}, "local": local, "model": self.MODEL}
        actual, plain = (harness.run(harness.image_config(algorithm(n), **once)).buffers for n in (name, "fedavg"))
        for key, value in plain.items():
            assert torch.equal(actual[key], value), key


class RecordingOracle:
    """A gradient oracle that records the points of its calls."""

    def __init__(self, size: int) -> None:
        self.points: list[Tensor] = []
        self.diagonal = torch.linspace(0.5, 2.0, size, dtype=torch.float64)

    def __call__(self, w: Tensor) -> Tensor:
        self.points.append(w.clone())
        return self.diagonal * w


class LocalStep:
    """A chain on a short vector: one client's first local step, with chosen variables."""

    def __init__(self, *chosen: Part, index: int = 1) -> None:
        torch.manual_seed(0)
        self.x, self.w = torch.randn(2, 6, dtype=torch.float64)
        self.algorithm = Algorithm(*chosen)
        mask = torch.tensor([True, True, True, True, False, False])
        self.round = Round(
            index,
            0.1,
            2,
            4,
            get_initial=lambda: self.x,
            get_weight_mask=lambda: mask,
            get_parameter_mask=lambda: mask,
            parameter_count=6,
            channels=1,
            steps=2,
            samples=5,
        )
        self.s = self.algorithm.publish(self.algorithm.server_init(self.x), self.round)
        self.i = self.algorithm.client_init(self.s, self.round)
        self.oracle = RecordingOracle(6)

    def step(self, oracle: Any = None, **variables: Tensor) -> Tensor:
        for name, value in variables.items():
            setattr(self.i if name in self.algorithm.client else self.s, name, value)
        self.algorithm.begin(self.s, self.i, self.round, lambda: torch.zeros(6))
        return self.algorithm.oracle(oracle or self.oracle, self.s, self.i, self.round)(self.w.clone())

    @property
    def gradient(self) -> Tensor:
        return self.oracle.diagonal * self.w

    @property
    def shift(self) -> Tensor:
        """The offset of the last gradient's point from the iterate."""
        return self.oracle.points[-1] - self.w


def assert_along(shift: Tensor, direction: Tensor, norm: float) -> None:
    assert float(shift.norm()) == pytest.approx(norm, abs=1e-12)
    assert float(torch.cosine_similarity(shift, direction, dim=0)) == pytest.approx(1.0, abs=1e-12)


class TestPerturbations:
    RHO = 0.37

    @pytest.mark.parametrize("part", [Sam(rho=RHO), MixedSam(rho=RHO), Interpolate(rho=RHO, rho_global=0.9)])
    def test_a_local_ascent_goes_up_the_gradient(self, part: Part) -> None:
        local_step = LocalStep(part)
        local_step.step()
        assert_along(local_step.shift, local_step.gradient, self.RHO)
        assert torch.equal(local_step.oracle.points[0], local_step.w)

    def test_the_direction_is_the_gradient_at_the_perturbed_point(self) -> None:
        local_step = LocalStep(Sam(rho=self.RHO))
        torch.testing.assert_close(local_step.step(), local_step.oracle.diagonal * local_step.oracle.points[-1])

    def test_a_zero_gradient_perturbs_nothing(self) -> None:
        local_step = LocalStep(Sam(rho=self.RHO))
        local_step.w.zero_()
        assert torch.equal(local_step.step(), local_step.w)

    def test_fedlesam_goes_back_to_the_old_model(self) -> None:
        local_step = LocalStep(Lesam(rho=self.RHO))
        old = torch.randn(6, dtype=torch.float64)
        local_step.step(old=old.clone())
        assert_along(local_step.shift, old - local_step.x, self.RHO)
        assert len(local_step.oracle.points) == 1

    def test_fedlesam_remembers_the_model_received_not_the_one_trained(self) -> None:
        local_step = LocalStep(Lesam(rho=self.RHO))
        local_step.algorithm.finish(local_step.w - local_step.x, local_step.s, local_step.i, local_step.round)
        assert torch.equal(local_step.i.old, local_step.x)

    def test_fednsam_goes_against_the_momentum(self) -> None:
        local_step, m = (
            LocalStep(MomentumPerturb(rho=self.RHO), parts["nesterov"]()),
            torch.randn(6, dtype=torch.float64),
        )
        local_step.step(m=m.clone())
        assert_along(local_step.shift, -m, self.RHO)
        assert len(local_step.oracle.points) == 1

    @pytest.mark.parametrize("part", [Lesam(rho=RHO), MomentumPerturb(rho=RHO)])
    def test_in_the_first_round_there_is_no_perturbation(self, part: Part) -> None:
        local_step = LocalStep(part, *([parts["nesterov"]()] if "m" in part.published else []), index=0)
        local_step.step()
        assert torch.equal(local_step.oracle.points[0], local_step.w)

    def test_fedsmoo_goes_up_the_corrected_gradient_in_every_step(self) -> None:
        local_step = LocalStep(CorrectedSam(rho=self.RHO))
        mu, s = torch.randn(2, 6, dtype=torch.float64)
        local_step.step(mu_i=mu.clone(), s=s.clone())
        first = local_step.shift
        assert_along(first, local_step.gradient - mu - s, self.RHO)
        torch.testing.assert_close(local_step.i.mu_i, mu + first - s)
        local_step.step()
        assert_along(local_step.shift, local_step.gradient - (mu + first - s) - s, self.RHO)

    def test_fedasam_goes_up_in_its_own_norm(self) -> None:
        local_step = LocalStep(Asam(rho=self.RHO, asam_eta=0.2))
        local_step.step()
        scale = torch.where(local_step.round.is_weight, local_step.w.abs() + 0.2, 1.0)
        assert_along(local_step.shift / scale, scale * local_step.gradient, self.RHO)

    @pytest.mark.parametrize("c", [0.25, 0.5])
    def test_fedgf_lies_between_the_two_perturbed_points(self, c: float) -> None:
        local_step = LocalStep(Interpolate(rho=self.RHO, rho_global=0.2))
        perturbed = torch.randn(6, dtype=torch.float64)
        local_step.step(perturbed=perturbed.clone(), share=torch.tensor(c))
        local = local_step.w + self.RHO * local_step.gradient / local_step.gradient.norm()
        torch.testing.assert_close(local_step.oracle.points[-1], c * perturbed + (1 - c) * local)

    def test_fedgf_publishes_a_point_uphill_of_the_model(self) -> None:
        part = Interpolate(rho=self.RHO, rho_global=0.2)
        local_step, previous = LocalStep(part), torch.randn(6, dtype=torch.float64)
        s = local_step.algorithm.server_init(local_step.x)
        s.previous = previous.clone()
        published = local_step.algorithm.publish(s, local_step.round)
        assert_along(published.perturbed - local_step.x, previous - local_step.x, 0.2)


class TestAddedTerms:
    """The gradient of every added term equals finite differences of its potential."""

    @pytest.mark.parametrize(
        ("part", "quadratic", "linear"),
        [(Prox(weight=0.4), 0.4, 0.0), (Dual(weight=0.4), 0.4, 0.4), (Dual(weight=0.4, prox=False), 0.0, 0.4)],
        ids=["prox", "dual", "dual-without-prox"],
    )
    def test_proximal_and_dual_terms_have_the_gradient_of_their_potential(
        self, part: Part, quadratic: float, linear: float
    ) -> None:
        local_step, h = LocalStep(part), torch.randn(6, dtype=torch.float64)

        def potential(w: Tensor) -> Tensor:
            return quadratic / 2 * (w - local_step.x).square().sum() + linear * h @ w

        variables = {"h_i": h.clone()} if linear else {}
        torch.testing.assert_close(local_step.step(torch.zeros_like, **variables), differences(potential, local_step.w))

    @pytest.mark.parametrize("name", ["nottrue", "trajectory", "clienttrajectory"])
    def test_distillation_has_the_gradient_of_its_potential(self, name: str) -> None:
        sizes, rng = [3, 4], torch.Generator().manual_seed(1)
        x, student, other = torch.randn(3, 16, dtype=torch.float64, generator=rng)
        inputs, labels = torch.randn(5, 3, dtype=torch.float64, generator=rng), torch.tensor([0, 3, 1, 2, 3])
        gamma, tau = 1.5, 2.0
        part: NotTrue | Teacher = parts[name](distill=gamma, temperature=tau)
        s, i = Vars(x=x, ema=other), Vars(e_i=other.clone(), last=torch.zeros(()))
        r = Round(
            1,
            0.1,
            2,
            4,
            get_initial=lambda: x,
            get_weight_mask=lambda: x > 0,
            get_parameter_mask=lambda: x > 0,
            parameter_count=16,
            channels=1,
        )
        part.begin(s, i, r, lambda: x)
        average = 0.5 * other + 0.5 * x
        teacher = {"nottrue": x, "trajectory": other, "clienttrajectory": average}[name]
        assert not isinstance(part, ClientTrajectory) or torch.allclose(i.e_i, average)

        def potential(w: Tensor) -> Tensor:
            teacher_logits, student_logits = (reference.logits(v, inputs, sizes) for v in (teacher, w))
            if name == "nottrue":
                teacher_logits, student_logits = (
                    reference.without_label(v, labels) for v in (teacher_logits, student_logits)
                )
            return gamma * tau**2 * reference.kl(teacher_logits, student_logits, tau)

        w = student.clone().requires_grad_()
        logits = reference.logits(w, inputs, sizes)
        term = part.penalty(
            ModelOutput(logits, {}),
            (inputs, labels),
            s,
            i,
            lambda v, a: ModelOutput(reference.logits(v, a, sizes).detach(), {}),
        )
        assert float(term.detach()) == pytest.approx(float(potential(student)))
        (gradient,) = torch.autograd.grad(term, w)
        torch.testing.assert_close(gradient, differences(potential, student))


def differences(f: Any, w: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences."""
    sides = [[f(w + sign * step * unit) for sign in (1, -1)] for unit in torch.eye(len(w), dtype=w.dtype)]
    return torch.stack([(up - down) / (2 * step) for up, down in sides]).detach()


def test_vectors_and_parameters_map_one_to_one() -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 2), torch.nn.Linear(5, 7), torch.nn.LayerNorm(7))
    before = [p.detach().clone() for p in module.parameters()]
    flat = FlatModel(module)
    for view, value in zip(flat.views(flat.vector), before, strict=True):
        assert torch.equal(view, value)
    other = torch.zeros_like(flat.vector)
    for k, view in enumerate(flat.views(other)):
        view.fill_(k + 1)
    flat.bind(other)
    assert [set(p.flatten().tolist()) for p in module.parameters()] == [{float(k + 1)} for k in range(len(before))]


class TestChains:
    def test_a_chain_in_yaml_equals_the_rule_composed_by_hand(self, harness: TrainingHarness, tmp_path: Path) -> None:
        """SAM's point, SCAFFOLD's correction and Nesterov's server, a combination without a paper."""
        algorithm_yaml = "algorithm: {parts: [{sam: {rho: 0.05}}, {scaffold: {}}, {nesterov: {lookahead: 0.85}}]}\n"
        rest = harness.config({}, local=PLAIN)
        del rest["algorithm"]
        path = tmp_path / "chain.yaml"
        path.write_text(yaml.safe_dump(rest) + algorithm_yaml)
        assert main([str(path), f"run.dir={tmp_path / 'run'}"]) == 0
        m = c = np.zeros_like(harness.initial_vector)
        x, client_values = harness.initial_vector, np.zeros((len(SIZES), harness.initial_vector.size))
        for t, cohort in enumerate(SCHEDULE):
            z, eta, deltas, changes = x + 0.85 * m, 0.2 * 0.9**t, [], []
            for i in cohort:
                w = z
                for _ in range(2):
                    q = w + 0.05 * reference.u(harness.gradient(i, w))
                    w = w - eta * (harness.gradient(i, q) - client_values[i] + c)
                new = client_values[i] - c + (z - w) / (2 * eta)
                changes.append(new - client_values[i])
                deltas.append(w - z)
                client_values[i] = new
            m = 0.85 * m + np.average(deltas, axis=0, weights=[SIZES[i] for i in cohort])
            x, c = x + m, c + sum(changes) / len(SIZES)
        config = {**rest, "algorithm": read_yaml(path)["algorithm"]}
        np.testing.assert_allclose(Run(config, tmp_path / "run").x, x, **CLOSE)

    def test_the_parts_of_an_algorithm_give_its_bits(self, harness: TrainingHarness) -> None:
        by_parts = harness.run(harness.config(chain({"sam": {"rho": 0.3}}, {"scaffold": {}})))
        assert by_parts.sha == harness.run(harness.config(algorithm("fedgamma"))).sha

    @pytest.mark.parametrize(
        "chosen",
        [
            ["asam", "scaffold"],
            ["asam", "dual"],
            ["interpolate", "dual"],
            ["nottrue", "dual"],
            ["lesam", "trajectory", "dual"],
            ["momentumperturb", "nesterov", "clienttrajectory", "dual"],
            ["sam", "affine", "mime", "servermomentum"],
        ],
        ids=" ".join,
    )
    def test_combinations_without_a_paper_train(self, harness: TrainingHarness, chosen: list[str]) -> None:
        result = harness.run(harness.config(chain(*({name: {}} for name in chosen))))
        assert np.isfinite(result.x).all()
        without_the_first = harness.run(harness.config(chain(*({name: {}} for name in chosen[1:]))))
        assert result.sha != without_the_first.sha

    @pytest.mark.parametrize(
        ("chosen", "reason"),
        [
            (["dual", "nesterov"], "dual must come after nesterov, which sets the server optimiser"),
            (["dual", "servermomentum"], "dual must come after servermomentum"),
            (["sam", "lesam"], "sam and lesam exclude each other: both set the evaluation point"),
            (["nottrue", "trajectory"], "nottrue and trajectory exclude each other: both set the teacher"),
            (["clientmomentum", "mime"], "exclude each other: both set the global direction"),
            (["scaffold", "scaffold"], "both keep a variable named 'c'"),
            (["nesterov", "serveradam"], "exclude each other: both set the server optimiser"),
            (["momentumperturb"], "momentumperturb needs the server variable 'm', which no part keeps"),
            (["scafold"], "unknown part 'scafold'; did you mean 'scaffold'?"),
        ],
        ids=" ".join,
    )
    def test_incompatible_parts_are_refused_with_the_reason(
        self, harness: TrainingHarness, chosen: list[str], reason: str
    ) -> None:
        with pytest.raises(ConfigError) as error:
            configuration.validate(harness.config(chain(*({name: {}} for name in chosen))))
        assert reason in str(error.value)


class TestSettings:
    @pytest.mark.parametrize("name", [*algorithms])
    def test_every_setting_is_checked_and_named(self, harness: TrainingHarness, name: str) -> None:
        for key in algorithms.schema(name).model_fields:
            with pytest.raises(ConfigError, match=rf"algorithm\.{key}\b.*'wrong'"):
                configuration.validate(harness.config(algorithm(name, **{key: "wrong"})))

    @pytest.mark.parametrize("name", [*algorithms])
    def test_numbers_out_of_range_are_refused(self, harness: TrainingHarness, name: str) -> None:
        for key, field in algorithms.schema(name).model_fields.items():
            if field.annotation in (int, float):
                config = harness.config(algorithm(name, **{key: field.annotation(-1)}))
                with pytest.raises(ConfigError, match=rf"algorithm\.{key}\b.*-1"):
                    configuration.validate(config)

    def test_an_unknown_setting_is_named_with_the_nearest(
        self, harness: TrainingHarness, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = harness.folder / "misspelt.yaml"
        path.write_text("algorithm: {name: fedsam, rhoo: 0.1}\n")
        assert main([str(path)]) == 2
        message = capsys.readouterr().err
        assert "algorithm.rhoo" in message
        assert "did you mean 'rho'?" in message
        assert str(path) in message

    def test_an_unknown_algorithm_is_named_with_the_nearest(self, harness: TrainingHarness) -> None:
        with pytest.raises(ConfigError, match=r"unknown algorithm 'fedsamm'; did you mean 'fedsam'\?"):
            configuration.validate(harness.config({"name": "fedsamm"}))

    def test_a_missing_setting_is_named(self, harness: TrainingHarness) -> None:
        class RequiresSetting(Part):
            def __init__(self, *, strength: float) -> None: ...

        with (
            mock.patch.dict(parts._builders, {"requires_setting": RequiresSetting}),
            pytest.raises(ConfigError, match=r"missing key algorithm\.parts\.0\.requires_setting\.strength"),
        ):
            configuration.validate(harness.config(chain({"requires_setting": {}})))

    def test_a_setting_of_a_part_is_named_by_its_position(self, harness: TrainingHarness) -> None:
        with pytest.raises(ConfigError, match=r"algorithm\.parts\.1\.nesterov\.lookahead\b.*1\.5"):
            configuration.validate(harness.config(chain({"sam": {}}, {"nesterov": {"lookahead": 1.5}})))
