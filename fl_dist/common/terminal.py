"""The terminal of a program: output that cannot fail a run, errors in one line, Ctrl-C without a traceback.

Imports nothing that takes time, for programs call `prepare` before the imports that do.
"""

import argparse
import codecs
import contextlib
import io
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from fl_dist.common.words import message

INTERRUPTED = 128 + signal.SIGINT
_PLAIN = {"·": "|", "±": "+-"}


WIDE = 10_000
"""Columns of what is no terminal: nothing there has to fit."""


def width(stream: TextIO | None = None) -> int:
    """Columns of the terminal that the stream (standard output) is."""
    stream = sys.stdout if stream is None else stream
    return shutil.get_terminal_size().columns if stream.isatty() else WIDE


def fitted(fields: Sequence[str], columns: int, between: str = "   ") -> str:
    """As many of the fields, from the first on, as fit into one line; the first always does."""
    line = fields[0]
    for field in fields[1:]:
        if len(line) + len(between) + len(field) > columns:
            break
        line += between + field
    return line


def wrapped(pieces: Sequence[str], columns: int, between: str = " · ") -> list[str]:
    """All of the pieces, on as many lines as it takes."""
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(between) + len(piece) <= columns:
            lines[-1] += between + piece
        else:
            lines.append(f"  {piece}")
    return lines


def say_starting() -> None:
    """To somebody who watches, before the imports that take seconds; once, whatever this process starts."""
    asked = {"-h", "--help", "--version"} & set(sys.argv)
    if os.environ.get("RANK", "0") == "0" and GREETED not in os.environ and not asked and sys.stderr.isatty():
        print("starting ...", file=sys.stderr, flush=True)
        os.environ[GREETED] = "1"


GREETED = "FL_DIST_GREETED"


def prepare() -> None:
    """First thing in a process of our own; later handlers of signals replace this one."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    _fill_descriptors()
    codecs.register_error("plain", _plain)
    sys.stdout, sys.stderr = _patient(1, sys.stdout), _patient(2, sys.stderr)


def _fill_descriptors() -> None:
    """A standard descriptor that is closed would become that of the next file, which then gets our output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)


class _Patient(io.FileIO):
    """A descriptor that may break, fill up or hang up: what it does not take is lost, and nothing else."""

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def _patient(number: int, stream: TextIO | None) -> io.TextIOWrapper:
    if stream is not None:
        stream.flush()
    unbuffered = bool(getattr(stream, "write_through", False))
    return io.TextIOWrapper(
        io.BufferedWriter(_Patient(number, "w", closefd=False)),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="plain",
        line_buffering=unbuffered or number == 2 or os.isatty(number),
    )


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What a terminal has no character for, in ASCII."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end


def complain(error: BaseException | str, shown: BaseException | None = None) -> None:
    """The last line, after the traceback of what is to be shown."""
    print(end="", flush=True)  # what was said before it
    if shown is not None:
        traceback.print_exception(shown)
    print(f"error: {message(error)}", file=sys.stderr, flush=True)


def add_traceback(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command."""

    def error(self, message: str) -> NoReturn:
        complain(f"{message}; see {self.prog} --help")
        sys.exit(2)


def at_least(low: int, text: str) -> int:
    """A whole number of the command line."""
    if not text.strip().lstrip("+-").isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least {low}, not {text[:20]!r}")
    return int(text)
