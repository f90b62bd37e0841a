"""Sweep files: inheritance, the precedence of keys, and the folders of runs."""

import itertools
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_dist.common.errors import ConfigError
from fl_dist.config.loading import load
from fl_dist.config.sweeps import read_sweep
from launch import sweep

TABLE = """
rows:
  Fed A: {algorithm: {name: fedavg}}
  SAM: {algorithm: {name: fedsam, rho: 0.05}}
  Mo/SAM: {algorithm: {name: mofedsam}}
columns:
  Dir(0.1): {partition: {name: dirichlet, alpha: 0.1}}
  IID: {partition: iid}
grid: {seed: [0, 1]}
set: {rounds: 4, model: mlp, local.lr: 0.3}
"""


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write("table.yaml", TABLE).parent


def write(name: str, text: str) -> Path:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file.absolute()


def names(file: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> list[str]:
    return [cell.name for cell in read_sweep(str(file), overrides, only)[1]]


def config_error(file: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        read_sweep(str(file), overrides, only)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


def test_a_sweep_has_every_combination_of_row_column_and_seed() -> None:
    _, cells = read_sweep("table.yaml")
    parts = (("Fed A", "SAM", "Mo/SAM"), ("Dir(0.1)", "IID"), (0, 1))
    assert [tuple(cell.labels.values()) for cell in cells] == [
        (r, c, f"seed={s}") for r, c, s in itertools.product(*parts)
    ]
    assert [cell.name for cell in cells][:4] == [
        *("Fed_A-Dir_0.1_-seed0", "Fed_A-Dir_0.1_-seed1", "Fed_A-IID-seed0", "Fed_A-IID-seed1")
    ]
    assert cells[-1].name == "Mo_SAM-IID-seed1" and cells[-1].run == Path("runs/table/Mo_SAM-IID-seed1")
    assert all(cell.config.run.dir == str(cell.run) for cell in cells)
    for cell in cells:
        assert cell.config.rounds == 4 and cell.config.model["name"] == "mlp" and cell.config.local.lr == 0.3
        assert cell.config.seed == int(cell.name[-1])
        assert cell.config.partition["name"] == ("iid" if "IID" in cell.name else "dirichlet")
    assert cells[4].config.algorithm == {"name": "fedsam", "rho": 0.05}


def test_the_command_of_a_run_gives_its_config() -> None:
    for cell in read_sweep("table.yaml", ["local.lr=0.7", "partition={name: shards, per_client: 3}"])[1]:
        file, *arguments = cell.command
        assert load(Path(file), arguments) == cell.config


def test_a_sweep_has_its_name_and_folder() -> None:
    write("named.yaml", "like: table.yaml\nname: mine\n")
    write("placed.yaml", "like: table.yaml\ndir: at/home\n")
    assert {cell.run.parent for cell in read_sweep("named.yaml")[1]} == {Path("runs/mine")}
    assert {cell.config.monitor.wandb.group for cell in read_sweep("named.yaml")[1]} == {"mine"}
    assert {cell.run.parent for cell in read_sweep("placed.yaml")[1]} == {Path("at/home")}
    assert read_sweep("placed.yaml")[0].dir == "at/home"


def test_inheritance_is_transitive() -> None:
    write("two.yaml", "like: table.yaml\nset: {local.lr: 0.5, local.momentum: 0.1}\ngrid: {seed: [5]}\n")
    write("three.yaml", "like: two.yaml\nset: {local.momentum: 0.2, rounds: 9}\nrows: [SAM]\n")
    (first, second) = read_sweep("three.yaml")[1]
    assert [first.name, second.name] == ["SAM-Dir_0.1_-seed5", "SAM-IID-seed5"]
    assert (first.config.local.lr, first.config.local.momentum, first.config.rounds) == (0.5, 0.2, 9)
    assert first.config.model["name"] == "mlp", "set in the first file"
    assert first.run.parent == Path("runs/three")
    assert [cell.config.rounds for cell in read_sweep("two.yaml")[1]] == [4] * 6


def test_name_and_folder_are_not_inherited() -> None:
    """Otherwise two sweeps would write into one folder."""
    write("named.yaml", f"name: mine\n{TABLE}")
    write("other.yaml", "like: named.yaml\nset: {local.lr: 0.1}\n")
    write("placed.yaml", f"dir: here\n{TABLE}")
    write("another.yaml", "like: placed.yaml\nset: {local.lr: 0.1}\n")
    for inheriting, inherited in (("other", "named"), ("another", "placed")):
        runs = [{cell.run for cell in read_sweep(f"{name}.yaml")[1]} for name in (inheriting, inherited)]
        assert not runs[0] & runs[1], inheriting


def test_lists_select_and_order_rows_and_columns() -> None:
    write("some.yaml", "like: table.yaml\nrows: [Mo/SAM, Fed A]\ncolumns: [IID]\ngrid: {seed: [0]}\n")
    assert names("some.yaml") == ["Mo_SAM-IID-seed0", "Fed_A-IID-seed0"]
    write("fewer.yaml", "like: some.yaml\nrows: [Fed A]\n")
    assert names("fewer.yaml") == ["Fed_A-IID-seed0"]


def test_new_rows_replace_the_old() -> None:
    write("new.yaml", "like: table.yaml\nrows: {GF: {algorithm: fedgf}}\ngrid: {seed: [3]}\n")
    assert names("new.yaml") == ["GF-Dir_0.1_-seed3", "GF-IID-seed3"]


def test_base_is_relative_to_the_file_that_names_it() -> None:
    write("far/away/base.yaml", "rounds: 11\nmodel: mlp\n")
    write("base.yaml", "rounds: 99\n")
    write("far/sweep.yaml", "base: away/base.yaml\nrows: {A: {algorithm: fedavg}}\n")
    write("near/sweep.yaml", "like: ../far/sweep.yaml\nset: {local.lr: 0.2}\n")
    for file in ("far/sweep.yaml", "near/sweep.yaml", Path("near/sweep.yaml").absolute()):
        (cell,) = read_sweep(str(file))[1]
        assert cell.config.rounds == 11 and cell.name == "A"
    write("near/own.yaml", "like: ../far/sweep.yaml\nbase: ../base.yaml\n")
    assert read_sweep("near/own.yaml")[1][0].config.rounds == 99


def test_columns_override_rows_and_overrides_override_both() -> None:
    write(
        "order.yaml",
        "set: {algorithm: fedsam, local.lr: 0.1, rounds: 2, local.momentum: 0.1, evaluate.final_window: 2}\n"
        "rows: {SAM: {algorithm: {name: fedsam, rho: 0.01}, local.lr: 0.2, rounds: 3, local.momentum: 0.2}}\n"
        "columns: {big: {algorithm.rho: 0.5, local.lr: 0.3, rounds: 4}, same: {}}\n"
        "grid: {local.lr: [0.4]}\n",
    )
    big, same = read_sweep("order.yaml", ["rounds=7"])[1]
    assert big.config.algorithm == {"name": "fedsam", "rho": 0.5} and same.config.algorithm["rho"] == 0.01
    assert [(c.config.rounds, c.config.local.momentum, c.config.evaluate.final_window) for c in (big, same)] == [
        (7, 0.2, 2)
    ] * 2
    assert big.config.local.lr == 0.4


@pytest.mark.parametrize(
    "text",
    [
        "set: {algorithm.rho: 0.2}\nrows: {S: {algorithm: {name: fedsam, rho: 0.01}}}\n"
        "columns: {big: {algorithm.rho: 0.5}}\n",
        "rows: {S: {algorithm.rho: 0.01}}\ncolumns: {c: {algorithm: {name: fedsam, rho: 0.2}}}\n"
        "grid: {algorithm.rho: [0.5]}\n",
    ],
)
def test_the_last_value_of_a_key_counts(text: str) -> None:
    """Also if it was set before its whole section."""
    write("order.yaml", text)
    (cell,) = read_sweep("order.yaml")[1]
    assert cell.config.algorithm == {"name": "fedsam", "rho": 0.5}


def test_set_is_merged_in_order() -> None:
    write("one.yaml", "set: {partition.alpha: 0.3, rounds: 2}\nrows: {A: {seed: 1}}\n")
    write("two.yaml", "like: one.yaml\nset: {partition: {name: dirichlet, alpha: 0.1}}\n")
    write("three.yaml", "like: two.yaml\nset: {partition.alpha: 0.7}\n")
    (cell,) = read_sweep("three.yaml")[1]
    assert cell.config.partition["alpha"] == 0.7 and cell.config.rounds == 2


def test_a_column_may_not_set_a_key_that_a_rows_algorithm_lacks() -> None:
    write("wrong.yaml", "rows: {Avg: {algorithm: fedavg}}\ncolumns: {big: {algorithm.rho: 0.5}}\n")
    assert config_error("wrong.yaml").startswith("run Avg-big: unknown key algorithm.rho")


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        (["local.lr=0.5"], "table-local.lr=0.5"),
        (["local.lr=0.5", "clients.total=40"], "table-clients.total=40-local.lr=0.5"),
        (["clients.total=40", "local.lr=0.5"], "table-clients.total=40-local.lr=0.5"),
        (["algorithm=fedsam"], "table-fedsam"),
        (["rounds=7"], "table"),
        (["run.dir=x"], "table"),
        (["monitor.wandb.mode=disabled", "checkpoint.every=3", "checkpoint.keep=5"], "table"),
        (["data={name: cifar10, root: /x}"], None),
        (["data.name=cifar10", "data.root=/x/y"], "table-cifar10"),
        (["rounds=7", "local.epochs=3"], "table-local.epochs=3"),
    ],
)
def test_overrides_apply_last_and_name_the_folder(overrides: list[str], folder: str | None) -> None:
    _, cells = read_sweep("table.yaml", overrides)
    folders = {str(cell.run.parent) for cell in cells}
    assert len(folders) == 1
    if folder:
        assert folders == {f"runs/{folder}"}
    else:
        assert all(name.startswith("runs/table-data") and name.count("/") == 1 for name in folders)
    config = cells[0].config
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        actual = getattr(config, section)
        for part in name.split(".") if name else ():
            actual = actual[part] if isinstance(actual, dict) else getattr(actual, part)
        if key == "algorithm":
            actual = actual["name"]
        if key not in ("run.dir", "data"):
            assert actual == yaml.safe_load(value), key


