"""Every algorithm does what its formulas say, in one process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from fl_dist.algorithms import algorithms
from fl_dist.algorithms.__main__ import row
from tests.support import reference
from tests.support.harness import (
    CASES,
    SCHEDULE,
    SILENT,
    SIZES,
    Case,
    Lab,
    Run,
    algorithm,
    kept,
    layers,
    watching_clients,
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
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


def faithful(lab: Lab, name: str, **changes: Any) -> dict[str, Any]:
    """The setting in which an algorithm is held against the reference."""
    averages = name not in reference.MOMENTUM | reference.DUAL | {"fedadam"}
    return lab.config(algorithm(name, **changes), server={"lr": 0.7 if averages else 1.0})


def drawn(lab: Lab, name: str, **changes: Any) -> dict[str, Any]:
    """The setting in which bits are compared: random crops, dropout, BatchNorm, clients drawn by the seed."""
    clients = {"schedule": None, "per_round": 3}
    return lab.on_images(algorithm(name), rounds=3, clients=clients, local={"epochs": 1}, **changes)


def test_every_algorithm_has_a_case() -> None:
    assert set(CASES) == set(algorithms)


def test_every_case_makes_its_algorithm_differ_from_all_others(lab: Lab) -> None:
    assert len({lab.run(faithful(lab, name)).sha for name in CASES}) == len(CASES)


class TestOracles:
    """A trajectory of each algorithm, computed elsewhere, is reproduced through the whole engine."""

    @pytest.fixture(params=ORACLES, ids=lambda path: path.parent.name, scope="class")
    @classmethod
    def told(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray], Run, list[Any]]]:
        case = json.loads(request.param.read_text())
        data = request.param.with_name("data.npz")
        arrays, folder = dict(np.load(data)), tmp_path_factory.mktemp("oracle")
        with watching_clients() as seen:
            yield case, arrays, kept(_oracle_config(case, data, arrays, folder), folder / "run"), seen

    def test_model_and_metrics_after_every_round(self, told: Any) -> None:
        _, arrays, run, _ = told
        np.testing.assert_allclose(run.server("x"), arrays["x"][1:], **EXACT)
        np.testing.assert_allclose(run.x, arrays["x"][-1], **EXACT)
        for name in ("test_loss", "test_accuracy"):
            np.testing.assert_allclose([r[name] for r in run.rows], arrays[name][1:], **EXACT)

    def test_server_variables_after_every_round(self, told: Any) -> None:
        case, arrays, run, _ = told
        for name in set(case["server_buffers"]) - {"divergence"}:
            ours = "direction" if case["algorithm"] == "mimelite" else SERVER_NAMES.get(name, name)
            np.testing.assert_allclose(run.server(ours), arrays[name][1:], **EXACT, err_msg=name)

    def test_client_variables_after_every_round(self, told: Any) -> None:
        case, arrays, run, _ = told
        for name in case["client_tables"]:
            ours = run.clients(CLIENT_NAMES.get(name, name), UNSET.get(name, 0.0))
            np.testing.assert_allclose(ours, arrays[name][1:], **EXACT, err_msg=name)

    def test_start_and_end_of_every_local_training(self, told: Any) -> None:
        case, arrays, run, seen = told
        for index, client, start, end in seen:
            np.testing.assert_allclose(run.plain(start), arrays["z"][index], **EXACT)
            np.testing.assert_allclose(run.plain(end), arrays["y_end"][index, client], **EXACT)
        assert len(seen) == sum(map(len, case["schedule"]))


def _oracle_config(case: dict[str, Any], data: Path, arrays: dict[str, np.ndarray], folder: Path) -> dict[str, Any]:
    hyper, server_lr = dict(case["hyper_parameters"]), 1.0
    if case["algorithm"] != "fedadam":
        server_lr = hyper.pop("server_lr", 1.0)
    init = folder / "init.safetensors"
    save_file(layers(arrays["init"], [case["features"], *case["hidden"], case["classes"]]), init)
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
        "monitor": SILENT,
    }


class TestReference:
    """Minibatches, unequal step counts, partial participation, momentum, weight decay, clipping, a server rate."""

    @pytest.mark.parametrize("name", reference.PARAMETERS)
    def test_equals_the_plain_version(self, lab: Lab, name: str) -> None:
        config = faithful(lab, name)
        told = reference.run(name, CASES[name].hyper, lab.problem(config))
        np.testing.assert_allclose(lab.run(config).x, told["x"][-1], **EXACT)

    @pytest.mark.parametrize(("name", "option"), OPTIONS, ids=str)
    def test_options_equal_the_plain_version_and_act(self, lab: Lab, name: str, option: dict[str, Any]) -> None:
        config = faithful(lab, name, **option)
        told = reference.run(name, CASES[name].hyper | option, lab.problem(config))
        np.testing.assert_allclose(lab.run(config).x, told["x"][-1], **EXACT)
        assert lab.run(config).sha != lab.run(faithful(lab, name)).sha

    @pytest.mark.parametrize("weights", ["samples", "uniform"])
    @pytest.mark.parametrize("name", ["fedavg", "fedgmt", "fednsam_s", "fedsmoo", "mofedsam", "mimelite"])
    def test_weights_of_the_clients(self, lab: Lab, name: str, weights: str) -> None:
        config = lab.config(algorithm(name), server={"weighting": weights})
        problem = lab.problem(config)
        problem.weights = weights
        told = reference.run(name, CASES[name].hyper, problem)
        np.testing.assert_allclose(lab.run(config).x, told["x"][-1], **EXACT)


class TestCosts:
    def test_fedgf_saves_the_first_pass_once_c_is_1(self, lab: Lab) -> None:
        rows = lab.run(lab.config(algorithm("fedgf", threshold=0.0))).rows
        steps = [sum(2 * -(-SIZES[client] // 4) for client in cohort) for cohort in SCHEDULE]
        assert [r["backwards"] for r in rows] == [2 * steps[0], *steps[1:]]

    def test_buffers_travel_with_each_model(self, lab: Lab) -> None:
        run = lab.run(drawn(lab, "scaffold"))
        parameters, buffers = run.x.size, sum(b.numel() for b in run.buffers.values())
        assert {r["bytes_down"] for r in run.rows} == {3 * (2 * parameters + buffers) * 4}
        assert {r["bytes_up"] for r in run.rows} == {3 * (2 * parameters + buffers) * 4}

    @pytest.mark.parametrize("name", [*algorithms])
    def test_the_printed_table_says_the_same(self, name: str) -> None:
        case: Case = CASES[name]
        *_, passes, down, up, memory = row(name)
        assert passes.startswith(f"{case.passes[0]}F {case.passes[1]}B")
        assert (int(down), int(up), int(memory)) == (case.down, case.up, case.memory)

    def test_the_table_names_what_is_special(self) -> None:
        assert row("fedgf")[3] == "2F 2B (1F 1B at share = 1)"
        assert row("mimelite")[3] == "1F 1B + full pass a round"
