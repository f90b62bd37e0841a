"""Run a sweep, such as the table of a paper: as a Slurm job array, or here, a few runs at a time.

python -m launch.sweep SWEEP.yaml [key.sub=value ...] [--only FedGMT] [--status | --local -j 2 | --dry-run]

Finished runs are skipped, unfinished ones resumed: the same command starts a sweep and continues it.
"""

import argparse
from collections.abc import Sequence
from functools import partial

from fl_dist.common import terminal
from fl_dist.common.terminal import parse_int_at_least
from launch.arguments import add_profile_options

SWEEP_KEYS = ("like", "base", "name", "dir", "resources", "rows", "columns", "grid", "set", "list", "table")
"""Keys of a sweep's file; a test compares them with its schema, whose import takes seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    from launch.sweep_command import sweep_command  # takes seconds

    return terminal.call_command(sweep_command, arguments)


def parser() -> argparse.ArgumentParser:
    parser = terminal.ArgumentParser(prog="python -m launch.sweep", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("sweep", metavar="SWEEP.yaml", help="keys: " + ", ".join(SWEEP_KEYS))
    add("overrides", nargs="*", metavar="key.sub=value", help="for all runs; they override everything else")
    only_help = "only runs with this name or label (may be repeated)"
    add("--only", action="append", default=[], metavar="PATTERN", help=only_help)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--status", action="store_true", help="show the progress of the runs")
    action.add_argument("--local", action="store_true", help="run here instead of submitting")
    action.add_argument("--dry-run", action="store_true", help="print the runs and the batch script of their array")
    positive = partial(parse_int_at_least, 1)
    add("-j", "--jobs", type=positive, default=1, metavar="N", help="with --local: runs at a time")
    add_profile_options(parser)
    terminal.add_traceback_option(parser)
    return parser


if __name__ == "__main__":
    terminal.run_program(main, is_slow=True)
