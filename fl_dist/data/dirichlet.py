"""Dirichlet partitions in the variants of the papers; `alpha` is the concentration of each single class.

Each takes the shuffled rows of every class (pools) and returns the rows of every client.
"""

import itertools
from bisect import bisect
from collections.abc import Iterator

import numpy as np

Parts = list[np.ndarray]

DRAWS = 1000
LEAST = 1e-12  # an alpha so small that one entry outweighs all others: the limit alpha = 0
GROUP = 10  # clients that share one draw in the grouped variant
GROUP_DRAWS, BATCH = 100_000, 100  # 4 classes and alpha 0.1, a setting of FedGMT, take some thousand draws
LOOKS = (0, 4, 20, BATCH)  # of a batch of draws, usually one of the first is good
BLOCK = 4096  # clients at a time, so that a hundred thousand take a second


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
    sizes = np.diff(even_bounds(left.sum(), clients))
    counts, draws = np.zeros((clients, len(pools)), int), _Draws(rng, alpha, len(pools))
    done = 0
    while done < clients:
        # As long as no class is used up, clients do not depend on each other.
        block = _cut(sizes[done : done + BLOCK], _proportions(draws.ahead(min(BLOCK, clients - done)), left > 0))
        untouched = ((block.cumsum(0) < left) | (left == 0)).all(1)
        free = len(block) if untouched.all() else int(untouched.argmin())
        counts[done : done + free] = block[:free]
        left -= block[:free].sum(0)
        draws.use(free)
        done += free
        if free < len(block):
            counts[done] = _one_by_one(sizes[done], left, draws)
            done += 1
    return _deal(pools, counts)


class _Draws:
    """An endless row of logarithms of Gamma variates, drawn one vector at a time, looked at in blocks."""

    def __init__(self, rng: np.random.Generator, alpha: float, classes: int) -> None:
        self._rng, self._alpha, self._classes = rng, alpha, classes
        self._ready = np.empty((0, classes))

    def ahead(self, count: int) -> np.ndarray:
        if (missing := count - len(self._ready)) > 0:
            new = [_gammas(self._rng, self._alpha, (self._classes,)) for _ in range(missing)]
            gammas, uniform = (np.array(column) for column in zip(*new, strict=True))
            self._ready = np.concatenate([self._ready, _logs(gammas, uniform, self._alpha)])
        return self._ready[:count]

    def use(self, count: int) -> None:
        self._ready = self._ready[count:]


def _one_by_one(size: int, left: np.ndarray, draws: _Draws) -> np.ndarray:
    """The rows of each class for a client that may use one up; they are taken from `left`."""
    row = np.zeros(len(left), int)
    while missing := size - row.sum():
        taken = np.minimum(_cut(np.array([missing]), _proportions(draws.ahead(1), left > 0))[0], left)
        draws.use(1)
        row += taken
        left -= taken
    return row


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
    return cut(np.concatenate(parts), even_bounds(len(rows), clients))


def _group_counts(sizes: list[int], clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Rows of [client, class] within a group: the first draw that gives each client half of the mean."""
    mean = sum(sizes) / clients
    for _ in range(GROUP_DRAWS // BATCH):
        gammas, uniform = _gammas(rng, alpha, (BATCH, len(sizes), clients))
        for start, end in itertools.pairwise(LOOKS):
            counts = _group_draws(sizes, mean, _logs(gammas[start:end], uniform[start:end], alpha))
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
    return _logs(*_gammas(rng, alpha, shape), alpha)


def _gammas(rng: np.random.Generator, alpha: float, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """What such logarithms are made of: Gamma(alpha + 1) and uniform variates."""
    return rng.standard_gamma(max(alpha, LEAST) + 1, shape), rng.random(shape)


def _logs(gammas: np.ndarray, uniform: np.ndarray, alpha: float) -> np.ndarray:
    return np.log(gammas) + np.log1p(-uniform) / max(alpha, LEAST)


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
    """The rows of each client, from the front of each pool, by counts[client, class], which use the pools up."""
    owners = np.concatenate([np.repeat(np.arange(len(counts)), n) for n in counts.T])
    rows = np.concatenate(pools)[np.argsort(owners, kind="stable")]
    return cut(rows, np.concatenate([[0], counts.sum(1).cumsum()]))


def even_bounds(rows: int, parts: int) -> np.ndarray:
    """Where np.array_split cuts so many rows."""
    each, more = divmod(rows, parts)
    ends = np.arange(parts + 1)
    return ends * each + np.minimum(ends, more)


def cut(rows: np.ndarray, bounds: np.ndarray) -> Parts:
    """Pieces between the bounds: np.split, but quick for many."""
    return [rows[start:end] for start, end in itertools.pairwise(bounds.tolist())]


def _repeat(pool: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """The first rows of the pool, followed by as many new shuffles of it as the size needs."""
    return np.concatenate([pool, *(rng.permutation(pool) for _ in range((size - 1) // len(pool)))])[:size]


def _uniform(rng: np.random.Generator) -> Iterator[float]:
    """Endless numbers in [0, 1), drawn in blocks because single draws are slow."""
    while True:
        yield from rng.random(4096).tolist()
