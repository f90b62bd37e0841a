"""A program called in this process, and what it said."""

import functools
import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Said:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def asker(main: Callable[[list[str]], int]) -> Callable[..., Said]:
    """Calls the program with words or paths."""
    return functools.partial(_ask, main)


def _ask(main: Callable[[list[str]], int], *words: str | Path) -> Said:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = main([str(word) for word in words])
        except SystemExit as e:
            code = int(e.code or 0)
    return Said(code, out.getvalue(), err.getvalue())
