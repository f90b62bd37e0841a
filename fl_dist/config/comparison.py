"""What differs between two configurations."""

from collections.abc import Iterator
from typing import Any

from fl_dist.common.formatting import shorten
from fl_dist.config.loading import validate
from fl_dist.config.schema import LAYOUT_KEYS
from fl_dist.optimizers.schedules import depends_on_rounds


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Keys whose values differ in a way that changes results so far, as `key: old -> new`."""
    before, after = dict(flatten_keys(old)), dict(flatten_keys(new))
    defaults = dict(flatten_keys(validate({}).model_dump()))
    before = {k: defaults.get(k) for k in after} | before  # an older version recorded fewer keys
    changed = [k for k in sorted(before.keys() | after.keys()) if before.get(k) != after.get(k)]
    ignored = tuple(f"{k}." for k in LAYOUT_KEYS)
    # Cohorts and batches depend on the round's own number, rates only with some schedules on how many follow.
    scheduled = [
        f"{section}.schedule" for section in ("local", "server") if depends_on_rounds(new[section]["schedule"])
    ]
    reasons = {"rounds": f", used by {' and '.join(scheduled)}" if scheduled else ", which may only be raised"}
    ignored += ("rounds.",) if new["rounds"] > old["rounds"] and not scheduled else ()
    changed = [k for k in changed if not f"{k}.".startswith(ignored)]
    return [f"{shorten(k)}: {shorten(before.get(k))} -> {shorten(after.get(k))}{reasons.get(k, '')}" for k in changed]


def flatten_keys(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested keys with dots, and their values."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from flatten_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
