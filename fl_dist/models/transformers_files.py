"""Configurations and weights of the package transformers: from local files, without running their code."""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from fl_dist.common.errors import ModelError, error_message
from fl_dist.common.formatting import shorten, suggest
from fl_dist.common.paths import expand_path
from fl_dist.common.torchvision import without_broken_torchvision
from fl_dist.models.adapters import ADAPTER_SETTINGS

CONFIG, WEIGHTS = "config.json", "*.safetensors"
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
Dtype = Literal["float32", "bfloat16", "auto"]
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
FROM_SEED = "weights drawn from the seed: {}"


class Source(NamedTuple):
    """What a network is made from."""

    settings: dict[str, Any]
    """Of its configuration; `model_type` is one of them."""
    folder: Path | None
    """Of its weights; None: they are drawn from the seed."""
    location: str
    """For messages."""
    origin: str
    """Where its weights come from, in a line."""


@contextlib.contextmanager
def quiet_library() -> Iterator[Any]:
    """The package, without progress bars and warnings; it asks no hub unless the user's environment allows that."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with without_broken_torchvision():
            import transformers
            import transformers.modeling_utils
    except ImportError as error:
        raise ModelError(
            f"model transformers needs the package transformers ({error_message(error)}): pip install 'fl_dist[llm]'"
        ) from None
    log = transformers.utils.logging
    level, has_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield transformers
    finally:
        log.set_verbosity(level)
        if has_bars:
            log.enable_progress_bar()


def read_source(path: str | dict[str, Any]) -> Source:
    """Of a folder in the format of transformers, a configuration's file, or its settings."""
    if isinstance(path, dict):
        return Source(path, None, "model.path", FROM_SEED.format("model.path is a configuration"))
    location = expand_path(path)
    if location.suffix == ".json":
        return Source(_read_settings(location), None, str(location), FROM_SEED.format(f"{location} is a configuration"))
    if not location.is_dir():
        raise ModelError(
            f"model.path {shorten(location)} does not exist; set it to a local folder with {CONFIG} and weights"
        )
    if (location / ADAPTER_SETTINGS).exists():
        raise ModelError(
            f"model.path {location} is an adapter; set it to the adapter's base, and model.init to its weights"
        )
    settings = _read_settings(location / CONFIG)
    if any(location.glob(WEIGHTS)):
        return Source(settings, location.resolve(), str(location), f"weights from {location}")
    if others := sorted(file.name for pattern in OTHER_WEIGHTS for file in location.glob(pattern)):
        raise ModelError(
            f"model.path {location} has {others[0]}, but no .safetensors file, and other formats may run code; "
            "save it again with save_pretrained"
        )
    return Source(settings, None, str(location), FROM_SEED.format(f"{location} has no .safetensors file"))


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({error_message(error)}); it has to be that of a model") from None
    if not isinstance(settings, dict):
        raise ModelError(f"{file} is not the configuration of a model")
    return settings


def build_config(library: Any, source: Source, ids: int) -> Any:
    """The configuration. Settings that the user wrote may leave out the vocabulary, which is then that of the data."""
    settings = {key: value for key, value in source.settings.items() if key not in ("auto_map", "_name_or_path")}
    kind, known = settings.pop("model_type", None), library.CONFIG_MAPPING
    if kind not in known:
        hint = shorten(suggest(kind, known.keys()), 200) if isinstance(kind, str) else "set it, as in model_type: gpt2"
        raise ModelError(
            f"{source.location} has the model_type {shorten(kind)!r}, which transformers does not have; {hint}"
        )
    try:
        if source.location == "model.path":
            settings = _fill_vocabulary(known[kind](), settings, ids)
        return known[kind].from_dict(settings)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{source.location} is not a configuration of {kind}: {error_message(error)}") from error


def _fill_vocabulary(default: Any, settings: dict[str, Any], ids: int) -> dict[str, Any]:
    """A misspelt key would be ignored."""
    for key in settings:
        if not hasattr(default, key):
            raise ModelError(f"model.path: {default.model_type} has no setting {key!r}; {suggest(key, vars(default))}")
    completed = {"vocab_size": ids} | settings
    absent = [name for name in SPECIAL_TOKENS if (getattr(default, name, None) or 0) >= completed["vocab_size"]]
    return dict.fromkeys(absent) | completed


def load_network(auto: Any, config: Any, folder: Path, dtype: Dtype, has_new_head: bool) -> Any:
    """A network with the weights of a folder. They stay in the mapped file, which all ranks share, unless converted."""
    try:
        network, info = auto.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=has_new_head,
        )
    except Exception as error:
        raise ModelError(f"model.path {folder} cannot be loaded: {error_message(error)}") from error
    mismatched = {name if isinstance(name, str) else name[0] for name in info["mismatched_keys"]}
    base = f"{network.base_model_prefix}."
    missing = sorted(
        name
        for name in {*info["missing_keys"], *mismatched}
        if not has_new_head or (name.startswith(base) and "pooler" not in name)
    )
    if missing:
        raise ModelError(
            f"model.path {folder} has no weights of {missing[0]} as its {CONFIG} describes them ({len(missing)} in all)"
        )
    return network
