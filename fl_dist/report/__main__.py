"""Runs as one page of HTML: tables, curves, comparison, times, clients, diagnostics, configurations.

python -m fl_dist.report SWEEP.yaml [key.sub=value ...] or RUN ... [-o report.html] [--serve [--port N]]
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare_terminal()  # here, for the imports below take seconds

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from fl_dist.common.errors import FlDistError
from fl_dist.common.formatting import format_bytes
from fl_dist.common.paths import expand_path
from fl_dist.common.terminal import parse_int_at_least
from fl_dist.report.page import build_document, load_plotly, render_page
from fl_dist.report.run_reader import RunSource
from fl_dist.report.series import SeriesCache
from fl_dist.report.serve import LiveDocument, serve
from fl_dist.results.archive import opened_archive
from fl_dist.results.arguments import add_run_arguments, expand_arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        load_plotly()  # before the runs are read, which takes longer
        with opened_archive(arguments.source) as folder:
            source = RunSource(expand_arguments(arguments.runs), arguments.only, arguments.published, folder)
            if arguments.serve:
                serve(LiveDocument(source), arguments.port)
            else:
                _write(render_page(build_document(source, SeriesCache())), arguments.output)
    except (FlDistError, OSError) as e:
        terminal.print_error(e, e if arguments.traceback else None)
        return 2
    return 0


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


def _write(text: str, output: str) -> None:
    file = expand_path(output)
    file.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode("utf-8", "replace")
    file.write_bytes(data)
    print(f"{file} ({format_bytes(len(data))})")


if __name__ == "__main__":
    sys.exit(main())
