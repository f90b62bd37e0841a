"""Submit a run to Slurm through submitit: it is requeued when it is interrupted, and resumes.

python -m launch.submit CONFIG.yaml [key.sub=value ...] --nodes 2 --gpus-per-node 8 --profile gpu
"""

import argparse
from collections.abc import Sequence

from fl_dist.common import terminal
from launch.arguments import add_profile_options


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    from launch.submit_command import submit_command  # takes seconds

    return terminal.call_command(submit_command, arguments)


def parser() -> argparse.ArgumentParser:
    parser = terminal.ArgumentParser(prog="python -m launch.submit", description=__doc__.splitlines()[0])
    add = parser.add_argument
    gpus_help = "one rank per GPU (default 0: ranks on the CPU; with --local: all visible GPUs)"
    add(
        "run_arguments", nargs="+", metavar="CONFIG key.sub=value", help="a YAML file and overrides, as for fl-dist run"
    )
    add("--nodes", type=int, default=1)
    add("--gpus-per-node", type=int, help=gpus_help)
    add("--tasks-per-node", type=int, help="ranks per node (default: the number of GPUs, or 3)")
    add("--name", help="name of the job (default: that of the run folder)")
    add("--dry-run", action="store_true", help="print the batch script and stop")
    instead = parser.add_mutually_exclusive_group().add_argument
    instead("--local", action="store_true", help="run it here, through submitit's local executor")
    instead("--doctor", action="store_true", help="submit fl-dist doctor for it: the job's log has the table of checks")
    add_profile_options(parser)
    terminal.add_traceback_option(parser)
    return parser


if __name__ == "__main__":
    terminal.run_program(main, is_slow=True)
