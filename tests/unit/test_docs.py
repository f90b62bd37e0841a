"""The documents agree with the program."""

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fl_dist.algorithms import algorithms
from fl_dist.algorithms.__main__ import main as show_algorithms
from fl_dist.algorithms.core import Algorithm, Part, ascend
from fl_dist.algorithms.fedsam import Rho, Sam
from fl_dist.common.registry import Registry
from fl_dist.config import validate
from fl_dist.metrics.record import markdown_table
from launch import sweep as sweeps
from tests.support.processes import ROOT
from tests.support.snippets import DOCUMENTS, Snippet, create_workspace, snippets
from tests.support.user_guide import needs_user_files


@pytest.mark.parametrize("document", ["README.md", "docs/algorithms.md"])
def test_the_documented_table_of_algorithms_is_current(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_algorithms(["--markdown"])
    table, _, reports = capsys.readouterr().out.strip().split("\n\n")
    assert len(table.splitlines()) == 2 + len([*algorithms])
    assert table in (ROOT / document).read_text()
    assert document == "README.md" or reports in (ROOT / document).read_text()


def test_the_documented_table_of_memory_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    show_algorithms(["--memory", "--markdown"])
    table, legend = capsys.readouterr().out.strip().split("\n\n")
    text = (ROOT / "docs/algorithms.md").read_text()
    assert table in text and legend in text


def test_the_documented_costs_of_a_paper_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    show_algorithms(["--paper", "fedlesam", "--markdown"])
    assert capsys.readouterr().out.strip() in (ROOT / "docs/algorithms.md").read_text()


def test_the_table_of_the_record_is_the_programs() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    (table,) = re.findall(r"^<!-- record: begin -->\n(.*?)\n<!-- record: end -->$", text, re.MULTILINE | re.DOTALL)
    update = "copy the output of `python -m fl_dist.metrics` between the two comments of docs/monitoring.md"
    assert table == markdown_table(), update


def test_every_linked_file_exists() -> None:
    for document in DOCUMENTS:
        for target in document.read_text().split("](")[1:]:
            name = target.split(")")[0].split("#")[0]
            if name and "://" not in name:
                assert (document.parent / Path(name)).exists(), f"{document.name} links to {name}"


GPU = re.compile(
    "cuda|cudnn|nccl|pin_memory|is_pinned|non_blocking|fp32_precision|SDPBackend|is_completed|_reduces_on_host|_fused_"
    r"|_foreach_|_stream\b|autocast\((?!.cpu)|dist\.(broadcast|reduce|all_reduce)",
    re.IGNORECASE,
)


def iterate_definitions(body: list[ast.stmt], inside: str = "") -> Iterator[tuple[str, str]]:
    """Functions and constants with their source, without docstrings and comments."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from iterate_definitions(node.body, f"{inside}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            first = node.body[0]
            has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            yield f"{inside}{node.name}", "\n".join(map(ast.unparse, node.body[has_docstring:]))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield f"{inside}{ast.unparse(target)}", ast.unparse(node)


def test_code_that_never_ran_on_a_real_gpu_is_listed() -> None:
    files = [path for package in ("fl_dist", "launch") for path in (ROOT / package).rglob("*.py")]
    gpu_code = {
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name, source in iterate_definitions(ast.parse(path.read_text()).body)
        if GPU.search(source)
    }
    page = ROOT / "docs" / "how-to" / "gpu-untested.md"
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", page.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(gpu_code)


def test_every_code_block_has_a_language() -> None:
    assert {s.language for s in snippets()} == {"sh", "yaml", "python", "text"}


def names_user_code(snippet: Snippet) -> bool:
    return needs_user_files(snippet) and "my_" in snippet.text


@pytest.mark.parametrize("snippet", [s for s in snippets("yaml") if not names_user_code(s)], ids=lambda s: s.name)
def test_documented_configurations_are_valid(snippet: Snippet, tmp_path: Path) -> None:
    text = yaml.safe_load(snippet.text)
    if "grid" not in text:
        validate(text)
        return
    (tmp_path / "my.yaml").write_text("rounds: 3\n")
    (tmp_path / "sweep.yaml").write_text(snippet.text)
    _, cells = sweeps.read_sweep(str(tmp_path / "sweep.yaml"))
    dimensions = [*text["grid"].values(), *(text[key] for key in ("rows", "columns", "list") if key in text)]
    assert len(cells) == math.prod(map(len, dimensions))


def test_the_part_in_the_readme_works() -> None:
    snippet = [s for s in snippets("python") if s.document.name == "README.md"][-1]
    parts: Registry[Part] = Registry("part")
    names = {"Part": Part, "Rho": Rho, "ascend": ascend, "Algorithm": Algorithm, "parts": parts}
    exec(snippet.text, names | {"entry": lambda paper: lambda build: build})
    from_readme, actual = parts.build("sam", {"rho": 0.3}), Sam(rho=0.3)
    w = torch.tensor([3.0, -1.0])
    assert torch.equal(
        from_readme.direction(w, torch.sin, None, None, None), actual.direction(w, torch.sin, None, None, None)
    )
    assert (from_readme.extra_passes, from_readme.role) == (actual.extra_passes, actual.role)


def test_the_python_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec([s for s in snippets("python") if s.document.name == "README.md"][0].text, names)
    assert sum(p.numel() for p in names["model"].parameters()) == (3 + 1) * 5
