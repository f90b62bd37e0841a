"""The entry point: read the configuration, find this process's rank, train.

python -m fl_dist.main [CONFIG.yaml] [key.sub=value ...]
torchrun --nproc-per-node 8 -m fl_dist.main CONFIG.yaml [key.sub=value ...]
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare()  # here, for the imports below take seconds
    terminal.say_starting()

import argparse
import sys
from collections.abc import Sequence

import torch

from fl_dist.common.imports import origin
from fl_dist.common.reading import as_yaml
from fl_dist.config import Config, dump
from fl_dist.config.arguments import resolve
from fl_dist.config.usage import help_lines
from fl_dist.engine.world import World
from fl_dist.execute import execute, exit_code, is_bug, one_line, report, settings
from fl_dist.machine import bf16
from fl_dist.machine.memory import keep_freed
from fl_dist.machine.place import Place, find
from fl_dist.machine.signals import REQUEUE, StopRequest, end_with_parent
from fl_dist.storage.checkpoint import NoCheckpoint
from fl_dist.storage.folder import RunFolder
from fl_dist.storage.metrics import RowsLost


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
    except SystemExit as e:
        if not origin(e):  # a signal before anything began
            raise
        terminal.complain(f"something called sys.exit({e.code!r}){origin(e)}", e if arguments.traceback else None)
        return 2
    except Exception as e:
        report(e)
        if speaks:
            # There is no log yet in which a traceback could stand.
            _complain(e, arguments.traceback or (is_bug(e) and not isinstance(e, ValueError)))
        return 2
    return _run(config, folder, place, arguments.traceback)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m fl_dist.main",
        description="Federated training: rank 0 serves, the other ranks train; one process alone does everything.",
        epilog=_keys(argv) if {"-h", "--help"} & set(argv) else "",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="CONFIG.yaml key.sub=value",
        help="a YAML file (without one: the embedded quick start), and values of single keys, in YAML syntax",
    )
    parser.add_argument(
        "-h", "--help", action="help", help="show this, and of keys those of what is named, e.g. model=my_models:resnet"
    )
    parser.add_argument(
        "--check", action="store_true", help="validate the configuration and its data, print both, and stop"
    )
    terminal.add_traceback(parser)
    return parser.parse_intermixed_args(argv)


def _keys(argv: Sequence[str]) -> str:
    """Every key, or those of the builders that the command line names."""
    try:
        lines = list(help_lines([word for word in argv if not word.startswith("-")]))
    except Exception as e:
        _complain(e, "--traceback" in argv)
        sys.exit(2)
    return "keys (type, default, meaning):\n" + "\n".join(f"  {line}" for line in lines)


def _check(config: Config) -> int:
    """Print what would run, as YAML: the data and the model as comments, then every key."""
    world = World(config, torch.device("cpu"))
    for line in world.describe():
        print(f"# {line}")
    print(as_yaml(dump(config)), end="")
    return 0


def _run(config: Config, folder: RunFolder, place: Place | None, traceback: bool) -> int:
    keep_freed()
    with settings(config), StopRequest(config.checkpoint.grace) as stop:
        try:
            return 0 if execute(config, folder, place, stop) else REQUEUE
        except Exception as e:
            if place is None or place.rank == 0:
                _complain(e, traceback)
            resumable = stop.asked and not isinstance(e, NoCheckpoint | RowsLost)
            return REQUEUE if resumable and exit_code(e) == 1 else exit_code(e)


def _complain(error: Exception, shows_traceback: bool) -> None:
    terminal.complain(one_line(error), error if shows_traceback else None)


if __name__ == "__main__":
    sys.exit(main())
