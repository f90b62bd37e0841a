"""Each partition has the sizes, classes and repetitions that its definition promises."""

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_dist.common.errors import DataError
from fl_dist.data import dirichlet as variants
from fl_dist.data.partition import hold_out, partition_rows, partitions

ONCE = ("balanced", "unbalanced", "grouped")
REPEATING = ("sequential", "per_client")


def balanced_labels(classes: int, each: int) -> np.ndarray:
    return np.random.default_rng(9).permutation(np.repeat(np.arange(classes), each))


CIFAR10 = balanced_labels(10, 5000)
CIFAR100 = balanced_labels(100, 500)
SMALL = balanced_labels(7, 61)


def dirichlet(labels: np.ndarray, clients: int, seed: int = 0, **settings: Any) -> list[np.ndarray]:
    return partition_rows("dirichlet", settings, labels, clients, seed, None)


def classes(parts: list[np.ndarray], labels: np.ndarray) -> list[int]:
    """The number of classes per client."""
    return [len(np.unique(labels[part])) for part in parts]


def sizes(parts: list[np.ndarray]) -> list[int]:
    return [len(part) for part in parts]


def all_once(parts: list[np.ndarray], rows: int) -> bool:
    return np.concatenate(parts).size == rows == np.unique(np.concatenate(parts)).size


def digest(parts: list[np.ndarray]) -> str:
    return hashlib.sha256(b"|".join(part.astype("<i8").tobytes() for part in parts)).hexdigest()


