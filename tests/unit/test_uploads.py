"""Parts that change what leaves a client, and what the server makes of it, equal plain references."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_dist.algorithms.clip_and_noise import ClipAndNoise
from fl_dist.algorithms.compression import Compression, Quantise, Sign, TopK
from fl_dist.algorithms.core import Round, Vars
from fl_dist.algorithms.cost_tables import upload_rows
from fl_dist.algorithms.privacy_accountant import _round_costs, epsilon
from fl_dist.algorithms.robust_aggregation import Krum, Median, RobustAggregate, TrimmedMean
from fl_dist.callbacks.early_stopping import EarlyStopping
from fl_dist.common.randomness import generator
from tests.support import upload_reference as plain

EXACT = {"rtol": 0, "atol": 1e-9}


def build_round(size: int, index: int = 0, client: int | None = 0, participants: int = 1, **more: Any) -> Round:
    def ones() -> Tensor:
        return torch.ones(size, dtype=torch.bool)

    counts = {"participants": participants, "clients": 9, "expected_participants": participants, **more}
    return Round(
        index,
        0.1,
        get_initial=ones,
        get_weight_mask=ones,
        get_parameter_mask=ones,
        parameter_count=size,
        channels=1,
        client=client,
        **counts,
    )


def vectors(number: int, size: int = 41, seed: int = 0) -> list[Tensor]:
    """Random vectors, the first of which has equal entries and zeros."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(number, size))
    made[0] = np.round(made[0])
    return [torch.from_numpy(row) for row in made]


class TestCompression:
    """Several rounds with error feedback, by the plain reference."""

    @pytest.mark.parametrize("feedback", [True, False])
    @pytest.mark.parametrize("name", ["top_k", "sign"])
    def test_what_is_sent_and_kept_over_several_rounds(self, name: str, feedback: bool) -> None:
        part: Compression = TopK(share=0.22, feedback=feedback) if name == "top_k" else Sign(feedback=feedback)
        i, kept, r = Vars(residual=torch.zeros(41, dtype=torch.float64)), [0.0] * 41, build_round(41)
        for delta in vectors(6):
            wanted = [d + e for d, e in zip(delta.tolist(), kept, strict=True)]
            sent = plain.largest_entries(wanted, 9) if name == "top_k" else plain.scaled_signs(wanted)
            kept = [w - s for w, s in zip(wanted, sent, strict=True)] if feedback else kept
            np.testing.assert_allclose(part.upload(delta, Vars(), i, r), sent, **EXACT)
            np.testing.assert_allclose(i.residual, kept, **EXACT)

    @pytest.mark.parametrize("bits", [2, 3, 8, 16])
    def test_quantised_entries_given_the_draws(self, bits: int) -> None:
        for client, delta in enumerate(vectors(4)):
            r = build_round(41, 5, client)
            draws = generator(0, "quantise", 5, client).random(41).tolist()
            expected = plain.quantised(delta.tolist(), bits, draws)
            np.testing.assert_allclose(Quantise(bits=bits).upload(delta, Vars(), Vars(), r), expected, **EXACT)

    @pytest.mark.parametrize("bits", [2, 5])
    def test_the_expectation_of_quantised_entries_is_exact(self, bits: int) -> None:
        """Each entry is `upper` for draws below a threshold, `lower` above it: the mean over the draws follows."""
        levels = 2 ** (bits - 1) - 1
        for delta in vectors(3):
            position = levels * delta.abs() / delta.abs().max()
            threshold = position - position.floor()

            def send(draws: Tensor, delta: Tensor = delta) -> Tensor:
                with mock.patch.object(Round, "generator") as drawn:
                    drawn.return_value.random.return_value = draws.numpy()
                    return Quantise(bits=bits).compress(delta, build_round(41))

            lower, upper = send((threshold + 1e-9).clamp(max=1.0)), send((threshold - 1e-9).clamp(min=0.0))
            np.testing.assert_allclose(lower + threshold * (upper - lower), delta, **EXACT)
            assert (lower != upper).any() and ((upper - lower).abs() <= delta.abs().max() / levels + 1e-12).all()

    def test_nothing_to_send(self) -> None:
        for part in (TopK(share=0.5, feedback=False), Sign(feedback=False), Quantise(), ClipAndNoise()):
            for dtype in (torch.float32, torch.float64):
                sent = part.upload(torch.zeros(7, dtype=dtype), Vars(), Vars(), build_round(7))
                assert sent.dtype == dtype and not sent.any()

    @pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
    def test_a_value_that_is_not_finite_stays_visible(self, value: float) -> None:
        delta = torch.tensor([1.0, 2.0, value, 0.5, -0.25])
        for part in (TopK(share=0.4, feedback=False), Sign(feedback=False), Quantise(), ClipAndNoise()):
            assert not part.upload(delta, Vars(), Vars(), build_round(5)).isfinite().all(), part


