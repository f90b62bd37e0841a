"""What must hold between algorithms, within their state and for every part: a wrong sign or a leak breaks one of these.

The tests over all algorithms run for whatever is registered; a new algorithm joins with its row in `CASES`.
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
from fl_dist.algorithms.fedasam import Asam
from fl_dist.algorithms.feddyn import Dual
from fl_dist.algorithms.fedgf import Interpolate
from fl_dist.algorithms.fedgmt import ClientTrajectory, Trajectory
from fl_dist.algorithms.fedlesam import Lesam
from fl_dist.algorithms.fednsam import MomentumPerturb
from fl_dist.algorithms.fedntd import NotTrue
from fl_dist.algorithms.fedprox import Prox
from fl_dist.algorithms.fedsam import Sam
from fl_dist.algorithms.fedsmoo import CorrectedSam
from fl_dist.algorithms.fedspeed import MixedSam
from fl_dist.common.reading import read_yaml
from fl_dist.config import ConfigError
from fl_dist.core import Algorithm, Part, Round, Seen, Vars
from fl_dist.engine.flat import Flat
from fl_dist.engine.world import World
from fl_dist.main import main
from tests.support import reference
from tests.support.harness import (
    CASES,
    CLASSES,
    EVERYONE,
    FEATURES,
    HIDDEN,
    SCHEDULE,
    SIZES,
    Lab,
    Run,
    Settings,
    algorithm,
    representatives,
    run,
    watching_clients,
)
from tests.support.marks import examples

NEAR = {"rtol": 0, "atol": 1e-10}
LAYERS = [FEATURES, *HIDDEN, CLASSES]
ALL = {"clients": {"schedule": EVERYONE}}
PLAIN = {"batch_size": "full", "momentum": 0.0, "weight_decay": 0.0, "clip": None}
"""Full batches and nothing but gradient steps."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


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
    (algorithm("fednsam", lookahead=0.0), algorithm("fedlesam"), ALL),
    (algorithm("fednsam", lookahead=0.0), algorithm("fedlesam", direction="last_update"), {}),
    (algorithm("fednsam_minus_nesterov", reading="ii"), algorithm("fedlesam", direction="last_update"), {}),
    (algorithm("fedlesam", direction="last_update"), algorithm("fedlesam"), ALL),
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
    (algorithm("fedgmt_v2"), algorithm("fedgmt"), ALL),
    (algorithm("fedgmt_v2", first_teacher="initial"), algorithm("fedgmt"), ALL),
    (algorithm("fedgmt_v2", elapsed=True), algorithm("fedgmt"), ALL),
    (algorithm("scaffold", control="gradients"), algorithm("scaffold"), {"local": PLAIN | {"batch_size": 4}}),
    (chain({"trajectory": {"distill": 0.0}}), algorithm("fedavg"), {}),
    (chain({"sam": {"rho": 0.3}}, {"scaffold": {}}), algorithm("fedgamma"), {}),
    (chain(), algorithm("fedavg"), {}),
]


def told(settings: Settings) -> str:
    changed = {k: v for k, v in settings.items() if k != "name" and v != CASES["fedavg"].hyper.get(k)}
    hyper = CASES[settings["name"]].hyper if "name" in settings else {}
    shown = ",".join(f"{k}={v}" for k, v in changed.items() if hyper.get(k) != v)
    return f"{settings.get('name', 'chain')}({shown})"


