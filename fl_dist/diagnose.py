"""Diagnostics of runs that are there, finished or not: sharpness, spectra, surfaces, what the next round would do.

python -m fl_dist.diagnose RUN ... [sharpness] [spectrum.top=5] [surface.points=21] [--picture surfaces.png]
torchrun --nproc-per-node 8 -m fl_dist.diagnose RUN ...
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare()  # here, for the imports below take seconds

import argparse
import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from fl_dist.common.imports import is_path, search_in
from fl_dist.common.paths import expand
from fl_dist.common.reading import ConfigError, read_yaml
from fl_dist.common.words import nearest
from fl_dist.config import Config, validate
from fl_dist.config.loading import merged
from fl_dist.diagnostics import diagnostics, plan
from fl_dist.drawing import surfaces
from fl_dist.drawing.base import SUFFIXES, check, told_apart
from fl_dist.engine.flat import Flat
from fl_dist.engine.measuring import needed
from fl_dist.engine.probe import Found, Probe
from fl_dist.engine.train import reader
from fl_dist.engine.world import World
from fl_dist.execute import exit_code, is_bug, on_terminal, one_line, settings
from fl_dist.machine.comm import Comm, connect
from fl_dist.machine.place import Place, find
from fl_dist.machine.signals import EndAtOnce
from fl_dist.storage.checkpoint import Save, newest, read_server
from fl_dist.storage.folder import CODE, CONFIG, DIAGNOSTICS, MODEL, RunFolder, append_lines

log = logging.getLogger("fl_dist")
USUAL = (
    *("sharpness", "spectrum", "trace", "clients"),
    *("flatness_distance", "flatness_discrepancy", "perturbation_drift", "directions"),
)
"""What is measured if neither the command nor the run says what."""
DRAWN = ("surface", "plane", "along")
"""What is a picture."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_intermixed_args(argv)
    place = find()
    speaks = place is None or place.rank == 0
    try:
        runs, wanted = _divided(arguments.words)
        configs = {path: _configured(path, wanted) for path in runs}
        picture = _picture(arguments.picture, configs.values())
        with _warnings_shown(speaks):
            found = {str(path): _diagnosed(path, config, place) for path, config in configs.items()}
        if speaks:
            print("\n".join(_told(found)))
            if picture and not surfaces.draw(found, picture):
                raise ConfigError(f"nothing that was measured is a picture; add {' or '.join(DRAWN)} for {picture}")
    except Exception as e:
        if speaks:
            terminal.complain(one_line(e), e if arguments.traceback or is_bug(e) else None)
        return exit_code(e)
    return 0


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<22} {(diagnostics[name].__doc__ or '').splitlines()[0]}" for name in diagnostics)
    parser = terminal.Parser(
        prog="python -m fl_dist.diagnose",
        description="Measure runs that are there, finished or not; under torchrun with all ranks.",
        epilog=f"diagnostics:\n{names}\n\nTheir settings: python -m fl_dist.main --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RUN or DIAGNOSTIC[.key=value]",
        help="folders of runs, and what to measure (default: what the run measured on its way, or the usual)",
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help=f"draw surfaces and lines, of all runs on one scale: {', '.join(SUFFIXES)}",
    )
    terminal.add_traceback(parser)
    return parser


