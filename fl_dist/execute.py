"""One attempt at a run in this process, as whichever rank it is: connect, lock the folder, train."""

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
from fl_dist.callbacks.base import NO_CALLBACKS, build_callbacks
from fl_dist.callbacks.console import STARTING, Warnings, write_line
from fl_dist.common.errors import ConfigError, FlDistError, describe_error, error_location, error_message
from fl_dist.common.files import append_lines, write_atomically
from fl_dist.common.formatting import pluralize
from fl_dist.common.terminal import print_error, terminal_width, wrap_fields
from fl_dist.config import Config
from fl_dist.distributed import hardware_errors
from fl_dist.distributed.devices import describe_device_problems, device_name
from fl_dist.distributed.failures import RankLostError, is_transient
from fl_dist.distributed.process_group import ProcessGroup, connect, hostname
from fl_dist.distributed.rank_exit import exit_rank
from fl_dist.distributed.rank_info import RankInfo, is_rank0
from fl_dist.distributed.signals import StopRequest
from fl_dist.distributed.tf32 import check_tf32_support, use_tf32
from fl_dist.federation.client_rows import check_workers
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.experiment_description import (
    client_class_counts,
    content_hashes,
    data_facts,
    describe,
    describe_assumptions,
    describe_cohorts,
    describe_size,
    describe_weights,
)
from fl_dist.federation.train import train
from fl_dist.storage.checkpoint import Checkpoint, CorruptCheckpointError, load_checkpoint, newest_checkpoint
from fl_dist.storage.run_folder import ATTEMPTS, CLIENTS, RunFolder

log = logging.getLogger(__name__)
package_log = logging.getLogger("fl_dist")
SELF_EXPLANATORY = (FlDistError, ValueError, OSError)
"""Errors whose message is understood without their class."""


def execute(config: Config, folder: RunFolder, rank_info: RankInfo | None, stop: StopRequest) -> bool:
    """Run the remaining rounds. False if a signal ended it before the last; other ranks are told of a failure."""
    group: ProcessGroup | None = None
    handlers: list[logging.Handler] = []
    has_log = False
    try:
        if is_rank0(rank_info):
            write_line(f"{STARTING} {folder.path}")
        group = connect(rank_info, config.topology, config.comm, stop)
        check_tf32_support(config.local.precision, group.device)
        check_workers(config, group)
        callbacks = build_callbacks(config.callbacks) if group.rank == 0 else NO_CALLBACKS
        handlers = _show_warnings(group)
        start = _claim(config, folder, group)
        handlers.append(_open_log(folder, group))
        has_log = True
        experiment = Experiment(config, group.device, group)
        _compare_contents(experiment, folder, group)
        _announce(experiment, group, start)
        callbacks.check(experiment.measurements)
        if group.rank == 0:
            _compare_devices(config, group, start)
            _record_attempt(experiment, group, folder, start)
        finished = train(experiment, group, folder, start, stop, callbacks)
        log.info("finished" if finished else "interrupted")
        stop.disarm()
        group.close()
        return finished
    except (Exception, SystemExit, KeyboardInterrupt) as caught:
        e = caught if isinstance(caught, Exception) else exit_error(caught)
        if has_log and needs_traceback(e):
            e.add_note(f"the traceback is in {folder.logs / f'rank{group.rank if group else 0}.log'}")
        log_error(e)
        if group is not None:
            group.fail(error_line(e), exit_code(e), is_transient(e))
        raise e from e.__cause__
    finally:
        stop.disarm()
        folder.release()
        for handler in handlers:
            package_log.removeHandler(handler)
            with contextlib.suppress(OSError):
                handler.close()


def exit_error(caught: SystemExit | KeyboardInterrupt) -> Exception:
    """User code that calls sys.exit must not end a run as if it had finished. A signal raises neither in a run."""
    what = f"called sys.exit({caught.code!r})" if isinstance(caught, SystemExit) else "raised KeyboardInterrupt"
    error = RuntimeError(f"something {what}{error_location(caught)}")
    error.__cause__ = caught
    return error


