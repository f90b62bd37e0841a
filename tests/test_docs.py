"""The documents say what the program says, and what they tell a reader to type works as printed."""

import ast
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fl_dist.algorithms.__main__ import main as show_algorithms
from fl_dist.algorithms.fedsam import Rho, Sam
from fl_dist.common.registry import Registry
from fl_dist.config import arguments, validate
from fl_dist.core import Algorithm, Part, ascend
from launch import sweep as sweeps
from tests.jobs import ROOT, environment
from tests.snippets import DOCUMENTS, Snippet, set_up_desk, snippets, type_command

QUICK = "rounds: 2\nclients: {total: 4, per_round: 2}\nmodel: {name: mlp}\nmonitor: {wandb: {mode: disabled}}\n"
NEW_ALGORITHM, YOURS = "add-an-algorithm.md", "yours.md"


@pytest.mark.parametrize("document", ["README.md", "docs/algorithms.md"])
def test_the_table_of_algorithms_is_the_programs(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_algorithms(["--markdown"])
    table, _, reports = capsys.readouterr().out.strip().split("\n\n")
    assert len(table.splitlines()) == 2 + 29
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


@pytest.mark.parametrize("snippet", [s for s in snippets("sh") if not elsewhere(s)], ids=lambda s: s.name)
def test_what_a_reader_types_works(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "quickstart.yaml").write_text(QUICK)
    monkeypatch.setattr(arguments, "QUICKSTART", tmp_path / "quick" / "quickstart.yaml")
    set_up_desk(tmp_path)
    for block in snippets("yaml"):
        if (sweep := yaml.safe_load(block.text)).get("name") == "my_sweep":
            (tmp_path / "my_sweep.yaml").write_text(yaml.safe_dump(first_of(sweep)))
    monkeypatch.chdir(tmp_path)
    for command in snippet.commands():
        # Every line is an alternative to those before it, on a new desk.
        shutil.rmtree("runs", ignore_errors=True)
        Path("runs/my_sweep/a/wandb/offline-run-20250101_000000-abc").mkdir(parents=True)
        for word in command.split() if "fl_dist.diagnose" in command else ():
            if word.startswith("runs/"):
                type_command(f"python -m fl_dist.main my.yaml run.dir={word}")
        # Uploading needs an account and a network.
        type_command(f"{command} --dry-run" if "launch.sync" in command else command)


def first_of(sweep: dict[str, Any]) -> dict[str, Any]:
    """The sweep with one value of each kind."""
    grid = {k: dict([*v.items()][:1]) if isinstance(v, dict) else v[:1] for k, v in sweep["grid"].items()}
    return sweep | {"grid": grid, "list": sweep["list"][:1], "set": {"rounds": 1}, "resources": {"tasks_per_node": 2}}


@pytest.mark.parametrize("snippet", [s for s in snippets("yaml") if not elsewhere(s)], ids=lambda s: s.name)
def test_configurations_in_the_documents_are_valid(snippet: Snippet, tmp_path: Path) -> None:
    text = yaml.safe_load(snippet.text)
    if "grid" not in text:
        validate(text)
        return
    (tmp_path / "my.yaml").write_text("rounds: 3\n")
    (tmp_path / "sweep.yaml").write_text(snippet.text)
    _, cells = sweeps.read(str(tmp_path / "sweep.yaml"))
    assert len(cells) == (36 if "list" in text else 12)


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


@pytest.mark.thorough
class TestANewAlgorithm:
    """The guide, followed to the letter in a copy of the repository."""

    @pytest.fixture(scope="class")
    @classmethod
    def copy(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        copy = tmp_path_factory.mktemp("copy") / "fl_dist"
        for name in ("fl_dist", "launch", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / name, copy / name)
        file, case, reduction = [s.text for s in snippets("python") if s.document.name == NEW_ALGORITHM]
        (copy / "fl_dist" / "algorithms" / "fednova.py").write_text(file)
        insert_after(copy / "tests" / "harness.py", "CASES: ", "}\n", case)
        insert_after(copy / "tests" / "test_properties.py", "REDUCTIONS: ", "]\n", reduction)
        return copy

    def test_every_command_works(self, copy: Path) -> None:
        commands = [c for s in snippets("sh") if s.document.name == NEW_ALGORITHM for c in s.commands()]
        assert len(commands) == 7
        path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
        for command in commands:
            env = environment(PATH=path, PYTHONPATH=str(copy), WANDB_MODE="disabled")
            shown = subprocess.run(["bash", "-c", command], cwd=copy, env=env, capture_output=True, text=True)
            assert shown.returncode == 0, f"{command}\n{shown.stdout[-3000:]}{shown.stderr[-3000:]}"
        assert self.sha(copy, "fednova") == self.sha(copy, "fednova-2-workers")

    @staticmethod
    def sha(copy: Path, name: str) -> str:
        return hashlib.sha256((copy / "runs" / name / "model.safetensors").read_bytes()).hexdigest()


def insert_after(file: Path, start: str, end: str, text: str) -> None:
    """Put the text below the definition that begins and ends so."""
    before, found, rest = file.read_text().partition(f"\n{start}")
    body, closing, after = rest.partition(f"\n{end}")
    assert found and closing
    file.write_text(f"{before}{found}{body}{closing}{text}{after}")
