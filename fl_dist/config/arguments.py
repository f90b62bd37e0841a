"""A command line as a configuration: which file, which overrides, which run folder."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from fl_dist.common.paths import expand
from fl_dist.config.loading import load
from fl_dist.config.schema import LAYOUT, Config, Run

QUICKSTART = Path(__file__).parent / "quickstart.yaml"
LONGEST_NAME = 100


def resolve(words: Sequence[str]) -> tuple[Config, list[str]]:
    """The validated configuration, and words that mean the same to any rank: file and run folder are spelt out."""
    path, overrides = None, list(words)
    if words and ("=" not in words[0] or os.path.exists(words[0])):
        path, overrides = str(expand(words[0])), overrides[1:]
    config = load(path or str(QUICKSTART), overrides)
    if config.run.dir is None:
        folder = f"runs/{default_name(path or QUICKSTART, overrides)}"
        overrides.append(f"run.dir={folder}")
        config = config.model_copy(update={"run": Run(dir=folder)})
    return config, [path or str(QUICKSTART), *overrides]


def default_name(path: str | Path, overrides: Sequence[str]) -> str:
    """The file's name and the overrides that change results; what only changes the layout or the length does not."""
    changes = dict(override.split("=", 1) for override in overrides)
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
