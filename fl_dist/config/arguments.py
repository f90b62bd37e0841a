"""A command line as a configuration: which file, which overrides, which run folder."""

import hashlib
import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_dist.common.errors import ConfigError, user_code_cause
from fl_dist.common.imports import prepend_to_path
from fl_dist.common.paths import expand_path
from fl_dist.config.loading import validate
from fl_dist.config.overrides import expand_override, merge_overrides
from fl_dist.config.schema import LAYOUT_KEYS, Config, Run

QUICKSTART = Path(__file__).parent / "quickstart.yaml"
MAX_NAME_LENGTH = 100
_UNNAMED_PREFIXES = tuple(f"{key}." for key in (*LAYOUT_KEYS, "rounds"))


def resolve_arguments(arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """The validated configuration, and arguments that name the file and the run folder, for other ranks."""
    path, overrides = split_arguments(arguments)
    add_search_paths(path)
    raw, sources = merge_overrides(path or str(QUICKSTART), overrides)
    folder = _run_dir(raw) or f"runs/{default_run_name(path or QUICKSTART, overrides)}"
    try:
        config = validate(raw, sources)
    except ConfigError as e:
        raise ConfigError(f"{e}{_save_traceback(e, folder)}") from e.__cause__
    if config.run.dir is None:
        overrides.append(f"run.dir={folder}")
        config = config.model_copy(update={"run": Run(dir=folder)})
    return config, [path or str(QUICKSTART), *overrides]


def add_search_paths(path: str | None) -> None:
    """Find the user's modules in the working folder and beside the configuration."""
    prepend_to_path(Path.cwd(), *([Path(path).parent] if path else []))


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file, if there is one, and the overrides."""
    if arguments and ("=" not in arguments[0] or os.path.exists(arguments[0])):
        return str(expand_path(arguments[0])), list(arguments[1:])
    return None, list(arguments)


def _run_dir(raw: dict[str, Any]) -> str | None:
    """The run folder of a configuration that is not validated yet."""
    folder = raw["run"].get("dir") if isinstance(raw.get("run"), dict) else None
    return folder if isinstance(folder, str) else None


def _save_traceback(error: ConfigError, folder: str) -> str:
    """If the user's code failed: write its traceback to the run folder, which has no log yet, and say where it is."""
    cause = user_code_cause(error)
    if cause is None:
        return ""
    try:
        log = expand_path(folder) / "logs" / "import.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(traceback.format_exception(cause)))
    except (OSError, ValueError):
        return ""
    return f"; its traceback is in {log}"


def default_run_name(path: str | Path, overrides: Sequence[str]) -> str:
    """The file's name and the overrides that change results, without those of the layout or the length of the run."""
    changes = dict(expand_override(override).split("=", 1) for override in overrides)
    pieces = [_name_piece(key, changes[key]) for key in sorted(changes) if not f"{key}.".startswith(_UNNAMED_PREFIXES)]
    name = "-".join([Path(path).stem, *pieces])
    if len(name) > MAX_NAME_LENGTH:
        name = f"{name[: MAX_NAME_LENGTH - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def _name_piece(key: str, value: str) -> str:
    """One override as a piece of a folder's name: the last part of a path, without characters unfit for a name."""
    value = re.sub(r"[^\w.+-]+", "_", value.rstrip("/").rpartition("/")[2]).strip("_")
    section = key.removesuffix(".name")
    return value if section != key and "." not in section else f"{section}={value}"
