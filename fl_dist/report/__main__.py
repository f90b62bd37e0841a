"""Runs as one page of HTML: tables, curves, comparison, times, clients, diagnostics, configurations.

python -m fl_dist.report SWEEP.yaml [key.sub=value ...] or RUN ... [-o report.html] [--serve [--port N]]
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare()  # here, for the imports below take seconds

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from fl_dist.common.paths import expand
from fl_dist.common.terminal import at_least
from fl_dist.common.words import size
from fl_dist.report.gather import Source
from fl_dist.report.lines import Known
from fl_dist.report.page import check, document, page
from fl_dist.report.serve import Watch, serve
from fl_dist.results.arguments import add_runs, expanded


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        check()
        source = Source(expanded(arguments.runs), arguments.only, arguments.published)
        if arguments.serve:
            serve(Watch(source), arguments.port)
        else:
            _write(page(document(source, Known())), arguments.output)
    except (ValueError, OSError, OverflowError) as e:
        terminal.complain(e, e if arguments.traceback else None)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(prog="python -m fl_dist.report", description=__doc__.splitlines()[0])
    add_runs(parser)
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default %(default)s")
    parser.add_argument("--serve", action="store_true", help="write no file: show the page here, and follow the runs")
    parser.add_argument(
        "--port", type=partial(at_least, 0), default=0, metavar="N", help="of --serve (default: one that is free)"
    )
    terminal.add_traceback(parser)
    return parser


def _write(text: str, output: str) -> None:
    file = expand(output)
    file.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode("utf-8", "replace")
    file.write_bytes(data)
    print(f"{file} ({size(len(data))})")


if __name__ == "__main__":
    sys.exit(main())
