"""The documents say what the program says."""

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
from fl_dist.algorithms.fedsam import Rho, Sam
from fl_dist.common.registry import Registry
from fl_dist.config import validate
from fl_dist.core import Algorithm, Part, ascend
from launch import sweep as sweeps
from tests.support.processes import ROOT
from tests.support.snippets import DOCUMENTS, Snippet, set_up_desk, snippets

NEW_ALGORITHM, YOURS = "add-an-algorithm.md", "yours.md"


@pytest.mark.parametrize("document", ["README.md", "docs/algorithms.md"])
def test_the_table_of_algorithms_is_the_programs(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_algorithms(["--markdown"])
    table, _, reports = capsys.readouterr().out.strip().split("\n\n")
    assert len(table.splitlines()) == 2 + len([*algorithms])
    assert table in (ROOT / document).read_text()
    assert document == "README.md" or reports in (ROOT / document).read_text()


def test_the_table_of_memory_is_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    show_algorithms(["--memory", "--markdown"])
    table, legend = capsys.readouterr().out.strip().split("\n\n")
    text = (ROOT / "docs/algorithms.md").read_text()
    assert table in text and legend in text


def test_every_linked_file_exists() -> None:
    for document in DOCUMENTS:
        for target in document.read_text().split("](")[1:]:
            name = target.split(")")[0].split("#")[0]
            if name and "://" not in name:
                assert (document.parent / Path(name)).exists(), f"{document.name} links to {name}"


GPU = re.compile(
    "cuda|cudnn|nccl|pin_memory|is_pinned|non_blocking|fp32_precision|SDPBackend|_polls|_gloo_only|_fused_"
    r"|_foreach_|_stream\b|autocast\((?!.cpu)|dist\.(broadcast|reduce|all_reduce)",
    re.IGNORECASE,
)


def named(body: list[ast.stmt], inside: str = "") -> Iterator[tuple[str, str]]:
    """Functions, and constants beside them, with their source; without docstrings and comments."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from named(node.body, f"{inside}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            first = node.body[0]
            told = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            yield f"{inside}{node.name}", "\n".join(map(ast.unparse, node.body[told:]))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield f"{inside}{ast.unparse(target)}", ast.unparse(node)


def test_what_never_ran_on_a_real_gpu_is_listed() -> None:
    files = [path for package in ("fl_dist", "launch") for path in (ROOT / package).rglob("*.py")]
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name, source in named(ast.parse(path.read_text()).body)
        if GPU.search(source)
    }
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(found)


def test_every_block_says_what_it_is() -> None:
    assert {s.language for s in snippets()} == {"sh", "yaml", "python", "text"}


def elsewhere(snippet: Snippet) -> bool:
    """Blocks that need the reader's own file first: they have a test of their own."""
    return snippet.document.name in (NEW_ALGORITHM, YOURS)


@pytest.mark.parametrize("snippet", [s for s in snippets("yaml") if not elsewhere(s)], ids=lambda s: s.name)
def test_configurations_in_the_documents_are_valid(snippet: Snippet, tmp_path: Path) -> None:
    text = yaml.safe_load(snippet.text)
    if "grid" not in text:
        validate(text)
        return
    (tmp_path / "my.yaml").write_text("rounds: 3\n")
    (tmp_path / "sweep.yaml").write_text(snippet.text)
    _, cells = sweeps.read(str(tmp_path / "sweep.yaml"))
    chosen = [*text["grid"].values(), *(text[key] for key in ("rows", "columns", "list") if key in text)]
    assert len(cells) == math.prod(map(len, chosen))


def test_the_part_in_the_readme_is_the_one_that_runs() -> None:
    snippet = [s for s in snippets("python") if s.document.name == "README.md"][-1]
    parts: Registry[Part] = Registry("part")
    names = {"Part": Part, "Rho": Rho, "ascend": ascend, "Algorithm": Algorithm, "parts": parts}
    exec(snippet.text, names | {"entry": lambda paper: lambda build: build})
    shown, real = parts.build("sam", {"rho": 0.3}), Sam(rho=0.3)
    w = torch.tensor([3.0, -1.0])
    assert torch.equal(shown.direction(w, torch.sin, None, None, None), real.direction(w, torch.sin, None, None, None))
    assert (shown.extra, shown.role) == (real.extra, real.role)


def test_the_readme_runs_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_desk(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec([s for s in snippets("python") if s.document.name == "README.md"][0].text, names)
    assert sum(p.numel() for p in names["model"].parameters()) == (3 + 1) * 5
