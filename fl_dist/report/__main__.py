"""Runs as one page of HTML: tables, curves, comparison, times, clients, diagnostics, configurations.

python -m fl_dist.report SWEEP.yaml [key.sub=value ...] or RUN ... [-o report.html] [--serve [--port N]]
"""

import argparse
from collections.abc import Sequence
from functools import partial

from fl_dist.common import terminal
from fl_dist.common.terminal import parse_int_at_least
from fl_dist.results.arguments import add_run_arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    from fl_dist.report.command import report_command  # takes seconds

    return terminal.call_command(report_command, arguments)


def parser() -> argparse.ArgumentParser:
    parser = terminal.ArgumentParser(prog="python -m fl_dist.report", description=__doc__.splitlines()[0])
    add_run_arguments(parser)
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default %(default)s")
    parser.add_argument("--serve", action="store_true", help="write no file; serve the page here and follow the runs")
    parser.add_argument(
        "--port", type=partial(parse_int_at_least, 0), default=0, metavar="N", help="of --serve (default: any free one)"
    )
    terminal.add_traceback_option(parser)
    return parser


if __name__ == "__main__":
    terminal.run_program(main)
