"""Whether parts form a chain: checked before anything runs."""

from typing import get_args

from fl_dist.algorithms.part import Need, Part, has_hook, part_name
from fl_dist.common.errors import UserError
from fl_dist.common.formatting import suggest
from fl_dist.common.hook_contract import check_hook_names

RENAMED = {"settle": "after_update", "extra": "extra_passes"}


class ChainError(UserError):
    """Parts that cannot form a chain."""


def check_chain(chain: tuple[Part, ...]) -> None:
    """ChainError for the first thing that is wrong."""
    for part in chain:
        _check_names(part)
    _check_order(chain)
    for kind in ("server", "client", "uploads", "reports"):
        _check_unique(chain, kind)
    _check_other_uploads(chain)
    _check_published(chain)


def _check_names(part: Part) -> None:
    """A misspelt hook would never be called, and a string would count as a tuple of its letters."""
    who = f"part {part_name(part)}"
    for name, new in RENAMED.items():
        if hasattr(part, name):
            raise ChainError(f"{who} has {name!r}, which is called {new!r}; rename it")
    for kind in ("server", "client", "published", "layers", "needs", "after"):
        if isinstance(value := getattr(part, kind), str):
            raise ChainError(f"{who}: {kind} must be a tuple of names, not the text {value!r}")
    if unknown := sorted(set(part.needs) - set(get_args(Need))):
        raise ChainError(f"{who} has the need {unknown[0]!r}; {suggest(unknown[0], get_args(Need))}")
    check_hook_names(who, part, Part)


def _check_unique(chain: tuple[Part, ...], kind: str) -> None:
    owners: dict[str, Part] = {}
    for part in chain:
        for name in getattr(part, kind):
            if name in owners:
                raise ChainError(
                    f"parts {part_name(owners[name])} and {part_name(part)} both keep a variable named {name!r}"
                )
            owners[name] = part


def _check_order(chain: tuple[Part, ...]) -> None:
    by_role: dict[str, Part] = {}
    for part in chain:
        if part.role and part.role in by_role:
            other = part_name(by_role[part.role])
            raise ChainError(f"parts {other} and {part_name(part)} exclude each other: both set the {part.role}")
        by_role[part.role] = part
    for k, part in enumerate(chain):
        for later in chain[k + 1 :]:
            if later.role and later.role in part.after:
                raise ChainError(
                    f"part {part_name(part)} must come after {part_name(later)}, which sets the {later.role}"
                )


def _check_other_uploads(chain: tuple[Part, ...]) -> None:
    """Whether all that leaves a client is its update as a part with the need "no other uploads" changed it."""
    for k, part in enumerate(chain):
        if "no other uploads" not in part.needs:
            continue
        for other in chain:
            for name in (name for name, upload in other.uploads.items() if not upload.is_update):
                raise ChainError(
                    f"part {part_name(other)} also sends {name!r}, which {part_name(part)} does not protect;"
                    " choose an algorithm that sends nothing but its update"
                )
        for later in chain[k + 1 :]:
            if has_hook(later, "upload"):
                raise ChainError(f"part {part_name(part)} must come after {part_name(later)}, which changes the upload")


def _check_published(chain: tuple[Part, ...]) -> None:
    kept = {"x"}.union(*(part.server for part in chain))
    for part in chain:
        for name in part.published:
            if name not in kept:
                raise ChainError(f"part {part_name(part)} needs the server variable {name!r}, which no part keeps")