class TestAggregates:
    @pytest.mark.parametrize("m", [5, 6, 7])
    @pytest.mark.parametrize(
        ("part", "rule"),
        [
            (Median(), plain.median),
            (TrimmedMean(share=0.2), lambda updates: plain.trimmed_mean(updates, 1)),
            (TrimmedMean(share=0.4), lambda updates: plain.trimmed_mean(updates, 2)),
            (Krum(byzantine=1), lambda updates: plain.krum(updates, 1, 1)),
            (Krum(byzantine=1, keep=3), lambda updates: plain.krum(updates, 1, 3)),
            (Krum(byzantine=0, keep=5), lambda updates: plain.krum(updates, 0, 5)),
        ],
        ids=["median", "trimmed", "trimmed more", "krum", "multi-krum", "no byzantine"],
    )
    def test_robust_rules(self, part: RobustAggregate, rule: Callable[[Any], Any], m: int) -> None:
        updates = torch.stack(vectors(m, seed=m))
        updates[-1] = 1e3  # wrong
        delta = updates.mean(0)
        with mock.patch("fl_dist.algorithms.robust_aggregation.COLUMNS", 16):  # several pieces
            found = part.aggregate(delta, updates, Vars(), build_round(41, client=None, participants=m))
        np.testing.assert_allclose(found, rule(updates.tolist()), **EXACT)

    def test_a_share_counts_as_people_write_it(self) -> None:
        """0.29 * 100 is less than 29 in floating point, and 1 / 0.07 * 0.07 * 100 more than 7."""
        updates = torch.arange(100.0, dtype=torch.float64)[:, None] ** 2
        for share, cut in ((0.29, 29), (0.07, 7), (0.3, 30)):
            expected = plain.trimmed_mean(updates.tolist(), cut)
            assert TrimmedMean(share=share).combine(updates).tolist() == pytest.approx(expected, abs=1e-9)
        assert [TrimmedMean(share=share).min_clients for share in (0.1, 0.2, 0.3, 0.49)] == [10, 5, 4, 3]

    def test_equal_scores_choose_the_lower_client(self) -> None:
        updates = torch.tensor([[5.0], [1.0], [1.0], [1.0], [1.0]])
        updates[1:, 0] += torch.tensor([0.0, 1.0, 0.0, 1.0])
        assert Krum(byzantine=1).combine(updates).item() == 1.0

    @pytest.mark.parametrize("participants", [4, 3])
    def test_noise_and_the_fixed_denominator(self, participants: int) -> None:
        """Of 4 expected clients one may have failed: it counts as an update of zeros."""
        part, updates = ClipAndNoise(clip=3.0, noise=0.7), vectors(participants)
        r = build_round(41, 6, None, participants, expected_participants=4)
        sent = [part.upload(u, Vars(), Vars(), build_round(41, 6, c)) for c, u in enumerate(updates)]
        draws = generator(0, "privacy noise", 6).standard_normal(41).tolist()
        expected = plain.private_mean([u.tolist() for u in updates], 3.0, 0.7, 4, draws)
        np.testing.assert_allclose(part.aggregate(torch.stack(sent).mean(0), None, Vars(), r), expected, **EXACT)
        lengths = [float(s.norm()) for s in sent]
        assert max(lengths) <= 3.0 + 1e-12 and sum(length > 2.999 for length in lengths) >= 2


