"""What a user names as `module:name`: where it is looked for, how it is imported, what its source was."""

import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fl_dist.common.words import message, nearest

SEPARATOR = ":"
_HERE = Path(__file__).resolve().parents[2]
_OURS = (_HERE / "fl_dist", _HERE / "launch")
_INSTALLED = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")}


class BadImport(ValueError):
    """Something that a user named cannot be had; an error of the user's own code is its cause."""


def search_in(*folders: str | Path, forget: Sequence[str] = ()) -> list[str]:
    """Look for modules in these folders before all others, in this process and in those that it starts.

    Returned is what was not looked at before; what an earlier call returned may be forgotten now.
    """
    own = list(dict.fromkeys(str(Path(folder).resolve()) for folder in folders))
    new = [folder for folder in own if folder not in sys.path or folder in forget]
    sys.path[:] = [*own, *(entry for entry in sys.path if entry not in own and entry not in forget)]
    passed_on = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    kept = [entry for entry in passed_on if entry not in own and entry not in forget]
    os.environ["PYTHONPATH"] = os.pathsep.join([*own, *kept])
    return new


def is_path(name: object) -> bool:
    """Whether a name of the configuration is `module:name`, not one of the program's own."""
    return isinstance(name, str) and SEPARATOR in name


def imported(name: str) -> Callable[..., Any]:
    """The function or class that `module:name` stands for, as its file says now."""
    where, _, what = name.partition(SEPARATOR)
    if not where or not what or not all(part.isidentifier() for part in where.split(".")):
        hint = f"; write {where.removesuffix('.py')}:{what}" if where.endswith(".py") and what else ""
        raise BadImport(f"{name!r} is not of the form module:name{hint}")
    _forget_outdated()
    before = set(sys.modules)
    module = _module(where)
    used = {other.__name__: file for file, other in _sources(module).items() if _is_own(file)}
    for other, file in used.items():
        if other not in _known and other != "__main__":
            _known[other] = _Known(_digest(file), other in before)
    if not hasattr(module, what):
        here = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise BadImport(f"{_file(module) or where} has no {what!r}; {nearest(what, here)}")
    found = getattr(module, what)
    if not callable(found):
        raise BadImport(f"{name} is of type {type(found).__name__}, not a function or a class")
    return found


def _module(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as e:
        missing = getattr(e, "name", None) if isinstance(e, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise BadImport(
                f"there is no module {missing!r} in the working folder {Path.cwd()}, in that of the configuration, "
                "or among the installed packages; go where it is, or put its folder on PYTHONPATH"
            ) from None
        raise BadImport(f"importing {name} failed: {told(e)}") from e


class _Known(NamedTuple):
    digest: str
    by_others: bool
    """Somebody else had imported it, and may hold what is in it."""


_known: dict[str, _Known] = {}
"""Modules of the user's that stand behind a name, and what their files held."""


def _forget_outdated() -> None:
    """A process may run several configurations: what lies elsewhere now, or was edited, is imported anew."""
    importlib.invalidate_caches()
    outdated = {name for name, known in _known.items() if not _is_current(name, known)}
    if not outdated:
        return
    for name in [name for name, known in _known.items() if name in outdated or not known.by_others]:
        module = sys.modules.pop(name, None)
        if module is not None and (file := _file(module)) is not None:
            _forget_bytecode(file)
        del _known[name]


def _forget_bytecode(file: Path) -> None:
    """Python takes it for that of a file of the same length that was edited within the same second."""
    with contextlib.suppress(OSError, NotImplementedError):
        os.unlink(importlib.util.cache_from_source(str(file)))


def _is_current(name: str, known: _Known) -> bool:
    module = sys.modules.get(name)
    file = _file(module) if module is not None else None
    if file is None or not file.is_file() or _digest(file) != known.digest:
        return False
    top = importlib.machinery.PathFinder.find_spec(name.partition(".")[0])
    if top is None:
        return known.by_others
    origin = Path(top.origin).resolve() if top.origin else None  # a folder without __init__.py has none
    return origin is None or origin == file or origin.parent in file.parents


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def told(error: BaseException) -> str:
    """An error of somebody's code in one line: its kind, its words, where it arose."""
    kind, words = type(error).__name__, str(error).strip()
    place = origin(error)
    return (f"{kind}: {message(error)}" if words else kind) + ("" if place.strip() in words else place)


def own_error(error: BaseException) -> BaseException | None:
    """The first cause of an error, if it lies in the user's own files."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error if origin(error) else None


def origin(error: BaseException) -> str:
    """Where in the user's own files an error arose, as the end of a message; empty if it did not."""
    lines = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append((Path(error.filename), error.lineno))
    own = [(file, line) for file, line in lines if file.is_file() and _is_own(file.resolve())]
    return f" ({own[-1][0].name}, line {own[-1][1]})" if own else ""


def source_hash(names: Iterable[str]) -> str:
    """SHA-256 of the files behind these names, and of the modules beside them that they use."""
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(name.encode())
        for file in sorted(_sources(importlib.import_module(name.partition(SEPARATOR)[0]))):
            digest.update(_digest(file).encode())
    return digest.hexdigest()


def _sources(module: types.ModuleType) -> dict[Path, types.ModuleType]:
    """The module's file and, if it is the user's own, those of the user's modules whose contents it uses."""
    found: dict[Path, types.ModuleType] = {}
    waiting = [module]
    while waiting:
        module = waiting.pop()
        file = _file(module)
        if file is None or file in found:
            continue
        found[file] = module
        if _is_own(file):
            used = (sys.modules.get(_home(value)) for value in list(vars(module).values()))
            waiting += [other for other in used if other is not None and _is_own(_file(other))]
    return found


def _home(value: Any) -> str:
    """The module of something that a module holds."""
    return value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", ""))


def _file(module: types.ModuleType) -> Path | None:
    path = getattr(module, "__file__", None)
    return Path(path).resolve() if path else None


def _is_own(file: Path | None) -> bool:
    return file is not None and not any(folder in file.parents for folder in (*_OURS, *_INSTALLED))
