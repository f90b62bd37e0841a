"""Dirichlet partitions in the variants of the papers; `alpha` is the concentration of each single class.

Each takes the shuffled rows of every class (pools) and returns the rows of every client.
"""

import itertools
from bisect import bisect
from collections.abc import Iterator

import numpy as np

from fl_dist.common.errors import DataError

RowLists = list[np.ndarray]

MAX_DRAWS = 1000
MIN_ALPHA = 1e-12  # so small that one entry outweighs all others: the limit alpha = 0
GROUP_SIZE = 10  # clients that share one draw in the grouped variant
MAX_GROUP_DRAWS, DRAW_BATCH = 100_000, 100  # 4 classes and alpha 0.1, a setting of FedGMT, take some thousand draws
SCAN_BOUNDS = 4, 20  # one of the first draws of a batch is usually accepted
CLIENT_BLOCK = 4096  # clients processed at a time, so that a hundred thousand take a second


def shuffle_by_class(labels: np.ndarray, rng: np.random.Generator) -> RowLists:
    """The rows of each class that occurs, in random order."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]


def make_long_tailed(pools: RowLists, imbalance: float) -> RowLists:
    """Class j of C keeps n_max * imbalance^(j/(C-1)) rows, at least one."""
    largest, last = max(map(len, pools)), max(len(pools) - 1, 1)
    return [pool[: max(int(largest * imbalance ** (j / last)), 1)] for j, pool in enumerate(pools)]


def split_balanced(pools: RowLists, clients: int, alpha: float, rng: np.random.Generator) -> RowLists:
    """Hsu et al. (2019): equal sizes, every row once; a client draws shares of what the others left.

    Their published divisions of CIFAR-10 and CIFAR-100 have the numbers of classes that follow from shares which are
    rounded, not drawn row by row, and which are drawn again over the other classes when a class is exhausted.
    """
    left = np.array([len(pool) for pool in pools])
    sizes = np.diff(even_split_bounds(left.sum(), clients))
    counts, stream = np.zeros((clients, len(pools)), int), _LogGammaStream(rng, alpha, len(pools))
    done = 0
    while done < clients:
        # Until a class is exhausted, clients do not depend on each other.
        logs = stream.peek(min(CLIENT_BLOCK, clients - done))
        block = _apportion(sizes[done : done + CLIENT_BLOCK], _softmax(logs, left > 0))
        fits = ((block.cumsum(0) < left) | (left == 0)).all(1)
        count = len(block) if fits.all() else int(fits.argmin())
        counts[done : done + count] = block[:count]
        left -= block[:count].sum(0)
        stream.advance(count)
        done += count
        if count < len(block):
            counts[done] = _draw_client(sizes[done], left, stream)
            done += 1
    return _assign_rows(pools, counts)


class _LogGammaStream:
    """An endless sequence of vectors of log-Gamma variates, drawn one vector at a time, read in blocks."""

    def __init__(self, rng: np.random.Generator, alpha: float, classes: int) -> None:
        self._rng, self._alpha, self._classes = rng, alpha, classes
        self._buffer = np.empty((0, classes))

    def peek(self, count: int) -> np.ndarray:
        if (missing := count - len(self._buffer)) > 0:
            draws = [_sample_log_gammas(self._rng, self._alpha, (self._classes,)) for _ in range(missing)]
            self._buffer = np.concatenate([self._buffer, draws])
        return self._buffer[:count]

    def advance(self, count: int) -> None:
        self._buffer = self._buffer[count:]


def _draw_client(size: int, left: np.ndarray, stream: _LogGammaStream) -> np.ndarray:
    """Rows per class for a client that may exhaust a class; subtracts them from `left`."""
    counts = np.zeros(len(left), int)
    while missing := size - counts.sum():
        draw = np.minimum(_apportion(np.array([missing]), _softmax(stream.peek(1), left > 0))[0], left)
        stream.advance(1)
        counts += draw
        left -= draw
    return counts


def split_unbalanced(pools: RowLists, clients: int, alpha: float, rng: np.random.Generator, min_size: int) -> RowLists:
    """Every class divided over the clients by Dir(alpha): unequal sizes, every row once."""
    sizes = np.array([len(pool) for pool in pools])
    for _ in range(MAX_DRAWS if clients * min_size <= sizes.sum() else 0):
        counts = _apportion(sizes, _softmax(_sample_log_gammas(rng, alpha, (len(pools), clients)))).T
        if counts.sum(1).min() >= min_size:
            return _assign_rows(pools, counts)
    raise DataError(
        f"partition unbalanced: in {MAX_DRAWS} draws some client always had fewer than {min_size} rows;"
        " raise partition.alpha, lower clients.total or choose variant balanced"
    )


def split_sequential(pools: RowLists, clients: int, alpha: float, rng: np.random.Generator) -> RowLists:
    """FedLESAM: row by row for a random client below its quota; an empty pool is refilled, so rows repeat."""
    return sample_by_priors(pools, _softmax(_sample_log_gammas(rng, alpha, (clients, len(pools)))), rng)


def sample_by_priors(pools: RowLists, priors: np.ndarray, rng: np.random.Generator) -> RowLists:
    """Equal sizes, classes by priors[client]: row by row for a random client below its quota, pools refilled."""
    clients = len(priors)
    quota = sum(map(len, pools)) // clients
    cumulative = np.cumsum(priors, 1)
    thresholds = (cumulative / cumulative[:, -1:]).tolist()
    parts: list[list[int]] = [[] for _ in range(clients)]
    rows, left, open_clients = [pool.tolist() for pool in pools], [len(pool) for pool in pools], list(range(clients))
    uniform = _uniform(rng)
    while open_clients:
        index = int(next(uniform) * len(open_clients))
        client = open_clients[index]
        label = bisect(thresholds[client], next(uniform))
        while not left[label]:
            left[label] = len(rows[label])
            label = bisect(thresholds[client], next(uniform))
        left[label] -= 1
        parts[client].append(rows[label][left[label]])
        if len(parts[client]) == quota:
            open_clients[index] = open_clients[-1]
            open_clients.pop()
    return [np.array(part) for part in parts]


def split_per_client(pools: RowLists, clients: int, alpha: float, rng: np.random.Generator) -> RowLists:
    """FedNSAM: labels drawn from the client's prior; an empty pool is shuffled again, so rows repeat."""
    quota = sum(map(len, pools)) // clients
    counts = rng.multinomial(quota, _softmax(_sample_log_gammas(rng, alpha, (clients, len(pools)))))
    return _assign_rows([_repeat(pool, n, rng) for pool, n in zip(pools, counts.sum(0), strict=True)], counts)