class TestReductions:
    @pytest.mark.parametrize(
        ("special", "known", "changes"), REDUCTIONS, ids=[f"{told(a)}-is-{told(b)}" for a, b, _ in REDUCTIONS]
    )
    def test_a_special_case_is_the_other_algorithm(
        self, lab: Lab, special: Settings, known: Settings, changes: Settings
    ) -> None:
        one, other = (lab.run(lab.config(settings, **changes)) for settings in (special, known))
        np.testing.assert_allclose(one.x, other.x, **NEAR)

    def test_fedasam_with_a_scale_of_1_is_fedsam(self, lab: Lab) -> None:
        original = World.round

        def unscaled(self: World, *where: Any) -> Round:
            r = original(self, *where)
            return dataclasses.replace(r, weights=lambda: torch.zeros_like(r.is_weight))

        with mock.patch.object(World, "round", unscaled):
            special = run(lab.config(algorithm("fedasam")), lab.folder / "unscaled")
        np.testing.assert_allclose(special.x, lab.run(lab.config(algorithm("fedsam"))).x, **NEAR)

    def test_fednsam_forms_differ_with_weight_decay(self, lab: Lab) -> None:
        one, other = (lab.run(lab.config(algorithm("fednsam", form=form))) for form in "AB")
        assert np.abs(one.x - other.x).max() > 1e-3

    def test_fedgmt_without_distillation_is_not_feddyn(self, lab: Lab) -> None:
        one = lab.run(lab.config(algorithm("fedgmt", distill=0.0)))
        assert np.abs(one.x - lab.run(lab.config(algorithm("feddyn"))).x).max() > 1e-3

    @pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedntd", "fedsam", "fedgamma"])
    def test_equal_clients_with_one_step_are_central_training(self, lab: Lab, name: str) -> None:
        """Gradient descent, or SAM, on the one data set that everybody has."""
        x, y = lab.x[:11], lab.y[:11]
        path = lab.folder / "equal.npz"
        np.savez(
            path, x_train=np.tile(x, (3, 1)), y_train=np.tile(y, 3), x_test=x, y_test=y, client=np.arange(33) // 11
        )
        clients = {"total": 3, "schedule": [[0, 1, 2]] * 4}
        config = lab.config(algorithm(name), data={"path": str(path)}, clients=clients, local=PLAIN | {"epochs": 1})
        w, rho = lab.start, 0.3 if name in ("fedsam", "fedgamma") else 0.0
        for t in range(4):
            g = reference.ce_gradient(w, x, y, LAYERS)
            w = w - 0.2 * 0.9**t * reference.ce_gradient(w + rho * reference.u(g), x, y, LAYERS)
        np.testing.assert_allclose(lab.run(config).x, w, **NEAR)


class TestTeachers:
    @pytest.mark.parametrize("name", ["fedgmt", "fedgmt_v2", "fedntd"])
    def test_a_teacher_equal_to_the_student_teaches_nothing(self, lab: Lab, name: str) -> None:
        def after(steps: int, distill: float) -> np.ndarray:
            local = PLAIN | {"epochs": steps}
            return lab.run(lab.config(algorithm(name, distill=distill), rounds=1, local=local)).x

        np.testing.assert_allclose(after(1, 5.0), after(1, 0.0), **NEAR)
        assert np.abs(after(2, 5.0) - after(2, 0.0)).max() > 1e-3

    @pytest.mark.parametrize("first", ["received", "initial"])
    def test_client_teachers_follow_the_servers_under_full_participation(self, lab: Lab, first: str) -> None:
        server = lab.saved(algorithm("fedgmt"), **ALL).server("ema")
        own = lab.saved(algorithm("fedgmt_v2", first_teacher=first), **ALL).clients("e_i")
        used = np.concatenate([lab.start[None], server[:-1]])
        np.testing.assert_allclose(own, np.repeat(used[:, None], len(SIZES), axis=1), **NEAR)

    def test_the_servers_teacher_is_the_average_of_all_models(self, lab: Lab) -> None:
        made = lab.saved(algorithm("fedgmt"))
        x, alpha = np.concatenate([lab.start[None], made.server("x")]), 0.7
        for end, ema in enumerate(made.server("ema"), start=1):
            past = sum(alpha ** (end - i) * (x[i] - x[i + 1]) for i in range(end))
            np.testing.assert_allclose(ema, x[end] + past, **NEAR)


def keeping(variable: str) -> list[str]:
    return [name for name in algorithms if variable in build({"name": name}).client]


