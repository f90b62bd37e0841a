"""Diagnostics of existing runs, finished or not: sharpness, spectra, surfaces, what the next round would do.

python -m fl_dist.diagnose RUN ... [sharpness] [spectrum.top=5] [surface.points=21] [--picture surfaces.png]
torchrun --nproc-per-node 8 -m fl_dist.diagnose RUN ...
"""

import argparse
from collections.abc import Sequence

from fl_dist.common import terminal
from fl_dist.common.key_listing import list_diagnostics
from fl_dist.plots.base import SUFFIXES


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_intermixed_args(argv)
    from fl_dist.diagnose_command import diagnose_command  # takes seconds

    return diagnose_command(arguments)


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<22} {summary}" for name, summary in list_diagnostics().items())
    parser = terminal.ArgumentParser(
        prog="python -m fl_dist.diagnose",
        description="Measure existing runs, finished or not; under torchrun with all ranks.",
        epilog=f"diagnostics:\n{names}\n\nTheir settings: fl-dist run --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RUN or DIAGNOSTIC[.key=value]",
        help="run folders, and what to measure (default: what the run measured during training, or the most common)",
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help=f"draw surfaces and lines, of all runs on one scale: {', '.join(SUFFIXES)}",
    )
    terminal.add_traceback_option(parser)
    return parser


if __name__ == "__main__":
    terminal.run_program(main)
