"""A command line as a configuration: which file, which overrides, which run folder."""

import hashlib
import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_dist.common.imports import own_error, search_in
from fl_dist.common.paths import expand
from fl_dist.common.reading import ConfigError
from fl_dist.config.loading import merged, spelt_out, validate
from fl_dist.config.schema import LAYOUT, Config, Run

QUICKSTART = Path(__file__).parent / "quickstart.yaml"
LONGEST_NAME = 100


def resolve(words: Sequence[str]) -> tuple[Config, list[str]]:
    """The validated configuration, and words that mean the same to any rank: file and run folder are spelt out."""
    path, overrides = divide(words)
    look_around(path)
    raw, where = merged(path or str(QUICKSTART), overrides)
    folder = _folder(raw) or f"runs/{default_name(path or QUICKSTART, overrides)}"
    try:
        config = validate(raw, where)
    except ConfigError as e:
        raise ConfigError(f"{e}{_kept_traceback(e, folder)}") from e.__cause__
    if config.run.dir is None:
        overrides.append(f"run.dir={folder}")
        config = config.model_copy(update={"run": Run(dir=folder)})
    return config, [path or str(QUICKSTART), *overrides]


_around: list[str] = []


def look_around(path: str | None) -> None:
    """Find the user's own modules in the working folder and beside the configuration, no longer beside the last one."""
    _around[:] = search_in(Path.cwd(), *([Path(path).parent] if path else []), forget=_around)


def divide(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file, if there is one, and the overrides."""
    if words and ("=" not in words[0] or os.path.exists(words[0])):
        return str(expand(words[0])), list(words[1:])
    return None, list(words)


def _folder(raw: dict[str, Any]) -> str | None:
    """The run folder that a configuration names, which may be wrong in everything else."""
    named = raw["run"].get("dir") if isinstance(raw.get("run"), dict) else None
    return named if isinstance(named, str) else None


def _kept_traceback(error: ConfigError, folder: str) -> str:
    """If the user's own code failed: where its traceback is from now on, in a run folder that has no log yet."""
    cause = own_error(error)
    if cause is None:
        return ""
    try:
        log = expand(folder) / "logs" / "import.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(traceback.format_exception(cause)))
    except (OSError, ValueError):
        return ""
    return f"; its traceback is in {log}"


def default_name(path: str | Path, overrides: Sequence[str]) -> str:
    """The file's name and the overrides that change results; what only changes the layout or the length does not."""
    changes = dict(spelt_out(override).split("=", 1) for override in overrides)
    told = [_told(key, changes[key]) for key in sorted(changes) if not f"{key}.".startswith(_UNTOLD)]
    name = "-".join([Path(path).stem, *told])
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


_UNTOLD = tuple(f"{key}." for key in (*LAYOUT, "rounds"))


def _told(key: str, value: str) -> str:
    """One override as a piece of a folder's name: of a path the last part, of other text what a name can hold."""
    value = re.sub(r"[^\w.+-]+", "_", value.rstrip("/").rpartition("/")[2]).strip("_")
    return value if key.endswith(".name") else f"{key}={value}"