class TestState:
    @pytest.mark.parametrize("name", keeping("h_i"))
    def test_the_servers_dual_is_the_mean_over_all_clients(self, lab: Lab, name: str) -> None:
        made = lab.saved(algorithm(name))
        np.testing.assert_allclose(made.server("h"), made.clients("h_i", unset=0.0).mean(axis=1), **NEAR)

    @pytest.mark.parametrize("name", keeping("c_i"))
    @pytest.mark.parametrize("control", ["option2", "gradients"])
    def test_the_servers_control_is_the_mean_over_all_clients(self, lab: Lab, name: str, control: str) -> None:
        made = lab.saved(algorithm(name, control=control))
        np.testing.assert_allclose(made.server("c"), made.clients("c_i", unset=0.0).mean(axis=1), **NEAR)

    @pytest.mark.parametrize("name", ["scaffold", "fedgamma", "fedlesam_s"])
    def test_with_everyone_the_control_is_the_mean_step(self, lab: Lab, name: str) -> None:
        local, server = {"batch_size": "full"}, {"weighting": "uniform"}
        made = lab.saved(algorithm(name), **ALL, local=local, server=server)
        x = np.concatenate([lab.start[None], made.server("x")])
        eta = 0.2 * 0.9 ** np.arange(len(x) - 1)
        np.testing.assert_allclose(made.server("c"), -np.diff(x, axis=0) / (2 * eta[:, None]), **NEAR)

    def test_feddyn_equals_its_multiplier_form(self, lab: Lab) -> None:
        config = lab.config(algorithm("feddyn"), local=PLAIN, server={"weighting": "uniform"})
        x, beta = lab.start, 0.3
        multipliers = np.zeros((len(SIZES), x.size))
        for t, cohort in enumerate(SCHEDULE):
            ends = []
            for i in cohort:
                w = x
                for _ in range(2):
                    w = w - 0.2 * 0.9**t * (lab.gradient(i, w) - multipliers[i] + beta * (w - x))
                multipliers[i] = multipliers[i] - beta * (w - x)
                ends.append(w)
            x = np.mean(ends, axis=0) - multipliers.mean(axis=0) / beta
        np.testing.assert_allclose(lab.run(config).x, x, **NEAR)

    @pytest.mark.parametrize("name", ["feddyn", "scaffold"])
    def test_the_limit_is_stationary_for_the_uniform_mean_of_the_losses(self, lab: Lab, name: str) -> None:
        """Also with sample weights, because c and h are uniform means."""
        linear = {"name": "mlp", "hidden": [], "init": str(lab.write_init(np.zeros(FEATURES * 3 + 3), []))}
        local = PLAIN | {"epochs": 5, "lr": 0.3, "lr_decay": 1.0}
        many = {"rounds": 110, "clients": {"schedule": EVERYONE[:1] * 110}, "evaluate": {"every": 110}}
        settings = algorithm(name, dual=0.5) if name == "feddyn" else algorithm(name)
        made = lab.saved(settings, model=linear, local=local, **many)
        gradients = np.array([lab.gradient(i, made.x, hidden=[]) for i in range(len(SIZES))])
        close = {"rtol": 0, "atol": 1e-5}
        np.testing.assert_allclose(gradients.mean(axis=0), 0, **close)
        assert np.abs(np.average(gradients, axis=0, weights=SIZES)).max() > 0.05
        if name == "feddyn":
            np.testing.assert_allclose(made.server("h")[-1], 0, **close)
            np.testing.assert_allclose(0.5 * made.clients("h_i")[-1], -gradients, **close)
        else:
            np.testing.assert_allclose(made.clients("c_i")[-1], gradients, **close)

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
    def test_the_model_moves_by_the_momentum(self, lab: Lab, name: str) -> None:
        made = lab.saved(algorithm(name))
        x = np.concatenate([lab.start[None], made.server("x")])
        np.testing.assert_allclose(np.diff(x, axis=0), made.server("m"), **NEAR)

    @pytest.mark.parametrize("name", ["fedacg", "fedavg_nesterov", "fedsam_nesterov", "fednsam", "fednsam_s"])
    def test_a_lookahead_ends_at_the_mean_of_the_local_models(self, lab: Lab, name: str) -> None:
        with watching_clients() as seen:
            made = run(lab.config(algorithm(name)), lab.folder / f"watched-{name}")
        ends = {client: made.plain(end) for index, client, _, end in seen if index == len(SCHEDULE) - 1}
        mean = np.average(list(ends.values()), axis=0, weights=[SIZES[client] for client in ends])
        np.testing.assert_allclose(made.x, mean, **NEAR)

    def test_fedcm_with_one_step_averages_gradients(self, lab: Lab) -> None:
        made = lab.saved(algorithm("fedcm"), **ALL, local=PLAIN | {"epochs": 1})
        x = [lab.start, *made.server("x")]
        direction = np.zeros_like(lab.start)
        for k, after in enumerate(made.server("direction")):
            gradients = [lab.gradient(i, x[k]) for i in range(len(SIZES))]
            direction = 0.4 * np.average(gradients, axis=0, weights=SIZES) + 0.6 * direction
            np.testing.assert_allclose(after, direction, **NEAR)

    def test_fedsmoo_keeps_its_global_perturbation_at_the_radius(self, lab: Lab) -> None:
        norms = np.linalg.norm(lab.saved(algorithm("fedsmoo")).server("s"), axis=1)
        np.testing.assert_allclose(norms, 0.3, **NEAR)

    @pytest.mark.parametrize(("threshold", "expected"), [(0.0, [1, 1, 1, 1]), (1e9, [0, 0, 0, 0])])
    def test_fedgf_at_extreme_thresholds(self, lab: Lab, threshold: float, expected: list[int]) -> None:
        assert lab.saved(algorithm("fedgf", threshold=threshold)).server("share").tolist() == expected

    def test_fedgf_averages_the_last_indicators(self, lab: Lab) -> None:
        """Over as many as there are, up to the window."""
        kept = lab.saved(algorithm("fedgf")).server("share")
        window = np.sort(lab.saved(algorithm("fedgf")).server("window"), axis=1)
        for k, c in enumerate(kept):
            values = [v for v in window[k] if not np.isnan(v)]
            assert len(values) == min(3, k + 1)
            assert set(values) <= {0.0, 1.0}
            assert c == pytest.approx(np.mean(values))
        assert 0 < kept[-1] < 1

    def test_fedgf_at_c_1_takes_every_gradient_at_the_perturbed_global_model(self, lab: Lab) -> None:
        made = lab.saved(algorithm("fedgf", threshold=0.0), **ALL, local=PLAIN)
        x = [lab.start, *made.server("x")]
        for k in range(1, len(SCHEDULE)):
            point = x[k] + 0.25 * reference.u(x[k - 1] - x[k])
            g = reference.ce_gradient(point, lab.x, lab.y, LAYERS)
            np.testing.assert_allclose(x[k + 1], x[k] - 2 * 0.2 * 0.9**k * g, **NEAR)