# Sampling rate, noise multiplier, rounds; delta is 1e-5. The first four are published with the RDP accountant of
# Mironov 2017: three rows of the table in the README of tensorflow-privacy's MNIST tutorial (15, 60 and 45 epochs of
# batches of 256), and the example of Abadi et al., Deep Learning with Differential Privacy, 2016, section 3.2.
PUBLISHED = [
    (256 / 60_000, 1.3, 3_515, 1.19),
    (256 / 60_000, 1.1, 14_062, 3.01),
    (256 / 60_000, 0.7, 10_546, 7.10),
    (0.01, 4.0, 10_000, 1.26),
]
ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))


class TestAccountant:
    @pytest.mark.parametrize(("rate", "noise", "rounds", "published"), PUBLISHED)
    def test_published_values(self, rate: float, noise: float, rounds: int, published: float) -> None:
        """The newer conversion of the accountant gives less from the same divergences."""
        orders, costs = _round_costs(rate, noise)
        classic = min(rounds * cost + math.log(1e5) / (order - 1) for order, cost in zip(orders, costs, strict=True))
        assert round(classic, 2) == published
        assert 0.8 * published < epsilon(rounds, rate, noise, 1e-5) < classic

    @pytest.mark.parametrize(
        ("rate", "noise", "rounds", "delta"),
        [(256 / 60_000, 1.1, 14_062, 1e-5), (0.1, 1.0, 300, 1e-3), (0.5, 3.0, 20, 1e-5), (1.0, 20.0, 50, 1e-6)],
    )
    def test_it_equals_numerical_integration(self, rate: float, noise: float, rounds: int, delta: float) -> None:
        expected = plain.privacy_spent(rounds, rate, noise, delta, ORDERS)
        assert epsilon(rounds, rate, noise, delta) == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("limit", [2.7, 3.0, 3.3])
    @pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.0), (0.05, 1.2), (0.3, 2.4)])
    def test_a_limit_is_reached_and_never_exceeded(self, rate: float, noise: float, limit: float) -> None:
        values = [epsilon(rounds, rate, noise, 1e-5) for rounds in range(1, 300)]
        assert values[2] <= limit, "a limit holds from the third round on"
        stopping, last = EarlyStopping(metric="epsilon", limit=limit), 0
        for last, value in enumerate(values):
            if stop(stopping, value, last + 1):
                break
        # Two rounds at most are not used: their growth is not known when the run has to decide.
        assert values[last + 1] <= limit < values[last + 4]


def stop(stopping: EarlyStopping, value: float, round_number: int) -> str:
    """Why the callback ends the run after the next round, or an empty text."""
    record = mock.Mock(method={"epsilon": value}, test={}, round=round_number)
    stopping.on_round_end(record, mock.Mock())
    return stopping.reason


def test_a_limit_that_was_exceeded_at_once_says_so() -> None:
    stopping = EarlyStopping(metric="epsilon", limit=2.0)
    assert stop(stopping, 2.13, 1) == "epsilon 2.13 in round 1 exceeds the limit 2, and round 2 was already in training"


def test_the_table_of_upload_parts() -> None:
    rows = {name: (float(up), int(kept)) for name, up, kept, *_ in upload_rows()}
    kept_places, bits = 0.01, math.ceil(math.log2(10**6))
    assert rows == {
        "clip_and_noise": (1.0, 0),
        "krum": (1.0, 0),
        "median": (1.0, 0),
        "quantise": (0.25, 0),
        "sign": (pytest.approx(1 / 32, abs=1e-3), 1),
        "top_k": (pytest.approx(kept_places * (32 + bits) / 32, abs=1e-4), 1),
        "trimmed_mean": (1.0, 0),
    }
