"""The terminal of a program: output that cannot fail a run, errors in one line, Ctrl-C without a traceback.

It imports nothing slow: programs call `prepare_terminal` before their slow imports.
"""

import argparse
import codecs
import contextlib
import io
import logging
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from fl_dist.common.errors import FlDistError, error_message

EXIT_INTERRUPTED = 128 + signal.SIGINT
START_ANNOUNCED = "FL_DIST_START_ANNOUNCED"
"""Environment variable: a process has printed that the program starts."""
UNLIMITED_WIDTH = 10_000
"""Columns of a stream that is no terminal."""
_ASCII = {"·": "|", "±": "+-"}


def terminal_width() -> int:
    """Columns of standard output."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED_WIDTH


def fit_fields(fields: Sequence[str], columns: int, between: str = "   ") -> str:
    """As many fields as fit into one line, but at least the first."""
    line = fields[0]
    for field in fields[1:]:
        if len(line) + len(between) + len(field) > columns:
            break
        line += between + field
    return line


def wrap_fields(fields: Sequence[str], columns: int, between: str = " · ") -> list[str]:
    """All fields, on as many lines as they need."""
    lines = [fields[0]]
    for field in fields[1:]:
        if len(lines[-1]) + len(between) + len(field) <= columns:
            lines[-1] += between + field
        else:
            lines.append(f"  {field}")
    return lines


def print_starting() -> None:
    """Before the slow imports, on a terminal: once, not again in child processes."""
    is_first = os.environ.get("RANK", "0") == "0" and START_ANNOUNCED not in os.environ
    if is_first and not {"-h", "--help", "--version"} & set(sys.argv) and sys.stderr.isatty():
        print("starting ...", file=sys.stderr, flush=True)
        os.environ[START_ANNOUNCED] = "1"


def prepare_terminal() -> None:
    """The first call of a program; later signal handlers replace this one."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    _open_closed_descriptors()
    codecs.register_error("ascii", _replace_with_ascii)
    sys.stdout, sys.stderr = _lossy_output(1, sys.stdout), _lossy_output(2, sys.stderr)


def run_program(main: Callable[[], int], is_slow: bool = False) -> NoReturn:
    """`is_slow`: its imports take seconds."""
    prepare_terminal()
    if is_slow:
        print_starting()
    sys.exit(main())


def _open_closed_descriptors() -> None:
    """A closed standard descriptor would become that of the next file, which then gets our output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)


class _LossyFile(io.FileIO):
    """A descriptor that may break or whose disk may be full: output is lost instead of raising."""

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def _lossy_output(number: int, stream: TextIO | None) -> io.TextIOWrapper:
    if stream is not None:
        stream.flush()
    unbuffered = bool(getattr(stream, "write_through", False))
    return io.TextIOWrapper(
        io.BufferedWriter(_LossyFile(number, "w", closefd=False)),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="ascii",
        line_buffering=unbuffered or number == 2 or os.isatty(number),
    )


def _replace_with_ascii(error: UnicodeError) -> tuple[str, int]:
    """For characters that the terminal cannot encode."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_ASCII.get(c, "?") for c in error.object[error.start : error.end]), error.end


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Show what code warns of without the line of code, as for a command's user."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        yield


def print_progress(text: str, stream: TextIO | None = None) -> None:
    """What a program waits for or does, while there is no progress bar."""
    print(text, file=sys.stderr if stream is None else stream, flush=True)


@contextlib.contextmanager
def handle_log(name: str, handler: logging.Handler) -> Iterator[None]:
    """Within it, the handler gets what the logger of that name, and those below it, report; others above do not."""
    logger = logging.getLogger(name)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        with contextlib.suppress(OSError):
            handler.close()


def print_error(error: BaseException | str, with_traceback_of: BaseException | None = None) -> None:
    """The last line of a program, after a traceback if one is wanted."""
    print(end="", flush=True)  # earlier output comes first
    if with_traceback_of is not None:
        traceback.print_exception(with_traceback_of)
    print(f"error: {error_message(error)}", file=sys.stderr, flush=True)


def call_command(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """The exit code of a command; 2 for an error in what the user gave."""
    try:
        return command(arguments)
    except (FlDistError, OSError) as e:
        print_error(e, e if arguments.traceback else None)
        return 2


def add_traceback_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


class ArgumentParser(argparse.ArgumentParser):
    """Errors in the command are one line, and name the program as the user has typed it."""

    def __init__(self, prog: str, **options: Any) -> None:
        """`prog`: the module behind a command of `fl-dist`, or a subcommand of it."""
        is_command = os.path.basename(sys.argv[0]) == "fl-dist" and prog.startswith("python -m ")
        super().__init__(f"fl-dist {sys.argv[1]}" if is_command else prog, **options)

    def error(self, message: str) -> NoReturn:
        print_error(f"{message}; see {self.prog} --help")
        sys.exit(2)


def parse_int_at_least(low: int, text: str) -> int:
    """A whole number from the command line."""
    if not text.strip().lstrip("+-").isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least {low}, not {text[:20]!r}")
    return int(text)