class TestClientOrder:
    """Nothing of one client may reach the next."""

    @pytest.mark.parametrize("name", examples(algorithms, representatives()))
    def test_a_reversed_schedule_gives_the_same_bits(self, lab: Lab, name: str) -> None:
        turned = {"clients": {"schedule": [cohort[::-1] for cohort in SCHEDULE]}}
        assert lab.run(lab.config(algorithm(name), **turned)).sha == lab.run(lab.config(algorithm(name))).sha

    @pytest.mark.parametrize("name", examples(algorithms, representatives()))
    def test_clients_under_other_numbers_give_the_same_bits(self, lab: Lab, name: str) -> None:
        """With full batches nothing is drawn, and the clients run in another order."""
        last = len(SIZES) - 1
        other = {
            "data": {"path": str(lab.write_data("renumbered", lab.x, last - lab.client))},
            "clients": {"schedule": [[last - client for client in cohort] for cohort in SCHEDULE]},
        }
        full = {"local": {"batch_size": "full"}}
        one, two = (lab.run(lab.config(algorithm(name), **full, **changes)) for changes in ({}, other))
        assert one.sha == two.sha


class TestBatchNorm:
    """Only the first gradient of a batch moves running statistics; teachers and full gradients never do."""

    MODEL = {"name": "cnn", "norm": "batch"}

    @pytest.mark.parametrize("name", examples(algorithms, representatives()))
    def test_each_batch_counts_once(self, lab: Lab, name: str) -> None:
        once = {"rounds": 2, "clients": {"schedule": [[4], [4]]}, "local": {"epochs": 1}, "model": self.MODEL}
        buffers = lab.run(lab.on_images(algorithm(name), **once)).buffers
        assert {int(v) for n, v in buffers.items() if n.endswith("num_batches_tracked")} == {2 * 3}

    @pytest.mark.parametrize("name", examples(algorithms, representatives()))
    def test_a_first_step_leaves_the_statistics_of_plain_averaging(self, lab: Lab, name: str) -> None:
        """In the first step every algorithm asks for the gradient at the model itself, before anything else."""
        local = {"epochs": 1, "batch_size": "full"}
        once = {"rounds": 1, "clients": {"schedule": [[3]]}, "local": local, "model": self.MODEL}
        ours, plain = (lab.run(lab.on_images(algorithm(n), **once)).buffers for n in (name, "fedavg"))
        for key, value in plain.items():
            assert torch.equal(ours[key], value), key


