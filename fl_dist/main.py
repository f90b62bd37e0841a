"""The entry point: read the configuration, find this process's rank, train.

python -m fl_dist.main [CONFIG.yaml] [key.sub=value ...]
torchrun --nproc-per-node 8 -m fl_dist.main CONFIG.yaml [key.sub=value ...]
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare_terminal()  # before the imports, which take seconds
    terminal.print_starting()

import argparse
import sys
from collections.abc import Sequence

import torch

from fl_dist.callbacks.base import build_callbacks
from fl_dist.common.errors import error_location
from fl_dist.common.yaml_reader import to_yaml
from fl_dist.config import Config, dump
from fl_dist.config.arguments import resolve_arguments
from fl_dist.config.help import help_lines
from fl_dist.distributed import bf16
from fl_dist.distributed.memory import keep_freed_memory
from fl_dist.distributed.rank_info import RankInfo, find_rank
from fl_dist.distributed.signals import EXIT_REQUEUE, StopRequest, end_with_parent
from fl_dist.execute import error_line, execute, exit_code, log_error, needs_traceback, torch_settings
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.experiment_description import describe
from fl_dist.metrics.file import MetricsLostError
from fl_dist.storage.checkpoint import CheckpointFailedError
from fl_dist.storage.run_folder import RunFolder


def main(argv: Sequence[str] | None = None) -> int:
    """Run a configuration. Exit codes: 2 bad configuration, 75 interrupted but resumable, 1 any other failure."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    rank_info, is_rank0 = None, True
    try:
        rank_info = find_rank()
        is_rank0 = rank_info is None or rank_info.rank == 0
        if rank_info is not None and rank_info.has_launcher:
            end_with_parent()
        config, _ = resolve_arguments(arguments.config)
        folder = RunFolder(str(config.run.dir))
        bf16.ensure_bf16_works(config)
        if arguments.check:
            return _check(config) if is_rank0 else 0
    except SystemExit as e:
        if not error_location(e):  # a signal before anything began
            raise
        terminal.print_error(
            f"something called sys.exit({e.code!r}){error_location(e)}", e if arguments.traceback else None
        )
        return 2
    except Exception as e:
        log_error(e)
        if is_rank0:
            # There is no log yet that could hold the traceback.
            _print_error(e, arguments.traceback or (needs_traceback(e) and not isinstance(e, ValueError | OSError)))
        return 2
    return _run(config, folder, rank_info, arguments.traceback)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = terminal.ArgumentParser(
        prog="python -m fl_dist.main",
        description="Federated training: rank 0 serves, the other ranks train; one process alone does everything.",
        epilog=_help_keys(argv) if {"-h", "--help"} & set(argv) else "",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument(
        "config",
        nargs="*",
        metavar="CONFIG.yaml key.sub=value",
        help="a YAML file (default: the embedded quick start), and values of single keys, in YAML syntax",
    )
    parser.add_argument(
        "-h",
        "--help",
        action="help",
        help="show this, with all keys or those of a builder, e.g. model=my_models:resnet",
    )
    parser.add_argument(
        "--check", action="store_true", help="validate the configuration and its data, print both, and stop"
    )
    terminal.add_traceback_option(parser)
    return parser.parse_intermixed_args(argv)


def _help_keys(argv: Sequence[str]) -> str:
    """Every key, or those of the builders that the command line names."""
    try:
        lines = list(help_lines([word for word in argv if not word.startswith("-")]))
    except Exception as e:
        _print_error(e, "--traceback" in argv)
        sys.exit(2)
    return "keys (type, default, meaning):\n" + "\n".join(f"  {line}" for line in lines)


def _check(config: Config) -> int:
    """Print the configuration as YAML, after comments on the data and the model."""
    build_callbacks(config.callbacks)
    experiment = Experiment(config, torch.device("cpu"))
    for line in describe(experiment):
        print(f"# {line}")
    print(to_yaml(dump(config)), end="")
    return 0


def _run(config: Config, folder: RunFolder, rank_info: RankInfo | None, traceback: bool) -> int:
    keep_freed_memory()
    with torch_settings(config), StopRequest(config.checkpoint.grace) as stop:
        try:
            return 0 if execute(config, folder, rank_info, stop) else EXIT_REQUEUE
        except Exception as e:
            if rank_info is None or rank_info.rank == 0:
                _print_error(e, traceback)
            is_resumable = stop.was_requested and not isinstance(e, CheckpointFailedError | MetricsLostError)
            return EXIT_REQUEUE if is_resumable and exit_code(e) == 1 else exit_code(e)


def _print_error(error: Exception, with_traceback: bool) -> None:
    terminal.print_error(error_line(error), error if with_traceback else None)


if __name__ == "__main__":
    sys.exit(main())
