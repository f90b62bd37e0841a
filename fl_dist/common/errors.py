"""The exceptions of the program, and errors of any kind as one line for people.

The program's own derive from FlDistError. Anything else that ends a run is a defect, of the program, of a library or of
the user's code, and keeps its traceback.
"""

import sysconfig
import traceback
from pathlib import Path

from fl_dist.common.formatting import shorten

MAX_MESSAGE_LENGTH = 2000
_ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")}
_FOREIGN_FOLDERS = (_ROOT / "fl_dist", _ROOT / "launch", *_LIBRARIES)


class FlDistError(Exception):
    """A failure that was foreseen; the message says what is wrong, where, and what to do."""


class UserError(FlDistError, ValueError):
    """The user's input or code cannot be used, rather than that a machine or the course of the run is at fault."""


class ConfigError(UserError):
    """A configuration that cannot be run; the message names the key, where it was set and a remedy."""


class DataError(UserError):
    """Data that is missing, damaged or unfit for the task."""


class ModelError(UserError):
    """A model or weights that do not fit."""


def error_message(error: BaseException | str) -> str:
    """The message of an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {shorten(error.filename)}" if error.filename else "")
    return shorten(" ".join(str(error).split()) or type(error).__name__, MAX_MESSAGE_LENGTH)


def describe_error(error: BaseException) -> str:
    """An error of the user's code in one line: its class, its message, where it arose."""
    kind, message, location = type(error).__name__, str(error).strip(), error_location(error)
    line = f"{kind}: {error_message(error)}" if message else kind
    return line if location.strip() in message else line + location


def error_location(error: BaseException) -> str:
    """The line of the user's files in which an error arose, as the end of a message; empty if in none of them."""
    lines = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append((Path(error.filename), error.lineno))
    lines = [(file, line) for file, line in lines if file.is_file() and is_user_file(file.resolve())]
    return f" ({lines[-1][0].name}, line {lines[-1][1]})" if lines else ""


def user_code_cause(error: BaseException) -> BaseException | None:
    """The root cause of an error, if it lies in the user's files."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error if error_location(error) else None


def is_user_file(file: Path | None) -> bool:
    """Whether a source file belongs neither to the program nor to an installed package."""
    return file is not None and not any(folder in file.parents for folder in _FOREIGN_FOLDERS)