class Asked:
    """A gradient oracle that remembers the points it was asked for."""

    def __init__(self, size: int) -> None:
        self.points: list[Tensor] = []
        self.curvature = torch.linspace(0.5, 2.0, size, dtype=torch.float64)

    def __call__(self, w: Tensor) -> Tensor:
        self.points.append(w.clone())
        return self.curvature * w


class Bench:
    """A chain on a short vector: one client's first local step, with variables set by hand."""

    def __init__(self, *chosen: Part, index: int = 1) -> None:
        torch.manual_seed(0)
        self.x, self.w = torch.randn(2, 6, dtype=torch.float64)
        self.algorithm = Algorithm(*chosen)
        mask = torch.tensor([True, True, True, True, False, False])
        self.round = Round(index, 0.1, 2, 4, first=lambda: self.x, weights=lambda: mask, channels=1, steps=2, samples=5)
        self.s = self.algorithm.publish(self.algorithm.server_init(self.x), self.round)
        self.i = self.algorithm.client_init(self.s, self.round)
        self.asked = Asked(6)

    def step(self, oracle: Any = None, **variables: Tensor) -> Tensor:
        for name, value in variables.items():
            setattr(self.i if name in self.algorithm.client else self.s, name, value)
        self.algorithm.begin(self.s, self.i, self.round, lambda: torch.zeros(6))
        return self.algorithm.oracle(oracle or self.asked, self.s, self.i, self.round)(self.w.clone())

    @property
    def gradient(self) -> Tensor:
        return self.asked.curvature * self.w

    @property
    def shift(self) -> Tensor:
        """From the iterate to the last point where a gradient was taken."""
        return self.asked.points[-1] - self.w


def assert_along(shift: Tensor, direction: Tensor, norm: float) -> None:
    assert float(shift.norm()) == pytest.approx(norm, abs=1e-12)
    assert float(torch.cosine_similarity(shift, direction, dim=0)) == pytest.approx(1.0, abs=1e-12)