def end_failed_run(error: Exception, rank_info: RankInfo | None, code: int, with_traceback: bool = False) -> int:
    """Rank 0 prints the error. A rank of a job leaves at once; one process alone returns the exit code."""
    if is_rank0(rank_info):
        print_error(error_line(error), error if with_traceback else None)
    if rank_info is not None:
        exit_rank(code)
    return code


@contextlib.contextmanager
def torch_settings(config: Config) -> Iterator[None]:
    """Torch as a run needs it, for as long as it runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    state, cuda_states = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    torch.set_num_threads(config.topology.threads)
    torch.backends.cudnn.benchmark = False
    try:
        with _deterministic_kernels(), use_tf32(config.local.precision == "tf32"):
            yield
    finally:
        torch.set_rng_state(state)
        torch.cuda.set_rng_state_all(cuda_states)
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def _deterministic_kernels() -> Iterator[None]:
    """Operations use deterministic kernels; those that have none raise."""
    memory: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    # Not use_deterministic_algorithms, which imports a compiler: two seconds of every rank's start.
    torch.set_deterministic_debug_mode("error")
    # By default every torch.empty would be filled with NaN, a pass over memory that is about to be written.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fill


def log_error(error: Exception) -> None:
    """Write an error to the log, with its traceback if that is needed."""
    extra = {"is_transient": is_transient(error), "ranks": error.ranks if isinstance(error, RankLostError) else ()}
    log.error("%s", error_line(error), exc_info=error if needs_traceback(error) else None, extra=extra)


def exit_code(error: Exception) -> int:
    return 2 if isinstance(error, ConfigError) else error.code if isinstance(error, RankLostError) else 1


def needs_traceback(error: BaseException) -> bool:
    """Whether the root cause was not foreseen, or lies in the user's code: then the message is not enough."""
    while isinstance(error, FlDistError) and not isinstance(error, RankLostError) and error.__cause__ is not None:
        error = error.__cause__
    is_foreseen = isinstance(error, FlDistError) and not error_location(error)
    return not is_foreseen and not hardware_errors.is_out_of_memory(error)


def error_line(error: BaseException) -> str:
    """An error in one line, with its notes."""
    is_clear = isinstance(error, SELF_EXPLANATORY)
    line = f"{error_message(error)}{error_location(error)}" if is_clear else describe_error(error)
    return "; ".join([hardware_errors.describe_hardware_error(error) or line, *getattr(error, "__notes__", [])])


def _claim(config: Config, folder: RunFolder, group: ProcessGroup) -> Checkpoint | None:
    """Rank 0 locks the folder and broadcasts the round to start from."""
    text = None
    if group.rank == 0:
        checkpoint = _newest_checkpoint(folder) if folder.acquire(config) else None
        folder.extend_rounds(config)
        text = json.dumps([folder.info.id, 0 if checkpoint is None else checkpoint.manifest.round])
    folder.info.id, start = json.loads(group.store.broadcast_text("start", text))
    return load_checkpoint(folder.checkpoints, start) if start else None


def _newest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    checkpoints = folder.checkpoints
    try:
        newest = newest_checkpoint(checkpoints, folder.info.id, log.warning)
    except OSError as e:
        raise CorruptCheckpointError(
            f"{checkpoints} cannot be read ({e.strerror}); repair it, or choose another run.dir"
        ) from None
    if newest is None and folder.info.saved:
        raise CorruptCheckpointError(f"this run was saved, but {checkpoints} no longer holds a checkpoint; restore it")
    return newest


def _compare_contents(experiment: Experiment, folder: RunFolder, group: ProcessGroup) -> None:
    """The inputs are those that the run began with, and the same on every rank."""
    contents, text = content_hashes(experiment), None
    if group.rank == 0:
        folder.compare_contents(contents, asdict(data_facts(experiment)))
        text = json.dumps(contents)
    expected = json.loads(group.store.broadcast_text("contents", text))
    if changed := [name for name in contents if contents[name] != expected[name]]:
        names = " and ".join(changed)
        raise ConfigError(
            f"this rank, on {hostname()}, sees another {names} than rank 0; fix the files of that machine"
        )


