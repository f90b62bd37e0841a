"""Start the ranks of one machine, or of one node among several, with torchrun.

python -m launch.local [CONFIG.yaml] [key.sub=value ...] --ranks 8

Exit codes as of fl_dist.main: 0 finished, 2 bad configuration, 75 interrupted and resumable, 1 any other failure.
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare()  # here, for the imports below take seconds
    terminal.say_starting()

import argparse
import logging
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from functools import partial

from fl_dist.common.reading import ConfigError
from fl_dist.common.terminal import at_least
from fl_dist.common.words import shortened
from fl_dist.config.arguments import resolve
from fl_dist.machine.signals import HANDLED, end_with_parent
from fl_dist.storage.folder import RunFolder
from launch.devices import placed, visible_gpus
from launch.node import BAD_CONFIG, OWNED, Node, node_folder

SIGNALLED = 128
"""Exit code of the agent above which it is the number of the signal that ended it."""
COURTESY = 10.0
"""Seconds beyond the grace time that ranks without an agent have to end."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        _check_nodes(arguments)
        config, command = resolve(arguments.what)
        folder = RunFolder(str(config.run.dir))
        folder.refuse_finished(config.rounds)
    except (ValueError, OSError) as e:
        terminal.complain(e, e if arguments.traceback else None)
        return BAD_CONFIG
    if OWNED in os.environ:
        end_with_parent()
    if arguments.node_rank == 0:
        print(placed(arguments.ranks, len(visible_gpus(config.topology.device)), arguments.nodes), flush=True)
    _set_environment(config.topology.threads)
    with node_folder() as node, node.passing_signals_on():
        failed = _supervise(torchrun_arguments(arguments, node, command), node, config.checkpoint.grace)
        return node.code(failed, folder.finished(config.rounds))


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
    terminal.add_traceback(parser)
    return parser


def _check_nodes(arguments: argparse.Namespace) -> None:
    host, _, port = arguments.rendezvous.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--rendezvous {shortened(arguments.rendezvous)} is not HOST:PORT, such as node1:29500")
    if arguments.node_rank >= arguments.nodes:
        raise ConfigError(f"--node-rank is {arguments.node_rank}, but --nodes {arguments.nodes} counts them from 0")
    if arguments.nodes > 1 and int(port) == 0:
        raise ConfigError(f"{arguments.nodes} nodes need a place to meet: give --rendezvous HOST:PORT, of node 0")


def _set_environment(threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # Restarted ranks that share the agent's store would read the addresses of the ranks before them.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def torchrun_arguments(arguments: argparse.Namespace, node: Node, command: list[str]) -> list[str]:
    return [
        f"--nnodes={arguments.nodes}",
        f"--nproc-per-node={arguments.ranks}",
        f"--max-restarts={arguments.max_restarts}",
        "--monitor-interval=0.1",
        f"--log-dir={node.path / 'torchrun'}",  # or it leaves a folder behind
        "--rdzv-backend=c10d",
        *_rendezvous(arguments, node),
        "-m",
        "launch.rank",
        *command,
        *(["--traceback"] if arguments.traceback else []),
    ]


def _rendezvous(arguments: argparse.Namespace, node: Node) -> list[str]:
    """One node meets in a file: torchrun would listen on every address of the machine, for anybody."""
    if arguments.nodes == 1:
        file = node.path / "rendezvous"
        return ["--local-addr=127.0.0.1", f"--rdzv-endpoint={file}", "--rdzv-conf=store_type=file", "--rdzv-id=here"]
    host, _, port = arguments.rendezvous.rpartition(":")
    is_host = int(arguments.node_rank == 0)
    return [f"--rdzv-endpoint={host}:{port}", f"--rdzv-id={port}", f"--rdzv-conf=is_host={is_host}"]


def _supervise(torchrun: list[str], node: Node, grace: float) -> bool:
    """Run torchrun to its end; False if it was content. Its ranks do not outlive it."""
    # A fork has torch imported already, and a group of its own does not hear the terminal's Ctrl-C.
    agent = multiprocessing.get_context("fork").Process(target=_agent, args=(torchrun, node, os.getpid()))
    agent.start()
    agent.join()
    code = agent.exitcode or 0
    number = -code if code < 0 else code - SIGNALLED
    if number > 0:
        if not node.stopped:
            name = signal.Signals(number).name
            print(f"error: torchrun was ended by {name}; start the same command to resume", file=sys.stderr)
        node.end(grace + COURTESY)
    return code != 0


def _agent(torchrun: list[str], node: Node, launcher: int) -> None:
    """The process that is torchrun: one line for a lost rank instead of its traceback and table."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    os.setpgid(0, 0)
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN if number in (signal.SIGUSR1, signal.SIGUSR2) else signal.SIG_DFL)
    end_with_parent(launcher)
    logging.disable()
    try:
        run(torchrun)
    except SignalException as e:
        if os.getppid() != launcher:
            shutil.rmtree(node.path, ignore_errors=True)
        sys.exit(SIGNALLED + e.sigval)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        # A rank that left its code had its say, however the interpreter ended after that.
        if failure.exitcode < 0 and not node.has_code(failure.local_rank):
            name = signal.Signals(-failure.exitcode).name
            terminal.complain(f"rank {rank} was ended by {name}; start the same command to resume")
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
