"""How a rank of a job ends after a failure: at once, whatever its main thread and its libraries wait for.

Saves are atomic and rows are flushed, so nothing has to be closed.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

_functions: list[Callable[[int], int]] = []


@contextlib.contextmanager
def call_before_exit(function: Callable[[int], int]) -> Iterator[None]:
    """Within the context, `exit_rank` calls the function with the exit code; it returns the one to use."""
    _functions.append(function)
    try:
        yield
    finally:
        _functions.remove(function)


def exit_rank(code: int) -> NoReturn:
    """End this process from any thread."""
    try:
        for function in reversed(_functions):
            code = function(code)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
