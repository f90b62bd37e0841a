"""The code blocks of the documents, and a desk on which their commands can be typed."""

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

from fl_dist.config.arguments import resolve
from tests.support.processes import ROOT, environment, run, run_ranks, torchrun

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MINE = """
rounds: 2
data: {name: npz, path: mine.npz}
model: {name: mlp, hidden: []}
clients: {total: 4, per_round: 2}
local: {epochs: 1, batch_size: 4}
monitor: {wandb: {mode: disabled}}
"""
SUBMITS = ("launch.submit", "launch.sweep")
HARMLESS = {"--dry-run", "--status", "--local"}


class Snippet(NamedTuple):
    document: Path
    line: int
    language: str
    text: str

    def commands(self) -> list[str]:
        """The lines of a shell block without their comments."""
        lines = [re.sub(r"\s+#\s.*", "", line).strip() for line in self.text.splitlines()]
        return [line for line in lines if line]

    @property
    def name(self) -> str:
        return f"{self.document.name}:{self.line}"


def snippets(language: str | None = None) -> list[Snippet]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            found.append(Snippet(document, text[: match.start()].count("\n") + 1, match[1], match[2]))
    return [s for s in found if language in (None, s.language)]


def set_up_desk(folder: Path) -> None:
    """What a reader has: the repository, data and a small configuration of their own."""
    for name in ("configs", "slurm", "fl_dist", "launch", "docs", "tests", "benchmarks", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "my.yaml").write_text(MINE)
    rng = np.random.default_rng(0)
    y = np.arange(40) % 5
    np.savez(
        folder / "mine.npz", x_train=rng.normal(size=(40, 3)), y_train=y, x_test=rng.normal(size=(8, 3)), y_test=y[:8]
    )


def type_command(line: str) -> None:
    """Do what the line does, here; programs of Python in this process, ranks as processes of their own."""
    words = shlex.split(line)
    for program, interpret in INTERPRETERS.items():
        if line.startswith(program):
            interpret(line, words)
            return
    raise AssertionError(f"no test knows how to run: {line}")


def _python(line: str, words: list[str]) -> None:
    module, arguments = words[2], words[3:]
    if "|" in words:
        code, output = run(["bash", "-o", "pipefail", "-c", f"{shlex.quote(sys.executable)} {line.split(' ', 1)[1]}"])
        assert code == 0, output
        return
    if module == "launch.local":
        chosen = importlib.import_module(module).parser().parse_intermixed_args(arguments)
        _ranks(chosen.ranks, chosen.what)
        return
    if "--local" in arguments and arguments[0].startswith("configs/results/"):
        arguments.remove("--local")  # it takes hours, and data that has to be fetched
    if module in SUBMITS and not HARMLESS & set(arguments):
        arguments.append("--dry-run")
    if "--local" in arguments and arguments[0].startswith("configs/paper/"):
        arguments += ["--only", "FedAvg"]  # test_papers.py runs them all
    _call(module, arguments)


def _call(module: str, arguments: list[str]) -> None:
    """The module's main, as `python -m` would call it."""
    package = importlib.util.find_spec(module)
    assert package is not None, module
    program = importlib.import_module(f"{module}.__main__" if package.submodule_search_locations else module)
    main: Callable[[list[str]], int | None] = program.main
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    assert not code, f"{module} {arguments} ended with {code}"


def _torchrun(line: str, words: list[str]) -> None:
    at = words.index("-m")
    if words[at + 1] == "fl_dist.diagnose":
        code, output = run([*torchrun(2), *words[at:]])
        assert code == 0, output
        return
    assert words[at + 1] == "fl_dist.main"
    _ranks(int(words[words.index("--nproc-per-node") + 1]), words[at + 2 :])


def _ranks(number: int, arguments: list[str]) -> None:
    _, spelt_out = resolve(arguments)
    codes, outputs = run_ranks(number, spelt_out)
    assert not any(codes), outputs


def _make(line: str, words: list[str]) -> None:
    shown = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr


def _shell(line: str, words: list[str]) -> None:
    code, output = run(["bash", "-c", line], env=environment())
    assert code == 0, output


def _elsewhere(line: str, words: list[str]) -> None:
    """Needs Slurm (test_slurm.py submits these lines), a network, or a machine of its own for minutes."""


INTERPRETERS: dict[str, Callable[[str, list[str]], None]] = {
    "python -m pytest": _elsewhere,  # test_docs.py runs it where the document says
    "python -m fl_dist.data fetch": _elsewhere,
    'python -c "import sys, timm': _elsewhere,  # test_timm.py runs it without the network
    "python -m benchmarks.scaling --no-check": _python,
    "python -m benchmarks.": _elsewhere,  # minutes of measuring; test_benchmarks.py runs a case
    "python -m ": _python,
    "torchrun ": _torchrun,
    "make ": _make,
    "sha256sum ": _shell,
    "mkdir ": _shell,
    "git clone ": _elsewhere,
    "sbatch ": _elsewhere,
    "srun ": _elsewhere,
    "export ": _elsewhere,
    "DATA=": _elsewhere,
    "RANKS=": _elsewhere,
}
