"""Start the ranks of one machine, or of one node among several, with torchrun.

python -m launch.local [CONFIG.yaml] [key.sub=value ...] --ranks 8

Exit codes as of fl_dist.main: 0 finished, 2 bad configuration, 75 interrupted and resumable, 1 any other failure.
"""

from fl_dist import terminal

if __name__ == "__main__":
    terminal.prepare()  # here, for the imports below take seconds

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from fl_dist.arguments import resolve
from fl_dist.folder import RunFolder
from fl_dist.reading import ConfigError
from fl_dist.signals import HANDLED, REQUEUE
from fl_dist.terminal import at_least
from fl_dist.words import shortened
from launch.rank import BAD_CONFIG, OUTCOMES, STOP, end_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        _check_nodes(arguments)
        config, command = resolve(arguments.what)
        folder = RunFolder(str(config.run.dir))
        folder.refuse_finished(config.rounds)
    except (ValueError, OSError) as e:
        terminal.complain(e)
        return BAD_CONFIG
    _set_environment(config.topology.threads)
    with tempfile.TemporaryDirectory(prefix="fl_dist-") as outcomes:
        code = _supervise(torchrun_arguments(arguments, command), Path(outcomes))
    return settle(code, folder.finished(config.rounds))


def parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(prog="python -m launch.local", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="CONFIG key.sub=value", help="as for python -m fl_dist.main")
    parser.add_argument(
        "-n", "--ranks", type=partial(at_least, 1), default=3, help="processes on this node (default 3)"
    )
    parser.add_argument(
        "--max-restarts", type=partial(at_least, 0), default=0, help="restarts after a rank was lost (default 0)"
    )
    parser.add_argument(
        "--nodes", type=partial(at_least, 1), default=1, help="nodes of the job, each with this command (default 1)"
    )
    parser.add_argument(
        "--node-rank", type=partial(at_least, 0), default=0, help="which of them this is; 0 is the rendezvous host"
    )
    parser.add_argument("--rendezvous", default="127.0.0.1:0", metavar="HOST:PORT", help="where the nodes meet")
    return parser


def _check_nodes(arguments: argparse.Namespace) -> None:
    host, _, port = arguments.rendezvous.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--rendezvous {shortened(arguments.rendezvous)} is not HOST:PORT, such as node1:29500")
    if arguments.node_rank >= arguments.nodes:
        raise ConfigError(f"--node-rank is {arguments.node_rank}, but --nodes {arguments.nodes} counts them from 0")
    if arguments.nodes > 1 and int(port) == 0:
        raise ConfigError(f"{arguments.nodes} nodes need a place to meet: give --rendezvous HOST:PORT, of node 0")


def settle(code: int, finished: bool) -> int:
    """What the run folder shows weighs more than what single ranks saw of a stop."""
    if code in (0, REQUEUE):
        return 0 if finished else REQUEUE
    return code


def _set_environment(threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # Restarted ranks that share the agent's store would read the addresses of the ranks before them.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def torchrun_arguments(arguments: argparse.Namespace, command: list[str]) -> list[str]:
    host, _, port = arguments.rendezvous.rpartition(":")
    local = ["--local-addr=127.0.0.1"] if arguments.nodes == 1 else []
    return [
        f"--nnodes={arguments.nodes}",
        f"--nproc-per-node={arguments.ranks}",
        f"--max-restarts={arguments.max_restarts}",
        "--monitor-interval=0.1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{port}",
        f"--rdzv-id={port}",
        f"--rdzv-conf=is_host={int(arguments.node_rank == 0)}",
        *local,
        "-m",
        "launch.rank",
        *command,
    ]


def _supervise(torchrun: list[str], outcomes: Path) -> int:
    """Run torchrun to its end; signals go to the ranks, for torchrun would kill them after half a minute."""

    def forward(number: int, frame: FrameType | None) -> None:
        (outcomes / STOP).touch()
        for file in outcomes.glob("*.pid"):
            _signal(file, number)

    os.environ[OUTCOMES] = str(outcomes)
    # A fork has torch imported already, and a group of its own does not hear the terminal's Ctrl-C.
    agent = multiprocessing.get_context("fork").Process(target=_agent, args=(torchrun,))
    old = {number: signal.signal(number, forward) for number in HANDLED}
    try:
        agent.start()
        agent.join()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return _outcome(outcomes, agent.exitcode or 0)


def _signal(file: Path, number: int) -> None:
    try:
        os.kill(int(file.read_text()), number)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return  # the rank is just starting, or has just ended


def _agent(torchrun: list[str]) -> None:
    """The process that is torchrun: one line for a lost rank instead of its traceback and table."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    os.setpgid(0, 0)
    end_with_parent()
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN if number in (signal.SIGUSR1, signal.SIGUSR2) else signal.SIG_DFL)
    logging.disable()
    try:
        run(torchrun)
    except SignalException:
        sys.exit(1)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        # A rank that left its code had its say, however the interpreter ended after that.
        spoke = (Path(os.environ[OUTCOMES]) / f"{failure.local_rank}.code").exists()
        if failure.exitcode < 0 and not spoke:
            name = signal.Signals(-failure.exitcode).name
            terminal.complain(f"rank {rank} was ended by {name}; start the same command to resume")
        sys.exit(1)


def _outcome(outcomes: Path, agent: int) -> int:
    codes = {int(file.read_text()) for file in outcomes.glob("*.code")}
    if BAD_CONFIG in codes:
        return BAD_CONFIG
    if (outcomes / STOP).exists():
        return REQUEUE
    # torchrun stops the ranks beside a lost one: their "interrupted" is not the user's.
    return 1 if agent else max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
