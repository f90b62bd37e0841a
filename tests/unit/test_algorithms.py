"""Every algorithm follows its formulas, in one process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from fl_dist.algorithms import algorithms
from fl_dist.algorithms.__main__ import main as show_algorithms
from fl_dist.algorithms.cost_tables import algorithm_row, paper_rows
from fl_dist.algorithms.paper_costs import PAPER_COSTS
from tests.support import reference
from tests.support.harness import (
    CASES,
    NO_WANDB_SECTION,
    SCHEDULE,
    SIZES,
    Case,
    Run,
    TrainingHarness,
    algorithm,
    mlp_parameters,
    record_client_models,
    run_with_checkpoints,
)

EXACT = {"rtol": 0, "atol": 1e-9}
ORACLES = sorted((Path(reference.__file__).parent / "oracles").glob("*/case.json"))
SERVER_NAMES = {"h_bar": "h", "delta": "direction", "c_scalar": "share"}
CLIENT_NAMES = {"o_i": "old", "Lambda_i": "scale", "b_i": "shift"}
UNSET = {"o_i": np.nan, "e_i": np.nan, "Lambda_i": 1.0}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("fedspeed", {"alpha": 0.4}),
    ("fedspeed", {"normalise": False}),
    ("fednsam", {"form": "A"}),
    ("fednsam_minus_nesterov", {"reading": "ii"}),
    ("fedgmt_v2", {"first_teacher": "initial"}),
    ("fedgmt_v2", {"elapsed": True}),
    ("fedgmt_v2", {"first_teacher": "initial", "elapsed": True}),
    *((name, {"direction": "last_update"}) for name in ("fedlesam", "fedlesam_s", "fedlesam_d")),
    *((name, {"control": "gradients"}) for name in ("scaffold", "fedgamma", "fedlesam_s", "fednsam_s")),
    ("fedrobust", {"ascent_steps": 3}),
]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> TrainingHarness:
    return TrainingHarness(tmp_path_factory.mktemp("harness"))


def reference_config(harness: TrainingHarness, name: str, **changes: Any) -> dict[str, Any]:
    """The configuration in which an algorithm is compared with the reference."""
    is_averaging = name not in reference.OWN_SERVER_STEP
    return harness.config(algorithm(name, **changes), server={"lr": 0.7 if is_averaging else 1.0})


def sampled_config(harness: TrainingHarness, name: str, **changes: Any) -> dict[str, Any]:
    """A configuration with random crops, dropout, BatchNorm and sampled clients."""
    clients = {"schedule": None, "per_round": 3}
    return harness.image_config(algorithm(name), rounds=3, clients=clients, local={"epochs": 1}, **changes)


def test_every_algorithm_has_a_case() -> None:
    assert set(CASES) == set(algorithms)


def test_no_two_cases_give_the_same_model(harness: TrainingHarness) -> None:
    assert len({harness.run(reference_config(harness, name)).sha for name in CASES}) == len(CASES)


class TestOracles:
    """The stored trajectory of each algorithm, computed independently, is reproduced by training."""

    @pytest.fixture(params=ORACLES, ids=lambda path: path.parent.name, scope="class")
    @classmethod
    def oracle(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray], Run, list[Any]]]:
        case = json.loads(request.param.read_text())
        data = request.param.with_name("data.npz")
        arrays, folder = dict(np.load(data)), tmp_path_factory.mktemp("oracle")
        with record_client_models() as trainings:
            yield (
                case,
                arrays,
                run_with_checkpoints(_oracle_config(case, data, arrays, folder), folder / "run"),
                trainings,
            )

    def test_model_and_metrics_after_every_round(self, oracle: Any) -> None:
        _, arrays, run, _ = oracle
        np.testing.assert_allclose(run.server("x"), arrays["x"][1:], **EXACT)
        np.testing.assert_allclose(run.x, arrays["x"][-1], **EXACT)
        for name in ("test_loss", "test_accuracy"):
            np.testing.assert_allclose([r[name] for r in run.records], arrays[name][1:], **EXACT)

    def test_server_variables_after_every_round(self, oracle: Any) -> None:
        case, arrays, run, _ = oracle
        for name in set(case["server_buffers"]) - {"divergence"}:
            variable = "direction" if case["algorithm"] == "mimelite" else SERVER_NAMES.get(name, name)
            np.testing.assert_allclose(run.server(variable), arrays[name][1:], **EXACT, err_msg=name)

    def test_client_variables_after_every_round(self, oracle: Any) -> None:
        case, arrays, run, _ = oracle
        for name in case["client_tables"]:
            values = run.clients(CLIENT_NAMES.get(name, name), UNSET.get(name, 0.0))
            np.testing.assert_allclose(values, arrays[name][1:], **EXACT, err_msg=name)

    def test_start_and_end_of_every_local_training(self, oracle: Any) -> None:
        case, arrays, run, trainings = oracle
        for index, client, start, end in trainings:
            np.testing.assert_allclose(run.remove_padding(start), arrays["z"][index], **EXACT)
            np.testing.assert_allclose(run.remove_padding(end), arrays["y_end"][index, client], **EXACT)
        assert len(trainings) == sum(map(len, case["schedule"]))


def _oracle_config(case: dict[str, Any], data: Path, arrays: dict[str, np.ndarray], folder: Path) -> dict[str, Any]:
    hyper, server_lr = dict(case["hyper_parameters"]), 1.0
    if case["algorithm"] != "fedadam":
        server_lr = hyper.pop("server_lr", 1.0)
    init = folder / "init.safetensors"
    save_file(mlp_parameters(arrays["init"], [case["features"], *case["hidden"], case["classes"]]), init)
    local = {"batch_size": "full", "lr_decay": case["decay"], "precision": "float64"}
    return {
        "rounds": case["rounds"],
        "data": {"name": "npz", "path": str(data)},
        "partition": {"name": "given"},
        "model": {"name": "mlp", "hidden": case["hidden"], "activation": "tanh", "init": str(init)},
        "clients": {"total": case["clients"], "schedule": case["schedule"]},
        "algorithm": {"name": case["algorithm"], **hyper},
        "local": local | {k: case[k] for k in ("epochs", "lr", "momentum", "weight_decay", "clip")},
        "server": {"lr": server_lr, "weighting": case["weights"]},
        "monitor": NO_WANDB_SECTION,
    }


class TestReference:
    """Minibatches, unequal step counts, partial participation, momentum, weight decay, clipping, a server rate."""

    @pytest.mark.parametrize("name", reference.PARAMETERS)
    def test_training_equals_the_reference(self, harness: TrainingHarness, name: str) -> None:
        config = reference_config(harness, name)
        expected = reference.run(name, CASES[name].hyper, harness.problem(config))
        np.testing.assert_allclose(harness.run(config).x, expected["x"][-1], **EXACT)

    @pytest.mark.parametrize(("name", "option"), OPTIONS, ids=str)
    def test_options_have_an_effect_and_equal_the_reference(
        self, harness: TrainingHarness, name: str, option: dict[str, Any]
    ) -> None:
        config = reference_config(harness, name, **option)
        expected = reference.run(name, CASES[name].hyper | option, harness.problem(config))
        np.testing.assert_allclose(harness.run(config).x, expected["x"][-1], **EXACT)
        assert harness.run(config).sha != harness.run(reference_config(harness, name)).sha

    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    @pytest.mark.parametrize("name", ["fedavg", "fedgmt", "fednsam_s", "fedsmoo", "mofedsam", "mimelite"])
    def test_client_weights_equal_the_reference(self, harness: TrainingHarness, name: str, weights: str) -> None:
        config = harness.config(algorithm(name), server={"weighting": weights})
        problem = harness.problem(config)
        problem.weights = weights
        expected = reference.run(name, CASES[name].hyper, problem)
        np.testing.assert_allclose(harness.run(config).x, expected["x"][-1], **EXACT)


class TestCosts:
    def test_fedgf_saves_the_first_pass_once_c_is_1(self, harness: TrainingHarness) -> None:
        records = harness.run(harness.config(algorithm("fedgf", threshold=0.0))).records
        steps = [sum(2 * -(-SIZES[client] // 4) for client in cohort) for cohort in SCHEDULE]
        assert [r["backwards"] for r in records] == [2 * steps[0], *steps[1:]]

    def test_buffers_are_sent_with_each_model(self, harness: TrainingHarness) -> None:
        run = harness.run(sampled_config(harness, "scaffold"))
        parameters, buffers = run.x.size, sum(b.numel() for b in run.buffers.values())
        assert {r["bytes_down"] for r in run.records} == {3 * (2 * parameters + buffers) * 4}
        assert {r["bytes_up"] for r in run.records} == {3 * (2 * parameters + buffers) * 4}

    @pytest.mark.parametrize("name", [*algorithms])
    def test_the_printed_table_has_the_costs_of_the_case(self, name: str) -> None:
        case: Case = CASES[name]
        *_, passes, down, up, memory = algorithm_row(name)
        assert passes.startswith(f"{case.passes[0]}F {case.passes[1]}B")
        assert (int(down), int(up), int(memory)) == (case.down, case.up, case.memory)

    def test_the_table_names_special_passes(self) -> None:
        assert algorithm_row("fedgf")[3] == "2F 2B (1F 1B at share = 1)"
        assert algorithm_row("mimelite")[3] == "1F 1B + full pass per round"

    @pytest.mark.parametrize(
        ("paper", "expected"),
        [
            ("fedsam", {}),
            ("fednsam", {"mofedsam": "communication", "fednsam": "communication"}),
            ("fedlesam", {"mofedsam": "communication", "fedlesam_d": "communication, memory"}),
            ("fedgf", {}),
            ("fedgmt", {}),
        ],
    )
    def test_a_paper_counts_otherwise_where_it_is_known_to(self, paper: str, expected: dict[str, str]) -> None:
        assert {name: differs for name, *_, differs in paper_rows(paper) if differs} == expected

    def test_the_costs_of_a_paper_are_beside_ours(self, capsys: pytest.CaptureFixture[str]) -> None:
        show_algorithms(["--paper", "fedgmt", "--markdown"])
        table, remark, legend = capsys.readouterr().out.strip().split("\n\n")
        assert "| fedgmt | 2F 1B | 2 | 1 | 1.5 (1.5) | 1.33 (1.33) | 3 |  |" in table.splitlines()
        assert remark.startswith("FedGMT (ICML 2025), Table 1.")
        assert "In brackets: the paper's number" in legend

    def test_an_unknown_paper_is_one_line_with_the_known_ones(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            show_algorithms(["--paper", "fedfoo"])
        (line,) = capsys.readouterr().err.splitlines()
        assert "'fedfoo'" in line
        assert all(name in line for name in PAPER_COSTS)
