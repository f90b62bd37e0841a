"""Fixed-point sums are exact in any order, or refused."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fl_dist.config import Topology, load
from fl_dist.distributed.host_transfer import NO_TRANSFER
from fl_dist.distributed.process_group import single_process_group
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.fixed_point import FixedPoint, FixedPointSum, ScratchBuffers
from fl_dist.federation.local_training import ClientFailedError, LocalResult, LocalTraining
from fl_dist.federation.uplink import RESOLUTION, ClientReport, OutOfRangeError, RankReport, Uplink
from fl_dist.federation.worker import Worker, build_messages
from fl_dist.main import main
from tests.support.processes import NO_WANDB

CPU = torch.device("cpu")


def make_uplink(mode: str = "exact", size: int = 50_000, largest: int = 6) -> Uplink:
    return Uplink({"v": size}, largest, mode, CPU)


def test_exact_sums_do_not_depend_on_order_or_split() -> None:
    vectors = torch.randn(6, 50_000, generator=torch.Generator().manual_seed(0))
    weights = [0.3, 1.0, 0.7, 0.01, 0.9, 0.5]
    all_ranks, first, second = make_uplink(), make_uplink(), make_uplink()
    for k in range(6):
        all_ranks.add("v", vectors[k], weights[k])
    for k in (5, 1, 3):
        first.add("v", vectors[k], weights[k])
    for k in (4, 0, 2):
        second.add("v", vectors[k], weights[k])
    first.buffer.add_(second.buffer)
    assert torch.equal(all_ranks.buffer, first.buffer)
    mean = all_ranks.mean("v", sum(weights), torch.zeros(50_000, dtype=torch.float64))
    expected = sum(w * v.double() for w, v in zip(weights, vectors, strict=True)) / sum(weights)
    assert float((mean - expected).abs().max()) < 2**-47


@pytest.mark.parametrize("mode", ["one word", "two words"])
@given(
    counts=st.lists(st.integers(1, 50_000), min_size=1, max_size=40),
    size=st.floats(1e-6, 4096),
    seed=st.integers(0, 100),
)
@settings(max_examples=60)
def test_a_mean_is_exact_to_the_bound_for_unequal_clients(mode: str, counts: list[int], size: float, seed: int) -> None:
    """Also if only the clients with the smallest weights of 1,000 take part in a round."""
    max_count = max(counts) if mode == "one word" else 50_000
    up = Uplink({"v": 50}, 8 if mode == "one word" else 1000, "exact", CPU, min_weight=min(counts) / max_count)
    if mode == "one word":
        counts = counts[:8]
    rng = np.random.default_rng(seed)
    vectors = rng.uniform(-size, size, (len(counts), 50)).astype(np.float32)
    for count, vector in zip(counts, vectors, strict=True):
        up.add("v", torch.from_numpy(vector), count / max_count)
    mean = up.mean("v", sum(c / max_count for c in counts), torch.zeros(50, dtype=torch.float64))
    for k in range(50):
        exact = sum(Fraction(c) * Fraction(float(v)) for c, v in zip(counts, vectors[:, k], strict=True)) / sum(counts)
        assert abs(Fraction(float(mean[k])) - exact) <= Fraction(2.0**-RESOLUTION) + abs(exact) * Fraction(2.0**-50)


def test_a_second_word_is_sent_only_for_unequal_clients() -> None:
    ups = [Uplink({"v": 9}, 10, "exact", CPU, min_weight) for min_weight in (1.0, 1 / 50, 1 / 50_000)]
    assert [up.formats["v"].words for up in ups] == [1, 1, 2]


@given(
    values=st.lists(st.floats(-(2.0**36), 2.0**36), min_size=1, max_size=9),
    weights=st.lists(st.floats(1e-5, 1.0), min_size=9, max_size=9),
)
@settings(max_examples=200)
def test_means_of_scalars_are_exact_for_counts_and_fractions(values: list[float], weights: list[float]) -> None:
    up = Uplink({"v": 1}, 9, "exact", CPU, min_weight=1e-5, scalars=["v"])
    for value, weight in zip(values, weights, strict=False):
        number = torch.tensor(value, dtype=torch.float64)
        up.check("v", abs(value))
        up.add("v", number, weight)
    total = sum(map(Fraction, weights[: len(values)]))
    exact = sum(Fraction(v) * Fraction(w) for v, w in zip(values, weights, strict=False)) / total
    mean = up.mean("v", float(total), torch.zeros(1, dtype=torch.float64))
    error = abs(Fraction(float(mean)) - exact)
    largest = max(abs(Fraction(v)) for v in values)
    assert error <= Fraction(2.0**-40) + (abs(exact) + largest * Fraction(max(weights)) / total) * Fraction(2.0**-49)


def test_a_number_beyond_the_range_is_refused() -> None:
    up = Uplink({"v": 1}, 9, "exact", CPU, scalars=["v"])
    with pytest.raises(OutOfRangeError, match="6.87195e.10"):
        up.check("v", 2.0**37)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 5000.0])
def test_values_outside_the_range_are_refused(bad: float) -> None:
    with pytest.raises(OutOfRangeError, match="its v "):
        make_uplink().check("v", bad)


def test_the_largest_sum_that_passes_the_check_does_not_overflow() -> None:
    up = make_uplink(size=1, largest=7)
    vector = torch.tensor([4096.0])
    for _ in range(7):
        up.check("v", 4096.0)
        up.add("v", vector, 1.0)
    assert float(up.mean("v", 7.0, torch.zeros(1))) == 4096.0


@pytest.mark.parametrize("mode", ["exact", "float32"])
def test_reports_are_combined_by_addition(mode: str) -> None:
    one, two = make_uplink(mode), make_uplink(mode)
    one.report_client(0, ClientReport(status=1, loss=0.25, seconds=1.5))
    two.report_client(4, ClientReport(status=2, loss=0.125))
    two.report_rank(0, RankReport(stop_requested=1, host_memory=4096))
    one.copy_reports()
    two.copy_reports()
    one.buffer.add_(two.buffer)
    clients, ranks = one.read_reports()
    assert (clients[0].loss, clients[0].seconds, clients[4].status, clients[4].loss) == (0.25, 1.5, 2, 0.125)
    assert clients[1] == ClientReport() and clients[0].is_trained and not clients[4].is_trained
    assert ranks == [RankReport(stop_requested=1, host_memory=4096)]


def test_a_vector_of_another_length_is_not_added() -> None:
    fixed = FixedPoint(4096.0, 2.0**40, 1.0, 1)
    total = FixedPointSum(torch.zeros(1, 5, dtype=torch.int64), fixed, ScratchBuffers(2, CPU))
    total.add(torch.ones(5), 1.0)
    assert total.mean_over(1.0, torch.empty(5)).tolist() == [1.0] * 5
    for length in (0, 4, 7):
        with pytest.raises((ValueError, RuntimeError)):
            total.add(torch.ones(length), 1.0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (float("nan"), "its update is not finite"),
        (float("-inf"), "its update is not finite"),
        (-5000.0, "its update has an entry of size 5e"),
    ],
)
def test_a_single_invalid_entry_is_detected(bad: float, message: str) -> None:
    class InvalidUpdate(LocalTraining):
        def run(self, *arguments: Any) -> LocalResult:
            trained = super().run(*arguments)
            trained.delta[7] = bad
            return trained

    experiment, group = Experiment(load(None, list(NO_WANDB)), CPU), single_process_group(Topology(device="cpu"))
    worker, (down, up) = (
        Worker(experiment, group, lambda client: None, Path(), NO_TRANSFER),
        build_messages(experiment, 1),
    )
    down.vars.x.copy_(experiment.initial)
    worker.training.__class__ = InvalidUpdate
    with pytest.raises(ClientFailedError, match=message):
        worker._train(0, experiment.round(0, 1, 0), down, up)


def test_batch_counters_beyond_the_range_of_sums_are_averaged(tmp_path: Path) -> None:
    """BatchNorm's batch counters keep growing; clients send only their change."""
    from fl_dist.config import load
    from fl_dist.federation.experiment import Experiment

    settings = [*NO_WANDB, "rounds=2", "model={name: cnn, norm: batch}", "clients={total: 4, per_round: 2}"]
    experiment = Experiment(load(None, settings), CPU)
    experiment.model.module.get_buffer(experiment.model.buffers.names[2]).fill_(1_000_000)
    parameters = {n: t.clone() for n, t in experiment.model.named(experiment.model.vector).items()}
    buffers = experiment.model.buffers.named(experiment.model.buffers.read())
    save_file(parameters | {n: b.clone() for n, b in buffers.items()}, tmp_path / "init.safetensors")
    assert main([*settings, f"model.init={tmp_path / 'init.safetensors'}", f"run.dir={tmp_path / 'run'}"]) == 0
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert int(model[experiment.model.buffers.names[2]]) > 1_000_000
