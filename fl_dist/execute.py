"""One attempt at a run in this process, as whichever rank it is: connect, lock the folder, train."""

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import time
from pathlib import Path

import torch

from fl_dist import __version__
from fl_dist.callbacks.always_on.console import STARTING, write_line
from fl_dist.callbacks.base import NO_CALLBACKS, build_callbacks
from fl_dist.common.errors import ConfigError
from fl_dist.common.files import append_lines, write_atomically
from fl_dist.common.formatting import pluralize
from fl_dist.common.terminal import terminal_width, wrap_fields
from fl_dist.config import Config
from fl_dist.distributed.devices import describe_device_problems, device_name
from fl_dist.distributed.failures import exit_error, log_error, needs_traceback
from fl_dist.distributed.process_group import ProcessGroup, connect, hostname
from fl_dist.distributed.rank_info import RankInfo, is_rank0
from fl_dist.distributed.signals import StopRequest
from fl_dist.distributed.tf32 import check_tf32_support
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
from fl_dist.logs import show_warnings, write_log
from fl_dist.storage.checkpoint import Checkpoint, CorruptCheckpointError, load_checkpoint, newest_checkpoint
from fl_dist.storage.run_folder import ATTEMPTS, CLIENTS, RunFolder

log = logging.getLogger(__name__)


def execute(config: Config, folder: RunFolder, rank_info: RankInfo | None, stop: StopRequest) -> bool:
    """Run the remaining rounds. False if a signal ended it before the last; other ranks learn of a failure."""
    group: ProcessGroup | None = None
    callbacks = NO_CALLBACKS
    log_file: Path | None = None
    with contextlib.ExitStack() as logs:
        try:
            if is_rank0(rank_info):
                write_line(f"{STARTING} {folder.path}")
            group = connect(rank_info, config.topology, config.comm, stop)
            check_tf32_support(config.local.precision, group.device)
            check_workers(config, group)
            callbacks = build_callbacks(config.callbacks) if group.rank == 0 else callbacks
            logs.enter_context(show_warnings(rank_info))
            start = _claim(config, folder, group)
            log_file = logs.enter_context(write_log(folder, group.rank))
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
            callbacks.close()
            return finished
        except (Exception, SystemExit, KeyboardInterrupt) as caught:
            e = caught if isinstance(caught, Exception) else exit_error(caught)
            if log_file is not None and needs_traceback(e):
                e.add_note(f"the traceback is in {log_file}")
            log_error(e)
            if group is not None:
                group.fail(e)
            if rank_info is None:  # a job ends at once, whatever its callbacks hold
                callbacks.close()
            raise e from e.__cause__
        finally:
            stop.disarm()
            folder.release()


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
        folder.compare_contents(contents, data_facts(experiment))
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
        model = f"{config.model['name']} with {describe_size(experiment)}"
        fields = [name, config.data["name"], model, describe_cohorts(experiment), f"{ranks} on {group.device.type}"]
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
