"""Published data: download it, check it, show how it is divided among clients.

python -m fl_dist.data fetch cifar10 --root data
python -m fl_dist.data check cifar10 --root data
python -m fl_dist.data show my.yaml [key.sub=value ...] [-o clients.png]
"""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fl_dist.common import terminal
from fl_dist.common.errors import DataError, FlDistError
from fl_dist.common.formatting import format_bytes, format_duration, pluralize
from fl_dist.common.paths import expand_path
from fl_dist.data.download_sources import SOURCES

if TYPE_CHECKING:
    from fl_dist.data import Dataset


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        arguments.run(arguments)
        return 0
    except (FlDistError, ValueError, OSError) as e:
        terminal.print_error(e, e if arguments.traceback else None)
        return 2


def parser() -> argparse.ArgumentParser:
    parser = terminal.ArgumentParser(prog="python -m fl_dist.data", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add_command(name: str, run: Any, about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=run)
        terminal.add_traceback_option(command)
        return command

    fetch = add_command("fetch", _fetch, "download a data set; the same command again resumes a download")
    check = add_command("check", _check, "read all files of a data set and compare its size with the published one")
    for command in (fetch, check):
        command.add_argument("name", help=", ".join(SOURCES))
        command.add_argument("--root", default="data", help="folder of all data (default %(default)s)")
    fetch.add_argument("--again", action="store_true", help="also download what is already there")
    show = add_command("show", _show, "sizes and classes of the clients, and a picture of them")
    show.add_argument("config", nargs="+", metavar="CONFIG", help="a configuration file, overrides key.sub=value")
    show.add_argument("-o", "--output", metavar="FILE", help="the picture: .png, .pdf or .svg")
    cache = add_command("cache", _cache, "arrays that this machine keeps ready for its ranks")
    cache.add_argument("--clear", action="store_true", help="remove them")
    return parser


def _fetch(arguments: argparse.Namespace) -> None:
    from fl_dist.data.download import download

    with terminal.handle_log("fl_dist.data", logging.StreamHandler(sys.stdout)):  # the library reports there
        download(arguments.name, expand_path(arguments.root), arguments.again)


def _check(arguments: argparse.Namespace) -> None:
    from fl_dist.data import datasets, shared_arrays
    from fl_dist.data.domains import list_published_domains
    from fl_dist.data.download import get_source

    source, root, start = get_source(arguments.name), expand_path(arguments.root), time.monotonic()
    settings: dict[str, Any] = {"root": str(root)}
    if "target" in datasets.schema(arguments.name).model_fields:
        settings["target"] = list_published_domains(arguments.name, root)[0]
    with shared_arrays.rebuild():
        data = datasets.build(arguments.name, settings)
    target = f" (tested on {settings['target']})" if "target" in settings else ""
    print(f"{source.title}: {describe(data)}{target}; read in {format_duration(time.monotonic() - start)}")
    rows = len(data.y_train), len(data.y_test)
    if source.rows not in (None, rows):
        raise DataError(f"the published data has {source.rows[0]:,} and {source.rows[1]:,} rows; download it again")
    if source.images not in (None, sum(rows)):
        raise DataError(f"the published data has {source.images:,} images in all domains, this has {sum(rows):,}")


def describe(data: "Dataset") -> str:
    shape = "x".join(map(str, data.shape))
    classes = f", {data.classes} classes" if data.classes else ""
    return f"{len(data.y_train):,} training and {len(data.y_test):,} test rows of {shape}{classes}"


def _show(arguments: argparse.Namespace) -> None:
    from fl_dist.config.arguments import resolve_arguments
    from fl_dist.federation.client_rows import build_data
    from fl_dist.plots.clients import draw
    from fl_dist.runs import clients_of

    config, _ = resolve_arguments([*arguments.config, "run.dir=unused"])
    data = build_data(config)
    clients = clients_of(config, data)
    print(f"{config.data['name']}: {describe(data)}")
    print(f"{pluralize(len(clients), 'client')} by {config.partition['name']}, seed {config.seed}")
    print(f"rows per client      {_format_range(clients.sizes)}")
    counts = clients.classes
    if counts is None:
        raise DataError("the targets of this data are not classes: there is no more to show")
    print(f"classes per client   {_format_range((counts > 0).sum(1))}")
    print(f"largest class of a client, share of its rows  {_format_range(counts.max(1) / counts.sum(1), decimals=2)}")
    print(f"rows per class       {_format_range(counts.sum(0))}")
    if arguments.output:
        settings = " ".join(f"{key}={value}" for key, value in config.partition.items() if key != "name")
        title = f"{config.data['name']}, {config.partition['name']} {settings}".rstrip()
        draw(counts, expand_path(arguments.output), f"{title}, seed {config.seed}")
        print(f"picture              {arguments.output}")


def _format_range(values: Any, decimals: int = 0) -> str:
    import numpy as np

    low, high = (f"{extreme:,.{decimals}f}" for extreme in (np.min(values), np.max(values)))
    return low if low == high else f"{low} to {high}, mean {np.mean(values):,.{max(decimals, 1)}f}"


def _cache(arguments: argparse.Namespace) -> None:
    from fl_dist.data import shared_arrays

    lines = [f"{format_bytes(count):>8}  {entry}" for entry, count in shared_arrays.list_cache()]
    print("\n".join(lines) or f"nothing in {shared_arrays.cache_folder()}")
    if arguments.clear:
        shared_arrays.clear_cache()
        print("removed")


if __name__ == "__main__":
    terminal.run_program(main)
