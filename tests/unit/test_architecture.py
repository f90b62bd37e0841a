"""Layers: imports go one way, and docs/design/index.md names every module."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support.processes import ROOT

LAYERS = (
    "fl_dist.common",
    "fl_dist.plots",
    "fl_dist.optimizers",
    "fl_dist.algorithms",
    "fl_dist.diagnostics",
    "fl_dist.data",
    "fl_dist.models",
    "fl_dist.tasks",
    "fl_dist.metrics",
    "fl_dist.callbacks",
    "fl_dist.config",
    "fl_dist.distributed",
    "fl_dist.storage",
    "fl_dist.federation",
    "fl_dist.logs",
    "fl_dist.execute",
    "fl_dist.runs",
    "fl_dist.results",
    "fl_dist.diagnose_command",
    "fl_dist.diagnose",
    "fl_dist.report",
    "fl_dist.data.__main__",
    "fl_dist.run_command",
    "fl_dist.main",
    "fl_dist.doctor",
    "launch",
    "fl_dist.__main__",
)
"""From the lowest layer to the highest; each imports only itself and the layers above it in this list."""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("fl_dist", "launch")
    for path in (ROOT / package).rglob("*.py")
    if path != ROOT / "fl_dist" / "__init__.py"  # it imports `run` lazily
}


def imports(path: Path) -> set[str]:
    """The modules of the program that a file imports, also within functions."""
    importing = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            importing |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{name.name}" for name in node.names}
            importing |= (inner & MODULES.keys()) or {node.module}
    return importing & MODULES.keys()


def layer(module: str) -> int:
    return max((k for k, name in enumerate(LAYERS) if f"{module}.".startswith(f"{name}.")), default=-1)


def test_every_module_has_its_layer() -> None:
    assert [m for m in MODULES if layer(m) < 0] == []


def test_modules_import_only_lower_layers() -> None:
    upward_imports = [(m, other) for m, path in MODULES.items() for other in imports(path) if layer(other) > layer(m)]
    assert not upward_imports


def test_there_are_no_import_cycles() -> None:
    order = TopologicalSorter({module: imports(path) - {module} for module, path in MODULES.items()})
    order.prepare()


def test_the_document_names_every_folder_and_module() -> None:
    text = (ROOT / "docs" / "design" / "index.md").read_text()
    documented = {word.strip("`,") for word in text.split() if word.startswith("`")}
    # One file per data set, model, paper or kind: the document names only their folders.
    packages = (
        "fl_dist.algorithms.",
        "fl_dist.diagnostics.",
        "fl_dist.data.",
        "fl_dist.models.",
        "fl_dist.tasks.",
        "fl_dist.callbacks.",
        "launch.",
    )
    names = [m for m in MODULES if not m.startswith(packages) and MODULES[m].name != "__init__.py"]
    assert [m for m in names if f"{m.rpartition('.')[2]}.py" not in documented] == []
    folders = [name.rpartition(".")[2] for name in LAYERS if (ROOT / name.replace(".", "/")).is_dir()]
    assert [name for name in folders if f"{name}/" not in documented] == []


def test_no_test_module_imports_another() -> None:
    """Shared code is in `tests/support`, and only one module waits and picks ports."""
    files = [path for layer in ("unit", "process", "cluster") for path in (ROOT / "tests" / layer).rglob("*.py")]
    assert len(files) > 60
    importing = [path.name for path in files if re.search(r"^(from|import) tests\.(?!support)", path.read_text(), re.M)]
    assert importing == []
    waits = [p.name for p in (ROOT / "tests").rglob("*.py") if re.search(r"def (wait_for|free_port)\(", p.read_text())]
    assert waits == ["waiting.py"]


def test_library_code_does_not_print() -> None:
    """It logs or raises; commands, the loop of `report --serve` and terminal helpers print."""
    printing = {module for module, path in MODULES.items() if _calls_print(path)}
    commands = {
        module for module in printing if module.startswith("launch.") or re.search(r"(__main__|command)$", module)
    }
    assert printing - commands == {"fl_dist.common.terminal", "fl_dist.report.serve"}


def _calls_print(path: Path) -> bool:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return any(isinstance(function, ast.Name) and function.id == "print" for function in calls)


def test_modules_have_loggers_of_their_own() -> None:
    named = [m for m, path in MODULES.items() if re.search(r'^log = logging\.getLogger\("', path.read_text(), re.M)]
    assert named == []