def _announce(experiment: Experiment, group: ProcessGroup, start: Checkpoint | None) -> None:
    """What runs where: everything in the log of each rank, a line or two on the terminal."""
    config, workers = experiment.config, pluralize(len(group.workers), "worker")
    ranks = f"server + {workers}" if group.has_dedicated_server else f"{workers} (rank 0 also serves)"
    ranks = "one process" if group.size == 1 else ranks
    resumed = [f"resuming after round {start.manifest.round} of {config.rounds}"] if start is not None else []
    job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    location = f"rank {group.rank} of {group.size} on {hostname()}, process {os.getpid()}, {group.device}{job}"
    for line in [f"fl_dist {__version__}, torch {torch.__version__}", location, *describe(experiment), *resumed]:
        log.info("%s", line)
    if group.rank == 0:
        added = [name for part in config.algorithm.get("with", []) for name in part]
        named = " + ".join([config.algorithm["name"], *added]) if "name" in config.algorithm else ""
        name = named or experiment.algorithm.describe()
        fields = [name, config.data["name"], f"{config.model['name']} with {describe_size(experiment)}"]
        fields += [describe_cohorts(experiment)]
        fields += [f"{ranks} on {group.device.type}"]
        for line in [*wrap_fields(fields, terminal_width()), *describe_weights(experiment), *resumed]:
            write_line(line)
        for line in describe_assumptions(experiment):
            log.warning("%s", line)


def _compare_devices(config: Config, group: ProcessGroup, start: Checkpoint | None) -> None:
    """Between ranks, and with the previous attempt: another kind of device has other kernels."""
    for problem in describe_device_problems(group.device_slots, config.topology.oversubscribe):
        log.warning("%s", problem)
    device = device_name(group.device)
    previous = device if start is None else start.manifest.extra.get("device", device)
    if previous != device:
        log.warning("the run was on %s and resumes on %s; results may no longer be bit-identical", previous, device)


def _record_attempt(experiment: Experiment, group: ProcessGroup, folder: RunFolder, start: Checkpoint | None) -> None:
    """For readers of the run folder: what this attempt runs on, and how many rows of each class a client has."""
    attempt = {
        "time": round(time.time(), 3),
        "round": start.manifest.round if start else 0,
        "ranks": group.size,
        "hosts": group.hosts(),
        "device": device_name(group.device),
        "versions": versions(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }
    try:
        append_lines(folder.path / ATTEMPTS, [attempt])
        if not (folder.path / CLIENTS).exists():
            write_atomically(folder.path / CLIENTS, json.dumps(client_class_counts(experiment)).encode())
    except OSError as e:
        log.warning("%s could not be written: %s", ATTEMPTS, e.strerror)


def versions() -> dict[str, str]:
    """Of this program and of the libraries that its results depend on."""
    others = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "scipy", "wandb")}
    return {"fl_dist": __version__, "python": platform.python_version(), **others}


class RankLogHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """A full disk must not fill the terminal with tracebacks."""


class OneLineFormatter(logging.Formatter):
    def formatException(self, ei: object) -> str:  # noqa: N802 (logging's name)
        """Tracebacks are only in the log."""
        return ""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).rstrip("\n")


def terminal_handler() -> logging.Handler:
    """Shows warnings; an error ends the program, which prints it."""
    handler = Warnings()
    handler.setFormatter(OneLineFormatter("warning: %(message)s"))
    handler.addFilter(lambda record: record.levelno == logging.WARNING)
    return handler


def _show_warnings(group: ProcessGroup) -> list[logging.Handler]:
    """Rank 0's warnings go to the terminal, from the first one."""
    handlers = [terminal_handler()] if group.rank == 0 else []
    for handler in handlers:
        package_log.addHandler(handler)
    package_log.propagate = False
    return handlers


def _open_log(folder: RunFolder, group: ProcessGroup) -> RankLogHandler:
    """Each rank's log file, in a folder that this run has locked."""
    file = RankLogHandler(folder.logs / f"rank{group.rank}.log", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    package_log.addHandler(file)
    package_log.setLevel(logging.INFO)
    return file
