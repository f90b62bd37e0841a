"""Global state that user code may change: settings of torch, and random generators."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.deterministic

backends: Any = torch.backends


class Setting(NamedTuple):
    """Something global that can be read and written."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    default: Any = None
    """The value with which torch starts, if another one changes results."""


@contextlib.contextmanager
def preserve_torch_globals() -> Iterator[None]:
    """Afterwards, settings and random generators are as before."""
    values, generators = [setting.read() for setting in SETTINGS], [(g.write, g.read()) for g in _find_generators()]
    named_precision = _read_named_precision()
    try:
        yield
    finally:
        if named_precision not in (None, _read_named_precision()):
            torch.set_float32_matmul_precision(named_precision or "")
        for setting, value in zip(SETTINGS, values, strict=True):
            _write(setting, value)
        for write, state in generators:
            write(state)


def use_default_settings() -> None:
    """Settings that change results are those with which torch starts."""
    for setting in SETTINGS:
        if setting.default is not None:
            _write(setting, setting.default)


def _write(setting: Setting, value: Any) -> None:
    if setting.read() != value:
        setting.write(value)


def _read_named_precision() -> str | None:
    """That of products in torch's older interface, which cannot be read after the newer one was used."""
    with contextlib.suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _find_generators() -> list[Setting]:
    on_gpus = [Setting(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)]
    return [
        Setting(torch.get_rng_state, torch.set_rng_state),
        Setting(random.getstate, random.setstate),
        Setting(np.random.get_state, np.random.set_state),
        *(on_gpus if torch.cuda.is_initialized() else []),
    ]


def _find_settings() -> list[Setting]:
    """Those of this version of torch."""
    cpu = [getattr(backends.mkldnn, name) for name in ("matmul", "conv", "rnn") if hasattr(backends.mkldnn, name)]
    has_precisions = hasattr(backends.cuda.matmul, "fp32_precision")  # from torch 2.9 on
    gpu = [backends.cuda.matmul, *((backends.cudnn.conv, backends.cudnn.rnn) if has_precisions else (backends.cudnn,))]
    return [
        Setting(torch.get_num_threads, torch.set_num_threads),
        Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        Setting(torch.get_default_device, _set_default_device, torch.device("cpu")),
        Setting(torch.is_grad_enabled, torch.set_grad_enabled, True),
        *(_autocast(device) for device in ("cpu", "cuda")),
        _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        _attribute(backends.cudnn, "benchmark"),
        _attribute(backends.mkldnn, "enabled", True),
        *(_attribute(owner, "fp32_precision" if has_precisions else "allow_tf32") for owner in gpu),
        *(_attribute(owner, "fp32_precision", "ieee") for owner in cpu),
    ]


def _attribute(owner: Any, name: str, default: Any = None) -> Setting:
    return Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value), default)


def _autocast(device: str) -> Setting:
    return Setting(
        lambda: torch.is_autocast_enabled(device), lambda value: torch.set_autocast_enabled(device, value), False
    )


def _set_default_device(device: torch.device) -> None:
    """None stands for the CPU, and costs nothing."""
    torch.set_default_device(None if device.type == "cpu" else device)


SETTINGS = _find_settings()
