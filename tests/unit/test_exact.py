"""Sums in fixed point: exact, whatever their order, or refused."""

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
from fl_dist.engine.client import ClientFailure, LocalTraining, Trained
from fl_dist.engine.exact import Fixed, Scratch, Total
from fl_dist.engine.uplink import RESOLUTION, OutOfRange, Uplink
from fl_dist.engine.worker import Worker, messages
from fl_dist.engine.world import World
from fl_dist.machine.comm import Alone
from fl_dist.machine.copies import HOST
from fl_dist.main import main
from tests.support.processes import QUIET

CPU = torch.device("cpu")


def uplink(mode: str = "exact", size: int = 50_000, largest: int = 6) -> Uplink:
    return Uplink({"v": size}, largest, mode, CPU)


def test_exact_sums_do_not_depend_on_order_or_split() -> None:
    vectors = torch.randn(6, 50_000, generator=torch.Generator().manual_seed(0))
    weights = [0.3, 1.0, 0.7, 0.01, 0.9, 0.5]
    whole, first, second = uplink(), uplink(), uplink()
    for k in range(6):
        whole.add("v", vectors[k], weights[k])
    for k in (5, 1, 3):
        first.add("v", vectors[k], weights[k])
    for k in (4, 0, 2):
        second.add("v", vectors[k], weights[k])
    first.buffer.add_(second.buffer)
    assert torch.equal(whole.buffer, first.buffer)
    mean = whole.mean("v", sum(weights), torch.zeros(50_000, dtype=torch.float64))
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
    """Also when only the lightest clients of 1,000 take part in a round."""
    most = max(counts) if mode == "one word" else 50_000
    up = Uplink({"v": 50}, 8 if mode == "one word" else 1000, "exact", CPU, least=min(counts) / most)
    if mode == "one word":
        counts = counts[:8]
    rng = np.random.default_rng(seed)
    vectors = rng.uniform(-size, size, (len(counts), 50)).astype(np.float32)
    for count, vector in zip(counts, vectors, strict=True):
        up.add("v", torch.from_numpy(vector), count / most)
    mean = up.mean("v", sum(c / most for c in counts), torch.zeros(50, dtype=torch.float64))
    for k in range(50):
        exact = sum(Fraction(c) * Fraction(float(v)) for c, v in zip(counts, vectors[:, k], strict=True)) / sum(counts)
        assert abs(Fraction(float(mean[k])) - exact) <= Fraction(2.0**-RESOLUTION) + abs(exact) * Fraction(2.0**-50)


def test_a_second_word_is_sent_only_for_unequal_clients() -> None:
    ups = [Uplink({"v": 9}, 10, "exact", CPU, least) for least in (1.0, 1 / 50, 1 / 50_000)]
    assert [up.fixed["v"].words for up in ups] == [1, 1, 2]


@given(
    values=st.lists(st.floats(-(2.0**36), 2.0**36), min_size=1, max_size=9),
    weights=st.lists(st.floats(1e-5, 1.0), min_size=9, max_size=9),
)
@settings(max_examples=200)
def test_a_mean_of_numbers_holds_counts_and_fractions(values: list[float], weights: list[float]) -> None:
    up = Uplink({"v": 1}, 9, "exact", CPU, least=1e-5, numbers=["v"])
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
    up = Uplink({"v": 1}, 9, "exact", CPU, numbers=["v"])
    with pytest.raises(OutOfRange, match="6.87195e.10"):
        up.check("v", 2.0**37)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 5000.0])
def test_exact_sums_refuse_what_does_not_fit(bad: float) -> None:
    with pytest.raises(OutOfRange, match="its v "):
        uplink().check("v", bad)


def test_the_largest_sum_that_passes_the_check_does_not_overflow() -> None:
    up = uplink(size=1, largest=7)
    vector = torch.tensor([4096.0])
    for _ in range(7):
        up.check("v", 4096.0)
        up.add("v", vector, 1.0)
    assert float(up.mean("v", 7.0, torch.zeros(1))) == 4096.0


@pytest.mark.parametrize("mode", ["exact", "float32"])
def test_reports_are_gathered_by_adding(mode: str) -> None:
    one, two = uplink(mode), uplink(mode)
    one.report(0, status=1, loss=0.25, seconds=1.5)
    two.report(4, status=2, loss=0.125)
    one.seal()
    two.seal()
    one.buffer.add_(two.buffer)
    rows, _ = one.read()
    assert (rows[0]["loss"], rows[0]["seconds"], rows[4]["status"], rows[4]["loss"]) == (0.25, 1.5, 2, 0.125)
    assert rows[1]["status"] == 0


def test_a_vector_of_another_length_is_not_added() -> None:
    fixed = Fixed(4096.0, 2.0**40, 1.0, 1)
    total = Total(torch.zeros(1, 5, dtype=torch.int64), fixed, Scratch(2, CPU))
    total.add(torch.ones(5), 1.0)
    assert total.over(1.0, torch.empty(5)).tolist() == [1.0] * 5
    for length in (0, 4, 7):
        with pytest.raises((ValueError, RuntimeError)):
            total.add(torch.ones(length), 1.0)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (float("nan"), "its update is not finite"),
        (float("-inf"), "its update is not finite"),
        (-5000.0, "its update has an entry of size 5e"),
    ],
)
def test_one_entry_that_cannot_be_added_is_found(bad: float, told: str) -> None:
    class Spoilt(LocalTraining):
        def run(self, *arguments: Any) -> Trained:
            trained = super().run(*arguments)
            trained.delta[7] = bad
            return trained

    world, comm = World(load(None, list(QUIET)), CPU), Alone(Topology(device="cpu"))
    worker, (down, up) = Worker(world, comm, lambda client: None, Path(), HOST), messages(world, 1)
    down.fill(world.published(), world.initial_buffers)
    worker.training.__class__ = Spoilt
    with pytest.raises(ClientFailure, match=told):
        worker._train(0, world.round(0, 1, 0), down, up)


def test_batch_counters_beyond_the_range_of_the_sums_do_no_harm(tmp_path: Path) -> None:
    """BatchNorm counts batches for ever; what goes up is the change."""
    from fl_dist.config import load
    from fl_dist.engine.world import World

    settings = [*QUIET, "rounds=2", "model={name: cnn, norm: batch}", "clients={total: 4, per_round: 2}"]
    world = World(load(None, settings), CPU)
    world.model.module.get_buffer(world.model.buffers.names[2]).fill_(1_000_000)
    parameters = {n: t.clone() for n, t in world.model.named(world.model.vector).items()}
    buffers = world.model.buffers.named(world.model.buffers.read(world.model.buffers.new()))
    save_file(parameters | {n: b.clone() for n, b in buffers.items()}, tmp_path / "init.safetensors")
    assert main([*settings, f"model.init={tmp_path / 'init.safetensors'}", f"run.dir={tmp_path / 'run'}"]) == 0
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert int(model[world.model.buffers.names[2]]) > 1_000_000
