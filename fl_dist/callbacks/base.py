"""What a callback is: something that happens on rank 0 beside the rounds of a run, and cannot change them."""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_dist.common.errors import ConfigError, FlDistError, describe_error, error_message
from fl_dist.common.hook_contract import check_hook_names
from fl_dist.common.registry import Registry
from fl_dist.common.torch_globals import preserve_torch_globals
from fl_dist.metrics.record import RoundRecord
from fl_dist.metrics.summary import Summary
from fl_dist.tasks import PrimaryMetric

log = logging.getLogger(__name__)


class CallbackError(FlDistError):
    """A callback failed; the message names it."""


@dataclass(frozen=True)
class Measurements:
    """What the records of a run will hold."""

    primary_metric: PrimaryMetric
    """The metric by which the task is judged, and whether more or less of it is better."""
    test: tuple[str, ...]
    """Metrics of the test set."""
    method: tuple[str, ...] = ()
    """Numbers that the algorithm reports."""


@dataclass(frozen=True)
class RunContext:
    """What a callback may know of its run."""

    config: Any
    """The validated configuration, with attributes such as `config.local.lr`: a copy."""
    folder: Path
    """The run folder."""
    primary_metric: PrimaryMetric
    """The metric by which the task is judged, and whether more or less of it is better."""
    rounds_done: int
    """Rounds that earlier attempts have completed."""
    state_dict: Callable[[], dict[str, Tensor]]
    """The global model after the round of the record, by parameter name: a copy in host memory."""
    request_stop: Callable[[str], None]
    """End the run after the round under way, for this reason; the run then counts as finished."""


class Callback:
    """Every hook is optional. Hooks run on rank 0 only; those of round t run while workers train round t + 1."""

    def check(self, measurements: Measurements) -> None:
        """Before the run, and for `--check`: raise an error if a setting does not fit what will be measured."""

    def on_run_begin(self, context: RunContext) -> None:
        """Before the first round of this attempt, after `load_state_dict` if the run is resumed."""

    def on_round_end(self, record: RoundRecord, context: RunContext) -> None:
        """After a round was evaluated, if it is to be. A resumed run begins with round `rounds_done`, once more."""

    def on_run_end(self, summary: Summary, context: RunContext) -> None:
        """After the last round of this attempt; `summary["finished"]` is False if the run was interrupted."""

    def close(self) -> None:
        """At the end of an attempt, unless a job fails, which ends at once: release files, threads and processes."""

    def state_dict(self) -> dict[str, Any]:
        """What the callback keeps from round to round, as JSON data: saved with every checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` returned when the checkpoint was made from which the run resumes."""


callbacks: Registry[Callback] = Registry("callback", Callback)


@dataclass
class ListedCallback:
    """A user's callback, under the name that the configuration gives it."""

    name: str
    callback: Callback
    is_optional: bool = False


class CallbackList(Callback):
    """The callbacks that a configuration lists. One that fails ends the run, or is left out if it is optional."""

    def __init__(self, listed: Sequence[ListedCallback]) -> None:
        self._all, self._listed = tuple(listed), list(listed)
        """All of them, and those that have not been left out."""
        self._begun: list[ListedCallback] = []
        """Those that have something to close."""

    def __bool__(self) -> bool:
        return bool(self._listed)

    def check(self, measurements: Measurements) -> None:
        for listed in self._listed:
            try:
                with _isolation():
                    listed.callback.check(measurements)
            except Exception as e:
                raise ConfigError(f"callback {listed.name}: {_describe(e)}") from e

    def on_run_begin(self, context: RunContext) -> None:
        for listed in list(self._listed):
            self._begun.append(listed)
            with self._guard(listed, "on_run_begin"):
                listed.callback.on_run_begin(context)

    def on_round_end(self, record: RoundRecord, context: RunContext) -> None:
        for listed in list(self._listed):
            with self._guard(listed, "on_round_end"):
                # A copy: what a callback does to its record concerns nobody else.
                listed.callback.on_round_end(record.model_copy(deep=True), context)

    def on_run_end(self, summary: Summary, context: RunContext) -> None:
        """All of them, also if one fails."""
        with contextlib.ExitStack() as stack:
            for listed in reversed(self._listed):
                stack.callback(self._end, listed, dict(summary), context)

    def _end(self, listed: ListedCallback, summary: Summary, context: RunContext) -> None:
        with self._guard(listed, "on_run_end"):
            listed.callback.on_run_end(summary, context)

    def close(self) -> None:
        for listed in self._begun:
            try:
                with _isolation():
                    listed.callback.close()
            except (Exception, SystemExit, KeyboardInterrupt) as e:
                # The run has ended, maybe with an error that says more.
                log.warning("callback %s failed in close: %s", listed.name, _describe(e), exc_info=e)

    def state_dict(self) -> dict[str, Any]:
        states: dict[str, Any] = {listed.name: None for listed in self._all}  # None: left out
        for listed in list(self._listed):
            with self._guard(listed, "state_dict"):
                # Through JSON: what cannot be saved fails here, and what was saved does not change later.
                states[listed.name] = json.loads(json.dumps(listed.callback.state_dict()))
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        names = [listed.name for listed in self._listed]
        for listed in list(self._listed):
            if states.get(listed.name) is None:
                continue
            if _alike(listed.name, states) != _alike(listed.name, names):
                log.warning("callback %s starts anew: the list has another number of them than before", listed.name)
                continue
            with self._guard(listed, "load_state_dict"):
                listed.callback.load_state_dict(states[listed.name])

    @contextlib.contextmanager
    def _guard(self, listed: ListedCallback, hook: str) -> Iterator[None]:
        try:
            with _isolation():
                yield
        except (Exception, SystemExit) as e:
            message = f"callback {listed.name} failed in {hook}: {_describe(e)}"
            if not listed.is_optional:
                raise CallbackError(message) from e
            log.warning("%s; the run continues without it", message, exc_info=e)
            self._listed.remove(listed)


def _alike(name: str, names: Iterable[str]) -> list[str]:
    """The names of all callbacks of this kind, which are numbered."""
    return sorted(other for other in names if other.partition(" #")[0] == name.partition(" #")[0])


def _describe(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    return error_message(error) if isinstance(error, FlDistError) else describe_error(error)


NO_CALLBACKS = CallbackList(())


def build_callbacks(section: Sequence[Mapping[str, Mapping[str, Any]]]) -> CallbackList:
    """From `[{name: {optional: ..., settings}}, ...]`, already validated."""
    listed: list[ListedCallback] = []
    for name, settings in (item for entry in section for item in entry.items()):
        number = sum(other.name.partition(" #")[0] == name for other in listed) + 1
        own = {key: value for key, value in settings.items() if key != "optional"}
        label = name if number == 1 else f"{name} #{number}"
        with _isolation():
            callback = callbacks.build(name, own)
        check_hook_names(f"callback {name}", callback, Callback)
        listed.append(ListedCallback(label, callback, bool(settings.get("optional"))))
    return CallbackList(listed)


@contextlib.contextmanager
def _isolation() -> Iterator[None]:
    """What a callback does to random generators, settings of torch and the working folder is undone."""
    folder = _working_folder()
    try:
        with preserve_torch_globals(), torch.no_grad():
            yield
    finally:
        if folder is not None and folder != _working_folder():
            with contextlib.suppress(OSError):
                os.chdir(folder)


def _working_folder() -> str | None:
    """None if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return None
