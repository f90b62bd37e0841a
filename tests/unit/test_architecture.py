"""The folders are the architecture: imports go one way, and every module stands in the document."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support.processes import ROOT

LAYERS = (
    "fl_dist.common",
    "fl_dist.core",
    "fl_dist.drawing",
    "fl_dist.algorithms",
    "fl_dist.diagnostics",
    "fl_dist.data",
    "fl_dist.models",
    "fl_dist.tasks",
    "fl_dist.config",
    "fl_dist.machine",
    "fl_dist.storage",
    "fl_dist.monitor",
    "fl_dist.engine",
    "fl_dist.execute",
    "fl_dist.runs",
    "fl_dist.results",
    "fl_dist.diagnose",
    "fl_dist.report",
    "fl_dist.data.__main__",
    "fl_dist.main",
    "launch",
    "fl_dist.__main__",
)
"""From what knows nothing to what knows everything; each imports only itself and what stands above it here."""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("fl_dist", "launch")
    for path in (ROOT / package).rglob("*.py")
    if path != ROOT / "fl_dist" / "__init__.py"  # which imports `run` when it is asked for
}


def imports(path: Path) -> set[str]:
    """The modules of the program that a file imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{name.name}" for name in node.names}
            found |= (inner & MODULES.keys()) or {node.module}
    return found & MODULES.keys()


def layer(module: str) -> int:
    return max((k for k, name in enumerate(LAYERS) if f"{module}.".startswith(f"{name}.")), default=-1)


def test_every_module_has_its_layer() -> None:
    assert [m for m in MODULES if layer(m) < 0] == []


def test_imports_go_one_way() -> None:
    up = [(m, other) for m, path in MODULES.items() for other in imports(path) if layer(other) > layer(m)]
    assert not up


def test_no_two_modules_import_each_other() -> None:
    order = TopologicalSorter({module: imports(path) - {module} for module, path in MODULES.items()})
    order.prepare()


def test_the_document_names_every_folder_and_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    told = {word.strip("`,") for word in text.split() if word.startswith("`")}
    # One file a data set, model, paper or kind: their folders stand for them.
    many = (
        "fl_dist.algorithms.",
        "fl_dist.diagnostics.",
        "fl_dist.data.",
        "fl_dist.models.",
        "fl_dist.tasks.",
        "launch.",
    )
    names = [m for m in MODULES if not m.startswith(many) and MODULES[m].name != "__init__.py"]
    assert [m for m in names if f"{m.rpartition('.')[2]}.py" not in told] == []
    folders = [name.rpartition(".")[2] for name in LAYERS if (ROOT / name.replace(".", "/")).is_dir()]
    assert [name for name in folders if f"{name}/" not in told] == []


def test_no_test_module_imports_another() -> None:
    """What tests share is in `tests/support`, and waits for things in one way."""
    files = [path for layer in ("unit", "process", "cluster") for path in (ROOT / "tests" / layer).rglob("*.py")]
    assert len(files) > 60
    found = [path.name for path in files if re.search(r"^(from|import) tests\.(?!support)", path.read_text(), re.M)]
    assert found == []
    waits = [p.name for p in (ROOT / "tests").rglob("*.py") if re.search(r"def (wait_for|free_port)\(", p.read_text())]
    assert waits == ["waiting.py"]
