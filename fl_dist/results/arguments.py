"""Which runs a command is about, as `results` and `report` are told it."""

import argparse
from collections.abc import Sequence

from fl_dist.common.paths import expand


def add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="SWEEP.yaml or RUN", help="sweeps' files with their overrides, or folders of runs"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only runs of this name or label (may be repeated)",
    )
    parser.add_argument(
        "--published", metavar="FILE", help="numbers to show beside ours (default: published.csv beside the sweep)"
    )


def expanded(words: Sequence[str]) -> list[str]:
    """Files and folders without ~ and variables; overrides as they are."""
    return [word if "=" in word else str(expand(word)) for word in words]
