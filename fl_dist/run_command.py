"""What `fl-dist run` does: read the configuration, find this process's rank, train; errors become exit codes."""

import argparse

import torch

from fl_dist.callbacks.base import build_callbacks
from fl_dist.common import terminal
from fl_dist.common.errors import FlDistError, error_location
from fl_dist.common.yaml_reader import to_yaml
from fl_dist.config import Config
from fl_dist.config.arguments import resolve_arguments
from fl_dist.distributed import bf16
from fl_dist.distributed.failures import end_failed_run, error_line, exit_code, exit_error, log_error, needs_traceback
from fl_dist.distributed.memory import keep_freed_memory
from fl_dist.distributed.rank_info import RankInfo, find_rank, is_rank0
from fl_dist.distributed.signals import EXIT_BAD_CONFIG, EXIT_REQUEUE, StopRequest, end_with_parent
from fl_dist.distributed.torch_settings import torch_settings
from fl_dist.execute import execute
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.experiment_description import describe, describe_assumptions
from fl_dist.metrics.file import MetricsLostError
from fl_dist.storage.checkpoint import CheckpointFailedError
from fl_dist.storage.run_folder import RunFolder


def run_command(arguments: argparse.Namespace) -> int:
    """Run a configuration. Exit codes: 2 bad configuration, 75 interrupted but resumable, 1 any other failure."""
    rank_info = None
    try:
        rank_info = find_rank()
        if rank_info is not None and rank_info.has_launcher:
            end_with_parent()
        config, _ = resolve_arguments(arguments.config)
        folder = RunFolder(str(config.run.dir))
        bf16.ensure_bf16_works(config)
        if arguments.check:
            return _check(config) if is_rank0(rank_info) else 0
    except (SystemExit, KeyboardInterrupt) as e:
        if not error_location(e):  # a signal before anything began
            raise
        terminal.print_error(exit_error(e), e if arguments.traceback else None)
        return EXIT_BAD_CONFIG
    except Exception as e:
        log_error(e)
        if is_rank0(rank_info):
            # There is no log yet that could hold the traceback of an unforeseen error.
            is_unforeseen = needs_traceback(e) and not isinstance(e, FlDistError | OSError)
            shows_traceback = arguments.traceback or is_unforeseen
            terminal.print_error(error_line(e), e if shows_traceback else None)
        return EXIT_BAD_CONFIG
    return _run(config, folder, rank_info, arguments.traceback)


def _check(config: Config) -> int:
    """Print the configuration as YAML, after comments on the data and the model."""
    callbacks, lines = build_callbacks(config.callbacks), ["data.local: rows are read by each rank"]
    if not config.data["local"]:
        experiment = Experiment(config, torch.device("cpu"))
        callbacks.check(experiment.measurements)
        lines = [*describe(experiment), *describe_assumptions(experiment)]
    for line in lines:
        print(f"# {line}")
    print(to_yaml(config.model_dump()), end="")
    return 0


def _run(config: Config, folder: RunFolder, rank_info: RankInfo | None, traceback: bool) -> int:
    keep_freed_memory()
    with torch_settings(config), StopRequest(config.checkpoint.grace, restores_handlers=False) as stop:
        try:
            return 0 if execute(config, folder, rank_info, stop) else EXIT_REQUEUE
        except Exception as e:
            is_unsaved = isinstance(e, CheckpointFailedError | MetricsLostError)
            code = exit_code(e) if is_unsaved else stop.exit_code(exit_code(e))
            return end_failed_run(e, rank_info, code, traceback)
