"""How training rows are divided among clients: index arrays from labels and a seed.

A builder takes what it needs of: `labels` (the class of each row), `targets` (what is to be learnt, of any kind),
`rows` (their number), `clients` (how many), `rng`, and `given` (the client ids that came with the data, or None).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fl_dist.common.registry import Registry
from fl_dist.data import dirichlet as draw
from fl_dist.data.dataset import labels_of

Parts = list[np.ndarray]

partitions: Registry[Parts] = Registry(
    "partition", Sequence, supplied=("labels", "targets", "rows", "clients", "rng", "given")
)

STREAM = 0x5EED  # sets the draws of the partition apart from everything else that uses the seed


def split(
    name: str, settings: dict[str, Any], targets: np.ndarray, clients: int, seed: int, given: np.ndarray | None
) -> Parts:
    """The training rows of each client, ascending: a pure function of its arguments."""
    rows, labels = len(targets), labels_of(targets)
    if clients > rows:
        raise ValueError(f"{clients} clients cannot share {rows} training rows; lower clients.total")
    if labels is None and "labels" in partitions.takes(name):
        raise ValueError(f"partition {name} divides rows by their class, and this data has none; choose iid or given")
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, STREAM])))
    supplied = {"labels": labels, "targets": targets, "rows": rows, "clients": clients, "rng": rng, "given": given}
    parts = partitions.build(name, settings, **supplied)
    if len(parts) != clients:
        raise ValueError(f"partition {name} made {len(parts)} clients of {clients}")
    return _ascending(name, [np.asarray(part) for part in parts], rows)


def _ascending(name: str, parts: Parts, rows: int) -> Parts:
    """Each part checked and sorted; all at once, for there may be a hundred thousand."""
    for client, part in enumerate(parts):
        if part.ndim != 1 or not part.size:
            raise ValueError(
                f"partition {name} leaves client {client} without training rows; lower clients.total"
                " or choose a more even partition"
            )
        if part.dtype.kind not in "iu":
            raise _strange(name, client, rows)
    sizes, whole = [len(part) for part in parts], np.concatenate(parts)
    owners = np.repeat(np.arange(len(parts)), sizes)
    if whole.min() < 0 or whole.max() >= rows:
        raise _strange(name, int(owners[((whole < 0) | (whole >= rows)).argmax()]), rows)
    # One sort of numbers that put a client before the next, and within it a row before the next.
    ordered = np.sort(owners * rows + whole.astype(np.int64)) % rows
    return draw.cut(ordered, np.cumsum([0, *sizes]))


def _strange(name: str, client: int, rows: int) -> ValueError:
    return ValueError(f"partition {name} gives client {client} rows that are not among 0 to {rows - 1}")


@partitions.register
def iid(rows: int, clients: int, rng: np.random.Generator) -> Parts:
    """Equal random parts; sizes differ by at most one."""
    return draw.cut(rng.permutation(rows), draw.even_bounds(rows, clients))


@partitions.register
def balanced(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Parts:
    """Equal parts with as many rows of each class (FedLESAM's iid of CIFAR-100); both differ by at most one."""
    dealt = np.concatenate(draw.pools(labels, rng))
    return [dealt[client::clients] for client in range(clients)]


@partitions.register
def pathological(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    classes: Annotated[
        int, Field(ge=1, description="different classes that each client has, as likely as each other")
    ] = 2,
) -> Parts:
    """Each client draws rows of a few random classes (FedLESAM); an empty class is refilled, so rows repeat."""
    pools = draw.pools(labels, rng)
    if classes > len(pools):
        raise ValueError(f"partition.classes is {classes}, but the data has {len(pools)} classes")
    chosen = rng.permuted(np.tile(np.arange(len(pools)), (clients, 1)), axis=1)[:, :classes]
    shares = np.zeros((clients, len(pools)))
    np.put_along_axis(shares, chosen, 1 / classes, 1)
    return draw.by_priors(pools, shares, rng)


@partitions.register
def domains(clients: int, rng: np.random.Generator, given: np.ndarray | None) -> Parts:
    """The domains that the data brings, each divided at random among as many clients (FedLESAM: 1 or 10)."""
    if given is None:
        raise ValueError("partition domains: the data set brings no domains; choose another partition")
    rows = [part for part in by_number(given, int(given.max()) + 1) if len(part)]
    if clients % len(rows):
        raise ValueError(
            f"partition domains: {clients} clients cannot be the same number in each of {len(rows)} domains;"
            f" set clients.total to a multiple of {len(rows)}"
        )
    return [part for domain in rows for part in np.array_split(rng.permutation(domain), clients // len(rows))]


@partitions.register
def dirichlet(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Annotated[
        float,
        Field(ge=0, description="concentration of each class; 0: as few classes as possible"),
    ] = 0.1,
    variant: Annotated[
        Literal["balanced", "unbalanced", "sequential", "per_client", "grouped"],
        Field(
            description="balanced (Hsu; FedGF), unbalanced (per class over clients), sequential (FedLESAM),"
            " per_client (FedNSAM), grouped (FedGMT); sequential and per_client repeat rows"
        ),
    ] = "balanced",
    imbalance: Annotated[
        float,
        Field(gt=0, le=1, description="long tail: size of the last class over that of the first; 1: none"),
    ] = 1.0,
    min_size: Annotated[int, Field(ge=1, description="fewest rows of a client; variant unbalanced only")] = 1,
) -> Parts:
    """Class proportions from a Dirichlet distribution."""
    pools = draw.thin(draw.pools(labels, rng), imbalance)
    if sum(map(len, pools)) < clients:
        raise ValueError(f"partition.imbalance leaves fewer rows than {clients} clients; raise it")
    variants: dict[str, Callable[..., Parts]] = {
        "balanced": draw.balanced,
        "unbalanced": partial(draw.unbalanced, min_size=min_size),
        "sequential": draw.sequential,
        "per_client": draw.per_client,
        "grouped": draw.grouped,
    }
    return variants[variant](pools, clients, alpha, rng)


@partitions.register
def shards(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    per_client: Annotated[int, Field(ge=1, description="shards, of one class each, that a client gets")] = 2,
) -> Parts:
    """Classes cut into equal shards, dealt at random: at most per_client classes a client."""
    pools = draw.pools(labels, rng)
    total = clients * per_client
    if total < len(pools):
        raise ValueError(
            f"partition shards: {clients} clients of {per_client} shards cannot hold {len(pools)} classes;"
            " raise partition.per_client"
        )
    if total > len(labels):
        raise ValueError(
            f"partition shards: {clients} clients of {per_client} shards need {total} rows, there are {len(labels)};"
            " lower partition.per_client"
        )
    # Where classes do not divide the shards evenly, the largest classes are cut once more.
    order = np.argsort([-len(pool) for pool in pools], kind="stable")
    cuts = np.full(len(pools), total // len(pools))
    cuts[order[: total % len(pools)]] += 1
    pieces = [piece for pool, cut in zip(pools, cuts, strict=True) for piece in np.array_split(pool, cut)]
    hands = rng.permutation(total).reshape(clients, per_client)
    return [np.concatenate([pieces[shard] for shard in hand]) for hand in hands]


@partitions.register
def given(clients: int, given: np.ndarray | None) -> Parts:
    """The client ids that come with the data."""
    if given is None:
        raise ValueError("partition given: the data set brings no client ids; choose another partition")
    if given.max() >= clients:
        raise ValueError(
            f"partition given: the data has a client {given.max()}, clients.total is {clients};"
            f" set it to {given.max() + 1}"
        )
    return by_number(given, clients)


def by_number(numbers: np.ndarray, count: int) -> Parts:
    """The places of 0, of 1, ... among the numbers, in one sort."""
    order = np.argsort(numbers, kind="stable")
    return draw.cut(order, np.searchsorted(numbers[order], np.arange(count + 1)))