class TestPerturbations:
    RHO = 0.37

    @pytest.mark.parametrize("part", [Sam(rho=RHO), MixedSam(rho=RHO), Interpolate(rho=RHO, rho_global=0.9)])
    def test_a_local_ascent_goes_up_the_gradient(self, part: Part) -> None:
        bench = Bench(part)
        bench.step()
        assert_along(bench.shift, bench.gradient, self.RHO)
        assert torch.equal(bench.asked.points[0], bench.w)

    def test_the_direction_is_the_gradient_at_the_perturbed_point(self) -> None:
        bench = Bench(Sam(rho=self.RHO))
        torch.testing.assert_close(bench.step(), bench.asked.curvature * bench.asked.points[-1])

    def test_a_zero_gradient_perturbs_nothing(self) -> None:
        bench = Bench(Sam(rho=self.RHO))
        bench.w.zero_()
        assert torch.equal(bench.step(), bench.w)

    def test_fedlesam_goes_back_to_the_old_model(self) -> None:
        bench = Bench(Lesam(rho=self.RHO))
        old = torch.randn(6, dtype=torch.float64)
        bench.step(old=old.clone())
        assert_along(bench.shift, old - bench.x, self.RHO)
        assert len(bench.asked.points) == 1

    def test_fedlesam_remembers_the_model_received_not_the_one_trained(self) -> None:
        bench = Bench(Lesam(rho=self.RHO))
        bench.algorithm.finish(bench.w - bench.x, bench.s, bench.i, bench.round)
        assert torch.equal(bench.i.old, bench.x)

    def test_fednsam_goes_against_the_momentum(self) -> None:
        bench, m = Bench(MomentumPerturb(rho=self.RHO), parts["nesterov"]()), torch.randn(6, dtype=torch.float64)
        bench.step(m=m.clone())
        assert_along(bench.shift, -m, self.RHO)
        assert len(bench.asked.points) == 1

    @pytest.mark.parametrize("part", [Lesam(rho=RHO), MomentumPerturb(rho=RHO)])
    def test_without_a_past_there_is_no_perturbation(self, part: Part) -> None:
        bench = Bench(part, *([parts["nesterov"]()] if "m" in part.published else []), index=0)
        bench.step()
        assert torch.equal(bench.asked.points[0], bench.w)

    def test_fedsmoo_goes_up_the_corrected_gradient_in_every_step(self) -> None:
        bench = Bench(CorrectedSam(rho=self.RHO))
        mu, s = torch.randn(2, 6, dtype=torch.float64)
        bench.step(mu_i=mu.clone(), s=s.clone())
        first = bench.shift
        assert_along(first, bench.gradient - mu - s, self.RHO)
        torch.testing.assert_close(bench.i.mu_i, mu + first - s)
        bench.step()
        assert_along(bench.shift, bench.gradient - (mu + first - s) - s, self.RHO)

    def test_fedasam_goes_up_in_its_own_norm(self) -> None:
        bench = Bench(Asam(rho=self.RHO, asam_eta=0.2))
        bench.step()
        scale = torch.where(bench.round.is_weight, bench.w.abs() + 0.2, 1.0)
        assert_along(bench.shift / scale, scale * bench.gradient, self.RHO)

    @pytest.mark.parametrize("c", [0.25, 0.5])
    def test_fedgf_lies_between_the_two_perturbed_points(self, c: float) -> None:
        bench = Bench(Interpolate(rho=self.RHO, rho_global=0.2))
        perturbed = torch.randn(6, dtype=torch.float64)
        bench.step(perturbed=perturbed.clone(), share=torch.tensor(c))
        local = bench.w + self.RHO * bench.gradient / bench.gradient.norm()
        torch.testing.assert_close(bench.asked.points[-1], c * perturbed + (1 - c) * local)

    def test_fedgf_publishes_a_point_uphill_of_the_model(self) -> None:
        part = Interpolate(rho=self.RHO, rho_global=0.2)
        bench, previous = Bench(part), torch.randn(6, dtype=torch.float64)
        s = bench.algorithm.server_init(bench.x)
        s.previous = previous.clone()
        published = bench.algorithm.publish(s, bench.round)
        assert_along(published.perturbed - bench.x, previous - bench.x, 0.2)