def test_overrides_do_not_share_an_explicit_folder() -> None:
    """Otherwise finished runs with other settings would be reused."""
    write("placed.yaml", f"dir: here\n{TABLE}")
    assert {cell.run.parent for cell in read_sweep("placed.yaml")[1]} == {Path("here")}
    assert {cell.run.parent for cell in read_sweep("placed.yaml", ["rounds=9"])[1]} == {Path("here")}
    assert {cell.run.parent for cell in read_sweep("placed.yaml", ["local.lr=0.5"])[1]} != {Path("here")}


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["IID"], ["Fed_A-IID-seed0", "Fed_A-IID-seed1", "SAM-IID-seed0", "SAM-IID-seed1", "Mo_SAM-IID-seed*"]),
        (["Fed A"], ["Fed_A-*"]),
        (["*SAM"], ["SAM-*", "Mo_SAM-*"]),
        (["*-seed1"], ["*-seed1"]),
        (["Fed_A-IID-seed0"], ["Fed_A-IID-seed0"]),
        (["Fed_A-IID-seed0", "SAM-IID-*"], ["Fed_A-IID-seed0", "SAM-IID-*"]),
        (["Dir(0.1)"], ["*-Dir_0.1_-*"]),
        (["*"], ["*"]),
    ],
)
def test_only_takes_labels_and_names(only: list[str], expected: list[str]) -> None:
    matching = [name for name in names("table.yaml") if any(fnmatchcase(name, pattern) for pattern in expected)]
    assert names("table.yaml", only=only) == matching and matching


