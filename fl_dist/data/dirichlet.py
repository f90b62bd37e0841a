"""Dirichlet partitions in the variants of the papers; `alpha` is the concentration of each single class.

Each takes the shuffled rows of every class (pools) and returns the rows of every client.
"""

from bisect import bisect
from collections.abc import Iterator

import numpy as np

Parts = list[np.ndarray]

DRAWS = 1000
GROUP = 10  # clients that share one draw in the grouped variant
GROUP_DRAWS, BATCH = 100_000, 100  # 4 classes and alpha 0.1, a setting of FedGMT, take some thousand draws


def pools(labels: np.ndarray, rng: np.random.Generator) -> Parts:
    """The rows of each class that occurs, in random order."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]


def thin(pools: Parts, imbalance: float) -> Parts:
    """A long tail: class j of C keeps n_max * imbalance^(j/(C-1)) rows, at least one."""
    largest, last = max(map(len, pools)), max(len(pools) - 1, 1)
    return [pool[: max(int(largest * imbalance ** (j / last)), 1)] for j, pool in enumerate(pools)]


def balanced(pools: Parts, clients: int, alpha: float, rng: np.random.Generator) -> Parts:
    """Hsu et al. (2019): equal sizes, every row once; a client draws shares of what the others left.

    Their published divisions of CIFAR-10 and CIFAR-100 have the numbers of classes that follow from shares which are
    rounded, not drawn row by row, and which are drawn anew over the other classes for what a used-up class lacks.
    """
    left = np.array([len(pool) for pool in pools])
    sizes = [len(part) for part in np.array_split(np.arange(left.sum()), clients)]
    counts = np.zeros((clients, len(pools)), int)
    for size, row in zip(sizes, counts, strict=True):
        while missing := size - row.sum():
            shares = _proportions(_log_gammas(rng, alpha, (1, len(pools))), left > 0)
            taken = np.minimum(_cut(np.array([missing]), shares)[0], left)
            row += taken
            left -= taken
    return _deal(pools, counts)


def unbalanced(pools: Parts, clients: int, alpha: float, rng: np.random.Generator, min_size: int) -> Parts:
    """Every class divided over the clients by Dir(alpha): unequal sizes, every row once."""
    sizes = np.array([len(pool) for pool in pools])
    for _ in range(DRAWS if clients * min_size <= sizes.sum() else 0):
        counts = _cut(sizes, _proportions(_log_gammas(rng, alpha, (len(pools), clients)))).T
        if counts.sum(1).min() >= min_size:
            return _deal(pools, counts)
    raise ValueError(
        f"partition unbalanced: in {DRAWS} draws some client always had fewer than {min_size} rows;"
        " raise partition.alpha, lower clients.total or choose variant balanced"
    )


def sequential(pools: Parts, clients: int, alpha: float, rng: np.random.Generator) -> Parts:
    """FedLESAM: row by row for a random client with room; an empty pool is refilled, so rows repeat."""
    return by_priors(pools, _proportions(_log_gammas(rng, alpha, (clients, len(pools)))), rng)


def by_priors(pools: Parts, shares: np.ndarray, rng: np.random.Generator) -> Parts:
    """Equal sizes, classes by the row of each client: row by row for a random client with room, pools refilled."""
    clients = len(shares)
    quota = sum(map(len, pools)) // clients
    cumulative = np.cumsum(shares, 1)
    priors = (cumulative / cumulative[:, -1:]).tolist()
    parts: list[list[int]] = [[] for _ in range(clients)]
    rows, left, room = [pool.tolist() for pool in pools], [len(pool) for pool in pools], list(range(clients))
    uniform = _uniform(rng)
    while room:
        place = int(next(uniform) * len(room))
        client = room[place]
        label = bisect(priors[client], next(uniform))
        while not left[label]:
            left[label] = len(rows[label])
            label = bisect(priors[client], next(uniform))
        left[label] -= 1
        parts[client].append(rows[label][left[label]])
        if len(parts[client]) == quota:
            room[place] = room[-1]
            room.pop()
    return [np.array(part) for part in parts]


def per_client(pools: Parts, clients: int, alpha: float, rng: np.random.Generator) -> Parts:
    """FedNSAM: labels drawn from the client's prior; an empty pool is shuffled again, so rows repeat."""
    quota = sum(map(len, pools)) // clients
    counts = rng.multinomial(quota, _proportions(_log_gammas(rng, alpha, (clients, len(pools)))))
    return _deal([_repeat(pool, n, rng) for pool, n in zip(pools, counts.sum(0), strict=True)], counts)


