"""The entry point: read the configuration, find this process's rank, train.

python -m fl_dist.main [CONFIG.yaml] [key.sub=value ...]
torchrun --nproc-per-node 8 -m fl_dist.main CONFIG.yaml [key.sub=value ...]
"""

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from fl_dist import config as configuration
from fl_dist.checkpoint import Manifest, NoCheckpoint, folder_name, newest
from fl_dist.client import ClientFailure
from fl_dist.comm import Comm, Lost, connect
from fl_dist.config import Config, ConfigError
from fl_dist.folder import RunFolder
from fl_dist.server import TooFewSurvivors
from fl_dist.signals import REQUEUE, StopRequest
from fl_dist.train import train
from fl_dist.usage import help_lines
from fl_dist.world import World

log = logging.getLogger("fl_dist")
QUICKSTART = Path(__file__).parent / "quickstart.yaml"
EXPECTED = (ValueError, OSError, ClientFailure, TooFewSurvivors, NoCheckpoint, Lost, MemoryError)
"""Errors whose message is enough; anything else is a defect and shows its traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a configuration. Exit codes: 2 bad configuration, 75 interrupted but resumable, 1 any other failure."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        config = _configure(arguments)
    except ValueError as e:
        _complain(e, speaks)
        return 2
    if arguments.check:
        if speaks:
            print(yaml.safe_dump(configuration.dump(config), sort_keys=False), end="")
        return 0
    torch.set_num_threads(config.topology.threads)
    _be_deterministic()
    return _run(config, arguments.traceback, speaks)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fl_dist.main",
        description="Federated training: rank 0 serves, the other ranks train; one process alone does everything.",
        epilog=_keys() if {"-h", "--help"} & set(argv) else "",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", help="a YAML file; without one the embedded quick start runs")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values of single keys, in YAML syntax")
    parser.add_argument("--check", action="store_true", help="validate, print the resolved configuration, and stop")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    return parser.parse_args(argv)


def _keys() -> str:
    return "keys (type, default, meaning):\n" + "\n".join(f"  {line}" for line in help_lines())


def _configure(arguments: argparse.Namespace) -> Config:
    path, overrides = arguments.config, list(arguments.overrides)
    if path is not None and "=" in path and not Path(path).exists():
        path, overrides = None, [path, *overrides]
    config = configuration.load(path or str(QUICKSTART), overrides)
    if config.run.dir is None:
        name = Path(path).stem if path else "quickstart"
        config = config.model_copy(update={"run": configuration.Run(dir=f"runs/{name}")})
    return config


def _run(config: Config, traceback: bool, speaks: bool) -> int:
    comm: Comm | None = None
    handlers: list[logging.Handler] = []
    folder = RunFolder(str(config.run.dir))
    with StopRequest(config.checkpoint.grace) as stop:
        try:
            comm = connect(config.topology, config.comm)
            start = _claim(config, folder, comm)
            handlers = _log_to(folder, comm)
            world = World(config, comm.device)
            _greet(world, comm, start)
            return 0 if train(world, comm, folder, start, stop) else REQUEUE
        except Exception as e:
            code = 2 if isinstance(e, ConfigError) else e.code if isinstance(e, Lost) else 1
            if comm is not None and not isinstance(e, Lost):
                comm.fail(_first_line(e), code)
            _complain(e, speaks, traceback or not isinstance(e, EXPECTED))
            resumable = stop.requested and not isinstance(e, NoCheckpoint)
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


def _claim(config: Config, folder: RunFolder, comm: Comm) -> Manifest | None:
    """Rank 0 takes the folder and finds where to start; the others are told."""
    text = None
    if comm.rank == 0:
        resuming = folder.claim(config)
        found = newest(folder.checkpoints, lambda message: print(f"warning: {message}")) if resuming else None
        text = json.dumps(0 if found is None else found.round)
    start = json.loads(comm.share("start", text))
    return Manifest.read(folder.checkpoints / folder_name(start) / "manifest.json") if start else None


def _greet(world: World, comm: Comm, start: Manifest | None) -> None:
    if comm.rank != 0:
        return
    config, workers = world.config, len(comm.workers)
    ranks = (
        "one process"
        if comm.size == 1
        else f"server + {workers} workers"
        if comm.overlaps
        else f"{workers} workers, rank 0 serves too"
    )
    name = config.algorithm.get("name") or world.algorithm.describe()
    print(
        f"{name} · {config.data['name']} · {config.model['name']} with {world.model.count:,} parameters · "
        f"{world.largest} of {config.clients.total} clients a round · {ranks} on {comm.device.type}"
    )
    if start is not None:
        print(f"resuming after round {start.round} of {config.rounds}")
    sys.stdout.flush()


class LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """A full disk must not fill the terminal with tracebacks."""


def _log_to(folder: RunFolder, comm: Comm) -> list[logging.Handler]:
    """Each rank's log file; rank 0's warnings also go to the terminal."""
    handlers: list[logging.Handler] = [LogFile(folder.logs / f"rank{comm.rank}.log")]
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


def _complain(error: Exception, speaks: bool, traceback: bool = False) -> None:
    log.error("%s", _first_line(error), exc_info=error if traceback else None)
    if speaks:
        if traceback:
            import traceback as tb

            tb.print_exception(error)
        print(f"error: {_first_line(error)}", file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, EXPECTED) else f"{type(error).__name__}: {text}"


def _be_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not use_deterministic_algorithms: that imports a compiler, two seconds of every rank's start.
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.benchmark = False


if __name__ == "__main__":
    sys.exit(main())
