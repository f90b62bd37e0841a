"""One attempt at a run in this process, as whichever rank it is: meet the others, take the folder, train."""

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.utils.deterministic

from fl_dist import __version__
from fl_dist.common.imports import origin, told
from fl_dist.common.terminal import width, wrapped
from fl_dist.common.words import counted, message
from fl_dist.config import Config, ConfigError
from fl_dist.engine.client import ClientFailure
from fl_dist.engine.server import Diverged, TooFewSurvivors
from fl_dist.engine.train import train
from fl_dist.engine.world import World
from fl_dist.machine import breakdown, tf32
from fl_dist.machine.comm import Comm, Lost, connect, host
from fl_dist.machine.devices import device_name
from fl_dist.machine.meeting import passes
from fl_dist.machine.place import Place
from fl_dist.machine.signals import StopRequest
from fl_dist.monitor.console import STARTING, Warnings
from fl_dist.storage.checkpoint import Damaged, NoCheckpoint, Save, load_save, newest
from fl_dist.storage.folder import ATTEMPTS, CLIENTS, FolderLost, RunFolder, append_lines, write_atomically
from fl_dist.storage.metrics import RowsLost

log = logging.getLogger("fl_dist")
EXPECTED = (
    ValueError,
    OSError,
    ClientFailure,
    Diverged,
    TooFewSurvivors,
    NoCheckpoint,
    RowsLost,
    FolderLost,
    Lost,
)
"""Errors whose message is enough; anything else is a defect, of the program or of the user's own code."""


def execute(config: Config, folder: RunFolder, place: Place | None, stop: StopRequest) -> bool:
    """Run what is left. False if a signal ended it before the last round; a failure is told to the other ranks."""
    comm: Comm | None = None
    handlers: list[logging.Handler] = []
    try:
        if place is None or place.rank == 0:
            print(f"{STARTING} {folder.path}", flush=True)
        comm = connect(place, config.topology, config.comm, stop)
        tf32.check(config.local.precision, comm.device)
        start = _claim(config, folder, comm)
        handlers = _log_to(folder, comm)
        world = World(config, comm.device)
        _compare_contents(world, folder, comm)
        _greet(world, comm, start)
        if comm.rank == 0:
            _compare_devices(comm, start)
            _note(world, comm, folder, start)
        finished = train(world, comm, folder, start, stop)
        log.info("finished" if finished else "interrupted")
        return finished
    except (Exception, SystemExit) as caught:
        e = caught if isinstance(caught, Exception) else _exit_of(caught)
        if handlers and is_bug(e):
            e.add_note(f"the traceback is in {folder.logs / f'rank{comm.rank if comm else 0}.log'}")
        report(e)
        if comm is not None and not isinstance(e, Lost):
            comm.fail(one_line(e), exit_code(e), passes(e))
        raise e from e.__cause__
    finally:
        stop.settle()
        if comm is not None:
            comm.close()
        folder.release()
        for handler in handlers:
            log.removeHandler(handler)
            with contextlib.suppress(OSError):
                handler.close()


def _exit_of(caught: SystemExit) -> Exception:
    """Nothing that takes part in a run may end it as if it were done."""
    error = RuntimeError(f"something called sys.exit({caught.code!r}){origin(caught)}")
    error.__cause__ = caught
    return error


