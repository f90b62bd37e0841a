"""Optimisers equal torch.optim's, schedules torch's lr_scheduler's; kept variables are the client's own."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from fl_dist.algorithms import algorithms
from fl_dist.algorithms.__main__ import main as show_algorithms
from fl_dist.algorithms.memory_needs import memory_needs
from fl_dist.common.randomness import torch_generator
from fl_dist.config import Config, ConfigError, load, validate
from fl_dist.main import main
from fl_dist.optimizers.base import Optimizer, check_optimizer, optimizers
from fl_dist.optimizers.schedules import build_rate, schedules
from fl_dist.optimizers.sgd import SGD
from tests.support.harness import CLASSES, FEATURES, HIDDEN, SIZES, Settings, TrainingHarness, run_with_checkpoints
from tests.support.processes import NO_WANDB

CLIENT, ROUNDS, LR = 1, 4, 0.03
"""The client that trains alone."""
SCHEDULE = {"name": "step", "every": 2, "decay": 0.5}
SGD_SETTINGS: Settings = {"momentum": 0.5, "weight_decay": 0.02}
ADAMW_SETTINGS: Settings = {"momentum": 0, "weight_decay": 0.02}
OPTIMIZERS: dict[str, tuple[Settings, Callable[[Any], optim.Optimizer]]] = {
    "sgd": ({"optimizer": "sgd", **SGD_SETTINGS}, lambda p: optim.SGD(p, LR, **SGD_SETTINGS)),
    "sgd without momentum": ({"momentum": 0, "weight_decay": 0.02}, lambda p: optim.SGD(p, LR, weight_decay=0.02)),
    "adamw": ({"optimizer": "adamw", **ADAMW_SETTINGS}, lambda p: optim.AdamW(p, LR, weight_decay=0.02)),
    "adamw with settings": (
        {"optimizer": {"name": "adamw", "betas": [0.7, 0.95], "eps": 1e-3}, "momentum": 0, "weight_decay": 0.5},
        lambda p: optim.AdamW(p, LR, (0.7, 0.95), 1e-3, 0.5),
    ),
}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> TrainingHarness:
    return TrainingHarness(tmp_path_factory.mktemp("optimizers"))


def config_of_one_client(harness: TrainingHarness, local: Settings, **changes: Any) -> Settings:
    config = harness.config({"name": "fedavg"}, rounds=ROUNDS, clients={"schedule": [[CLIENT]] * ROUNDS}, **changes)
    config["local"] = {"epochs": 2, "batch_size": 4, "lr": LR, "precision": "float64", "schedule": SCHEDULE, **local}
    return config


def train_with_torch(
    harness: TrainingHarness, new_optimizer: Callable[[Any], optim.Optimizer], keep: str
) -> np.ndarray:
    """The client's rows, batch by batch, with torch's classes."""
    rows = harness.client == CLIENT
    x, y = torch.from_numpy(harness.x[rows]), torch.from_numpy(harness.y[rows])
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN[0]), nn.Tanh(), nn.Linear(HIDDEN[0], CLASSES)).double()
    nn.utils.vector_to_parameters(torch.tensor(harness.initial_vector), model.parameters())
    optimizer = new_optimizer(model.parameters())
    for index in range(ROUNDS):
        optimizer = optimizer if keep == "client" else new_optimizer(model.parameters())
        optimizer.param_groups[0]["lr"] = LR * 0.5 ** (index // 2)
        order = torch_generator(3, "batches", index, CLIENT)
        for batch in [b for _ in range(2) for b in torch.randperm(len(y), generator=order).split(4)]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


@pytest.mark.parametrize("keep", ["round", "client"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_client_equals_torch(harness: TrainingHarness, name: str, keep: str) -> None:
    local, new_optimizer = OPTIMIZERS[name]
    section = local.get("optimizer", "sgd")
    section = {"name": section} if isinstance(section, str) else section
    run = harness.run(config_of_one_client(harness, local | {"optimizer": {**section, "keep": keep}}))
    expected = train_with_torch(harness, new_optimizer, keep)
    assert np.abs(expected - harness.initial_vector).max() > 0.05
    np.testing.assert_allclose(run.x, expected, rtol=0, atol=1e-12)


def test_keeping_variables_changes_the_result(harness: TrainingHarness) -> None:
    for name in ("sgd", "adamw"):
        models = [
            harness.run(config_of_one_client(harness, OPTIMIZERS[name][0] | {"optimizer": {"name": name, "keep": k}})).x
            for k in ("round", "client")
        ]
        assert np.abs(models[0] - models[1]).max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_step_of_sgd_has_the_bits_of_torchs(dtype: torch.dtype) -> None:
    """Also of zeros with a sign."""
    generator = torch.Generator().manual_seed(0)
    start, direction = (torch.randn(101, generator=generator, dtype=dtype) for _ in range(2))
    start[::5], direction[::5], direction[1::7] = -0.0, -0.0, 0.0
    model = nn.Parameter(start.clone())
    model.grad = direction.clone()
    optim.SGD([model], 0.1, momentum=0.9, weight_decay=1e-5, fused=True).step()
    optimizer, w = SGD(0.9, 1e-5), start.clone()
    optimizer.step(w, direction, optimizer.init(w), 0.1)
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    assert torch.equal(w.view(bits), model.detach().view(bits))


class TestSchedules:
    T = 12
    """Rounds after the warm-up."""
    CASES: tuple[tuple[Settings, Callable[[optim.Optimizer], lr_scheduler.LRScheduler]], ...] = (
        ({"name": "constant"}, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
        ({"name": "exponential", "decay": 0.9}, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        ({"name": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, 12)),
        ({"name": "cosine", "end": 0.1}, lambda o: lr_scheduler.CosineAnnealingLR(o, 12, eta_min=0.1 * LR)),
        ({"name": "linear"}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, 12)),
        ({"name": "linear", "end": 0.25}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, 12)),
        (
            {"name": "step", "milestones": [3, 4, 9], "decay": 0.2},
            lambda o: lr_scheduler.MultiStepLR(o, [3, 4, 9], 0.2),
        ),
        ({"name": "step", "every": 5}, lambda o: lr_scheduler.StepLR(o, 5)),
    )

    @pytest.mark.parametrize("warmup", [0, 1, 5])
    @pytest.mark.parametrize(("section", "scheduler"), CASES, ids=[str(section) for section, _ in CASES])
    def test_rates_equal_torchs(
        self, section: Settings, scheduler: Callable[[optim.Optimizer], lr_scheduler.LRScheduler], warmup: int
    ) -> None:
        rate = build_rate(LR, {**section, "warmup": warmup}, self.T + warmup)
        optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], LR)
        torchs = scheduler(optimizer)
        assert [rate(k) for k in range(warmup)] == pytest.approx([LR * (k + 1) / warmup for k in range(warmup)])
        for t in range(self.T):
            assert rate(warmup + t) == pytest.approx(torchs.get_last_lr()[0], rel=1e-12, abs=1e-14)
            optimizer.step()
            torchs.step()

    def test_every_schedule_is_compared(self) -> None:
        assert {section["name"] for section, _ in self.CASES} == set(schedules)

    def test_the_default_is_lr_decay(self) -> None:
        rate = validate({"local": {"lr": 0.3, "lr_decay": 0.97}}).local_rate()
        assert [rate(k) for k in range(50)] == [0.3 * 0.97**k for k in range(50)]

    @pytest.mark.parametrize("name", ["cosine", "linear"])
    def test_after_the_last_round_the_rate_stays(self, name: str) -> None:
        """A diagnostic then trains a client with the rate of the next round, which must not be 0."""
        rate = build_rate(LR, {"name": name}, 5)
        assert rate(5) == rate(4) > 0

    def test_a_warm_up_of_all_rounds(self) -> None:
        rate = build_rate(1.0, {"name": "cosine", "warmup": 4}, 4)
        assert [rate(k) for k in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]

    def test_both_rates_are_used_and_recorded(self, harness: TrainingHarness) -> None:
        """A server that halves each update, by its rate or by its schedule."""
        server = {"lr": 0.5, "schedule": {"name": "step", "milestones": [2], "decay": 0.5}}
        run = harness.run(config_of_one_client(harness, SGD_SETTINGS, server=server))
        assert [record["server_lr"] for record in run.records] == [0.5, 0.5, 0.25, 0.25]
        assert [record["lr"] for record in run.records] == [LR, LR, LR / 2, LR / 2]
        whole = harness.run_with_state({"name": "fedavg"})
        half = harness.run_with_state({"name": "fedavg"}, server={"schedule": {"name": "step", "milestones": [1]}})
        first, second = (checkpoint.server["x"] for checkpoint in half.checkpoints[:2])
        assert torch.equal(first, whole.checkpoints[0].server["x"])
        step = whole.checkpoints[1].server["x"] - first
        torch.testing.assert_close(second - first, step * 0.1, rtol=1e-9, atol=1e-12)


class TestKeptVariables:
    """Of clients [0, 2], [1], [0], ...: each has its own."""

    COHORTS = [[0, 2], [1], [0], [2, 0]]

    @pytest.fixture(scope="class")
    @classmethod
    def states(cls, harness: TrainingHarness) -> list[dict[int, dict[str, Tensor]]]:
        config = harness.config({"name": "scaffold", "control": "gradients"}, rounds=4)
        config["clients"]["schedule"] = cls.COHORTS
        config["local"] |= {"optimizer": {"name": "adamw", "keep": "client"}, "momentum": 0, "epochs": 1, "lr": 0.01}
        return [checkpoint.clients for checkpoint in harness.run(config, run_with_checkpoints).checkpoints]

    def test_only_trained_clients_change(self, states: list[dict[int, dict[str, Tensor]]]) -> None:
        assert [sorted(clients) for clients in states[:3]] == [sorted(cohort) for cohort in self.COHORTS[:3]]
        for name, tensor in states[3][1].items():  # the last checkpoint holds all clients
            assert torch.equal(tensor, states[1][1][name])

    def test_steps_are_counted_for_each_client(self, states: list[dict[int, dict[str, Tensor]]]) -> None:
        counts = dict.fromkeys(range(len(SIZES)), 0)
        for cohort, clients in zip(self.COHORTS, states, strict=True):
            for client in cohort:
                counts[client] += math.ceil(SIZES[client] / 4)
                assert set(clients[client]) == {"c_i", "optimizer.m", "optimizer.v", "optimizer.step"}
                assert clients[client]["optimizer.step"].item() == counts[client]

    def test_moments_are_those_of_the_clients_own_gradients(self, states: list[dict[int, dict[str, Tensor]]]) -> None:
        first, last = states[0], states[3]
        assert not torch.equal(first[0]["optimizer.m"], first[2]["optimizer.m"])
        assert not torch.equal(first[0]["optimizer.m"], last[0]["optimizer.m"])


ERRORS = [
    ("local.optimizer=adam", "local.optimizer: unknown optimizer 'adam'; did you mean 'adamw'?"),
    ("local.optimizer={name: adamw, betas: [0.9, 1.0]}", "local.optimizer.betas.1 (set on the command line): input"),
    ("local.optimizer={name: adamw, betas: [-0.1, 0.9]}", "local.optimizer.betas.0 (set on the command line): input"),
    ("local.optimizer={name: adamw, betas: [0.9]}", "missing key local.optimizer.betas.1: local.optimizer needs it"),
    ("local.optimizer={name: adamw, eps: 0}", "local.optimizer.eps (set on the command line): input should be greater"),
    ("local.optimizer={name: adamw, keep: always}", "local.optimizer.keep (set on the command line): input should be"),
    ("local.optimizer={name: sgd, betas: [0.9, 0.9]}", "unknown key local.optimizer.betas (set on the command line)"),
    ("local={optimizer: adamw, momentum: 0.9}", "local.momentum is 0.9, which the optimizer adamw does not use; set"),
    (
        "local.optimizer=null",
        "local.optimizer (set on the command line): input should be a mapping such as {key: value}, got None",
    ),
    ("local={schedule: cosine, lr_decay: 0.99}", "local.lr_decay is 0.99, which the schedule cosine does not use; set"),
    ("local={schedule: {name: exponential, decay: 0.5}, lr_decay: 0.9}", "local.lr_decay is 0.9, which the schedule"),
    ("local.schedule=cosin", "local.schedule: unknown schedule 'cosin'; did you mean 'cosine'?"),
    ("local.schedule={name: cosine, end: 2}", "local.schedule.end (set on the command line): input should be less"),
    ("local.schedule={name: cosine, warmup: 31}", "local.schedule: a warm-up of 31 rounds does not fit into rounds=30"),
    ("server.schedule={name: constant, warmup: 31}", "server.schedule: a warm-up of 31 rounds does not fit into"),
    ("local.schedule.warmup=-1", "local.schedule.warmup (set on the command line): input should be greater"),
    ("local.schedule=step", "local.schedule: step needs either milestones, such as [100, 150], or every"),
    ("local.schedule={name: step, milestones: [3], every: 2}", "local.schedule: step needs either milestones"),
    ("local.schedule={name: step, milestones: [3, 2]}", "local.schedule: milestones must increase, got [3, 2]"),
    ("local.schedule={name: step, milestones: [3, 3]}", "local.schedule: milestones must increase, got [3, 3]"),
    ("local.schedule={name: step, every: 0}", "local.schedule.every (set on the command line): input should be"),
    ("server.schedule=exponential", "server.schedule: exponential needs its decay here, such as {name: exponential"),
]


@pytest.mark.parametrize(("override", "message"), ERRORS)
def test_mistakes_are_one_line(override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([override]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


class TestConfiguration:
    def test_unused_keys_have_no_effect_and_can_be_read_again(self) -> None:
        config = load(None, ["local.optimizer=adamw", "local.schedule=cosine"])
        assert (config.local.momentum, config.local.lr_decay, config.local.weight_decay) == (0.0, 1.0, 1e-5)
        assert validate(config.model_dump()) == config

    def test_defaults_are_as_before(self) -> None:
        local = validate({}).local
        assert local.optimizer == {"name": "sgd", "keep": "round"}
        assert (local.momentum, local.weight_decay, local.lr_decay) == (0.9, 1e-5, 0.998)
        assert local.schedule == {"name": "exponential", "warmup": 0, "decay": None}

    @pytest.mark.parametrize(
        "overrides",
        [
            ["local.optimizer=adamw", "local.optimizer.eps=0.1"],
            ["local.optimizer.eps=0.1", "local.optimizer=adamw"],
            ["local.optimizer={name: adamw, eps: 0.1}"],
            ["local={optimizer: adamw}", "local.optimizer.eps=0.1"],
            ["local={optimizer: {name: adamw, eps: 0.1}}"],
        ],
    )
    def test_an_optimizer_may_be_only_named(self, overrides: list[str]) -> None:
        expected = {"name": "adamw", "keep": "round", "betas": [0.9, 0.999], "eps": 0.1}
        assert load(None, overrides).local.optimizer == expected

    def test_another_name_discards_settings_of_the_old_one(self, tmp_path: Path) -> None:
        (tmp_path / "my.yaml").write_text("local: {optimizer: {name: adamw, eps: 0.1}, schedule: cosine}\n")
        config = load(str(tmp_path / "my.yaml"), ["local.optimizer=sgd"])
        assert config.local.optimizer == {"name": "sgd", "keep": "round"}
        assert config.local.schedule["name"] == "cosine"

    def test_a_run_of_an_older_version_resumes(self, tmp_path: Path) -> None:
        """Its configuration has neither optimizer nor schedules."""
        settings = [*NO_WANDB, "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1"]
        assert main([*settings, "rounds=1", f"run.dir={tmp_path}"]) == 0
        recorded = yaml.safe_load((tmp_path / "config.yaml").read_text())
        del recorded["local"]["optimizer"], recorded["local"]["schedule"], recorded["server"]["schedule"]
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded))
        assert main([*settings, "rounds=2", f"run.dir={tmp_path}"]) == 0


class TestMoreRounds:
    SMALL = (*NO_WANDB, "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")

    @pytest.mark.parametrize(
        ("overrides", "used_by"),
        [
            (["local.schedule=cosine"], "local.schedule"),
            (["server.schedule={name: linear, end: 0.5}"], "server.schedule"),
            (["local.schedule=linear", "server.schedule=cosine"], "local.schedule and server.schedule"),
        ],
    )
    def test_they_are_refused_if_a_rate_depends_on_them(
        self, overrides: list[str], used_by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        settings = [*self.SMALL, *overrides, f"run.dir={tmp_path}"]
        assert main([*settings, "rounds=2"]) == 0
        assert main([*settings, "rounds=3"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"belongs to another config (rounds: 2 -> 3, used by {used_by}); choose another run.dir" in line

    def test_they_are_allowed_otherwise(self, tmp_path: Path) -> None:
        schedules = [
            "local.schedule={name: step, every: 1, warmup: 1}",
            "server.schedule={name: exponential, decay: 0.9}",
        ]
        for folder, rounds in (("grown", 2), ("grown", 3), ("long", 3)):
            assert main([*self.SMALL, *schedules, f"rounds={rounds}", f"run.dir={tmp_path / folder}"]) == 0
        first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("grown", "long"))
        assert first == second


class TestUserOptimizers:
    """An optimiser of the user that does not do what it has to is refused before the first round."""

    class Rebinds(Optimizer):
        def step(self, w: Tensor, direction: Tensor, state: dict[str, Tensor], lr: float) -> None:
            w = w - lr * direction

    class Returns(Optimizer):
        def step(self, w: Tensor, direction: Tensor, state: dict[str, Tensor], lr: float) -> Any:
            return w.sub_(lr * direction)

    class Adds(Optimizer):
        def step(self, w: Tensor, direction: Tensor, state: dict[str, Tensor], lr: float) -> None:
            state["new"] = w.sub_(lr * direction)

    class Reshapes(Optimizer):
        def init(self, w: Tensor) -> dict[str, Tensor]:
            return {"m": torch.zeros(1)}

        def step(self, w: Tensor, direction: Tensor, state: dict[str, Tensor], lr: float) -> None:
            state["m"] = w.sub_(lr * direction)

    class Numbers(Optimizer):
        def init(self, w: Tensor) -> dict[str, Tensor]:
            return {"t": 0}  # type: ignore[dict-item]

    class Aliases(Optimizer):
        def init(self, w: Tensor) -> dict[str, Tensor]:
            return {"anchor": w}

    class Fails(Optimizer):
        def step(self, w: Tensor, direction: Tensor, state: dict[str, Tensor], lr: float) -> None:
            w.sub_(state["m"])

    class Misspelt(Optimizer):
        def stepp(self) -> None: ...

    @pytest.mark.parametrize(
        ("optimizer", "message"),
        [
            (Rebinds, "step has to change `w` in place and return nothing"),
            (Returns, "step has to change `w` in place and return nothing"),
            (Adds, "step changed the names in `state`"),
            (Reshapes, "its variable 'm' became a tensor of float32 and shape [3]"),
            (Numbers, "init gave a dict, not a dict of tensors"),
            (Aliases, "init gave `w` itself as 'anchor', which every step changes; give w.clone()"),
            (Fails, "failed on a vector of 3 ones: KeyError: 'm'"),
            (Misspelt, "has a method 'stepp', which is not a hook; did you mean 'step'?"),
        ],
    )
    def test_mistakes_are_found(self, optimizer: type[Optimizer], message: str) -> None:
        with pytest.raises(ValueError) as error:
            check_optimizer("mine:it", optimizer())
        assert message in str(error.value) and str(error.value).startswith("optimizer mine:it")

    def test_a_schedule_gives_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for factor in (-1.0, float("nan"), None):
            monkeypatch.setitem(globals(), "FACTOR", factor)
            with pytest.raises(ConfigError, match="local.schedule: schedule tests.unit.test_optimizers:odd gave"):
                validate({"local": {"schedule": "tests.unit.test_optimizers:odd"}})


FACTOR: float | None = 1.0


def odd(rounds: int) -> Callable[[int], float | None]:
    return lambda t: FACTOR


class TestMemory:
    def test_vectors_of_the_optimizer_are_counted(self) -> None:
        vectors = {"sgd": 1, "adamw": 2}
        assert set(vectors) == set(optimizers)
        for name in ("fedavg", "scaffold"):
            without = memory_needs(algorithms.build(name, {}), SGD(0.0, 0.0))
            for optimizer, count in vectors.items():
                built = optimizers.build(optimizer, {}, momentum=0.9, weight_decay=0.0)
                needs = memory_needs(algorithms.build(name, {}), built)
                assert (needs.worker - without.worker, needs.server) == (4 * count, without.server)

    def test_the_table_is_of_the_optimizer(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert show_algorithms(["--memory", "--optimizer", "adamw"]) == 0
        output = capsys.readouterr().out
        assert "local.optimizer=adamw, whose variables are 8 bytes per parameter of a worker" in output
        with pytest.raises(SystemExit):
            show_algorithms(["--memory", "--optimizer", "adam"])
        assert "unknown optimizer 'adam'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("algorithm", "part"), [("scaffold", "scaffold"), ("fedcm", "clientmomentum"), ("fedsam", ""), ("feddyn", "")]
)
def test_methods_that_assume_sgd_are_named(algorithm: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    for optimizer, momentum, cause in (
        ("sgd", 0, ""),
        ("sgd", 0.9, "local.momentum=0.9"),
        ("adamw", 0, "local.optimizer=adamw"),
    ):
        overrides = [f"algorithm={algorithm}", f"local.optimizer={optimizer}", f"local.momentum={momentum}"]
        assert main(["--check", *overrides]) == 0
        line = f"# part {part} takes updates for steps of sgd without momentum; with {cause} it is another method"
        output = capsys.readouterr().out
        assert (line in output) == bool(part and cause)
        assert ("# part" in output) == bool(part and cause)


def test_config_defaults_need_no_validation() -> None:
    assert Config().local_rate()(0) == 0.01 and Config().server_rate()(7) == 1.0
