"""What `fl-dist diagnose` does: restore a run, measure it on all ranks, print and record the results."""

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from fl_dist.common.errors import ConfigError, FlDistError, user_code_cause
from fl_dist.common.files import append_lines
from fl_dist.common.formatting import align_columns, suggest
from fl_dist.common.imports import is_import_path, prepend_to_path
from fl_dist.common.paths import expand_path
from fl_dist.config import Config, validate
from fl_dist.config.overrides import merge_overrides, read_recorded_config
from fl_dist.diagnostics import build_diagnostics, diagnostics
from fl_dist.distributed.failures import end_failed_run, exit_code, needs_traceback
from fl_dist.distributed.process_group import ProcessGroup, connect
from fl_dist.distributed.rank_info import RankInfo, find_rank, is_rank0
from fl_dist.distributed.signals import ExitOnSignal
from fl_dist.distributed.torch_settings import torch_settings
from fl_dist.federation.client_rows import check_workers
from fl_dist.federation.client_state import client_reader
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.experiment_description import content_hashes
from fl_dist.federation.flat_model import FlatModel
from fl_dist.federation.post_hoc_diagnostics import Measurement, PostHocDiagnostics
from fl_dist.federation.round_diagnostics import requirements_of
from fl_dist.logs import show_warnings
from fl_dist.plots import surfaces
from fl_dist.plots.base import check_plot_file, distinct_names
from fl_dist.storage.checkpoint import Checkpoint, newest_checkpoint, read_server
from fl_dist.storage.run_folder import CODE, CONFIG, DIAGNOSTICS, MODEL, RunFolder

DEFAULT_DIAGNOSTICS = (
    *("sharpness", "spectrum", "trace", "clients"),
    *("flatness_distance", "flatness_discrepancy", "perturbation_drift", "directions"),
)
"""Measured if neither the command nor the run names any."""
PLOTTABLE = ("surface", "plane", "along")
MAX_SHOWN = 5
"""Numbers of a list that the table shows; of a longer one, the first and the last."""


def diagnose_command(arguments: argparse.Namespace) -> int:
    """Exit codes as of a run."""
    rank_info = find_rank()
    try:
        runs, overrides = _split_words(arguments.words)
        configs = {path: _load_config(path, overrides) for path in runs}
        plot_file = _check_plot_file(arguments.picture, configs.values())
        with show_warnings(rank_info):
            results = {str(path): _diagnose(path, config, rank_info) for path, config in configs.items()}
        if is_rank0(rank_info):
            print("\n".join(_format_results(results)))
            if plot_file:
                _draw(results, plot_file)
    except Exception as e:
        return end_failed_run(e, rank_info, exit_code(e), arguments.traceback or _shows_traceback(e))
    return 0


def _shows_traceback(error: Exception) -> bool:
    """There is no log that could hold it."""
    is_clear = isinstance(error, FlDistError | OSError) and user_code_cause(error) is None
    return needs_traceback(error) and not is_clear


