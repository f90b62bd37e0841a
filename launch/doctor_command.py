"""What `fl-dist doctor` does: start the ranks, or be one of them; rank 0 prints the table."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence

from fl_dist.common import terminal
from fl_dist.common.errors import FlDistError
from fl_dist.common.files import write_atomically
from fl_dist.common.paths import expand_path
from fl_dist.config.arguments import resolve_arguments
from fl_dist.distributed.failures import error_line
from fl_dist.distributed.rank_info import find_rank, is_rank0
from fl_dist.distributed.signals import EXIT_BAD_CONFIG
from fl_dist.doctor.checks import Check
from fl_dist.doctor.examine import Options, RanksMissingError, examine
from fl_dist.doctor.render import exit_code, table_lines, to_json
from launch import local
from launch.arguments import DEFAULT_RANKS
from launch.devices import visible_gpus
from launch.node import create_node

GRACE_SECONDS = 5.0
MAX_COLUMNS = 150
"""Of the table where the output is no terminal."""


def doctor_command(arguments: argparse.Namespace) -> int:
    try:
        rank_info = find_rank()
        config, words = resolve_arguments(arguments.run_arguments)
    except (FlDistError, OSError) as e:
        terminal.print_error(e, e if arguments.traceback else None)
        return EXIT_BAD_CONFIG
    ranks = arguments.ranks or len(visible_gpus(config.topology.device)) or DEFAULT_RANKS
    if rank_info is None and ranks > 1:
        return _start_ranks(arguments, words, config.topology.threads, ranks)
    return _run_as_rank(Options(config, words, rank_info, arguments.requeue, arguments.compile), arguments)


def _start_ranks(arguments: argparse.Namespace, words: list[str], threads: int, ranks: int) -> int:
    """With torchrun, as `launch.local` does."""
    flags = [flag for flag in ("--compile", "--requeue", "--traceback") if getattr(arguments, flag.strip("-"))]
    flags += ["--json", arguments.json] if arguments.json else []
    launcher = local.parser().parse_args([f"--ranks={ranks}"])
    local.set_environment(threads)
    with create_node() as node:
        command = local.torchrun_arguments(launcher, node, "launch.doctor", [*words, *flags])
        has_failed = local.run_torchrun(command, node, False, GRACE_SECONDS)
        return terminal.EXIT_INTERRUPTED if node.is_stopping else int(has_failed)


def _run_as_rank(options: Options, arguments: argparse.Namespace) -> int:
    start, is_first = time.monotonic(), is_rank0(options.rank_info)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # children and files end with the doctor
    try:
        checks = examine(options, terminal.print_progress if is_first else lambda _: None)
    except RanksMissingError as e:
        if not is_first:
            terminal.print_error(e)
            return 1
        checks = [e.check]
    except (FlDistError, OSError, RuntimeError) as e:
        if is_first or arguments.traceback:
            terminal.print_error(error_line(e), e if arguments.traceback else None)
        return 1
    return _print(checks, time.monotonic() - start, arguments.json) if is_first else 0


def _print(checks: Sequence[Check], seconds: float, file: str | None) -> int:
    print("\n".join(table_lines(checks, seconds, min(MAX_COLUMNS, terminal.terminal_width()))), flush=True)
    if file:
        try:
            write_atomically(expand_path(file), to_json(checks, seconds).encode())
        except OSError as e:
            terminal.print_error(e)
            return 1
    return exit_code(checks)
