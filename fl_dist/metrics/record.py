"""One round as a typed record: each number is declared once, with its unit, meaning and place on dashboards.

`metrics.jsonl`, W&B, TensorBoard, the console, the report and the tables of the documentation follow from it.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

TEST = "test_"
"""Prefix of the task's metrics in `metrics.jsonl`."""
VALIDATION = "validation_"
"""Prefix of the fields of `spread` that an evaluation fills in."""
MAX_LIST = 100
"""Longest list of a diagnostic whose entries become scalars."""


class Display(NamedTuple):
    """Where a number of the record is shown."""

    section: str = ""
    """Section on W&B and TensorBoard; both sort sections by name. Of a field with inner values: of all of them."""
    name: str = ""
    """Name in that section, unless it is the field's own."""
    title: str = ""
    """Title of its chart in the report; without a title and a heading, the report has another place for it."""
    heading: str = ""
    """Heading above its chart in the report, unless it is "Round"; of a field with inner values: above their charts."""
    unit: str = ""
    scale: float = 1.0
    """From the unit of the record to that of the title."""
    over_workers: Literal["mean", "max"] = "max"
    """How the report combines the values of all workers."""
    levels: tuple[str, ...] = ()
    """Of a field with inner values whose names differ between runs: what these names are, in angle brackets."""


def field(meaning: str, section: str = "", *, default: Any = ..., **display: Any) -> Any:
    """A field of the record with its meaning and where it is shown; `ge` and other limits as in pydantic."""
    limits = {key: display.pop(key) for key in ("ge", "le") if key in display}
    extra: Any = {"display": Display(section, **display)}
    return Field(default=default, description=meaning, json_schema_extra=extra, **limits)


