"""The seams: plan, exact sums, flat vectors, client state, one process."""

import weakref
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from fl_dist.config import Clients, Topology, load
from fl_dist.core import Vars
from fl_dist.engine import plan
from fl_dist.engine.client import ClientFailure, LocalTraining, Trained
from fl_dist.engine.exact import Fixed, Scratch, Total
from fl_dist.engine.flat import Flat
from fl_dist.engine.state import ClientStates
from fl_dist.engine.uplink import RESOLUTION, OutOfRange, Uplink
from fl_dist.engine.worker import Worker, messages
from fl_dist.engine.world import World
from fl_dist.machine.comm import Alone
from fl_dist.machine.copies import HOST
from fl_dist.main import main
from tests.support.processes import QUIET
from tests.support.run_folder import metrics, model_hash, results

CPU = torch.device("cpu")


def test_uniform_cohorts_have_the_size_and_no_repeats() -> None:
    drawn = [plan.cohort(Clients(total=30, per_round=7), None, 3, t) for t in range(200)]
    assert all(len(c) == len(set(c)) == 7 and c == sorted(c) for c in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=30)
    assert counts.min() > 25
    assert drawn != [plan.cohort(Clients(total=30, per_round=7), None, 4, t) for t in range(200)]


def test_bernoulli_cohorts_have_the_mean_and_are_never_empty() -> None:
    clients = Clients(total=20, per_round=2, sampling="bernoulli")
    drawn = [plan.cohort(clients, None, 0, t) for t in range(500)]
    assert all(drawn)
    assert len({len(c) for c in drawn}) > 3
    assert np.mean([len(c) for c in drawn]) == pytest.approx(2 / (1 - 0.9**20), abs=0.2)


@given(
    costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=30),
    workers=st.integers(1, 6),
    homes=st.lists(st.integers(0, 9), min_size=30, max_size=30),
)
@settings(max_examples=100, deadline=None)
def test_assignment_is_complete_and_balanced(costs: list[float], workers: int, homes: list[int]) -> None:
    loads = dict.fromkeys(range(workers), 0.0)
    placed = plan.assign(dict(enumerate(costs)), range(workers), {}, dict(enumerate(homes)))
    assert set(placed) == set(range(len(costs)))
    for client, worker in placed.items():
        loads[worker] += costs[client]
    # Longest first is within 4/3 of the best; the best is no less than the mean and the longest.
    assert max(loads.values()) <= 4 / 3 * (sum(costs) / workers + max(costs)) + 1e-9


def test_a_worker_that_was_slow_once_is_tried_again() -> None:
    speeds, costs = plan.Speeds([1, 2]), dict.fromkeys(range(3), 1.0)
    speeds.observe(1, 1.0, 0.01)
    speeds.observe(2, 1.0, 1.0)
    for _ in range(10):
        placed = plan.assign(costs, [1, 2], speeds.relative(), {})
        if 2 in placed.values():
            return
        speeds.observe(1, 3.0, 0.03)
        speeds.rest(2)
    raise AssertionError("it never was")


def test_longest_first_uses_measured_speeds() -> None:
    placed = plan.assign(dict.fromkeys(range(9), 1.0), [1, 2], {1: 1.0, 2: 0.5}, {})
    assert [list(placed.values()).count(w) for w in (1, 2)] == [6, 3]


@given(
    costs=st.dictionaries(st.integers(0, 99), st.sampled_from([1.0, 2.0, 7.0]), min_size=1, max_size=30),
    speeds=st.lists(st.sampled_from([0.5, 1.0]), min_size=1, max_size=6),
    homes=st.lists(st.integers(0, 9), min_size=100, max_size=100),
)
@settings(max_examples=100, deadline=None)
def test_a_client_without_room_at_home_goes_where_it_ends_soonest(
    costs: dict[int, float], speeds: list[float], homes: list[int]
) -> None:
    workers, ends = range(len(speeds)), [0.0] * len(speeds)
    room = sum(costs.values()) / sum(speeds)
    placed = plan.assign(costs, workers, dict(enumerate(speeds)), dict(enumerate(homes)))
    for client in sorted(costs, key=lambda c: (-costs[c], c)):
        times = [ends[w] + costs[client] / speeds[w] for w in workers]
        home = homes[client]
        fits = home < len(speeds) and times[home] <= room * (1 + 1e-9)
        assert placed[client] == (home if fits else times.index(min(times)))
        ends[placed[client]] = times[placed[client]]


