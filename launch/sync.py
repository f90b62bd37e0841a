"""Upload the offline W&B records of runs.

python -m launch.sync runs/fedgmt_vit [runs/...]
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fl_dist.common import terminal


def main(argv: Sequence[str] | None = None) -> int:
    parser = terminal.ArgumentParser(prog="python -m launch.sync", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="run folder, or a folder of run folders")
    parser.add_argument("--dry-run", action="store_true", help="show what would be uploaded")
    arguments = parser.parse_args(argv)
    records = [record for run in arguments.runs for record in find_offline_records(run)]
    if not records:
        return _fail(f"no offline W&B record in {', '.join(map(str, arguments.runs))}")
    if arguments.dry_run:
        print("\n".join(map(str, records)))
        return 0
    from fl_dist.callbacks.always_on.wandb import has_account  # takes seconds

    if not has_account():
        return _fail(f"no W&B account to upload {len(records)} records to: run `wandb login` or set WANDB_API_KEY")
    return upload(records)


def find_offline_records(run: Path) -> list[Path]:
    """The records of a run, or of all runs below a folder, oldest first."""
    return sorted(record for record in run.rglob("wandb/offline-run-*") if record.is_dir())


def upload(records: list[Path]) -> int:
    """A resumed run has several records of one id; wandb appends them in the order in which they started."""
    if subprocess.run([sys.executable, "-m", "wandb", "sync", "--yes", *map(str, records)]).returncode:
        return _fail("not everything could be uploaded; start the same command again")
    return 0


def _fail(message: str) -> int:
    terminal.print_error(message)
    return 1


if __name__ == "__main__":
    terminal.run_program(main)
