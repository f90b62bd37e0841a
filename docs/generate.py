"""The parts of the reference that follow from the code, as Markdown files for the pages of `docs/reference` to include.

`docs/conf.py` calls `write` before Sphinx reads the pages.
"""

import argparse
import contextlib
import importlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fl_dist.__main__ import COMMANDS, usage
from fl_dist.algorithms import algorithms, papers
from fl_dist.algorithms.__main__ import main as show_algorithms
from fl_dist.algorithms.core import parts
from fl_dist.algorithms.cost_tables import (
    PAPER_LEGEND,
    REPORT_COLUMNS,
    UPLOAD_COLUMNS,
    UPLOAD_LEGEND,
    report_rows,
    upload_rows,
)
from fl_dist.algorithms.paper_costs import PAPER_COSTS
from fl_dist.callbacks import callbacks
from fl_dist.common.registry import Registry
from fl_dist.config.builder_sections import BUILDER_SECTIONS, COMMON_KEYS, CallbackKeys, DiagnosticKeys
from fl_dist.config.help import KeyInfo, list_keys, summary_of
from fl_dist.config.schema import Config
from fl_dist.config.sweep_file import ExtraColumn, Sweep
from fl_dist.diagnostics import diagnostics
from fl_dist.metrics.keys import markdown_table
from fl_dist.metrics.summary import MEANINGS
from launch.cluster import Profile, Resources

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference" / "generated"
COLUMNS = 100
"""Width of the help texts."""
SENTENCES = "{.keys}"
"""Before a table whose last column has sentences: its class in docs/_static/site.css."""
KEY_COLUMNS = ("key", "type", "default", "meaning")
BUILDER_TITLES = {
    "task": "Tasks",
    "data": "Data sets",
    "augment": "Augmentations",
    "partition": "Partitions",
    "model": "Models",
    "algorithm": "Algorithms",
    "local.optimizer": "Optimisers of local steps",
    "local.schedule": "Schedules of the local learning rate",
    "server.schedule": "Schedules of the server's learning rate",
}
FURTHER_MODULES = ("fl_dist.metrics.__main__",)
"""Commands that `fl-dist` does not have."""
HELP_OF_KEYS = "keys (type, default, meaning):"
"""Where the help of `fl_dist.main` lists the keys, which have a page of their own."""