class TestAddedTerms:
    """The gradient of every added term is that of its potential, by finite differences."""

    @pytest.mark.parametrize(
        ("part", "quadratic", "linear"),
        [(Prox(weight=0.4), 0.4, 0.0), (Dual(weight=0.4), 0.4, 0.4), (Dual(weight=0.4, prox=False), 0.0, 0.4)],
        ids=["prox", "dual", "dual-without-prox"],
    )
    def test_pulls(self, part: Part, quadratic: float, linear: float) -> None:
        bench, h = Bench(part), torch.randn(6, dtype=torch.float64)

        def potential(w: Tensor) -> Tensor:
            return quadratic / 2 * (w - bench.x).square().sum() + linear * h @ w

        given = {"h_i": h.clone()} if linear else {}
        torch.testing.assert_close(bench.step(torch.zeros_like, **given), differences(potential, bench.w))

    @pytest.mark.parametrize("name", ["nottrue", "trajectory", "clienttrajectory"])
    def test_distillation(self, name: str) -> None:
        sizes, rng = [3, 4], torch.Generator().manual_seed(1)
        x, student, other = torch.randn(3, 16, dtype=torch.float64, generator=rng)
        inputs, labels = torch.randn(5, 3, dtype=torch.float64, generator=rng), torch.tensor([0, 3, 1, 2, 3])
        gamma, tau = 1.5, 2.0
        part: NotTrue | Trajectory = parts[name](distill=gamma, temperature=tau)
        s, i = Vars(x=x, ema=other), Vars(e_i=other.clone(), last=torch.zeros(()))
        r = Round(1, 0.1, 2, 4, first=lambda: x, weights=lambda: x > 0, channels=1)
        part.begin(s, i, r, lambda: x)
        average = 0.5 * other + 0.5 * x
        teacher = {"nottrue": x, "trajectory": other, "clienttrajectory": average}[name]
        assert not isinstance(part, ClientTrajectory) or torch.allclose(i.e_i, average)

        def potential(w: Tensor) -> Tensor:
            said, meant = (reference.logits(v, inputs, sizes) for v in (teacher, w))
            if name == "nottrue":
                said, meant = (reference.without_label(v, labels) for v in (said, meant))
            return gamma * tau**2 * reference.kl(said, meant, tau)

        w = student.clone().requires_grad_()
        logits = reference.logits(w, inputs, sizes)
        term = part.penalty(
            Seen(logits, {}), (inputs, labels), s, i, lambda v, a: Seen(reference.logits(v, a, sizes).detach(), {})
        )
        assert float(term.detach()) == pytest.approx(float(potential(student)))
        (gradient,) = torch.autograd.grad(term, w)
        torch.testing.assert_close(gradient, differences(potential, student))


