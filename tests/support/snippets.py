"""The code blocks of the documents, and a workspace in which their commands can be run."""

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fl_dist.__main__ import COMMANDS
from fl_dist.config.arguments import resolve_arguments
from tests.support.processes import ROOT, environment, run, run_ranks, torchrun

DOCUMENTS = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "generated")]
USER_CONFIG = """
rounds: 2
data: {name: npz, path: mine.npz}
model: {name: mlp, hidden: []}
clients: {total: 4, per_round: 2, validation: 0.2}
local: {epochs: 1, batch_size: 4}
monitor: {wandb: {mode: disabled}}
"""
SUBMIT_MODULES = ("launch.submit", "launch.sweep")
NO_SUBMIT_FLAGS = {"--dry-run", "--status", "--local"}


class Snippet(NamedTuple):
    document: Path
    line: int
    language: str
    text: str

    def commands(self) -> list[str]:
        """The lines of a shell block without their comments; a backslash continues a line."""
        text = re.sub(r"\\\n\s*", "", self.text)
        lines = [re.sub(r"\s+#\s.*", "", line).strip() for line in text.splitlines()]
        return [as_module(line) for line in lines if line]

    @property
    def name(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def snippets(language: str | None = None) -> list[Snippet]:
    """The code blocks of all documents, without directives of the site such as {toctree}."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for match in re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            found.append(Snippet(document, text[: match.start()].count("\n") + 1, match[1], match[2]))
    return [s for s in found if language in (None, s.language) and not re.fullmatch(r"\{[\w-]+\}", s.language)]


def as_module(line: str) -> str:
    """`fl-dist COMMAND ...` as `python -m MODULE ...`."""
    program, _, rest = line.partition(" ")
    name, _, arguments = rest.partition(" ")
    if program != "fl-dist" or name not in COMMANDS:
        return line
    return f"python -m {COMMANDS[name][0].removesuffix('.__main__')} {arguments}".strip()


def create_workspace(folder: Path) -> None:
    """Give a reader's folder the repository, data and a small configuration."""
    for name in ("configs", "slurm", "fl_dist", "launch", "docs", "tests", "benchmarks", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "my.yaml").write_text(USER_CONFIG)
    rng = np.random.default_rng(0)
    y = np.arange(40) % 5
    np.savez(
        folder / "mine.npz", x_train=rng.normal(size=(40, 3)), y_train=y, x_test=rng.normal(size=(8, 3)), y_test=y[:8]
    )


def run_command(line: str) -> None:
    """Run the line: Python programs in this process, ranks in their own processes."""
    words = shlex.split(line)
    for program, interpret in INTERPRETERS.items():
        if line.startswith(program):
            interpret(line, words)
            return
    raise AssertionError(f"no test knows how to run: {line}")


def _run_python(line: str, words: list[str]) -> None:
    module, arguments = words[2], words[3:]
    if "|" in words:
        code, output = run(["bash", "-o", "pipefail", "-c", f"{shlex.quote(sys.executable)} {line.split(' ', 1)[1]}"])
        assert code == 0, output
        return
    if module == "launch.local":
        options = importlib.import_module(module).parser().parse_intermixed_args(arguments)
        _run_ranks(options.ranks, options.run_arguments)
        return
    if "--local" in arguments and arguments[0].startswith("configs/results/"):
        arguments.remove("--local")  # takes hours and needs downloaded data
    if module in SUBMIT_MODULES and not NO_SUBMIT_FLAGS & set(arguments):
        arguments.append("--dry-run")
    if "--local" in arguments and arguments[0].startswith("configs/paper/"):
        arguments += ["--only", "FedAvg"]  # test_paper_sweeps.py runs them all
    _call_main(module, arguments)


def _call_main(module: str, arguments: list[str]) -> None:
    """Call the module's main, as `python -m` would."""
    package = importlib.util.find_spec(module)
    assert package is not None, module
    program = importlib.import_module(f"{module}.__main__" if package.submodule_search_locations else module)
    main: Callable[[list[str]], int | None] = program.main
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    assert not code, f"{module} {arguments} ended with {code}"


def _run_torchrun(line: str, words: list[str]) -> None:
    position = words.index("-m")
    if words[position + 1] == "fl_dist.diagnose":
        code, output = run([*torchrun(2), *words[position:]])
        assert code == 0, output
        return
    if words[position + 1] == "launch.doctor":
        _parse_doctor(line, words[position:])
        return
    assert words[position + 1] == "fl_dist.main"
    _run_ranks(int(words[words.index("--nproc-per-node") + 1]), words[position + 2 :])


def _run_ranks(number: int, arguments: list[str]) -> None:
    _, resolved = resolve_arguments(arguments)
    codes, outputs = run_ranks(number, resolved)
    assert not any(codes), outputs


def _run_make(line: str, words: list[str]) -> None:
    result = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def _run_shell(line: str, words: list[str]) -> None:
    code, output = run(["bash", "-c", line], env=environment())
    assert code == 0, output


def _compare_hashes(line: str, words: list[str]) -> None:
    """The documents say that the hashes are equal."""
    code, output = run(["bash", "-c", line], env=environment())
    assert code == 0 and len({row.split()[0] for row in output.splitlines()}) == 1, output


def _run_python_code(line: str, words: list[str]) -> None:
    code, output = run([sys.executable, *words[1:]])
    assert code == 0, output


def _parse_doctor(line: str, words: list[str]) -> None:
    """Read the arguments; test_doctor.py runs it."""
    options = (
        importlib.import_module("launch.doctor")
        .parser()
        .parse_intermixed_args(words[words.index("launch.doctor") + 1 :])
    )
    resolve_arguments(options.run_arguments)


def _skip(line: str, words: list[str]) -> None:
    """Run nothing: needs Slurm (test_slurm.py submits these lines), a network, or minutes of an idle machine."""


INTERPRETERS: dict[str, Callable[[str, list[str]], None]] = {
    "python -m pytest": _skip,  # a test run within the tests
    "python -m fl_dist.data fetch": _skip,
    'python -c "import sys, timm': _skip,  # test_timm.py runs it without the network
    "python -c ": _run_python_code,
    "python -m launch.doctor": _parse_doctor,
    "python -m benchmarks.scaling --no-check": _run_python,
    "python -m benchmarks.": _skip,  # minutes of measuring; test_benchmarks.py runs a case
    "python -m ": _run_python,
    "python configs/": _run_python_code,
    "fl-dist --help": _skip,
    "torchrun ": _run_torchrun,
    "make ": _run_make,
    "sha256sum ": _compare_hashes,
    "mkdir ": _run_shell,
    "tail ": _run_shell,
    "git clone ": _skip,
    "python3 -m venv ": _skip,
    ".venv/bin/pip install ": _skip,
    "wandb login": _skip,
    "sbatch ": _skip,
    "srun ": _skip,
    "export ": _skip,
    "DATA=": _skip,
    "RANKS=": _skip,
}
