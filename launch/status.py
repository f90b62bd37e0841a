"""Progress of runs, read from their folders, their logs and Slurm's queue.

python -m launch.status [RUN ...]
"""

from collections.abc import Sequence
from pathlib import Path

from fl_dist.common import terminal


def main(argv: Sequence[str] | None = None) -> int:
    parser = terminal.ArgumentParser(prog="python -m launch.status", description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs", nargs="*", type=Path, default=[Path("runs")], help="run folders, or folders of them (default runs)"
    )
    folders = parser.parse_args(argv).runs
    # These take seconds.
    from fl_dist.storage.run_folder import find_runs
    from launch.run_status import format_table, read_queue, read_submitted_status

    runs = [run for folder in folders for run in find_runs(folder)]
    if not runs:
        terminal.print_error(f"no run in {', '.join(map(str, folders))}; a run folder contains a config.yaml")
        return 1
    queue = read_queue()
    print(format_table([read_submitted_status(run, queue) for run in runs]))
    return 0


if __name__ == "__main__":
    terminal.run_program(main)