def differences(f: Any, w: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences."""
    sides = [[f(w + sign * step * unit) for sign in (1, -1)] for unit in torch.eye(len(w), dtype=w.dtype)]
    return torch.stack([(up - down) / (2 * step) for up, down in sides]).detach()


def test_vectors_and_parameters_of_many_shapes_map_one_to_one() -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 2), torch.nn.Linear(5, 7), torch.nn.LayerNorm(7))
    before = [p.detach().clone() for p in module.parameters()]
    flat = Flat(module)
    for view, value in zip(flat.views(flat.vector), before, strict=True):
        assert torch.equal(view, value)
    other = torch.zeros_like(flat.vector)
    for k, view in enumerate(flat.views(other)):
        view.fill_(k + 1)
    flat.bind(other)
    assert [set(p.flatten().tolist()) for p in module.parameters()] == [{float(k + 1)} for k in range(len(before))]


class TestChains:
    def test_a_chain_in_yaml_equals_the_rule_composed_by_hand(self, lab: Lab, tmp_path: Path) -> None:
        """SAM's point, SCAFFOLD's correction, Nesterov's server: no paper's algorithm."""
        written = "algorithm: {parts: [{sam: {rho: 0.05}}, {scaffold: {}}, {nesterov: {lookahead: 0.85}}]}\n"
        rest = lab.config({}, local=PLAIN)
        del rest["algorithm"]
        path = tmp_path / "chain.yaml"
        path.write_text(yaml.safe_dump(rest) + written)
        assert main([str(path), f"run.dir={tmp_path / 'run'}"]) == 0
        m = c = np.zeros_like(lab.start)
        x, own = lab.start, np.zeros((len(SIZES), lab.start.size))
        for t, cohort in enumerate(SCHEDULE):
            z, eta, deltas, changes = x + 0.85 * m, 0.2 * 0.9**t, [], []
            for i in cohort:
                w = z
                for _ in range(2):
                    q = w + 0.05 * reference.u(lab.gradient(i, w))
                    w = w - eta * (lab.gradient(i, q) - own[i] + c)
                new = own[i] - c + (z - w) / (2 * eta)
                changes.append(new - own[i])
                deltas.append(w - z)
                own[i] = new
            m = 0.85 * m + np.average(deltas, axis=0, weights=[SIZES[i] for i in cohort])
            x, c = x + m, c + sum(changes) / len(SIZES)
        whole = {**rest, "algorithm": read_yaml(path)["algorithm"]}
        np.testing.assert_allclose(Run(whole, tmp_path / "run").x, x, **NEAR)

    def test_the_parts_of_an_algorithm_give_its_bits(self, lab: Lab) -> None:
        by_parts = lab.run(lab.config(chain({"sam": {"rho": 0.3}}, {"scaffold": {}})))
        assert by_parts.sha == lab.run(lab.config(algorithm("fedgamma"))).sha

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
    def test_combinations_that_no_paper_ran_train(self, lab: Lab, chosen: list[str]) -> None:
        made = lab.run(lab.config(chain(*({name: {}} for name in chosen))))
        assert np.isfinite(made.x).all()
        without_the_first = lab.run(lab.config(chain(*({name: {}} for name in chosen[1:]))))
        assert made.sha != without_the_first.sha

    @pytest.mark.parametrize(
        ("chosen", "reason"),
        [
            (["dual", "nesterov"], "dual has to stand after nesterov, which sets the server optimiser"),
            (["dual", "servermomentum"], "dual has to stand after servermomentum"),
            (["sam", "lesam"], "sam and lesam exclude each other: both set the evaluation point"),
            (["nottrue", "trajectory"], "nottrue and trajectory exclude each other: both set the teacher"),
            (["clientmomentum", "mime"], "both keep a variable named 'direction'"),
            (["scaffold", "scaffold"], "both keep a variable named 'c'"),
            (["nesterov", "serveradam"], "both keep a variable named 'm'"),
            (["momentumperturb"], "momentumperturb needs the server variable 'm', which no part keeps"),
            (["scafold"], "unknown part 'scafold'; did you mean 'scaffold'?"),
        ],
        ids=" ".join,
    )
    def test_parts_that_cannot_stand_together_are_refused_with_the_reason(
        self, lab: Lab, chosen: list[str], reason: str
    ) -> None:
        with pytest.raises(ConfigError) as refused:
            configuration.validate(lab.config(chain(*({name: {}} for name in chosen))))
        assert reason in str(refused.value)


class TestSettings:
    @pytest.mark.parametrize("name", [*algorithms])
    def test_every_setting_is_checked_and_named(self, lab: Lab, name: str) -> None:
        for key in algorithms.schema(name).model_fields:
            with pytest.raises(ConfigError, match=rf"algorithm\.{key}\b.*'wrong'"):
                configuration.validate(lab.config(algorithm(name, **{key: "wrong"})))

    @pytest.mark.parametrize("name", [*algorithms])
    def test_numbers_out_of_range_are_refused(self, lab: Lab, name: str) -> None:
        for key, field in algorithms.schema(name).model_fields.items():
            if field.annotation in (int, float):
                config = lab.config(algorithm(name, **{key: field.annotation(-1)}))
                with pytest.raises(ConfigError, match=rf"algorithm\.{key}\b.*-1"):
                    configuration.validate(config)

    def test_an_unknown_setting_is_named_with_the_nearest(self, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
        path = lab.folder / "misspelt.yaml"
        path.write_text("algorithm: {name: fedsam, rhoo: 0.1}\n")
        assert main([str(path)]) == 2
        message = capsys.readouterr().err
        assert "algorithm.rhoo" in message
        assert "did you mean 'rho'?" in message
        assert str(path) in message

    def test_an_unknown_algorithm_is_named_with_the_nearest(self, lab: Lab) -> None:
        with pytest.raises(ConfigError, match=r"unknown algorithm 'fedsamm'; did you mean 'fedsam'\?"):
            configuration.validate(lab.config({"name": "fedsamm"}))

    def test_a_missing_setting_is_named(self, lab: Lab) -> None:
        class Needy(Part):
            def __init__(self, *, strength: float) -> None: ...

        with (
            mock.patch.dict(parts._builders, {"needy": Needy}),
            pytest.raises(ConfigError, match=r"missing key algorithm\.parts\.0\.needy\.strength"),
        ):
            configuration.validate(lab.config(chain({"needy": {}})))

    def test_a_setting_of_a_part_is_named_by_its_place(self, lab: Lab) -> None:
        with pytest.raises(ConfigError, match=r"algorithm\.parts\.1\.nesterov\.lookahead\b.*1\.5"):
            configuration.validate(lab.config(chain({"sam": {}}, {"nesterov": {"lookahead": 1.5}})))
