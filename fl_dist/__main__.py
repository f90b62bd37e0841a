"""One command for everything: fl-dist COMMAND ..., or python -m fl_dist COMMAND ..."""

import importlib
import sys
from collections.abc import Sequence

from fl_dist import __version__
from fl_dist.common import terminal

COMMANDS = {
    "doctor": ("launch.doctor", "check that a run will work here, fast and with the same bits"),
    "run": ("fl_dist.main", "train in this process, or as one rank of a launcher"),
    "local": ("launch.local", "start the ranks of one machine"),
    "submit": ("launch.submit", "submit a run to Slurm, or run it here as Slurm would"),
    "sweep": ("launch.sweep", "a grid or a list of runs, as a job array or here"),
    "status": ("launch.status", "progress of runs"),
    "results": ("fl_dist.results.__main__", "runs as a table and as curves"),
    "diagnose": ("fl_dist.diagnose", "sharpness, spectra and surfaces of existing runs"),
    "report": ("fl_dist.report.__main__", "runs as one HTML page, which can follow them live"),
    "data": ("fl_dist.data.__main__", "download data sets, check them, show the partition"),
    "sync": ("launch.sync", "upload offline W&B records"),
    "algorithms": ("fl_dist.algorithms.__main__", "the table of all algorithms"),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(f"fl_dist {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        from fl_dist.common.formatting import suggest

        terminal.print_error(f"unknown command {argv[0]!r}; {suggest(argv[0], COMMANDS)}")
        return 2
    return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:]) or 0


def command() -> int:
    """The entry point of the installed command."""
    terminal.prepare_terminal()
    return main()


def usage() -> str:
    lines = [f"  {name:<12} {meaning}" for name, (_, meaning) in COMMANDS.items()]
    about = "Federated learning on clusters. `fl-dist COMMAND --help` shows its arguments."
    return "\n".join(["usage: fl-dist COMMAND ...", "", about, "", *lines, "", "  --version"])


if __name__ == "__main__":
    sys.exit(command())
