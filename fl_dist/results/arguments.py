"""Arguments that choose the runs, of `results` and `report`."""

import argparse
from collections.abc import Sequence

from fl_dist.common.paths import expand_path
from fl_dist.metrics.keys import list_keys

SUFFIXES = {".txt": "text", ".md": "markdown", ".tex": "latex", ".csv": "csv"}
"""Formats of a table, by the name of the file."""
NUMBER_KEYS = [info.key for info in list_keys() if info.key != "dropped"]
"""Keys of numbers in `metrics.jsonl`."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="SWEEP.yaml or RUN", help="sweeps' files with their overrides, or folders of runs")
    add(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only runs of this name or label (may be repeated)",
    )
    add("--published", metavar="FILE", help="numbers to show beside ours (default: published.csv beside the sweep)")
    add(
        "--from",
        dest="sources",
        action="append",
        default=[],
        metavar="FILE",
        help="read the runs of the sweep from an archive of records (results --archive) instead of their folders (may "
        "be repeated: a run is read from the first archive that has it)",
    )


def expand_arguments(words: Sequence[str]) -> list[str]:
    """Expand ~ and variables in files and folders; leave overrides as they are."""
    return [word if "=" in word else str(expand_path(word)) for word in words]
