"""Runs whose uploads are changed on their way: equal to plain references, counted, dropped, refused where wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fl_dist.common.randomness import generator
from fl_dist.diagnose import main as diagnose
from fl_dist.main import main
from tests.support import reference
from tests.support import upload_reference as plain
from tests.support.data_files import write_diverging_client
from tests.support.harness import FULL_PARTICIPATION, Run, Settings, TrainingHarness, algorithm
from tests.support.processes import NO_WANDB
from tests.support.run_folder import model_hash, read_records

EXACT = {"rtol": 0, "atol": 1e-9}
PARAMETERS = 27
"""Of the model: 4 * 3 + 3 and 3 * 3 + 3."""
Vector = list[float]
Draw = Callable[..., Vector]
"""Random numbers of a purpose ("quantise", ...), round and perhaps client, one for each parameter."""
GATHER, UNIFORM, FULL = (
    {"comm": {"reduce": "gather"}},
    {"server": {"weighting": "uniform"}},
    {"clients": {"schedule": FULL_PARTICIPATION}},
)


class Case(NamedTuple):
    """An algorithm, the part that is added to it, and its rules by the plain reference."""

    name: str
    part: Settings
    compress: Callable[[Vector, Draw, int, int], Vector] = lambda v, draw, t, i: v
    """From what a client wants to send, in this round."""
    feedback: bool = False
    aggregate: Callable[[list[Vector], Draw, int], Vector] | None = None
    """From what the clients sent."""
    changes: Settings = {}


def two_largest(v: Vector, draw: Draw, t: int, i: int) -> Vector:
    return plain.largest_entries(v, 2)


def six_bits(v: Vector, draw: Draw, t: int, i: int) -> Vector:
    return plain.quantised(v, 6, draw("quantise", t, i))


def private(updates: list[Vector], draw: Draw, t: int) -> Vector:
    return plain.private_mean(updates, 0.3, 0.5, len(updates), draw("privacy noise", t))


PRIVATE = {"clip_and_noise": {"clip": 0.3, "noise": 0.5}}
CASES = {
    "top_k": Case("fedavg", {"top_k": {"share": 0.07}}, two_largest, True),
    "top_k without feedback": Case("fedavg", {"top_k": {"share": 0.07, "feedback": False}}, two_largest),
    "scaffold, top_k": Case("scaffold", {"top_k": {"share": 0.07}}, two_largest, True),
    "feddyn, top_k": Case("feddyn", {"top_k": {"share": 0.07}}, two_largest, True),
    "fedcm, sign": Case("fedcm", {"sign": {}}, lambda v, *_: plain.scaled_signs(v), True),
    "quantise": Case("fedsam", {"quantise": {"bits": 6}}, six_bits),
    "fedsam, private": Case("fedsam", PRIVATE, aggregate=private, changes=UNIFORM),
    "feddyn, private": Case("feddyn", PRIVATE, aggregate=private, changes=UNIFORM),
    "gather": Case("feddyn", {"top_k": {"share": 0.07}}, two_largest, True, changes=GATHER),
    "median": Case("fedavg", {"median": {}}, aggregate=lambda u, *_: plain.median(u), changes=GATHER),
    "scaffold, median": Case("scaffold", {"median": {}}, aggregate=lambda u, *_: plain.median(u), changes=GATHER),
    "trimmed mean": Case(
        *("fedsam", {"trimmed_mean": {"share": 0.2}}),
        aggregate=lambda u, *_: plain.trimmed_mean(u, 1),
        changes=GATHER | FULL,
    ),
    "multi-krum": Case(
        *("fedavg", {"krum": {"byzantine": 1, "keep": 2}}),
        aggregate=lambda u, *_: plain.krum(u, 1, 2),
        changes=GATHER | FULL,
    ),
}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> TrainingHarness:
    return TrainingHarness(tmp_path_factory.mktemp("harness"))


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def run(harness: TrainingHarness, case: Case) -> Run:
    is_averaging = case.name not in reference.DUAL
    changes = {"server": {"lr": 0.7 if is_averaging else 1.0} | case.changes.get("server", {})}
    return harness.run_with_state(algorithm(case.name) | {"with": [case.part]}, **case.changes | changes)


def without_gaps(run: Run) -> Draw:
    def draw(purpose: str, *where: int) -> Vector:
        rng, size = generator(run.config["seed"], purpose, *where), len(run.experiment.initial)
        draws = rng.random(size) if purpose == "quantise" else rng.standard_normal(size)
        return run.remove_padding(torch.from_numpy(draws)).tolist()  # type: ignore[no-any-return]

    return draw


def trajectory(harness: TrainingHarness, case: Case, run: Run) -> tuple[list[np.ndarray], np.ndarray]:
    """The model after every round, and what each client has not sent in the end: training by one plain reference,
    uploads by the other."""
    problem, draw = harness.problem(run.config), without_gaps(run)
    problem.weights = run.config.get("server", {}).get("weighting", "samples")
    h = reference.settings(case.name, {k: v for k, v in algorithm(case.name).items() if k != "name"}, problem)
    state = reference.initial_state(case.name, h, problem)
    kept, models = np.zeros((run.config["clients"]["total"], PARAMETERS)), []
    memory: dict[str, Any] = {"x_prev": None, "last_active": {}, "indicators": []}
    for t, cohort in enumerate(problem.schedule):
        z = state["x"]
        sent = {i: reference.train_client(case.name, h, problem, state, memory, z, t, i) for i in cohort}
        updates = {}
        for i in cohort:
            wanted = sent[i]["y"] - z + kept[i]
            updates[i] = case.compress(wanted.tolist(), draw, t, i)
            kept[i] = wanted - updates[i] if case.feedback else 0.0
        for i in cohort:  # the mean of equal updates is that update
            used = case.aggregate(list(updates.values()), draw, t) if case.aggregate is not None else updates[i]
            sent[i]["y"] = z + np.array(used)
        reference.update_server(case.name, h, problem, state, memory, z, t, sent)
        memory["x_prev"] = z
        models.append(state["x"].copy())
    return models, kept


class TestReference:
    """Minibatches, unequal step counts, partial participation, momentum, weight decay, clipping, a server rate."""

    def test_the_model_after_every_round(self, harness: TrainingHarness, case: Case, run: Run) -> None:
        models, kept = trajectory(harness, case, run)
        np.testing.assert_allclose(run.server("x"), models, **EXACT)
        if case.feedback:
            np.testing.assert_allclose(run.clients("residual", 0.0)[-1], kept, **EXACT)
            assert np.count_nonzero(kept)

    def test_the_bytes_that_a_real_client_would_send(self, case: Case, run: Run) -> None:
        vector, others = 8 * PARAMETERS, (1 if case.name == "scaffold" else 0)
        update = {
            "top_k": 2 * (8 + 5 / 8),  # 5 bits say which of 27
            "sign": PARAMETERS / 8 + 8,
            "quantise": PARAMETERS * 6 / 8 + 8,
        }.get(next(iter(case.part)), vector)
        for record, cohort in zip(run.records, run.config["clients"]["schedule"], strict=True):
            assert record["bytes_up"] == len(cohort) * (int(np.ceil(update)) + others * vector)
            assert record["bytes_down"] == len(cohort) * vector * (2 if case.name in ("scaffold", "fedcm") else 1)


def test_gathered_updates_have_the_mean_of_the_exact_reduce(harness: TrainingHarness) -> None:
    exact, gathered = (
        harness.run(harness.config(algorithm("fedgmt"), comm={"reduce": mode})) for mode in ("exact", "gather")
    )
    np.testing.assert_allclose(exact.x, gathered.x, rtol=0, atol=1e-12)
    assert [r["bytes_up"] for r in exact.records] == [r["bytes_up"] for r in gathered.records]


def test_the_next_round_of_an_existing_run_is_diagnosed_from_all_updates(tmp_path: Path) -> None:
    common = [*NO_WANDB, "algorithm={name: fedsam, with: [{top_k: {share: 0.1}}, median]}", "comm.reduce=gather"]
    common += ["model={name: mlp, hidden: [8]}", "clients={total: 6, per_round: 3}", "local.epochs=1"]
    measured = "diagnostics={perturbation_drift: {every: 3}}"
    assert main([*common, "rounds=3", measured, f"run.dir={tmp_path / 'within'}"]) == 0
    assert main([*common, "rounds=2", f"run.dir={tmp_path / 'after'}"]) == 0
    assert diagnose([str(tmp_path / "after"), "perturbation_drift"]) == 0
    found = json.loads((tmp_path / "after" / "diagnostics.jsonl").read_text())
    within = read_records(tmp_path / "within")[-1]["diagnostics"]["perturbation_drift"]
    assert found["round"] == 3 and found["values"] == within


class TestFailures:
    """Of the clients of a round, client 2 diverges."""

    COHORTS = "[[0, 2, 3], [1, 4, 5], [2, 3, 5]]", "[[0, 3], [1, 4, 5], [3, 5]]"

    @pytest.mark.parametrize(
        "settings",
        [
            ("algorithm={name: scaffold, with: [{top_k: {share: 0.3}}]}",),
            ("algorithm.with=[sign]",),
            ("algorithm.with=[quantise]",),
            ("algorithm.with=[median]", "comm.reduce=gather"),
        ],
        ids=str,
    )
    def test_a_dropped_client_has_no_effect(self, settings: tuple[str, ...], tmp_path: Path) -> None:
        common = (*NO_WANDB, *write_diverging_client(tmp_path / "d.npz"), "rounds=3", "local={epochs: 2, lr: 0.05}")
        for name, schedule in zip(("with", "without"), self.COHORTS, strict=True):
            clients = f"clients={{total: 6, schedule: {schedule}, on_failure: drop}}"
            assert main([*common, *settings, clients, f"run.dir={tmp_path / name}"]) == 0
        assert model_hash(tmp_path / "with") == model_hash(tmp_path / "without")
        assert [record["dropped"] for record in read_records(tmp_path / "with")] == [[2], [], [2]]

    def test_too_few_clients_for_the_rule_end_the_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        common = (*NO_WANDB, *write_diverging_client(tmp_path / "d.npz"), "rounds=1", "comm.reduce=gather")
        clients = "clients={total: 6, schedule: [[0, 1, 2, 3, 4]], on_failure: drop}"
        assert main([*common, clients, "algorithm.with=[krum]", f"run.dir={tmp_path / 'run'}"]) == 1
        error = "round 1: 4 of 5 clients survived, the algorithm's aggregate asks for 5"
        assert error in capsys.readouterr().err

    def test_noise_does_not_depend_on_who_failed(self, tmp_path: Path) -> None:
        """A dropped client counts as an update of zeros: nobody can tell from the model that it failed."""
        data = write_diverging_client(tmp_path / "d.npz")
        private = ("algorithm.with=[{clip_and_noise: {clip: 1.0e-9, noise: 1.0e+9}}]", "server.weighting=uniform")
        for name, cohort in (("with", "[1, 2, 3]"), ("without", "[1, 3, 4]")):
            clients = f"clients={{total: 6, schedule: [{cohort}], on_failure: drop}}"
            settings = (*private, clients, "rounds=1", "local.precision=float64")
            assert main([*NO_WANDB, *data, *settings, f"run.dir={tmp_path / name}"]) == 0
        with_failure, without = (read_records(tmp_path / name)[0]["norms"]["update"] for name in ("with", "without"))
        assert with_failure == pytest.approx(without, rel=1e-8)


SMALL = (*NO_WANDB, "model=mlp", "clients={total: 8, per_round: 4}")


class TestChecks:
    """`--check` finds what does not fit together, in one line."""

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (["algorithm.with=[clip_and_noise]"], "which needs equal weights; set server.weighting=uniform"),
            (["algorithm.with=[median]"], "part median needs every client's update; set comm.reduce=gather"),
            (["algorithm.with=[krum]", "comm.reduce=gather"], "part krum needs 5 clients, but a round may have only 4"),
            (
                ["algorithm.with=[{krum: {byzantine: 0, keep: 6}}]", "comm.reduce=gather"],
                "part krum needs 6 clients, but a round may have only 4; raise clients.per_round, or change the part's",
            ),
            (
                ["algorithm.with=[{trimmed_mean: {share: 0.2}}]", "comm.reduce=gather"],
                "part trimmed_mean needs 5 clients, but a round may have only 4",
            ),
            (
                ["algorithm={name: scaffold, with: [clip_and_noise]}", "server.weighting=uniform"],
                "part scaffold also sends 'c_change', which clip_and_noise does not protect; choose an algorithm that",
            ),
            (
                ["algorithm={name: fedgf, with: [clip_and_noise]}", "server.weighting=uniform"],
                "part interpolate also sends 'distance', which clip_and_noise does not protect",
            ),
            (
                ["algorithm.with=[clip_and_noise]", "server.weighting=uniform", "model={name: cnn, norm: batch}"],
                "which the part clip_and_noise does not protect; choose a model without BatchNorm",
            ),
            (
                ["algorithm.with=[clip_and_noise, top_k]", "server.weighting=uniform"],
                "part clip_and_noise must come after top_k, which changes the upload",
            ),
            (["algorithm.with=[top_k, sign]"], "parts top_k and sign exclude each other: both set the compression"),
            (["algorithm.with=[median, krum]"], "parts median and krum exclude each other: both set the aggregate"),
            (["algorithm.with=[{top_k: {share: 0}}]"], "algorithm.with.0.top_k.share"),
            (["algorithm.with=[{quantise: {feedback: true}}]"], "unknown key algorithm.with.0.quantise.feedback"),
            (["algorithm.with=top_k"], "algorithm.with must be a list such as"),
            (
                ["callbacks=[{early_stopping: {metric: epsilon, limit: 8}}]"],
                "the task does not measure 'epsilon'; it measures",
            ),
        ],
        ids=str,
    )
    def test_a_misconfiguration(self, settings: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--check", *SMALL, *settings]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and message in line, line

    def test_a_missing_accountant(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr("fl_dist.config.consistency.has_opacus", lambda: False)
        settings = ["algorithm.with=[clip_and_noise]", "server.weighting=uniform"]
        assert main(["--check", *SMALL, *settings]) == 2
        assert "part clip_and_noise needs the package opacus for its accountant: pip install" in capsys.readouterr().err

    def test_what_fits(self) -> None:
        compressed_private = ["algorithm.with=[top_k, clip_and_noise]", "server.weighting=uniform"]
        assert main(["--check", *SMALL, *compressed_private]) == 0
        robust = ["algorithm.with=[sign, {trimmed_mean: {share: 0.25}}]", "comm.reduce=gather"]
        assert main(["--check", *SMALL, *robust]) == 0


def test_the_configuration_of_the_run_has_the_parts(harness: TrainingHarness) -> None:
    run = harness.run(harness.config(algorithm("fedavg") | {"with": ["top_k"]}))
    assert "top_k" in (run.folder / "config.yaml").read_text() and json.loads(json.dumps(run.records))
