"""Start the ranks of one machine, or of one node among several, with torchrun.

python -m launch.local [CONFIG.yaml] [key.sub=value ...] --ranks 8

Exit codes as of fl_dist.main: 0 finished, 2 bad configuration, 75 interrupted and resumable, 1 any other failure.
"""

import argparse
import logging
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from functools import partial

from fl_dist.common import terminal
from fl_dist.common.errors import ConfigError, FlDistError
from fl_dist.common.formatting import shorten
from fl_dist.common.terminal import parse_int_at_least
from fl_dist.distributed.signals import EXIT_BAD_CONFIG, HANDLED_SIGNALS, end_with_parent
from launch.arguments import DEFAULT_RANKS
from launch.node import CHILD_LAUNCHER, Node, create_node

SIGNAL_EXIT_BASE = 128
"""torchrun's exit code is this plus the number of the signal that ended it."""
STRAGGLER_CHECK_SECONDS = 1.0
TERMINATION_MARGIN_SECONDS = 10.0
"""Time beyond checkpoint.grace in which ranks whose torchrun is gone must end."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    # These take seconds.
    from fl_dist.config.arguments import resolve_arguments
    from fl_dist.storage.run_folder import RunFolder
    from launch.devices import describe_placement, visible_gpus

    try:
        _check_nodes(arguments)
        config, command = resolve_arguments(arguments.run_arguments)
        folder = RunFolder(str(config.run.dir))
        folder.check_not_finished(config.rounds)
    except (FlDistError, OSError) as e:
        terminal.print_error(e, e if arguments.traceback else None)
        return EXIT_BAD_CONFIG
    if CHILD_LAUNCHER in os.environ:
        end_with_parent()
    if arguments.node_rank == 0:
        gpus = len(visible_gpus(config.topology.device))
        print(describe_placement(arguments.ranks, gpus, arguments.nodes), flush=True)
    set_environment(config.topology.threads)
    with create_node() as node:
        words, has_server = torchrun_arguments(arguments, node, "launch.rank", command), arguments.node_rank == 0
        has_failed = run_torchrun(words, node, has_server, config.checkpoint.grace)
        return node.exit_code(has_failed, folder.is_finished(config.rounds))


def parser() -> argparse.ArgumentParser:
    parser = terminal.ArgumentParser(prog="python -m launch.local", description=__doc__.splitlines()[0])
    add, natural, positive = parser.add_argument, partial(parse_int_at_least, 0), partial(parse_int_at_least, 1)
    add(
        "run_arguments", nargs="*", metavar="CONFIG key.sub=value", help="a YAML file and overrides, as for fl-dist run"
    )
    add("-n", "--ranks", type=positive, default=DEFAULT_RANKS, help="processes on this node (default %(default)s)")
    add("--max-restarts", type=natural, default=0, help="restarts after a rank was lost (default 0)")
    add("--nodes", type=positive, default=1, help="nodes of the job; each runs this command (default 1)")
    add("--node-rank", type=natural, default=0, help="number of this node; node 0 hosts the rendezvous (default 0)")
    add("--rendezvous", default="127.0.0.1:0", metavar="HOST:PORT", help="where the nodes connect to each other")
    address_help = (
        "name or address under which the other nodes reach this one (default: its Slurm name, or torchrun's choice)"
    )
    add("--local-addr", default=os.environ.get("SLURMD_NODENAME"), metavar="HOST", help=address_help)
    terminal.add_traceback_option(parser)
    return parser


def _check_nodes(arguments: argparse.Namespace) -> None:
    host, _, port = arguments.rendezvous.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--rendezvous {shorten(arguments.rendezvous)} is not HOST:PORT, such as node1:29500")
    if arguments.node_rank >= arguments.nodes:
        raise ConfigError(
            f"--node-rank {arguments.node_rank} must be below --nodes {arguments.nodes}: it counts from 0"
        )
    if arguments.nodes > 1 and int(port) == 0:
        raise ConfigError(f"{arguments.nodes} nodes need a rendezvous: give --rendezvous HOST:PORT of node 0")


def set_environment(threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # Restarted ranks that share torchrun's store would read the addresses of the previous ranks.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def torchrun_arguments(arguments: argparse.Namespace, node: Node, module: str, command: list[str]) -> list[str]:
    return [
        f"--nnodes={arguments.nodes}",
        f"--nproc-per-node={arguments.ranks}",
        f"--max-restarts={arguments.max_restarts}",
        "--monitor-interval=0.1",
        f"--log-dir={node.path / 'torchrun'}",  # by default torchrun leaves a folder behind
        "--rdzv-backend=c10d",
        *_rendezvous_arguments(arguments, node),
        *("-m", module, *command),
        *(["--traceback"] if arguments.traceback else []),
    ]


def _rendezvous_arguments(arguments: argparse.Namespace, node: Node) -> list[str]:
    """One node uses a file: torchrun would listen on every address of the machine, for anybody."""
    if arguments.nodes == 1:
        file = node.path / "rendezvous"
        return ["--local-addr=127.0.0.1", f"--rdzv-endpoint={file}", "--rdzv-conf=store_type=file", "--rdzv-id=here"]
    port, is_host = arguments.rendezvous.rpartition(":")[2], int(arguments.node_rank == 0)
    endpoint = [f"--rdzv-endpoint={arguments.rendezvous}", f"--rdzv-id={port}", f"--rdzv-conf=is_host={is_host}"]
    # By default rank 0's address is the full name of its node, which does not resolve on every cluster.
    return endpoint + ([f"--local-addr={arguments.local_addr}"] if arguments.local_addr else [])


def run_torchrun(arguments: list[str], node: Node, has_server: bool, grace_seconds: float) -> bool:
    """Run torchrun to its end; True if it failed. Its ranks do not outlive it.

    `has_server`: rank 0 of a run is on this node, and records how it ended.
    """
    # A fork has torch imported already, and the terminal's Ctrl-C does not reach a process group of its own.
    process = multiprocessing.get_context("fork").Process(target=_torchrun, args=(arguments, node, os.getpid()))
    process.start()
    while process.is_alive():
        process.join(STRAGGLER_CHECK_SECONDS)
        node.kill_stragglers()
    code = process.exitcode or 0
    number = -code if code < 0 else code - SIGNAL_EXIT_BASE
    if number > 0:
        if not node.is_stopping:
            name = signal.Signals(number).name
            terminal.print_error(f"torchrun was ended by {name}; start the same command to resume")
        node.terminate(grace_seconds + TERMINATION_MARGIN_SECONDS)
    elif has_server and node.has_left_silently(0):
        terminal.print_error("rank 0 ended without an error, as after os._exit; start the same command to resume")
        return True
    return code != 0


def _torchrun(arguments: list[str], node: Node, launcher_pid: int) -> None:
    """The process that becomes torchrun; a lost rank is one line instead of torchrun's traceback and table."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    os.setpgid(0, 0)
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in (signal.SIGUSR1, signal.SIGUSR2) else signal.SIG_DFL)
    end_with_parent(launcher_pid)
    logging.disable()
    try:
        run(arguments)
    except SignalException as e:
        if os.getppid() != launcher_pid:
            shutil.rmtree(node.path, ignore_errors=True)
        sys.exit(SIGNAL_EXIT_BASE + e.sigval)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        # A rank that recorded its exit code reported its error itself, however its interpreter ended after that.
        if failure.exitcode < 0 and not node.has_exit_code(failure.local_rank):
            name = signal.Signals(-failure.exitcode).name
            terminal.print_error(f"rank {rank} was ended by {name}; start the same command to resume")
            node.record_exit(failure.local_rank, 1, is_fatal=False)
        sys.exit(1)


if __name__ == "__main__":
    terminal.run_program(main, is_slow=True)
