"""The documents agree with the program."""

import ast
import importlib.util
import inspect
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from fl_dist.__main__ import COMMANDS
from fl_dist.algorithms import algorithms, papers, parts
from fl_dist.algorithms.__main__ import main as show_algorithms
from fl_dist.algorithms.core import Algorithm, Part, ascend
from fl_dist.algorithms.fedsam import Rho, Sam
from fl_dist.algorithms.paper_costs import PAPER_COSTS
from fl_dist.callbacks import callbacks
from fl_dist.common.registry import Registry
from fl_dist.config import validate
from fl_dist.config.builder_sections import BUILDER_SECTIONS
from fl_dist.config.sweeps import read_sweep
from fl_dist.diagnostics import diagnostics
from fl_dist.metrics.keys import markdown_table
from fl_dist.metrics.summary import MEANINGS
from tests.support.processes import ROOT
from tests.support.snippets import DOCUMENTS, Snippet, create_workspace, snippets
from tests.support.user_guide import needs_user_files


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def load_generator() -> ModuleType:
    """docs/generate.py, as docs/conf.py imports it."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flat_keys(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of a validated configuration; sections that hold a builder's settings are one key."""
    for name, value in values.items():
        if isinstance(value, dict) and prefix + name not in {*BUILDER_SECTIONS, "diagnostics"}:
            yield from flat_keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


class TestTheGeneratedReference:
    """What `make docs` writes from the code has everything in it."""

    @pytest.fixture(scope="class")
    @classmethod
    def pages(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("generated")
        (folder / "former.md").touch()
        load_generator().write(folder)
        return {file.stem: file.read_text() for file in folder.iterdir()}

    def test_every_part_is_on_a_page(self, pages: dict[str, str]) -> None:
        text = "".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
        assert sorted(re.findall(r"^:::\{include\} generated/([\w-]+)\.md$", text, re.MULTILINE)) == sorted(pages)

    def test_every_key_of_the_configuration(self, pages: dict[str, str]) -> None:
        keys = list(flat_keys(validate({}).model_dump()))
        assert len(keys) > 45
        assert [key for key in keys if pages["keys"].count(f"| `{key}` |") != 1] == []

    @pytest.mark.parametrize(
        ("kind", "registry", "prefix"),
        [
            *((section, registry, f"{section}.") for section, registry in BUILDER_SECTIONS.items()),
            ("part", parts, ""),
            ("diagnostic", diagnostics, "diagnostics.<label>."),
            ("callback", callbacks, ""),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_every_builder_with_its_settings(
        self, pages: dict[str, str], kind: str, registry: Registry[Any], prefix: str
    ) -> None:
        for name in registry:
            (section,) = re.findall(
                rf"^\({kind}-{name}\)=\n\n### `{name}`\n(.*?)(?=^##|^\(|\Z)",
                pages["builders"],
                re.MULTILINE | re.DOTALL,
            )
            settings = {f"{prefix}{setting}" for setting in inspect_settings(registry[name])}
            listed = set(re.findall(r"^\| `([\w.<>]+)` \|", section, re.MULTILINE))
            assert listed >= settings
            assert {key.rpartition(".")[0] for key in listed - settings} <= settings  # keys of a section

    def test_every_algorithm_with_its_cost(self, pages: dict[str, str]) -> None:
        for name in algorithms:
            assert f"\n| [{name}](#algorithm-{name}) | {papers[name]} | " in pages["algorithms"]
            assert f"\n| {name} | " in pages["memory"]
        for part in parts:
            for report in parts.build(part, {}).reports:
                assert f"\n| {report} | {part} | " in pages["reports"]
        titles = re.findall(r"^### (\w+)$", pages["paper-costs"], re.MULTILINE)
        assert [title.lower() for title in titles] == [*PAPER_COSTS]

    def test_every_command(self, pages: dict[str, str]) -> None:
        sources = [path.read_text() for package in ("fl_dist", "launch") for path in (ROOT / package).rglob("*.py")]
        programs = {program for text in sources for program in re.findall(r'prog="([^"]+)"', text)}
        assert len(programs) > 10
        assert [name for name in programs if f"\nusage: {name} [-h]" not in pages["commands"]] == []
        assert [name for name in COMMANDS if f"\n## fl-dist {name}\n" not in pages["commands"]] == []
        assert re.findall(r"^### fl-dist data (\w+)$", pages["commands"], re.MULTILINE) == [
            "fetch",
            "check",
            "show",
            "cache",
        ]

    def test_the_record_and_the_summary(self, pages: dict[str, str]) -> None:
        assert markdown_table() in pages["record"]
        assert [name for name in MEANINGS if f"\n| `{name}` | " not in pages["summary"]] == []

    def test_it_names_no_folder_of_this_machine(self, pages: dict[str, str]) -> None:
        assert [name for name, text in pages.items() if str(ROOT) in text or str(Path.home()) in text] == []

    def test_a_command_that_fails_fails_the_generation(self) -> None:
        with pytest.raises(RuntimeError, match="ended with exit code 2"):
            load_generator()._output(show_algorithms, ["--unknown"])


def inspect_settings(builder: Any) -> list[str]:
    return [p.name for p in inspect.signature(builder).parameters.values() if p.kind is p.KEYWORD_ONLY]


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
    _, cells = read_sweep(str(tmp_path / "sweep.yaml"))
    dimensions = [*text["grid"].values(), *(text[key] for key in ("rows", "columns", "list") if key in text)]
    assert len(cells) == math.prod(map(len, dimensions))


def test_the_part_in_the_readme_works() -> None:
    snippet = [s for s in snippets("python") if s.document.name == "README.md"][-1]
    parts: Registry[Part] = Registry("part")
    names = {"Part": Part, "Rho": Rho, "ascend": ascend, "Algorithm": Algorithm, "parts": parts}
    exec(snippet.text, names | {"algorithm": lambda paper: lambda build: build})
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