def message(*args: Any, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        partition_rows(args[0], settings, *args[1:])
    assert "\n" not in str(caught.value)
    return str(caught.value)


EVERY = [
    ("iid", {}),
    ("balanced", {}),
    ("pathological", {"classes": 3}),
    ("shards", {"per_client": 3}),
    *(("dirichlet", {"variant": variant, "alpha": 0.5}) for variant in (*ONCE, *REPEATING)),
]


def test_every_setting_has_a_description() -> None:
    for name in partitions:
        assert all(field.description for field in partitions.schema(name).model_fields.values())


@pytest.mark.parametrize(("name", "settings"), EVERY)
def test_split_is_a_pure_function_of_seed_and_labels(name: str, settings: dict[str, Any]) -> None:
    np.random.seed(1)
    labels = SMALL.copy()
    first = digest(partition_rows(name, settings, labels, 20, 5, None))
    np.random.seed(2)
    assert digest(partition_rows(name, settings, labels, 20, 5, None)) == first
    assert digest(partition_rows(name, settings, labels, 20, 6, None)) != first
    assert (labels == SMALL).all()


@pytest.mark.parametrize(("name", "settings"), EVERY)
def test_rows_are_ascending_and_within_the_data(name: str, settings: dict[str, Any]) -> None:
    parts = partition_rows(name, settings, SMALL, 20, 0, None)
    assert len(parts) == 20
    assert all((np.diff(part) >= 0).all() and part[0] >= 0 and part[-1] < len(SMALL) for part in parts)


def test_partitions_of_a_seed_never_change() -> None:
    assert (
        digest(partition_rows("iid", {}, SMALL, 20, 0, None))
        == "fe3a1831c139ad21b159404612cf177adf992d0a4b3fb29ff741253d901bae09"
    )
    assert digest(dirichlet(SMALL, 20)) == "13da5f70249999ed090d14ef86415b253bf801d93de4f677ed58f0dae5097245"


def test_iid_clients_have_equal_sizes() -> None:
    parts = partition_rows("iid", {}, SMALL, 20, 0, None)
    assert all_once(parts, 427) and set(sizes(parts)) == {21, 22}


@pytest.mark.parametrize("variant", ONCE)
def test_variants_without_replacement_use_every_row_once(variant: str) -> None:
    for alpha in (0.1, 1, 10):
        parts = dirichlet(CIFAR10, 100, variant=variant, alpha=alpha)
        assert all_once(parts, 50_000)
        assert variant == "unbalanced" or set(sizes(parts)) == {500}


@pytest.mark.parametrize("variant", ["balanced", "grouped"])
def test_equal_sizes_differ_by_at_most_one_row(variant: str) -> None:
    parts = dirichlet(SMALL, 23, variant=variant)
    assert all_once(parts, 427) and set(sizes(parts)) == {18, 19}


@pytest.mark.parametrize(("labels", "number"), [(CIFAR10, 10), (CIFAR100, 100)])
def test_balanced_with_alpha_0_gives_one_class_each(labels: np.ndarray, number: int) -> None:
    parts = dirichlet(labels, 100, alpha=0)
    assert classes(parts, labels) == [1] * 100 and set(sizes(parts)) == {500} and all_once(parts, 50_000)
    assert len({labels[part[0]] for part in parts}) == number


@pytest.mark.parametrize(
    ("labels", "alpha", "published", "fewest", "most"),
    [
        (CIFAR10, 0.005, 1.32, 1, 3),
        (CIFAR10, 10, 9.9, 6, 10),
        (CIFAR100, 0.005, 5.1, 2, 13),
        (CIFAR100, 10, 98.8, 42, 100),
    ],
)
def test_balanced_has_as_many_classes_per_client_as_the_published_files(
    labels: np.ndarray, alpha: float, published: float, fewest: int, most: int
) -> None:
    counts = [classes(dirichlet(labels, 100, seed, alpha=alpha), labels) for seed in range(8)]
    assert abs(np.mean(counts) - published) < 0.05 * published
    assert abs(np.mean([min(c) for c in counts]) - fewest) < 0.15 * most
    assert abs(np.mean([max(c) for c in counts]) - most) < 0.2 * most + 1


def test_balanced_rounds_shares_while_nothing_is_used_up() -> None:
    """The first client of the file for alpha 10 has counts whose variance is that of the shares."""
    first = [np.bincount(CIFAR100[dirichlet(CIFAR100, 100, seed, alpha=10)[0]], minlength=100) for seed in range(20)]
    variance = 500**2 * 0.01 * 0.99 / 1001 + 1 / 6  # of a Dirichlet share, and of rounding the ends of an interval
    assert np.mean([np.var(c) for c in first]) == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("size", [2, 7, 250])
def test_balanced_is_the_same_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch, alpha: float, size: int) -> None:
    labels, parts = np.repeat(np.arange(10), 50), {}
    for block in (1, 3, 4096):
        monkeypatch.setattr(variants, "CLIENT_BLOCK", block)
        parts[block] = partition_rows("dirichlet", {"alpha": alpha}, labels, 500 // size, 0, None)
    for block in (3, 4096):
        assert all(np.array_equal(a, b) for a, b in zip(parts[1], parts[block], strict=True))


def test_proportions_are_dirichlet() -> None:
    rng, alpha, k = np.random.default_rng(0), 0.3, 5
    p = variants._softmax(variants._sample_log_gammas(rng, alpha, (40_000, k)))
    assert np.allclose(p.sum(1), 1)
    assert np.allclose(p.mean(0), 1 / k, atol=0.01)
    assert np.allclose(p.var(0), (1 / k) * (1 - 1 / k) / (k * alpha + 1), atol=0.003)


def test_proportions_do_not_underflow() -> None:
    logs = variants._sample_log_gammas(np.random.default_rng(0), 1e-9, (100, 10))
    one_hot = variants._softmax(logs)
    others = variants._softmax(logs, one_hot == 0)
    assert (one_hot.max(1) == 1).all() and (others.max(1) == 1).all() and (others * one_hot == 0).all()


def test_unbalanced_keeps_the_smallest_size() -> None:
    any_size, parts = (dirichlet(CIFAR10, 100, 3, variant="unbalanced", alpha=0.3, min_size=m) for m in (1, 60))
    assert all_once(parts, 50_000) and min(sizes(any_size)) < 60 <= min(sizes(parts)) and max(sizes(parts)) > 800


def test_unbalanced_fails_with_advice() -> None:
    text = message("dirichlet", CIFAR10, 100, 0, None, variant="unbalanced", alpha=0.001)
    assert "fewer than 1 rows" in text and "raise partition.alpha" in text


@pytest.mark.parametrize("variant", REPEATING)
@pytest.mark.parametrize("alpha", [0, 0.1, 10])
def test_repeating_variants_are_equal_in_size_and_repeat_a_row_only_after_its_class(variant: str, alpha: float) -> None:
    parts = dirichlet(CIFAR10, 100, variant=variant, alpha=alpha)
    assert set(sizes(parts)) == {500}
    used = np.bincount(np.concatenate(parts), minlength=50_000)
    for label in range(10):
        assert np.ptp(used[label == CIFAR10]) <= 1
    assert used.max() > 1


@pytest.mark.parametrize(("alpha", "low", "high"), [(0, 1, 1), (0.1, 4, 6), (10, 9.99, 10)])
@pytest.mark.parametrize("variant", REPEATING)
def test_repeating_variants_follow_the_prior(variant: str, alpha: float, low: float, high: float) -> None:
    assert low <= np.mean(classes(dirichlet(CIFAR10, 100, variant=variant, alpha=alpha), CIFAR10)) <= high


@pytest.mark.parametrize(
    ("classes_", "each", "total"),
    [(10, 5000, 36_223), (100, 500, 36_029), (10, 9000, 65_204), (4, 30_000, 87_709)],
)
def test_long_tail_totals_of_fedgmt(classes_: int, each: int, total: int) -> None:
    labels = np.repeat(np.arange(classes_), each)
    parts = dirichlet(labels, 100, variant="grouped", imbalance=0.5)
    class_counts = np.bincount(labels[np.concatenate(parts)])
    assert all_once(parts, total) and class_counts[0] == each and class_counts[-1] == each // 2
    assert (np.diff(class_counts) <= 0).all() and max(sizes(parts)) - min(sizes(parts)) <= 1


@pytest.mark.parametrize("variant", [*ONCE, *REPEATING])
def test_long_tail_works_with_every_variant(variant: str) -> None:
    rows = np.concatenate(dirichlet(CIFAR10, 100, variant=variant, alpha=1, imbalance=0.5))
    assert len(rows) == (36_200 if variant in REPEATING else 36_223)
    assert len(np.unique(rows[CIFAR10[rows] == 9])) <= 2500


def test_long_tail_keeps_a_random_part_of_each_class() -> None:
    first, second = (np.concatenate(dirichlet(CIFAR10, 100, seed, imbalance=0.1)) for seed in (0, 1))
    last = [set(rows[CIFAR10[rows] == 9]) for rows in (first, second)]
    assert len(last[0]) == len(last[1]) == 500 and len(last[0] & last[1]) < 150


def test_groups_give_each_client_half_of_the_mean_before_the_cut() -> None:
    rng, amounts = np.random.default_rng(0), [500, 480, 0, 520, 490, 510, 700, 300]
    for alpha in (0.05, 1):
        counts = variants._draw_group(amounts, 10, alpha, rng)
        assert counts.sum(0).tolist() == amounts and counts.min() >= 0
        assert counts.sum(1).min() >= 175


def test_groups_give_no_more_to_a_client_at_the_mean() -> None:
    amounts = [50, 48, 52, 49, 51]
    logs = variants._sample_log_gammas(np.random.default_rng(0), 0.3, (200, 5, 5))
    counts = variants._apportion_groups(amounts, 50.0, logs)
    before = np.cumsum(counts, 1) - counts
    assert (counts.sum(2) == amounts).all() and (before >= 50).any()
    assert (counts[before >= 50] == 0).all()


def test_groups_take_a_class_without_rows_when_all_are_full() -> None:
    logs = np.array([[[0.0, -1e9], [-1e9, 0.0], [0.0, 0.0]]])
    with np.errstate(all="raise", under="ignore"):
        assert variants._apportion_groups([10, 10, 0], 10.0, logs).tolist() == [[[10, 0], [0, 10], [0, 0]]]


def test_groups_fail_with_advice() -> None:
    text = message("dirichlet", np.repeat([0, 1], 500), 10, 0, None, variant="grouped", alpha=0)
    assert "half of the mean" in text and "choose variant balanced" in text


def test_grouped_follows_alpha() -> None:
    means = [np.mean(classes(dirichlet(CIFAR10, 100, variant="grouped", alpha=a), CIFAR10)) for a in (0.01, 0.1, 1)]
    assert means[0] < 3 < means[1] < 6 < means[2]


@pytest.mark.parametrize(("labels", "per_client", "size"), [(CIFAR10, 2, 250), (CIFAR100, 10, 50)])
def test_each_shard_is_complete_and_of_one_class(labels: np.ndarray, per_client: int, size: int) -> None:
    parts = partition_rows("shards", {"per_client": per_client}, labels, 100, 0, None)
    assert all_once(parts, 50_000) and set(sizes(parts)) == {500}
    assert max(classes(parts, labels)) == per_client and min(classes(parts, labels)) < per_client
    assert all((np.bincount(labels[part]) % size == 0).all() for part in parts)


def test_shards_split_the_largest_classes_if_rows_do_not_divide() -> None:
    labels = np.repeat([0, 1, 2], [10, 30, 20])
    parts = partition_rows("shards", {"per_client": 1}, labels, 5, 0, None)
    shapes = sorted((labels[part[0]], len(part)) for part in parts)
    assert all_once(parts, 60) and shapes == [(0, 10), (1, 15), (1, 15), (2, 10), (2, 10)]


def test_shards_must_hold_every_class() -> None:
    assert "cannot hold 100 classes" in message("shards", CIFAR100, 30, 0, None, per_client=3)


def test_given_ids_are_used_as_they_are() -> None:
    parts = partition_rows("given", {}, np.zeros(6, int), 3, 0, np.array([2, 0, 1, 0, 2, 2]))
    assert [part.tolist() for part in parts] == [[1, 3], [2], [0, 4, 5]]


def test_given_ids_must_fit_the_clients() -> None:
    labels, ids = np.zeros(6, int), np.array([3, 0, 1, 0, 3, 3])
    assert "has no client ids" in message("given", labels, 4, 0, None)
    assert "has clients 0 to 3, but clients.total is 3; set it to 4" in message("given", labels, 3, 0, ids)
    assert "has clients 0 to 3, but clients.total is 5; set it to 4" in message("given", labels, 5, 0, ids)
    assert "client 2 without training rows" in message("given", labels, 4, 0, ids)


def test_more_clients_than_rows_is_an_error() -> None:
    assert "8 clients cannot share 7 training rows" in message("iid", np.zeros(7, int), 8, 0, None)
    assert "partition.imbalance" in message("dirichlet", np.repeat([0, 1], 10), 15, 0, None, imbalance=0.1)


def test_a_client_without_rows_is_named() -> None:
    labels = np.repeat([0, 1], [1, 99])
    assert "leaves client" in message("shards", labels, 20, 0, None, per_client=1)


@pytest.mark.parametrize("settings", [{"alpha": -1.0}, {"imbalance": 2.0}, {"variant": "dir"}, {"alpha": np.inf}])
def test_settings_out_of_range_are_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        dirichlet(SMALL, 5, **settings)


@given(clients=st.integers(1, 40), classes=st.integers(1, 9), each=st.integers(40, 90), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_balanced_clients_share_each_class_equally(clients: int, classes: int, each: int, seed: int) -> None:
    labels = balanced_labels(classes, each)
    parts = partition_rows("balanced", {}, labels, clients, seed, None)
    counts = np.array([np.bincount(labels[part], minlength=classes) for part in parts])
    assert all_once(parts, len(labels))
    assert np.ptp(counts, axis=0).max() <= 1 and np.ptp(counts.sum(1)) <= 1


@pytest.mark.parametrize(("labels", "expected"), [(CIFAR10, 3), (CIFAR10, 6), (CIFAR100, 10), (SMALL, 2)])
def test_pathological_clients_have_the_given_number_of_classes(labels: np.ndarray, expected: int) -> None:
    parts = partition_rows("pathological", {"classes": expected}, labels, 20, 1, None)
    assert set(classes(parts, labels)) == {expected}
    assert set(sizes(parts)) == {len(labels) // 20}
    shares = [np.bincount(labels[part]).max() / len(part) for part in parts]
    assert max(shares) < 1 / expected + 5 * (1 / expected / len(parts[0])) ** 0.5


def test_pathological_needs_enough_classes() -> None:
    assert "partition.classes is 8, but the data has 7 classes" in message("pathological", SMALL, 5, 0, None, classes=8)


@pytest.mark.parametrize("each", [1, 10])
def test_domains_are_divided_among_their_own_clients(each: int) -> None:
    domain = np.random.default_rng(0).permutation(np.repeat([0, 2, 3], [50, 70, 100]))
    parts = partition_rows("domains", {}, np.zeros(220, int), 3 * each, 0, domain)
    assert all_once(parts, 220)
    assert [set(domain[part]) for part in parts] == [{d} for d in (0, 2, 3) for _ in range(each)]
    assert [len(part) for part in parts[:each]] == [50 // each] * each
    assert "set clients.total to a multiple of 3" in message("domains", np.zeros(220, int), 4, 0, domain)
    assert "has no domains" in message("domains", np.zeros(220, int), 4, 0, None)


def test_given_scales_to_very_many_clients() -> None:
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(100_000), 3))
    parts = partition_rows("given", {}, np.zeros(300_000, int), 100_000, 0, ids)
    assert all((ids[part] == client).all() and len(part) == 3 for client, part in enumerate(parts))


class TestValidationRows:
    @pytest.mark.parametrize(("name", "settings"), EVERY)
    def test_training_and_validation_rows_are_the_client_s_and_disjoint(
        self, name: str, settings: dict[str, Any]
    ) -> None:
        parts = partition_rows(name, settings, SMALL, 7, 0, None)
        training, validation = hold_out(parts, 0.3, len(SMALL), 0)
        for part, train, held in zip(parts, training, validation, strict=True):
            assert sorted([*train, *held]) == sorted(part)
            assert len(held) >= int(0.3 * len(part))
        assert not set(np.concatenate(training)) & set(np.concatenate(validation))

    @given(st.floats(0, 0.9), st.lists(st.integers(5, 30), min_size=1, max_size=6), st.integers(0, 9))
    @settings(max_examples=50)
    def test_each_client_holds_out_its_share(self, share: float, counts: list[int], seed: int) -> None:
        parts = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
        expected = [int(share * count + 0.5) for count in counts]
        if share and not any(expected):
            return
        training, validation = hold_out(parts, share, sum(counts), seed)
        assert sizes(validation) == expected
        assert all((np.diff(part) > 0).all() for part in [*training, *validation])
        again, _ = hold_out(parts, share, sum(counts), seed)
        assert digest(again) == digest(training)

    def test_rows_differ_between_seeds_and_clients(self) -> None:
        parts = [np.arange(100), np.arange(100, 200)]
        (_, first), (_, second) = (hold_out(parts, 0.2, 200, seed) for seed in (0, 1))
        assert digest(first) != digest(second)
        assert (first[0] != first[1] - 100).any()

    def test_a_row_that_two_clients_share_is_trained_by_neither_if_one_holds_it_out(self) -> None:
        training, validation = hold_out([np.arange(10), np.arange(5, 15)], 0.5, 15, 0)
        assert not set(np.concatenate(training)) & set(np.concatenate(validation))

    def test_without_a_share_nothing_changes(self) -> None:
        parts = [np.arange(3), np.arange(3, 4)]
        training, validation = hold_out(parts, 0.0, 4, 0)
        assert digest(training) == digest(parts)
        assert sizes(validation) == [0, 0]

    def test_clients_that_would_keep_no_row_are_named(self) -> None:
        with pytest.raises(DataError, match=r"^clients.validation=0.6 leaves 2 clients without training rows: 0, 2$"):
            hold_out([np.array([0]), np.array([1, 2, 3]), np.array([4])], 0.6, 5, 0)

    def test_a_share_that_holds_out_no_row_is_an_error(self) -> None:
        with pytest.raises(DataError, match=r"^clients.validation=0.1 holds out no row: clients have at most 2$"):
            hold_out([np.array([0]), np.array([1, 2])], 0.1, 3, 0)

    def test_very_many_clients_take_seconds_at_most(self) -> None:
        training, validation = hold_out(list(np.arange(500_000).reshape(-1, 5)), 0.2, 500_000, 0)
        assert set(sizes(validation)) == {1}
        assert set(sizes(training)) == {4}
