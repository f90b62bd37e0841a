"""What `fl-dist report` does: write the page of some runs, or serve it."""

import argparse

from fl_dist.common.files import write_output
from fl_dist.common.formatting import format_bytes
from fl_dist.common.paths import expand_path
from fl_dist.report.page import build_document, load_plotly, render_page
from fl_dist.report.run_source import RunSource
from fl_dist.report.series import SeriesCache
from fl_dist.report.serve import LiveDocument, serve
from fl_dist.results.archive import open_archives
from fl_dist.results.arguments import expand_arguments


def report_command(arguments: argparse.Namespace) -> int:
    load_plotly()  # before the runs are read, which takes longer
    with open_archives(arguments.sources) as archives:
        source = RunSource(expand_arguments(arguments.runs), arguments.only, arguments.published, archives)
        if arguments.serve:
            serve(LiveDocument(source), arguments.port)
        else:
            file = expand_path(arguments.output)
            size = write_output(file, render_page(build_document(source, SeriesCache())))
            print(f"{file} ({format_bytes(size)})")
    return 0