def split_grouped(pools: RowLists, clients: int, alpha: float, rng: np.random.Generator) -> RowLists:
    """FedGMT: Dir(alpha) over ten clients at a time, none far below the mean; then cut into equal parts."""
    rows, label = np.concatenate(pools), np.repeat(np.arange(len(pools)), [len(pool) for pool in pools])
    groups = np.array_split(np.arange(clients), max(clients // GROUP_SIZE, 1))
    bounds = [len(rows) * (group[-1] + 1) // clients for group in groups[:-1]]
    parts: RowLists = []
    for group, share in zip(groups, np.split(rng.permutation(len(rows)), bounds), strict=True):
        classes = [rows[share[label[share] == index]] for index in range(len(pools))]
        parts += _assign_rows(classes, _draw_group([len(c) for c in classes], len(group), alpha, rng))
    # Equal parts again: neighbouring clients exchange rows at their bounds.
    return split_at(np.concatenate(parts), even_split_bounds(len(rows), clients))


def _draw_group(sizes: list[int], clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Rows per [client, class] in a group: the first draw that gives each client at least half of the mean."""
    mean = sum(sizes) / clients
    for _ in range(MAX_GROUP_DRAWS // DRAW_BATCH):
        logs = _sample_log_gammas(rng, alpha, (DRAW_BATCH, len(sizes), clients))
        for draws in np.split(logs, SCAN_BOUNDS):
            counts = _apportion_groups(sizes, mean, draws)
            accepted = np.flatnonzero(counts.sum(1).min(1) >= mean / 2)
            if len(accepted):
                group: np.ndarray = counts[accepted[0]].T
                return group
    raise DataError(
        f"partition grouped: in {MAX_GROUP_DRAWS} draws some client always had less than half of the mean size;"
        " raise partition.alpha or choose variant balanced"
    )


def _apportion_groups(sizes: list[int], mean: float, logs: np.ndarray) -> np.ndarray:
    """Rows per [draw, class, client]: class by class, over the clients that are below the mean so far."""
    counts = np.zeros(logs.shape, int)
    for index, size in enumerate(sizes):
        below = counts.sum(1) < mean
        below |= ~below.any(1, keepdims=True)  # all are full, and the class is empty
        counts[:, index] = _apportion(np.full(len(logs), size), _softmax(logs[:, index], below))
    return counts


def _sample_log_gammas(rng: np.random.Generator, alpha: float, shape: tuple[int, ...]) -> np.ndarray:
    """Logarithms of Gamma(alpha) variates: as logarithms they do not underflow, however small alpha is."""
    alpha = max(alpha, MIN_ALPHA)
    gammas, uniform = rng.standard_gamma(alpha + 1, shape), rng.random(shape)
    logs: np.ndarray = np.log(gammas) + np.log1p(-uniform) / alpha
    return logs


def _softmax(logs: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Dirichlet vectors from log-Gamma variates, along the last axis, over the entries of the mask."""
    logs = logs if mask is None else np.where(mask, logs, -np.inf)
    weights: np.ndarray = np.exp(logs - logs.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def _apportion(sizes: np.ndarray, proportions: np.ndarray) -> np.ndarray:
    """Integers in these proportions; row i sums to sizes[i]."""
    bounds = np.rint(np.cumsum(proportions, 1) * sizes[:, None]).astype(int)
    return np.diff(bounds, axis=1, prepend=0)


def _assign_rows(pools: RowLists, counts: np.ndarray) -> RowLists:
    """The rows of each client, from the front of each pool, by counts[client, class], which exhaust the pools."""
    owners = np.concatenate([np.repeat(np.arange(len(counts)), n) for n in counts.T])
    rows = np.concatenate(pools)[np.argsort(owners, kind="stable")]
    return split_at(rows, np.concatenate([[0], counts.sum(1).cumsum()]))


def even_split_bounds(rows: int, parts: int) -> np.ndarray:
    """The indices at which np.array_split divides the rows."""
    size, larger = divmod(rows, parts)
    index = np.arange(parts + 1)
    return index * size + np.minimum(index, larger)


def split_at(rows: np.ndarray, bounds: np.ndarray) -> RowLists:
    """The slices between the bounds: np.split, but fast for many."""
    return [rows[start:end] for start, end in itertools.pairwise(bounds.tolist())]


def _repeat(pool: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """The first rows of the pool, followed by as many new shuffles of it as the size needs."""
    return np.concatenate([pool, *(rng.permutation(pool) for _ in range((size - 1) // len(pool)))])[:size]


def _uniform(rng: np.random.Generator) -> Iterator[float]:
    """Endless numbers in [0, 1), drawn in blocks because single draws are slow."""
    while True:
        yield from rng.random(4096).tolist()