def _divided(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Folders of runs, and overrides below `diagnostics`: those that name one first, then their settings."""
    runs = [expand(word) for word in words if (expand(word) / CONFIG).exists()]
    rest = [word for word in words if expand(word) not in runs]
    for word in rest:
        label = _label(word)
        if label not in diagnostics and ":" not in label and not _is_setting(word):
            raise ConfigError(f"{word} is neither the folder of a run nor a diagnostic; {nearest(word, diagnostics)}")
    if not runs:
        raise ConfigError(f"name the folder of a run; it has a {CONFIG}")
    ordered = sorted(rest, key=lambda word: "=" in word)
    return list(dict.fromkeys(runs)), [override for word in ordered for override in _overrides(word)]


def _label(word: str) -> str:
    """Up to the first dot, which in `module:name` is looked for behind the colon."""
    key = word.partition("=")[0]
    dot = key.find(".", key.find(":") + 1)
    return key if dot < 0 else key[:dot]


def _is_setting(word: str) -> bool:
    """Whether it is `label.key=value` or `label={...}`, and not a folder such as runs/lr=0.1."""
    key, equals, value = word.partition("=")
    return bool(equals) and "/" not in key and ("." in key or value.lstrip().startswith("{"))


def _overrides(word: str) -> list[str]:
    """A label has no dots: that of a diagnostic in a package is `module:name` without the package."""
    label = _label(word)
    short, setting = label.rpartition(".")[2], word[len(label) :]
    named = [f"diagnostics.{short}.name={label}"] if short != label else []
    return [f"diagnostics.{short}{setting}{'' if '=' in word else '={}'}", *named]


def _picture(name: str | None, configs: Iterable[Config]) -> Path | None:
    """Where to draw; that there will be something is seen before it is measured."""
    if name is None:
        return None
    names = {given["name"] for config in configs for given in config.diagnostics.values()}
    if not names & set(DRAWN) and not any(map(is_path, names)):
        raise ConfigError(f"nothing to draw in {name}: add {' or '.join(DRAWN)}")
    try:
        check(expand(name))
    except ValueError as e:
        raise ConfigError(str(e)) from None
    return expand(name)


@contextlib.contextmanager
def _warnings_shown(speaks: bool) -> Iterator[None]:
    """Why something could not be measured is a warning, and there is no log here."""
    handler = on_terminal() if speaks else logging.NullHandler()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _diagnosed(path: Path, config: Config, place: Place | None) -> list[Found]:
    """What was found of one run; it is also added to a file in its folder."""
    folder, speaks = RunFolder(path), place is None or place.rank == 0
    with settings(config), EndAtOnce(f"nothing was measured of {path}", speaks) as stop:
        comm = connect(place, config.topology, config.comm, stop)
        try:
            world = World(config, comm.device)
            _compare(world, folder)
            found = _probe(world, comm, folder).measure(plan(config.diagnostics), path)
        except Exception as e:
            comm.fail(one_line(e), exit_code(e))
            raise
        finally:
            comm.close()
    for entry in found:
        entry["settings"] = config.diagnostics[entry["label"]]
    if found:
        append_lines(path / DIAGNOSTICS, found)
    return found


def _configured(path: Path, wanted: list[str]) -> Config:
    raw: dict[str, Any] = read_yaml(path / CONFIG)
    own = {} if wanted else raw.get("diagnostics") or dict.fromkeys(USUAL, {})
    raw, where = merged(None, wanted, raw | {"diagnostics": own})
    search_in(Path.cwd())
    return validate(raw, where)


def _compare(world: World, folder: RunFolder) -> None:
    """That data, partition and model are those of the run."""
    recorded, now = folder.remembered().contents, world.contents()
    other = [name for name, told in recorded.items() if name != CODE and now.get(name) != told]
    if other:
        raise ConfigError(f"the run in {folder.path} was made with another {' and '.join(other)} than there is now")


def _probe(world: World, comm: Comm, folder: RunFolder) -> Probe:
    save = newest(folder.checkpoints, folder.remembered().id, lambda warning: None)
    done, server = _state(world, folder, save)
    return Probe(world, comm, done, server, reader(folder, save))


def _state(world: World, folder: RunFolder, save: Save | None) -> tuple[int, dict[str, Tensor]]:
    """How many rounds are done, and the server's variables after them; without a save, the model is all there is."""
    if save is not None:
        return save.manifest.round, read_server(folder.checkpoints, save.manifest)
    if not (folder.path / MODEL).exists():
        raise ConfigError(f"the run in {folder.path} has neither a model nor a checkpoint yet")
    unsaved = [name for name in world.algorithm.server if name != "x"] or world.template
    if unsaved and needed(world.diagnostics):
        raise ConfigError(f"{folder.path} has no checkpoint, which measuring a round of this algorithm needs")
    flat: Flat = world.model
    flat.module.load_state_dict(load_file(folder.path / MODEL), strict=False)
    return folder.rounds(), {"x": flat.vector.clone(), "buffers": flat.buffers.read(flat.buffers.new())}


def _told(found: dict[str, list[Found]]) -> Iterator[str]:
    """A line a number, a column a run."""
    names = dict.fromkeys((entry["label"], name) for run in found.values() for entry in run for name in entry["values"])
    columns = [{entry["label"]: entry["values"] for entry in run} for run in found.values()]
    table = [["", *told_apart(found)]]
    for label, name in names:
        table.append([f"{label}.{name}", *(_shown(values.get(label, {}).get(name)) for values in columns)])
    widths = [max(len(row[k]) for row in table) for k in range(len(table[0]))]
    for row in table:
        yield "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
    for run, entries in found.items():
        seconds = sum(entry["seconds"] for entry in entries)
        yield f"{run}: {seconds:.1f} s, also in {Path(run) / DIAGNOSTICS}"
        for round_, of in itertools.groupby(sorted(entries, key=_round), _round):
            yield f"  after round {round_}: {', '.join(entry['label'] for entry in of)}"


def _round(entry: Found) -> int:
    return int(entry["round"])


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        inner = len(value[0]) if value and isinstance(value[0], list) else 0
        short = not inner and len(value) <= 5
        return " ".join(map(_shown, value)) if short else f"[{len(value)}{f' x {inner}' if inner else ''} numbers]"
    return f"{value:.4g}" if isinstance(value, int | float) else json.dumps(value)[:20]


if __name__ == "__main__":
    sys.exit(main())
