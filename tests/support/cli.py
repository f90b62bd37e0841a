"""Call a program's main in this process and capture its output."""

import functools
import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path


@dataclass
class CliResult:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def make_invoker(main: Callable[[list[str]], int]) -> Callable[..., CliResult]:
    """A function that calls main with strings or paths."""
    return functools.partial(_invoke, main)


def _invoke(main: Callable[[list[str]], int], *arguments: str | Path) -> CliResult:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as e:
            code = int(e.code or 0)
    return CliResult(code, out.getvalue(), err.getvalue())