def write(folder: Path = FOLDER) -> None:
    """All files, leaving alone those that are current, and no others."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{name}.md": text() for name, text in PAGES.items()}
    for name, text in files.items():
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
    for file in folder.iterdir():
        if file.name not in files:
            file.unlink()


def _keys() -> str:
    sections: dict[str, list[KeyInfo]] = {}
    for info in list_keys(Config):
        section = info.name.partition(".")[0]
        sections.setdefault(section if "." in info.name else "", []).append(info)
    lines = ["### At the top level", "", *_key_table(sections.pop("")), ""]
    for section, infos in sections.items():
        lines += [f"### `{section}`", "", *_key_table(infos), ""]
    return _text(lines)


def _builders() -> str:
    lines: list[str] = []
    for section, registry in BUILDER_SECTIONS.items():
        about = f"`{section}: {{name: ..., settings}}`. Your own: `{section}: {{name: module:builder}}`."
        lines += [f"## {BUILDER_TITLES[section]}", "", about, ""]
        if section in COMMON_KEYS:
            lines += ["Whatever the name:", "", *_key_table(list_keys(COMMON_KEYS[section], f"{section}.")), ""]
        lines += _builder_sections(section, registry, f"{section}.")
    lines += ["## Parts of an algorithm", "", "`algorithm: {parts: [{part: {settings}}, ...]}`, innermost first.", ""]
    lines += _builder_sections("part", parts)
    about = "`diagnostics: {label: {name: diagnostic, every: 10, settings}}`. Every diagnostic has:"
    lines += ["## Diagnostics", "", about, "", *_key_table(list_keys(DiagnosticKeys, "diagnostics.<label>.")), ""]
    lines += _builder_sections("diagnostic", diagnostics, "diagnostics.<label>.")
    about = "`callbacks: [callback, {callback: {settings}}]`. Every callback has:"
    lines += ["## Callbacks", "", about, "", *_key_table(list_keys(CallbackKeys)), ""]
    lines += _builder_sections("callback", callbacks)
    return _text(lines)


def _builder_sections(kind: str, registry: Registry[Any], prefix: str = "") -> Iterator[str]:
    for name in registry:
        yield from (f"({kind}-{name})=", "", f"### `{name}`", "", *_about(registry, name))
        keys = list(list_keys(registry.schema(name), prefix))
        yield from (*(_key_table(keys) if keys else ["It has no settings."]), "")


def _about(registry: Registry[Any], name: str) -> Iterator[str]:
    summary = _prose(summary_of(registry[name]))
    if registry is algorithms:
        rule = f"{papers[name]}; parts: {algorithms.build(name, {}).describe()}. [Rule](algorithms.md#the-rules)."
        yield from (f"{rule} Defaults: {summary}" if summary else rule, "")
    elif summary:
        yield from (summary, "")


def _sweeps() -> str:
    tables = {
        "A sweep": list_keys(Sweep),
        "`table.extra_columns`": list_keys(ExtraColumn, "table.extra_columns.<name>."),
        "`resources` of a run": list_keys(Resources, "resources."),
        "A cluster profile": list_keys(Profile),
    }
    return _text(line for title, keys in tables.items() for line in (f"### {title}", "", *_key_table(keys), ""))


def _commands() -> str:
    lines = ["## fl-dist", "", *_block(usage()), ""]
    for name, (module, _) in COMMANDS.items():
        lines += [f"## fl-dist {name}", "", f"The same as `{_python_command(module)}`.", ""]
        lines += _help_of(module, f"fl-dist {name}")
    for module in FURTHER_MODULES:
        lines += [f"## {_python_command(module)}", "", *_help_of(module, _python_command(module))]
    return _text(lines)


def _help_of(module: str, title: str) -> Iterator[str]:
    program = importlib.import_module(module)
    yield from (*_block(_help(program.main, [])), "")
    for name in _subcommands(program):
        yield from (f"### {title} {name}", "", *_block(_help(program.main, [name])), "")


def _python_command(module: str) -> str:
    return f"python -m {module.removesuffix('.__main__')}"


def _help(main: Callable[[list[str]], Any], arguments: list[str]) -> str:
    """What a command prints for --help, without the list of keys and without folders of this machine."""
    with patch.dict(os.environ, COLUMNS=str(COLUMNS)):
        text = _output(main, [*arguments, "--help"])
    return text.partition(HELP_OF_KEYS)[0].replace(f"{ROOT}{os.sep}", "").rstrip()


def _output(main: Callable[[list[str]], Any], arguments: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
    if code:
        raise RuntimeError(f"{main.__module__} {' '.join(arguments)} ended with exit code {code}")
    return output.getvalue()


def _subcommands(program: Any) -> list[str]:
    if not hasattr(program, "parser"):
        return []
    actions = program.parser()._actions
    return [name for action in actions if isinstance(action, argparse._SubParsersAction) for name in action.choices]


def _algorithms() -> str:
    """The table of algorithms; each name links to its settings."""
    table, legend, *_ = _output(show_algorithms, ["--markdown"]).strip().split("\n\n")
    for name in algorithms:
        table = table.replace(f"\n| {name} |", f"\n| [{name}](#algorithm-{name}) |")
    return _text([table, "", legend])


def _uploads() -> str:
    return _text([*_table(UPLOAD_COLUMNS, upload_rows()), "", UPLOAD_LEGEND])


def _reports() -> str:
    return _text(_table(REPORT_COLUMNS, report_rows()))


def _paper_costs() -> str:
    lines: list[str] = []
    for paper, costs in PAPER_COSTS.items():
        output = _output(show_algorithms, ["--paper", paper, "--markdown"]).strip()
        lines += [f"### {costs.source.partition(' (')[0]}", "", output.removesuffix(PAPER_LEGEND)]
    return _text([PAPER_LEGEND, "", *lines])


def _memory() -> str:
    return _output(show_algorithms, ["--memory", "--markdown"])


def _record() -> str:
    return _text([SENTENCES, markdown_table()])


def _summary() -> str:
    rows = [(f"`{key}`", meaning) for key, meaning in MEANINGS.items()]
    return _text([SENTENCES, *_table(("in `summary.json`", "meaning"), rows)])


def _key_table(keys: Iterable[KeyInfo]) -> list[str]:
    rows = [(_code(key.name), _code(key.type), _code(key.default), _prose(key.meaning)) for key in keys]
    return [SENTENCES, *_table(KEY_COLUMNS, rows)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _code(text: str) -> str:
    return "`{}`".format(text.replace("|", "\\|")) if text else ""


def _prose(text: str) -> str:
    """Plain text as Markdown; what is between backticks stays."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([<*|\[\]~$])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def _block(text: str) -> list[str]:
    return ["```text", text, "```"]


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "keys": _keys,
    "builders": _builders,
    "sweeps": _sweeps,
    "commands": _commands,
    "algorithms": _algorithms,
    "uploads": _uploads,
    "reports": _reports,
    "paper-costs": _paper_costs,
    "memory": _memory,
    "record": _record,
    "summary": _summary,
}