def test_clients_stay_where_their_state_is_when_there_is_room() -> None:
    home = {c: 1 + c % 2 for c in range(10)}
    assert plan.assign(dict.fromkeys(range(10), 1.0), [1, 2], {}, home) == home


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
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=200, deadline=None)
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


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


def test_parameters_are_aligned_views_of_one_vector() -> None:
    module = Uneven()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    flat = Flat(module)
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])
        assert (p.data_ptr() - flat.vector.data_ptr()) % 64 == 0
    flat.vector.fill_(2.0)
    assert all(bool((p == 2).all()) for p in module.parameters())
    assert flat.count == sum(p.numel() for p in module.parameters()) < flat.size


def test_a_bound_vector_is_where_the_module_computes() -> None:
    flat, x = Flat(Uneven()), torch.randn(4, 3)
    flat.module.eval()
    here, other = flat.module(x), flat.vector * 2
    flat.bind(other)
    there = flat.module(x)
    flat.bind(flat.vector)
    assert not torch.equal(here, there)
    assert torch.equal(flat.module(x), here)


def test_gathered_gradients_equal_autograd() -> None:
    flat, x = Flat(Uneven()), torch.randn(4, 3)
    out = torch.full_like(flat.vector, 7.0)
    flat.module(x).square().sum().backward()
    flat.params[0].grad = None
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in flat.params]
    flat.gather_gradients(flat.views(out))
    for grad, view in zip(grads, flat.views(out), strict=True):
        assert torch.equal(view, grad)
    assert all(p.grad is None for p in flat.params)


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


def test_views_of_a_vector_are_made_once_and_go_with_it() -> None:
    flat = Flat(Uneven())
    vector = flat.vector.clone()
    assert flat.views(vector) is flat.views(vector)
    gone = weakref.ref(flat.views(vector)[0].untyped_storage())
    del vector
    assert gone() is None


def test_what_a_module_computes_itself_is_set_back_not_sent() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.arange(3.0), persistent=False)
    flat = Flat(module)
    assert flat.buffers.size == 0
    module.get_buffer("table").zero_()
    flat.buffers.write(flat.buffers.new())
    assert module.get_buffer("table").tolist() == [0, 1, 2]


def test_buffers_go_to_a_vector_and_back() -> None:
    flat = Flat(Uneven())
    flat.module(torch.randn(16, 3))
    saved = flat.buffers.read(flat.buffers.new())
    before = {n: b.clone() for n, b in flat.module.named_buffers()}
    flat.module(torch.randn(16, 3))
    flat.buffers.write(saved)
    assert all(torch.equal(b, before[n]) for n, b in flat.module.named_buffers())


class Wire:
    """Two ranks in one process: what one sends the other receives."""

    def __init__(self, rank: int, mail: list[torch.Tensor]) -> None:
        self.rank, self.mail = rank, mail

    def exchange(self, sends: list, receives: list) -> None:
        self.mail.extend(t for t, _ in sends)
        for buffer, _ in receives:
            buffer.copy_(self.mail.pop(0))


def test_a_clients_state_follows_it() -> None:
    template = {"h": ((5,), torch.float32), "k": ((), torch.float64)}
    mail: list[torch.Tensor] = []
    one, two = (ClientStates(template, Wire(rank, mail), lambda c: None) for rank in (1, 2))
    for states in (one, two):
        states.move({3: 1})
    assert one.load(3) is None
    one.store(3, Vars(h=torch.arange(5.0), k=torch.tensor(0.1, dtype=torch.float64)))
    for states in (one, two):
        states.move({3: 2})
    moved = two.load(3)
    assert moved is not None
    assert torch.equal(moved.h, torch.arange(5.0)) and float(moved.k) == 0.1
    for states in (one, two):
        states.move({4: 1})
    for states in (one, two):  # client 4 failed in its first round: it has nothing to take along
        states.move({4: 2})
    assert two.load(4) is None
    moved.h.zero_()
    assert torch.equal(two.load(3).h, torch.arange(5.0)), "what is loaded is a copy"
    assert one.load(3) is None