@contextlib.contextmanager
def settings(config: Config) -> Iterator[None]:
    """Torch as a run needs it, for as long as it runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads, state, benchmark = torch.get_num_threads(), torch.get_rng_state(), torch.backends.cudnn.benchmark
    torch.set_num_threads(config.topology.threads)
    torch.backends.cudnn.benchmark = False
    try:
        with _same_bits(), tf32.tf32(config.local.precision == "tf32"):
            yield
    finally:
        torch.set_rng_state(state)
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def _same_bits() -> Iterator[None]:
    """Operations with kernels whose bits do not depend on chance use these; those that have none raise."""
    memory: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    # Not use_deterministic_algorithms: that imports a compiler, two seconds of every rank's start.
    torch.set_deterministic_debug_mode("error")
    # Else every torch.empty is filled with NaN, a pass over memory that is about to be written.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fill


def report(error: Exception) -> None:
    """To the log; of a defect with its traceback."""
    about = {"passes": passes(error), "ranks": error.ranks if isinstance(error, Lost) else ()}
    log.error("%s", one_line(error), exc_info=error if is_bug(error) else None, extra=about)


def exit_code(error: Exception) -> int:
    return 2 if isinstance(error, ConfigError) else error.code if isinstance(error, Lost) else 1


def is_bug(error: BaseException) -> bool:
    """Whether the error, or what caused it, is none that was foreseen, or arose in the user's own code."""
    while isinstance(error, EXPECTED) and not isinstance(error, Lost) and error.__cause__ is not None:
        error = error.__cause__
    return (not isinstance(error, EXPECTED) or bool(origin(error))) and not breakdown.lacks_memory(error)


def one_line(error: BaseException) -> str:
    line = f"{message(error)}{origin(error)}" if isinstance(error, EXPECTED) else told(error)
    return "; ".join([breakdown.advice(error) or line, *getattr(error, "__notes__", [])])


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
        folder.compare_contents(mine, asdict(world.facts()))
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
        pieces = [name, config.data["name"], f"{config.model['name']} with {world.size()}"]
        pieces += [f"{world.largest} of {counted(config.clients.total, 'client')} a round"]
        pieces += [f"{ranks} on {comm.device.type}"]
        print(*[*wrapped(pieces, width()), *world.notes, *resumed], sep="\n", flush=True)


def _compare_devices(comm: Comm, start: Save | None) -> None:
    """Another kind of device has other kernels."""
    now = device_name(comm.device)
    before = now if start is None else start.manifest.extra.get("device", now)
    if before != now:
        log.warning("the run was on %s so far and goes on on %s: from here on its bits may be others", before, now)


def _note(world: World, comm: Comm, folder: RunFolder, start: Save | None) -> None:
    """For those who look at the run later: what this attempt runs on, and who has what of the data."""
    about = {
        "time": round(time.time(), 3),
        "round": start.manifest.round if start else 0,
        "ranks": comm.size,
        "hosts": comm.hosts(),
        "device": device_name(comm.device),
        "versions": versions(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }
    try:
        append_lines(folder.path / ATTEMPTS, [about])
        if not (folder.path / CLIENTS).exists():
            write_atomically(folder.path / CLIENTS, json.dumps(world.who_has_what()).encode())
    except OSError as e:
        log.warning("%s could not be written: %s", ATTEMPTS, e.strerror)


def versions() -> dict[str, str]:
    """Of this program and of what its numbers depend on."""
    others = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "scipy", "wandb")}
    return {"fl_dist": __version__, "python": platform.python_version(), **others}


class LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """A full disk must not fill the terminal with tracebacks."""


class OneLine(logging.Formatter):
    def formatException(self, ei: object) -> str:  # noqa: N802 (logging's name)
        """Tracebacks are for the log."""
        return ""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).rstrip("\n")


def on_terminal() -> logging.Handler:
    """Shows warnings; errors end a program and are printed once, at the end."""
    terminal = Warnings()
    terminal.setFormatter(OneLine("warning: %(message)s"))
    terminal.addFilter(lambda record: record.levelno == logging.WARNING)
    return terminal


def _log_to(folder: RunFolder, comm: Comm) -> list[logging.Handler]:
    """Each rank's log file; rank 0's warnings also go to the terminal."""
    layout = "%(asctime)s %(levelname)s %(message)s"
    file = LogFile(folder.logs / f"rank{comm.rank}.log", encoding="utf-8")
    file.setFormatter(logging.Formatter(layout))
    handlers: list[logging.Handler] = [file]
    if comm.rank == 0:
        handlers.insert(0, on_terminal())
    for handler in handlers:
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    return handlers
