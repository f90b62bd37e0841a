"""Check that a run will work here, fast and with the same bits: on this machine, or in the allocation of a job.

fl-dist doctor [CONFIG.yaml] [key.sub=value ...] -n 4
srun fl-dist doctor CONFIG.yaml, torchrun --nproc-per-node 8 -m launch.doctor CONFIG.yaml

Exit codes: 0 nothing failed, 1 a check failed, 2 bad arguments or configuration.
"""

import argparse
import os
from collections.abc import Sequence
from functools import partial

from fl_dist.common import terminal
from fl_dist.common.terminal import parse_int_at_least
from launch.node import NODE_FOLDER, find_node


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    if NODE_FOLDER in os.environ:
        find_node().register(int(os.environ["LOCAL_RANK"]))  # the launcher passes signals to it
    from launch.doctor_command import doctor_command  # takes seconds

    return doctor_command(arguments)


def parser() -> argparse.ArgumentParser:
    parser = terminal.ArgumentParser(prog="python -m launch.doctor", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("run_arguments", nargs="*", metavar="CONFIG key.sub=value", help="as for a run (default: the quick start)")
    add(
        "-n",
        "--ranks",
        type=partial(parse_int_at_least, 1),
        help="ranks to start on this machine (default: its GPUs, or 3); not under torchrun or srun, which start them",
    )
    add("--json", metavar="FILE", help="also write the checks to a file, for a bug report")
    add("--compile", action="store_true", help="also measure a local step with torch.compile: a minute or more")
    add("--requeue", action="store_true", help="in a batch job: requeue it once, to see that it comes back")
    terminal.add_traceback_option(parser)
    return parser


if __name__ == "__main__":
    terminal.run_program(main, is_slow=True)