class RecordModel(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    def to_json(self) -> dict[str, Any]:
        """Plain data, without fields that are None."""
        return self.model_dump(exclude_none=True)


class Seconds(RecordModel):
    """Where the time of a round went."""

    model_config = ConfigDict(allow_inf_nan=False)

    broadcast: float = field("sending model and assignment", default=0.0)
    local: float = field("local training of the busiest worker", default=0.0)
    reduce: float = field("adding up updates, beyond waiting for the busiest worker", default=0.0)
    server: float = field("server step", default=0.0)
    evaluate: float = field("evaluating this round's model, during the next round", default=0.0)
    checkpoint: float = field("starting a checkpoint; a thread writes it", default=0.0)
    total: float = field("whole round", ge=0)
    diagnostics: float | None = field("measuring diagnostics, in addition to `total`", default=None)


PHASES = tuple(name for name in Seconds.model_fields if name not in ("total", "diagnostics"))
"""Parts of a round whose seconds are measured."""
MEMORY_HEADING = "Memory of the rank that uses most"


class Spread(RecordModel):
    """How clients differ: those of the round, and all of them on their own validation rows."""

    loss_std: float = field("standard deviation of the clients' mean training loss")
    loss_min: float = field("smallest mean training loss of a client")
    loss_max: float = field("largest mean training loss of a client")
    norm_mean: float = field("mean norm of the clients' updates")
    norm_std: float = field("standard deviation of the norms of the clients' updates")
    validation_mean: float | None = field(
        "mean over all clients of the task's metric on their own validation rows (`clients.validation`)", default=None
    )
    validation_std: float | None = field("standard deviation of that metric over the clients", default=None)
    validation_best: float | None = field("that metric of the best client", default=None)
    validation_worst_tenth: float | None = field("its mean over the worst tenth of the clients", default=None)


class Norms(RecordModel):
    update: float = field("norm of the mean update")
    drift: float = field("root mean squared distance of the clients' updates from their mean")
    model: float = field("norm of the new model")


class WorkerRecord(RecordModel):
    """What one rank did in the round."""

    busy: float | None = field("seconds of local training", default=None, unit="s")
    clients: int | None = field("clients trained", default=None)
    share: float | None = field(
        "busy share of the round", default=None, title="busy share of workers", over_workers="mean"
    )
    memory: int | None = field(
        "host memory in use", default=None, title="memory (GB)", heading=MEMORY_HEADING, unit="B", scale=1e-9
    )
    device_memory: int | None = field(
        "peak GPU memory", default=None, title="GPU memory (GB)", heading=MEMORY_HEADING, unit="B", scale=1e-9
    )
    evaluate: float | None = field("seconds of evaluation, if it took part", default=None, unit="s")


class RoundRecord(RecordModel):
    """One round of a run. Records are immutable; the methods `with_...` return new ones."""

    model_config = ConfigDict(extra="allow")

    round: int = field("number of the round, from 1", ge=1)
    time: float | None = field("when the round ended, in Unix seconds", default=None)
    test: Mapping[str, float | None] = field(
        "the task's metrics on the test set, as `test_<name>`; null if the round was not evaluated",
        "1_test",
        levels=("<metric>",),
    )
    train_loss: float | None = field(
        "mean loss of the clients' local steps, weighted by samples", "2_train", name="loss", default=None
    )
    clients: int | None = field("clients trained", "5_clients", name="trained", title="clients", default=None)
    dropped: list[int] = field("clients that failed and were left out", "5_clients", title="dropped clients")
    bytes_down: int = field("bytes that real clients would receive", "7_cost", title="bytes down", unit="B")
    bytes_up: int = field("bytes that real clients would send", "7_cost", title="bytes up", unit="B")
    messages: int | None = field("model-sized vectors sent down and up", "7_cost", title="messages", default=None)
    forwards: int | None = field("forward passes of batches", "7_cost", title="forward passes", default=None)
    backwards: int | None = field("backward passes of batches", "7_cost", title="backward passes", default=None)
    lr: float | None = field("learning rate of the round", "2_train", title="learning rate", default=None)
    server_lr: float | None = field(
        "factor on the mean update in the round", "2_train", title="server learning rate", default=None
    )
    method: Mapping[str, float] = field(
        "what the algorithm's parts report", "4_method", heading="Method", levels=("<name>",), default={}
    )
    spread: Spread | None = field(
        "spread over the round's clients", "5_clients", heading="Spread over clients", default=None
    )
    norms: Norms | None = field("L2 norms of vectors", "6_norms", heading="Norms", default=None)
    seconds: Seconds = field("seconds per phase", "8_seconds", heading="Seconds of a round", unit="s")
    workers: Mapping[str, WorkerRecord] = field("by rank, what it did", "9_workers", levels=("<rank>",), default={})
    diagnostics: Mapping[str, Mapping[str, Any]] | None = field(
        "by label, what was measured; lists of up to 100 numbers become one scalar per entry",
        "3_diagnostics",
        levels=("<label>", "<value>"),
        default=None,
    )

    @model_validator(mode="after")
    def _check_accuracy(self) -> Self:
        accuracy = self.test.get("accuracy")
        if accuracy is not None and not 0 <= accuracy <= 1:
            raise ValueError("an accuracy is between 0 and 1")
        return self

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RoundRecord":
        """From an object of `metrics.jsonl`; a pydantic error (a ValueError) if it is not a record."""
        tests = {name.removeprefix(TEST): value for name, value in values.items() if name.startswith(TEST)}
        others = {name: value for name, value in values.items() if not name.startswith(TEST)}
        return cls.model_validate({**others, "test": tests})

    def to_json(self) -> dict[str, Any]:
        """An object of `metrics.jsonl`: metrics of the test set stand beside the other fields."""
        values = super().to_json()
        tests = {f"{TEST}{name}": value for name, value in values.pop("test").items()}
        first = {name: values.pop(name) for name in ("round", "time") if name in values}
        return first | tests | values | (self.model_extra or {})

    @property
    def is_evaluated(self) -> bool:
        return self.test.get("loss") is not None

    def with_test(
        self, metrics: Mapping[str, float], validation: Mapping[str, float], seconds: float, ranks: int
    ) -> "RoundRecord":
        """With the metrics that the first `ranks` ranks measured; some of them may have joined since the round.

        `validation`: over the clients' own validation rows, if there are any.
        """
        duration = {"evaluate": round(seconds, 6)}
        workers = {str(rank): self.workers.get(str(rank), WorkerRecord()) for rank in range(ranks)}
        evaluated = {rank: worker.model_copy(update=duration) for rank, worker in workers.items()}
        changes = {"seconds": self.seconds.model_copy(update=duration), "workers": {**self.workers, **evaluated}}
        return self._with_validation(validation).model_copy(update={"test": {**self.test, **metrics}, **changes})

    def without_test(self) -> "RoundRecord":
        unknown = {name: None for name in Spread.model_fields if name.startswith(VALIDATION)}
        return self._with_validation(unknown).model_copy(update={"test": NOT_EVALUATED})

    def _with_validation(self, values: Mapping[str, float | None]) -> "RoundRecord":
        return (
            self if self.spread is None else self.model_copy(update={"spread": self.spread.model_copy(update=values)})
        )

    def with_diagnostics(self, values: Mapping[str, Any], seconds: float) -> "RoundRecord":
        timed = self.seconds.model_copy(update={"diagnostics": round(seconds, 6)})
        return self.model_copy(update={"diagnostics": values, "seconds": timed})

    def scalars(self) -> dict[str, float]:
        """Every number by the name it has on W&B and TensorBoard."""
        scalars: dict[str, float] = {}
        for name, info in type(self).model_fields.items():
            if display_of(info).section:
                value = getattr(self, name)
                value = len(value) if isinstance(value, list) else value
                scalars |= {self.dashboard_name(name, *path): number for path, number in _numbers(value)}
        return scalars

    @classmethod
    def dashboard_name(cls, name: str, *path: str) -> str:
        """The name on W&B and TensorBoard of a field, or of a value inside it."""
        display = display_of(cls.model_fields[name])
        return "/".join((display.section, *(path or (display.name or name,))))


NOT_EVALUATED: Mapping[str, float | None] = {"loss": None, "accuracy": None}


def parse_record(line: bytes) -> RoundRecord | None:
    """The record in a whole line, or None."""
    with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
        return RoundRecord.from_json(json.loads(line, parse_int=_parse_int)) if line.endswith(b"\n") else None
    return None


def _parse_int(text: str) -> int:
    """ValueError if no counter can have this value: arithmetic with floats would overflow."""
    if abs(value := int(text)) >= 2**63:
        raise ValueError("not a number of a record")
    return value


def display_of(info: FieldInfo) -> Display:
    """Where a field of the record is shown."""
    extra = info.json_schema_extra
    assert isinstance(extra, dict)
    display: Any = extra["display"]
    assert isinstance(display, Display)
    return display


def _numbers(value: Any, path: tuple[str, ...] = (), in_plot: bool = False) -> Iterator[tuple[tuple[str, ...], float]]:
    """All numbers inside a value with their paths; lists are numbered, unless they are long or a plot shows them."""
    if isinstance(value, RecordModel):
        value = value.to_json()
    if isinstance(value, list) and not in_plot and len(value) <= MAX_LIST:
        value = {str(position): entry for position, entry in enumerate(value)}
    if isinstance(value, Mapping):
        from fl_dist.plots.surfaces import can_draw  # imports numpy, which commands that list the keys do not need

        in_plot = in_plot or can_draw(value)
        for name, inner in value.items():
            yield from _numbers(inner, (*path, str(name)), in_plot)
    elif isinstance(value, int | float):
        yield path, value