def test_states_beyond_the_memory_given_lie_in_files_and_change_nothing(tmp_path: Path) -> None:
    template = {"h": ((1000,), torch.float32)}
    states = ClientStates(template, Wire(0, []), lambda c: None, room=8100, spill=tmp_path)
    for client in range(5):
        states.store(client, Vars(h=torch.full((1000,), float(client))))
    maps = Path("/proc/self/maps").read_text()
    assert maps.count(str(tmp_path / ".state-")) == 3
    assert [float(states.load(c).h[7]) for c in range(5)] == [0, 1, 2, 3, 4]
    assert not list(tmp_path.iterdir())
    small = [*QUIET, "rounds=3", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}"]
    for name, memory in (("memory", 1.0), ("files", 0.0)):
        assert main([*small, f"topology.state_memory={memory}", f"run.dir={tmp_path / name}"]) == 0
    assert model_hash(tmp_path / "memory") == model_hash(tmp_path / "files")


def test_rounds_begin_for_those_who_are_told_of_lost_ranks_and_orders_to_stop_are_none(tmp_path: Path) -> None:
    begun: list[tuple[int, int]] = []
    told = mock.patch.object(Alone, "begins", lambda self, index, assignment: begun.append((index, len(assignment))))
    with told:
        assert main([*QUIET, "rounds=2", "clients={total: 4, per_round: 2}", f"run.dir={tmp_path}"]) == 0
    assert begun == [(0, 2), (1, 2)]


def test_steps_end_a_clients_round_early(tmp_path: Path) -> None:
    """Two epochs in 12 steps: cut after 6 they are one epoch; cut after 12 or later they are whole."""
    small = [*QUIET, "rounds=2", "data={name: digits}", "partition=iid", "model={name: mlp, hidden: []}"]
    small += ["clients={total: 4, per_round: 2}", "local={batch_size: 60}", "evaluate.every=2", "algorithm=scaffold"]
    cut = {"one": (1, "null"), "cut": (2, 6), "two": (2, "null"), "enough": (2, 12)}
    for name, (epochs, steps) in cut.items():
        assert main([*small, f"local.epochs={epochs}", f"local.steps={steps}", f"run.dir={tmp_path / name}"]) == 0
    assert model_hash(tmp_path / "one") == model_hash(tmp_path / "cut") != model_hash(tmp_path / "two")
    assert model_hash(tmp_path / "two") == model_hash(tmp_path / "enough")
    assert [metrics(tmp_path / name)[0]["backwards"] for name in cut] == [12, 12, 24, 24]
    one, other = (metrics(tmp_path / name)[-1]["train_loss"] for name in ("one", "cut"))
    assert one == other, "the mean over the steps that were made"


def test_main_can_be_called_again_and_again(tmp_path: Path) -> None:
    small = [*QUIET, "rounds=2", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}"]
    for name in ("a", "b"):
        assert main([*small, f"run.dir={tmp_path / name}"]) == 0
    assert model_hash(tmp_path / "a") == model_hash(tmp_path / "b")
    assert results(tmp_path / "a") == results(tmp_path / "b")


def test_a_schedule_from_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "schedule.yaml").write_text("- [3, 1]\n- [0]\n- [2, 0, 1]\n")
    small = [*QUIET, "rounds=3", "model={name: mlp, hidden: []}", "clients.total=4"]
    assert main([*small, f"clients.schedule={tmp_path / 'schedule.yaml'}", f"run.dir={tmp_path / 'run'}"]) == 0
    assert [r["clients"] for r in metrics(tmp_path / "run")] == [2, 1, 3]


@pytest.mark.parametrize("precision", ["float64", "bf16"])
def test_other_precisions_train(precision: str, tmp_path: Path) -> None:
    small = [*QUIET, "rounds=3", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}"]
    assert main([*small, f"local.precision={precision}", f"run.dir={tmp_path}"]) == 0
    rows = metrics(tmp_path)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


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


def test_a_teacher_is_asked_once_a_batch_unless_the_inputs_change(tmp_path: Path) -> None:
    small = [*QUIET, "rounds=1", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}"]
    passes = {"{sam: {}}": (3, 2), "{affine: {ascent_steps: 3}}": (6, 3)}
    for k, (part, (forwards, backwards)) in enumerate(passes.items()):
        chain = f"algorithm={{parts: [{part}, {{nottrue: {{}}}}]}}"
        assert main([*small, chain, f"run.dir={tmp_path / str(k)}"]) == 0
        row = metrics(tmp_path / str(k))[0]
        assert row["forwards"] * backwards == row["backwards"] * forwards