def _split_words(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Run folders, and overrides below `diagnostics`: first those that name one, then their settings."""
    runs = [expand_path(word) for word in words if (expand_path(word) / CONFIG).exists()]
    others = [word for word in words if expand_path(word) not in runs]
    for word in others:
        label = _label(word)
        if label not in diagnostics and ":" not in label and not _is_setting(word):
            raise ConfigError(f"{word} is neither the folder of a run nor a diagnostic; {suggest(word, diagnostics)}")
    if not runs:
        raise ConfigError(f"name the folder of a run; it has a {CONFIG}")
    ordered = sorted(others, key=lambda word: "=" in word)
    return list(dict.fromkeys(runs)), [override for word in ordered for override in _overrides(word)]


def _label(word: str) -> str:
    """Up to the first dot or, in `module:name`, the first dot behind the colon."""
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
    name = [f"diagnostics.{short}.name={label}"] if short != label else []
    return [f"diagnostics.{short}{setting}{'' if '=' in word else '={}'}", *name]


def _check_plot_file(name: str | None, configs: Iterable[Config]) -> Path | None:
    """The file to draw; that there will be something to draw is checked before anything is measured."""
    if name is None:
        return None
    names = {keys["name"] for config in configs for keys in config.diagnostics.values()}
    if not names & set(PLOTTABLE) and not any(map(is_import_path, names)):
        raise ConfigError(f"nothing to draw in {name}: add {' or '.join(PLOTTABLE)}")
    check_plot_file(file := expand_path(name))
    return file


def _draw(results: dict[str, list[Measurement]], file: Path) -> None:
    if not surfaces.draw({run: [entry["values"] for entry in entries] for run, entries in results.items()}, file):
        raise ConfigError(f"no measurement is a picture; add {' or '.join(PLOTTABLE)} for {file}")
    print(f"picture: {file}")


def _diagnose(path: Path, config: Config, rank_info: RankInfo | None) -> list[Measurement]:
    """Measure one run; the results are also appended to a file in its folder."""
    folder = RunFolder(path)
    with torch_settings(config), ExitOnSignal(f"nothing was measured of {path}", is_rank0(rank_info)) as stop:
        group = connect(rank_info, config.topology, config.comm, stop)
        try:
            check_workers(config, group)
            experiment = Experiment(config, group.device, group)
            _check_contents(experiment, folder)
            results = _restore(experiment, group, folder).measure(build_diagnostics(config.diagnostics), path)
        except Exception as e:
            group.fail(e)
            raise
        group.close()
    for entry in results:
        entry["settings"] = config.diagnostics[entry["label"]]
    if results:
        append_lines(path / DIAGNOSTICS, results)
    return results


def _load_config(path: Path, overrides: list[str]) -> Config:
    """The run's configuration, with these diagnostics or its own."""
    raw: dict[str, Any] = read_recorded_config(path / CONFIG)
    own = {} if overrides else raw.get("diagnostics") or dict.fromkeys(DEFAULT_DIAGNOSTICS, {})
    prepend_to_path(Path.cwd())
    return validate(*merge_overrides(None, overrides, raw | {"diagnostics": own}))


def _check_contents(experiment: Experiment, folder: RunFolder) -> None:
    """Data, partition and model are those of the run."""
    recorded, contents = folder.read_info().contents, content_hashes(experiment)
    if changed := [name for name, value in recorded.items() if name != CODE and contents.get(name, value) != value]:
        raise ConfigError(f"the run in {folder.path} was made with another {' and '.join(changed)} than there is now")


def _restore(experiment: Experiment, group: ProcessGroup, folder: RunFolder) -> PostHocDiagnostics:
    checkpoint = newest_checkpoint(folder.checkpoints, folder.read_info().id, lambda warning: None)
    rounds, server = _server_state(experiment, folder, checkpoint)
    return PostHocDiagnostics(experiment, group, rounds, server, client_reader(folder.checkpoints, checkpoint))


def _server_state(
    experiment: Experiment, folder: RunFolder, checkpoint: Checkpoint | None
) -> tuple[int, dict[str, Tensor]]:
    """The completed rounds, and the server's variables after them; without a checkpoint only the model is left."""
    if checkpoint is not None:
        return checkpoint.manifest.round, read_server(folder.checkpoints, checkpoint.manifest)
    if not (folder.path / MODEL).exists():
        raise ConfigError(f"the run in {folder.path} has neither a model nor a checkpoint yet")
    unsaved = [name for name in experiment.algorithm.server if name != "x"] or experiment.template
    if unsaved and requirements_of(experiment.diagnostics):
        raise ConfigError(f"{folder.path} has no checkpoint, which measuring a round of this algorithm needs")
    flat: FlatModel = experiment.model
    flat.module.load_state_dict(load_file(folder.path / MODEL), strict=False)
    return folder.model_round(), {"x": flat.vector.clone(), "buffers": flat.buffers.read()}


def _format_results(results: dict[str, list[Measurement]]) -> Iterator[str]:
    """A line per number, a column per run; then the seconds and rounds of each run."""
    names = dict.fromkeys(
        (entry["label"], name) for entries in results.values() for entry in entries for name in entry["values"]
    )
    columns = [{entry["label"]: entry["values"] for entry in entries} for entries in results.values()]
    table = [["", *distinct_names(results)]]
    for label, name in names:
        table.append([f"{label}.{name}", *(_format_value(values.get(label, {}).get(name)) for values in columns)])
    yield from align_columns(table, str.rjust)
    for run, entries in results.items():
        seconds = sum(entry["seconds"] for entry in entries)
        yield f"{run}: {seconds:.1f} s, also in {Path(run) / DIAGNOSTICS}"
        for round_, group in itertools.groupby(sorted(entries, key=itemgetter("round")), itemgetter("round")):
            yield f"  after round {round_}: {', '.join(entry['label'] for entry in group)}"


def _format_value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        inner = len(value[0]) if value and isinstance(value[0], list) else 0
        if inner:
            return f"[{len(value)} x {inner} numbers]"
        if len(value) <= MAX_SHOWN:
            return " ".join(map(_format_value, value))
        return f"{_format_value(value[0])} ... {_format_value(value[-1])} ({len(value)} numbers)"
    return f"{value:.4g}" if isinstance(value, int | float) else json.dumps(value)[:20]
