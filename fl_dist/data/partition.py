"""How training rows are divided among clients: index arrays from labels and a seed.

A builder takes any of: `labels` (the class of each row), `targets` (of any kind), `rows` (their number), `clients`
(their number), `rng`, and `given` (the client ids that came with the data, or None).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fl_dist.common.errors import DataError
from fl_dist.common.formatting import pluralize
from fl_dist.common.randomness import generator
from fl_dist.common.registry import Registry
from fl_dist.data import dirichlet as variants
from fl_dist.data.dataset import class_labels
from fl_dist.data.dirichlet import RowLists, even_split_bounds, shuffle_by_class, split_at

partitions: Registry[RowLists] = Registry(
    "partition", Sequence, supplied=("labels", "targets", "rows", "clients", "rng", "given")
)

STREAM = 0x5EED  # separates the draws of the partition from all other uses of the seed


def partition_rows(
    name: str, settings: dict[str, Any], targets: np.ndarray, clients: int, seed: int, given: np.ndarray | None
) -> RowLists:
    """The training rows of each client, ascending: a pure function of its arguments."""
    rows, labels = len(targets), class_labels(targets)
    if clients > rows:
        raise DataError(f"{clients} clients cannot share {rows} training rows; lower clients.total")
    if labels is None and "labels" in partitions.takes(name):
        raise DataError(f"partition {name} divides rows by class, but this data has no labels; choose iid or given")
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, STREAM])))
    supplied = {"labels": labels, "targets": targets, "rows": rows, "clients": clients, "rng": rng, "given": given}
    parts = partitions.build(name, settings, **supplied)
    if len(parts) != clients:
        raise DataError(f"partition {name} returned rows of {len(parts)} clients instead of {clients}")
    return _check_and_sort(name, [np.asarray(part) for part in parts], rows)


def _check_and_sort(name: str, parts: RowLists, rows: int) -> RowLists:
    """All parts at once, for there may be a hundred thousand."""
    for client, part in enumerate(parts):
        if part.ndim != 1 or not part.size:
            raise DataError(
                f"partition {name} leaves client {client} without training rows; lower clients.total"
                " or choose a more even partition"
            )
    sizes, indices = [len(part) for part in parts], np.concatenate(parts)
    owners = np.repeat(np.arange(len(parts)), sizes)
    not_integer = [client for client, part in enumerate(parts) if part.dtype.kind not in "iu"]
    invalid = not_integer or owners[(indices < 0) | (indices >= rows)]
    if len(invalid):
        raise DataError(f"partition {name} gives client {invalid[0]} rows that are not among 0 to {rows - 1}")
    # One sort of keys that order rows by client first, by index second.
    ordered = np.sort(owners * rows + indices.astype(np.int64)) % rows
    return split_at(ordered, np.cumsum([0, *sizes]))


def hold_out(parts: RowLists, share: float, rows: int, seed: int) -> tuple[RowLists, RowLists]:
    """Training and validation rows of each client: `share` of its rows, at random, rounded to whole rows.

    A row that some client holds out is trained by nobody, also where clients share rows.
    """
    if share == 0:
        return parts, [part[:0] for part in parts]
    sizes, indices = np.array([len(part) for part in parts]), np.concatenate(parts)
    bounds, owners = np.cumsum([0, *sizes]), np.repeat(np.arange(len(parts)), sizes)
    order = np.lexsort((generator(seed, "validation").random(len(indices)), owners))
    position = np.empty_like(order)
    position[order] = np.arange(len(order)) - bounds[owners]
    is_drawn = np.zeros(rows, dtype=bool)
    is_drawn[indices[position < (share * sizes + 0.5).astype(int)[owners]]] = True
    is_held_out = is_drawn[indices]
    if not is_held_out.any():
        raise DataError(f"clients.validation={share:g} holds out no row: clients have at most {sizes.max()}")
    masks = split_at(is_held_out, bounds)
    training = [part[~mask] for part, mask in zip(parts, masks, strict=True)]
    if empty := [client for client, part in enumerate(training) if not len(part)]:
        names = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        raise DataError(
            f"clients.validation={share:g} leaves {pluralize(len(empty), 'client')} without training rows: {names}"
        )
    return training, [part[mask] for part, mask in zip(parts, masks, strict=True)]


@partitions.register
def iid(rows: int, clients: int, rng: np.random.Generator) -> RowLists:
    """Equal random parts; sizes differ by at most one."""
    return split_at(rng.permutation(rows), even_split_bounds(rows, clients))


@partitions.register
def balanced(labels: np.ndarray, clients: int, rng: np.random.Generator) -> RowLists:
    """Equal parts with as many rows of each class (FedLESAM's iid of CIFAR-100); both differ by at most one."""
    rows = np.concatenate(shuffle_by_class(labels, rng))
    return [rows[client::clients] for client in range(clients)]


@partitions.register
def pathological(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes: Annotated[int, Field(ge=1, description="different classes per client, all equally likely")] = 2,
) -> RowLists:
    """Each client draws rows of a few random classes (FedLESAM); an empty class is refilled, so rows repeat."""
    pools = shuffle_by_class(labels, rng)
    if classes > len(pools):
        raise DataError(f"partition.classes is {classes}, but the data has {len(pools)} classes")
    chosen = rng.permuted(np.tile(np.arange(len(pools)), (clients, 1)), axis=1)[:, :classes]
    priors = np.zeros((clients, len(pools)))
    np.put_along_axis(priors, chosen, 1 / classes, 1)
    return variants.sample_by_priors(pools, priors, rng)


@partitions.register
def domains(clients: int, rng: np.random.Generator, given: np.ndarray | None) -> RowLists:
    """The domains of the data, each divided at random among the same number of clients (FedLESAM: 1 or 10)."""
    if given is None:
        raise DataError("partition domains: the data set has no domains; choose another partition")
    rows = [part for part in _rows_by_id(given, int(given.max()) + 1) if len(part)]
    if clients % len(rows):
        raise DataError(
            f"partition domains: {clients} clients cannot be divided evenly among {len(rows)} domains;"
            f" set clients.total to a multiple of {len(rows)}"
        )
    return [part for domain in rows for part in np.array_split(rng.permutation(domain), clients // len(rows))]


@partitions.register
def dirichlet(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Annotated[float, Field(ge=0, description="concentration per class; 0: as few classes as possible")] = 0.1,
    variant: Annotated[
        Literal["balanced", "unbalanced", "sequential", "per_client", "grouped"],
        Field(
            description="balanced (Hsu; FedGF), unbalanced (per class over clients), sequential (FedLESAM),"
            " per_client (FedNSAM), grouped (FedGMT); sequential and per_client repeat rows"
        ),
    ] = "balanced",
    imbalance: Annotated[float, Field(gt=0, le=1, description="long tail: last class size over first; 1: none")] = 1.0,
    min_size: Annotated[int, Field(ge=1, description="fewest rows of a client; variant unbalanced only")] = 1,
) -> RowLists:
    """Class proportions from a Dirichlet distribution."""
    pools = variants.make_long_tailed(shuffle_by_class(labels, rng), imbalance)
    if sum(map(len, pools)) < clients:
        raise DataError(f"partition.imbalance leaves fewer rows than {clients} clients; raise it")
    split: dict[str, Callable[..., RowLists]] = {
        "balanced": variants.split_balanced,
        "unbalanced": partial(variants.split_unbalanced, min_size=min_size),
        "sequential": variants.split_sequential,
        "per_client": variants.split_per_client,
        "grouped": variants.split_grouped,
    }
    return split[variant](pools, clients, alpha, rng)


@partitions.register
def shards(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    per_client: Annotated[int, Field(ge=1, description="shards per client, each of one class")] = 2,
) -> RowLists:
    """Classes cut into equal shards, assigned at random: at most per_client classes per client."""
    pools = shuffle_by_class(labels, rng)
    total = clients * per_client
    prefix = f"partition shards: {clients} clients of {per_client} shards"
    if total < len(pools):
        raise DataError(f"{prefix} cannot hold {len(pools)} classes; raise partition.per_client")
    if total > len(labels):
        raise DataError(f"{prefix} need {total} rows, there are {len(labels)}; lower partition.per_client")
    # If the shards do not divide evenly among the classes, the largest classes get one more each.
    order = np.argsort([-len(pool) for pool in pools], kind="stable")
    counts = np.full(len(pools), total // len(pools))
    counts[order[: total % len(pools)]] += 1
    pieces = [shard for pool, count in zip(pools, counts, strict=True) for shard in np.array_split(pool, count)]
    assignment = rng.permutation(total).reshape(clients, per_client)
    return [np.concatenate([pieces[index] for index in client]) for client in assignment]


@partitions.register
def given(clients: int, given: np.ndarray | None) -> RowLists:
    """The client ids that come with the data."""
    if given is None:
        raise DataError("partition given: the data set has no client ids; choose another partition")
    if given.max() + 1 != clients:
        raise DataError(
            f"partition given: the data has clients 0 to {given.max()}, but clients.total is {clients};"
            f" set it to {given.max() + 1}"
        )
    return _rows_by_id(given, clients)


def _rows_by_id(ids: np.ndarray, count: int) -> RowLists:
    """The rows with id 0, 1, ..., in one sort."""
    order = np.argsort(ids, kind="stable")
    return split_at(order, np.searchsorted(ids[order], np.arange(count + 1)))
