"""The entry point: read the configuration, find this process's rank, train.

python -m fl_dist.main [CONFIG.yaml] [key.sub=value ...]
torchrun --nproc-per-node 8 -m fl_dist.main CONFIG.yaml [key.sub=value ...]
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare()  # here, for the imports below take seconds

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence

import torch

from fl_dist import __version__
from fl_dist import config as configuration
from fl_dist.common.reading import as_yaml
from fl_dist.common.words import counted, message
from fl_dist.config import Config, ConfigError
from fl_dist.config.arguments import resolve
from fl_dist.config.usage import help_lines
from fl_dist.engine.client import ClientFailure
from fl_dist.engine.server import TooFewSurvivors
from fl_dist.engine.train import train
from fl_dist.engine.world import World
from fl_dist.machine import bf16
from fl_dist.machine.comm import Comm, Lost, connect, host
from fl_dist.machine.meeting import passes
from fl_dist.machine.place import Place, find
from fl_dist.machine.signals import REQUEUE, StopRequest, end_with_parent
from fl_dist.monitor.console import STARTING
from fl_dist.storage.checkpoint import Damaged, NoCheckpoint, Save, load_save, newest
from fl_dist.storage.folder import FolderLost, RunFolder
from fl_dist.storage.metrics import RowsLost

log = logging.getLogger("fl_dist")
EXPECTED = (
    ValueError,
    OSError,
    ClientFailure,
    TooFewSurvivors,
    NoCheckpoint,
    RowsLost,
    FolderLost,
    Lost,
    MemoryError,
)
"""Errors whose message is enough; anything else is a defect and shows its traceback."""
NO_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
"""By which torch's RuntimeErrors are known."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a configuration. Exit codes: 2 bad configuration, 75 interrupted but resumable, 1 any other failure."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    place, speaks = None, True
    try:
        place = find()
        speaks = place is None or place.rank == 0
        if place is not None and place.launched:
            end_with_parent()
        config, _ = resolve(arguments.what)
        folder = RunFolder(str(config.run.dir))
        bf16.make_safe(config)
        if arguments.check:
            return _check(config) if speaks else 0
    except Exception as e:
        _complain(e, speaks, arguments.traceback)
        return 2
    torch.set_num_threads(config.topology.threads)
    _be_deterministic()
    return _run(config, folder, place, arguments.traceback)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m fl_dist.main",
        description="Federated training: rank 0 serves, the other ranks train; one process alone does everything.",
        epilog=_keys() if {"-h", "--help"} & set(argv) else "",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="CONFIG.yaml key.sub=value",
        help="a YAML file (without one: the embedded quick start), and values of single keys, in YAML syntax",
    )
    parser.add_argument(
        "--check", action="store_true", help="validate the configuration and its data, print both, and stop"
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    return parser.parse_intermixed_args(argv)


def _keys() -> str:
    return "keys (type, default, meaning):\n" + "\n".join(f"  {line}" for line in help_lines())


def _check(config: Config) -> int:
    """Print what would run, as YAML: the data and the model as comments, then every key."""
    world = World(config, torch.device("cpu"))
    for line in world.describe():
        print(f"# {line}")
    print(as_yaml(configuration.dump(config)), end="")
    return 0


def _run(config: Config, folder: RunFolder, place: Place | None, traceback: bool) -> int:
    speaks = place is None or place.rank == 0
    comm: Comm | None = None
    handlers: list[logging.Handler] = []
    with StopRequest(config.checkpoint.grace) as stop:
        try:
            if speaks:
                print(f"{STARTING} {folder.path}", flush=True)
            comm = connect(place, config.topology, config.comm, stop)
            start = _claim(config, folder, comm)
            handlers = _log_to(folder, comm)
            world = World(config, comm.device)
            _compare_contents(world, folder, comm)
            _greet(world, comm, start)
            finished = train(world, comm, folder, start, stop)
            log.info("finished" if finished else "interrupted")
            return 0 if finished else REQUEUE
        except Exception as e:
            code = 2 if isinstance(e, ConfigError) else e.code if isinstance(e, Lost) else 1
            if comm is not None and not isinstance(e, Lost):
                comm.fail(_one_line(e), code, passes(e))
            _complain(e, speaks, traceback)
            resumable = stop.requested and not isinstance(e, NoCheckpoint | RowsLost)
            return REQUEUE if resumable and code == 1 else code
        finally:
            stop.settle()
            if comm is not None:
                comm.close()
            folder.release()
            for handler in handlers:
                log.removeHandler(handler)
                with contextlib.suppress(OSError):
                    handler.close()


def _claim(config: Config, folder: RunFolder, comm: Comm) -> Save | None:
    """Rank 0 takes the folder and finds where to start; the others are told."""
    text, found = None, None
    if comm.rank == 0:
        found = _newest(folder) if folder.claim(config) else None
        folder.extend(config)
        text = json.dumps([folder.record.id, 0 if found is None else found.manifest.round])
    folder.record.id, start = json.loads(comm.share("start", text))
    return load_save(folder.checkpoints, start) if start else None


def _newest(folder: RunFolder) -> Save | None:
    try:
        found = newest(folder.checkpoints, folder.record.id, lambda message: print(f"warning: {message}"))
    except OSError as e:
        raise Damaged(
            f"{folder.checkpoints} cannot be read ({e.strerror}); mend it, or choose another run.dir"
        ) from None
    if found is None and folder.record.saved:
        raise Damaged(f"this run was saved, but {folder.checkpoints} holds no save any more; put it back")
    return found


def _compare_contents(world: World, folder: RunFolder, comm: Comm) -> None:
    """The inputs are those that the run began with, and the same on every rank."""
    mine, first = world.contents(), None
    if comm.rank == 0:
        folder.compare_contents(mine)
        first = json.dumps(mine)
    told = json.loads(comm.share("contents", first))
    other = [name for name in mine if mine[name] != told[name]]
    if other:
        raise ConfigError(f"this rank, on {host()}, sees another {' and '.join(other)} than rank 0; mend its files")


def _greet(world: World, comm: Comm, start: Save | None) -> None:
    """What runs where: all of it in the log of each rank, in a line or two on the terminal."""
    config, workers = world.config, counted(len(comm.workers), "worker")
    ranks = (
        "one process"
        if comm.size == 1
        else f"server + {workers}"
        if comm.overlaps
        else f"{workers} (rank 0 also serves)"
    )
    resumed = [f"resuming after round {start.manifest.round} of {config.rounds}"] if start is not None else []
    job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    place = f"rank {comm.rank} of {comm.size} on {host()}, process {os.getpid()}, {comm.device}{job}"
    for line in [f"fl_dist {__version__}, torch {torch.__version__}", place, *world.describe(), *resumed]:
        log.info("%s", line)
    if comm.rank == 0:
        name = config.algorithm.get("name") or world.algorithm.describe()
        line = (
            f"{name} · {config.data['name']} · {config.model['name']} with {world.model.count:,} parameters · "
            f"{world.largest} of {counted(config.clients.total, 'client')} a round · {ranks} on {comm.device.type}"
        )
        print(*[line, *resumed], sep="\n", flush=True)


class LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """A full disk must not fill the terminal with tracebacks."""


def _log_to(folder: RunFolder, comm: Comm) -> list[logging.Handler]:
    """Each rank's log file; rank 0's warnings also go to the terminal."""
    handlers: list[logging.Handler] = [LogFile(folder.logs / f"rank{comm.rank}.log", encoding="utf-8")]
    if comm.rank == 0:
        terminal = logging.StreamHandler()
        # Errors end the run and are printed once, at the end.
        terminal.addFilter(lambda record: record.levelno == logging.WARNING)
        handlers.append(terminal)
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    return handlers


def _complain(error: Exception, speaks: bool, traceback: bool) -> None:
    traceback = traceback or not (isinstance(error, EXPECTED) or _lacks_memory(error))
    log.error("%s", _one_line(error), exc_info=error if traceback else None, extra={"passes": passes(error)})
    if speaks:
        if traceback:
            import traceback as tb

            tb.print_exception(error)
        terminal.complain(_one_line(error))


def _one_line(error: Exception) -> str:
    if _lacks_memory(error):
        return f"not enough memory ({message(error)}); choose a smaller model, batch or data set"
    return message(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {message(error)}"


def _lacks_memory(error: Exception) -> bool:
    of_torch = isinstance(error, RuntimeError) and not isinstance(error, EXPECTED)
    return isinstance(error, MemoryError) or (of_torch and any(words in str(error) for words in NO_MEMORY))


def _be_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not use_deterministic_algorithms: that imports a compiler, two seconds of every rank's start.
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.benchmark = False


if __name__ == "__main__":
    sys.exit(main())