def grouped(pools: Parts, clients: int, alpha: float, rng: np.random.Generator) -> Parts:
    """FedGMT: Dir(alpha) over ten clients at a time, none far below the mean; then cut into equal parts."""
    rows, label = np.concatenate(pools), np.repeat(np.arange(len(pools)), [len(pool) for pool in pools])
    groups = np.array_split(np.arange(clients), max(clients // GROUP, 1))
    borders = [len(rows) * (group[-1] + 1) // clients for group in groups[:-1]]
    parts: Parts = []
    for group, share in zip(groups, np.split(rng.permutation(len(rows)), borders), strict=True):
        classes = [rows[share[label[share] == index]] for index in range(len(pools))]
        parts += _deal(classes, _group_counts([len(c) for c in classes], len(group), alpha, rng))
    # Equal parts again: neighbouring clients exchange rows at their borders.
    return np.array_split(np.concatenate(parts), clients)


def _group_counts(sizes: list[int], clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Rows of [client, class] within a group: the first draw that gives each client half of the mean."""
    mean = sum(sizes) / clients
    for _ in range(GROUP_DRAWS // BATCH):
        counts = _group_draws(sizes, mean, _log_gammas(rng, alpha, (BATCH, len(sizes), clients)))
        good = np.flatnonzero(counts.sum(1).min(1) >= mean / 2)
        if len(good):
            return counts[good[0]].T
    raise ValueError(
        f"partition grouped: in {GROUP_DRAWS} draws some client always had less than half of the mean size;"
        " raise partition.alpha or choose variant balanced"
    )


def _group_draws(sizes: list[int], mean: float, logs: np.ndarray) -> np.ndarray:
    """Rows of [draw, class, client]: class by class, over the clients that are below the mean so far."""
    counts = np.zeros(logs.shape, int)
    for index, size in enumerate(sizes):
        room = counts.sum(1) < mean
        room |= ~room.any(1, keepdims=True)  # all are full, and the class is empty
        counts[:, index] = _cut(np.full(len(logs), size), _proportions(logs[:, index], room))
    return counts


def _log_gammas(rng: np.random.Generator, alpha: float, shape: tuple[int, ...]) -> np.ndarray:
    """Logarithms of Gamma(alpha) variates: as logarithms they do not underflow, however small alpha is."""
    alpha = max(alpha, 1e-12)  # so small that one entry outweighs all others: the limit alpha = 0
    return np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha


def _proportions(logs: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
    """Dirichlet vectors from logarithms of Gamma variates, along the last axis, over the allowed entries."""
    logs = logs if allowed is None else np.where(allowed, logs, -np.inf)
    weights: np.ndarray = np.exp(logs - logs.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def _cut(sizes: np.ndarray, proportions: np.ndarray) -> np.ndarray:
    """Whole numbers in the given proportions; row i adds up to sizes[i]."""
    borders = np.rint(np.cumsum(proportions, 1) * sizes[:, None]).astype(int)
    return np.diff(borders, axis=1, prepend=0)


def _deal(pools: Parts, counts: np.ndarray) -> Parts:
    """The rows of each client, from the front of each pool, by counts[client, class]."""
    hands = [np.split(pool, np.cumsum(n)[:-1]) for pool, n in zip(pools, counts.T, strict=True)]
    return [np.concatenate(hand) for hand in zip(*hands, strict=True)]


def _repeat(pool: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """The first rows of the pool, followed by as many new shuffles of it as the size needs."""
    return np.concatenate([pool, *(rng.permutation(pool) for _ in range((size - 1) // len(pool)))])[:size]


def _uniform(rng: np.random.Generator) -> Iterator[float]:
    """Endless numbers in [0, 1), drawn in blocks because single draws are slow."""
    while True:
        yield from rng.random(4096).tolist()
