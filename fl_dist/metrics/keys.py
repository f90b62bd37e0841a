"""Every key of `metrics.jsonl`, as the record declares it."""

from collections.abc import Iterator
from typing import NamedTuple, get_args

from pydantic.fields import FieldInfo

from fl_dist.metrics.record import TEST, RecordModel, RoundRecord, display_of


class RecordKey(NamedTuple):
    key: str
    """Path in `metrics.jsonl`, with dots; what differs between runs is in angle brackets."""
    dashboard: str
    """Name on W&B and TensorBoard; empty: not there."""
    meaning: str


def list_keys() -> Iterator[RecordKey]:
    """Every key of `metrics.jsonl`."""
    for name, info in RoundRecord.model_fields.items():
        display, model = display_of(info), _inner_model(info)
        inner = {(part,): about for part, about in model.model_fields.items()} if model else {(): info}
        for part, about in inner.items():
            path = *display.levels, *part
            key = f"{TEST}{path[0]}" if name == "test" else ".".join((name, *path))
            dashboard_name = RoundRecord.dashboard_name(name, *path) if display.section else ""
            unit = display_of(about).unit or display.unit
            yield RecordKey(key, dashboard_name, f"{about.description}{f' ({unit})' if unit else ''}")


def _inner_model(info: FieldInfo) -> type[RecordModel] | None:
    """The record inside a field, such as that of `Spread | None` or of `Mapping[str, WorkerRecord]`."""
    types = (info.annotation, *get_args(info.annotation))
    return next((kind for kind in types if isinstance(kind, type) and issubclass(kind, RecordModel)), None)


def markdown_table() -> str:
    """Every field of the record, for the documentation."""
    lines = ["| in `metrics.jsonl` | on W&B and TensorBoard | meaning |", "|---|---|---|"]
    for key, dashboard_name, meaning in list_keys():
        lines.append(f"| `{key}` | {f'`{dashboard_name}`' if dashboard_name else ''} | {meaning} |")
    return "\n".join(lines)
