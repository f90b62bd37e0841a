"""The user's own code, named as `module:name`: where it is looked for, how it is imported, the hash of its source."""

import hashlib
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fl_dist.common.errors import UserError, describe_error, is_user_file
from fl_dist.common.formatting import suggest
from fl_dist.common.torchvision import without_broken_torchvision

SEPARATOR = ":"


class UserImportError(UserError):
    """A `module:name` that cannot be imported; an error of the user's own code is its cause."""


def prepend_to_path(*folders: str | Path) -> None:
    """Look for modules in these folders before all others, in this process and in its child processes."""
    first = list(dict.fromkeys(str(Path(folder).resolve()) for folder in folders))
    sys.path[:] = [*first, *(entry for entry in sys.path if entry not in first)]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in first]
    os.environ["PYTHONPATH"] = os.pathsep.join([*first, *inherited])


def is_import_path(name: object) -> bool:
    """Whether a name of the configuration is `module:name`, not one of the program's own."""
    return isinstance(name, str) and SEPARATOR in name


def import_builder(path: str) -> Callable[..., Any]:
    """The function or class at `module:name`."""
    module_name, _, name = path.partition(SEPARATOR)
    if not module_name or not name or not all(part.isidentifier() for part in module_name.split(".")):
        is_file = module_name.endswith(".py") and name
        hint = f"; write {module_name.removesuffix('.py')}:{name}" if is_file else ""
        raise UserImportError(f"{path!r} is not of the form module:name{hint}")
    module = _import_module(module_name)
    if not hasattr(module, name):
        callables = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise UserImportError(f"{_source_file(module) or module_name} has no {name!r}; {suggest(name, callables)}")
    builder: object = getattr(module, name)
    if not callable(builder):
        raise UserImportError(f"{path} is of type {type(builder).__name__}, not a function or a class")
    return builder


def _import_module(name: str) -> types.ModuleType:
    importlib.invalidate_caches()  # the file may be new
    try:
        with without_broken_torchvision():
            return importlib.import_module(name)
    except (Exception, SystemExit) as e:
        missing = getattr(e, "name", None) if isinstance(e, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise UserImportError(
                f"there is no module {missing!r} in the working folder {Path.cwd()}, in that of the configuration, "
                "or among the installed packages; change to its folder, or put that on PYTHONPATH"
            ) from None
        raise UserImportError(f"importing {name} failed: {describe_error(e)}") from e


def hash_sources(paths: Iterable[str]) -> str:
    """SHA-256 of the files behind these `module:name`, and of the user's modules that they use."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.encode())
        for file in sorted(_source_files(importlib.import_module(path.partition(SEPARATOR)[0]))):
            digest.update(hashlib.sha256(file.read_bytes()).hexdigest().encode())
    return digest.hexdigest()


def _source_files(module: types.ModuleType) -> set[Path]:
    """The module's file and, if it is the user's own, those of the user's modules whose contents it uses."""
    files: set[Path] = set()
    pending = [module]
    while pending:
        module = pending.pop()
        file = _source_file(module)
        if file is None or file in files:
            continue
        files.add(file)
        if is_user_file(file):
            used = (sys.modules.get(_defining_module(value)) for value in list(vars(module).values()))
            pending += [other for other in used if other is not None and is_user_file(_source_file(other))]
    return files


def _defining_module(value: Any) -> str:
    return value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", ""))


def _source_file(module: types.ModuleType) -> Path | None:
    path = getattr(module, "__file__", None)
    return Path(path).resolve() if path else None
