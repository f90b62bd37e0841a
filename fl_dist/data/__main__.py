"""Published data: fetch it, check it, see how it is divided among clients.

python -m fl_dist.data fetch cifar10 --root data
python -m fl_dist.data check cifar10 --root data
python -m fl_dist.data show my.yaml [key.sub=value ...] [-o clients.png]
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare()  # here, for the imports below take seconds

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from fl_dist.common.paths import expand
from fl_dist.common.words import counted, duration, size
from fl_dist.config.arguments import resolve
from fl_dist.data import Dataset, datasets, shared
from fl_dist.data.fetch import fetch, known
from fl_dist.data.folders import domains_below
from fl_dist.data.sources import SOURCES
from fl_dist.drawing.clients import draw
from fl_dist.engine.world import build_data
from fl_dist.runs import clients_of


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.act(arguments) or 0)
    except (ValueError, OSError, shared.NoPlace) as e:
        terminal.complain(e, e if arguments.traceback else None)
        return 2


def parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(prog="python -m fl_dist.data", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, act: Any, about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(act=act)
        terminal.add_traceback(sub)
        return sub

    named = ", ".join(SOURCES)
    fetching = command("fetch", _fetch, "download a data set; the same command again goes on where it stopped")
    fetching.add_argument("name", help=named)
    fetching.add_argument("--root", default="data", help="folder of all data (default %(default)s)")
    fetching.add_argument("--again", action="store_true", help="also what is there already")
    checking = command(
        "check", _check, "read all files of a data set, and compare its number of rows with the published one"
    )
    checking.add_argument("name", help=named)
    checking.add_argument("--root", default="data", help="folder of all data (default %(default)s)")
    showing = command("show", _show, "who has what: sizes, classes, and a picture of clients and classes")
    showing.add_argument("config", nargs="+", metavar="CONFIG", help="a configuration's file, overrides key.sub=value")
    showing.add_argument("-o", "--output", metavar="FILE", help="the picture: .png, .pdf or .svg")
    caching = command("cache", _cache, "what this machine holds ready for its ranks")
    caching.add_argument("--clear", action="store_true", help="remove it")
    return parser


def _fetch(arguments: argparse.Namespace) -> None:
    fetch(arguments.name, expand(arguments.root), arguments.again)


def _check(arguments: argparse.Namespace) -> int:
    source, root, began = known(arguments.name), expand(arguments.root), time.monotonic()
    settings: dict[str, Any] = {"root": str(root)}
    if "target" in datasets.schema(arguments.name).model_fields:
        settings["target"] = domains_below(arguments.name, root)[0]
    with shared.anew():
        data = datasets.build(arguments.name, settings)
    target = f" (tested on {settings['target']})" if "target" in settings else ""
    print(f"{source.title}: {described(data)}{target}; read in {duration(time.monotonic() - began)}")
    rows = len(data.x_train), len(data.x_test)
    if source.rows not in (None, rows):
        raise ValueError(f"published were {source.rows[0]:,} and {source.rows[1]:,} rows")
    if source.images not in (None, sum(rows)):
        raise ValueError(f"published were {source.images:,} images in all domains, here are {sum(rows):,}")
    return 0


def described(data: Dataset) -> str:
    shape = "x".join(map(str, data.shape))
    return f"{len(data.x_train):,} training and {len(data.x_test):,} test rows of {shape}, {data.classes} classes"


def _show(arguments: argparse.Namespace) -> None:
    config, _ = resolve([*arguments.config, "run.dir=unused"])
    data = build_data(config)
    clients = clients_of(config, data)
    print(f"{config.data['name']}: {described(data)}")
    print(f"{counted(len(clients), 'client')} by {config.partition['name']}, seed {config.seed}")
    print(f"rows of a client     {_spread(clients.sizes)}")
    counts = clients.classes
    if counts is None:
        raise ValueError("the targets of this data are no classes: there is no more to show")
    print(f"classes of a client  {_spread((counts > 0).sum(1))}")
    print(f"largest class of a client, share of its rows  {_spread((counts.max(1) / counts.sum(1)), '.2f')}")
    print(f"rows of a class      {_spread(counts.sum(0))}")
    if arguments.output:
        how = " ".join(f"{key}={value}" for key, value in config.partition.items() if key != "name")
        title = f"{config.data['name']}, {config.partition['name']} {how}".rstrip()
        draw(counts, expand(arguments.output), f"{title}, seed {config.seed}")
        print(f"picture              {arguments.output}")


def _spread(values: Any, kind: str = ",.0f") -> str:
    low, high = np.min(values), np.max(values)
    mean = format(np.mean(values), kind if kind != ",.0f" else ",.1f")
    return f"{low:{kind}} to {high:{kind}}, mean {mean}" if low != high else f"{low:{kind}}"


def _cache(arguments: argparse.Namespace) -> None:
    lines = [f"{size(count):>8}  {entry}" for entry, count in shared.held()]
    print("\n".join(lines) or f"nothing in {shared.cache()}")
    if arguments.clear:
        shared.forget()
        print("removed")


if __name__ == "__main__":
    sys.exit(main())