def test_only_without_a_match_lists_the_valid_names() -> None:
    text = config_error("table.yaml", only=["IDI"])
    assert "no run is 'IDI'" in text and "IID" in text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("like: table.yaml\nrows: [SMA]\n", ["SMA", "did you mean 'SAM'?"]),
        ("like: table.yaml\ncolumns: [IDI]\n", ["IDI", "did you mean 'IID'?"]),
        ("like: table.yaml\nrows: [nothing of it]\n", ["nothing of it", "Fed A"]),
        ("rows: [SAM]\n", ["rows", "like"]),
        ("columns: [IID]\nrows: {A: {seed: 1}}\n", ["columns", "like"]),
        ("like: bad.yaml\n", ["bad.yaml"]),
        ("like: none.yaml\n", ["cannot read", "none.yaml"]),
        ("like: table.yaml\nbase: none.yaml\n", ["cannot read", "none.yaml"]),
        ("like: [table.yaml]\n", ["like"]),
        ("like: table.yaml\nrows: 3\n", ["rows"]),
        ("rows: {A: 3}\n", ["A"]),
        ("rows: {A: {algorithm: fedavgg}}\n", ["run A", "did you mean 'fedavg'?"]),
        ("rows: {A b: {seed: 1}, A/b: {seed: 2}}\n", ["A_b"]),
        ("like: table.yaml\nset: {local.lrr: 1}\n", ["local.lrr", "did you mean 'lr'?"]),
        ("like: table.yaml\ntable: {measure: median}\n", ["measure"]),
        ("like: table.yaml\ntable: {lats: 3}\n", ["table.lats", "valid: extra_columns, final_window"]),
        ("like: table.yaml\ntable: {final_window: 0}\n", ["final_window"]),
        ("like: table.yaml\ntable: {targets: [high]}\n", ["targets"]),
        ("- 1\n- 2\n", ["bad.yaml"]),
        ("rows: {A: {seed: 1}\n", ["bad.yaml"]),
        ("", ["bad.yaml"]),
        ("rows: {A: {seed: 1}}\nrows: {B: {seed: 2}}\n", ["rows"]),
        ("rows: {A: {seed: 1}, A: {seed: 2}}\n", ["A"]),
    ],
)
def test_errors_are_one_line(text: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    write("bad.yaml", text)
    assert sweep.main(["bad.yaml", "--dry-run"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and output.err.count("\n") == 1 and output.out == ""
    assert all(part in output.err for part in parts), output.err


def test_circular_inheritance_is_named() -> None:
    write("a.yaml", "like: b.yaml\n")
    write("b.yaml", "like: c/c.yaml\n")
    write("c/c.yaml", "like: ../a.yaml\n")
    for file in ("a.yaml", "b.yaml", "c/c.yaml"):
        assert Path(file).name in config_error(file)


def test_wrong_overrides_are_one_line() -> None:
    assert "did you mean 'lr'?" in config_error("table.yaml", ["local.lrr=1"])
    assert "'local' is not of the form key.sub=value" in config_error("table.yaml", ["local"])
    assert "unknown key algorithm.rho" in config_error("table.yaml", ["algorithm.rho=0.5"])


LABELS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=6)


@settings(max_examples=25)
@given(rows=st.lists(LABELS, min_size=1, max_size=3, unique=True), columns=st.lists(LABELS, max_size=2, unique=True))
def test_any_label_gives_a_folder_below_the_sweeps(rows: list[str], columns: list[str]) -> None:
    """Or is refused in one line; never a path outside it, never two runs in one folder."""
    content = {
        "rows": {label: {"seed": k} for k, label in enumerate(rows)},
        "columns": {label: {"rounds": k + 1} for k, label in enumerate(columns)},
    }
    file = write("labels.yaml", yaml.safe_dump(content, allow_unicode=True))
    try:
        _, cells = read_sweep(str(file))
    except ConfigError:
        config_error(file)
        return
    assert len({cell.run for cell in cells}) == len(cells) == len(rows) * max(1, len(columns))
    for cell in cells:
        assert cell.run.parent == Path("runs/labels") and cell.run.name == cell.name not in (".", "..", "")
        assert cell.labels["row"] in rows
