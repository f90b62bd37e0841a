"""Promise: who evaluates the global model is a matter of speed, and of nothing else."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fl_dist.config import Topology, load
from fl_dist.engine import client, evaluate, tape, worker
from fl_dist.engine.clock import Clock
from fl_dist.engine.evaluate import Choice, Evaluator, Sums
from fl_dist.engine.outcome import later
from fl_dist.engine.tape import Tape
from fl_dist.engine.world import World
from fl_dist.machine.comm import Alone
from fl_dist.main import main
from tests.support.processes import QUIET
from tests.support.run_folder import metrics

SMALL = (*QUIET, "rounds=3", "clients={total: 6, per_round: 4}", "local={epochs: 1, batch_size: 10, lr: 0.05}")
ALONE, TOGETHER = False, True


@pytest.mark.parametrize(
    ("where", "ranks", "seen", "beside", "expected"),
    [
        ("server", 8, [(ALONE, 9.0)] * 2, 0.0, False),
        ("workers", 8, [], 100.0, True),
        ("workers", 1, [], 0.0, False),
        ("auto", 1, [(ALONE, 9.0)] * 2, 0.0, False),
        ("auto", 8, [], 0.0, False),  # nothing is known
        ("auto", 8, [(ALONE, 90.0)], 0.0, False),  # the first brings the rows to the device
        ("auto", 8, [(ALONE, 90.0), (ALONE, 8.0)], 0.0, True),  # 1 s and 0.5 s of sending
        ("auto", 8, [(ALONE, 90.0), (ALONE, 8.0)], 9.0, False),  # beside training it costs nothing
        ("auto", 8, [(ALONE, 90.0), (ALONE, 8.0)], 6.0, True),  # 1.5 s instead of 2 s
        ("auto", 8, [(ALONE, 90.0), (ALONE, 8.0)], 7.0, False),  # 1.5 s instead of 1 s
        ("auto", 8, [(ALONE, 90.0), (ALONE, 8.0)], -3.0, True),
        ("auto", 2, [(ALONE, 0.9), (ALONE, 0.8)], 0.0, False),  # 0.4 s and 0.5 s of sending
        ("auto", 8, [(ALONE, 9.0), (ALONE, 8.0), (TOGETHER, 50.0)], 0.0, True),  # rows again
        ("auto", 8, [(ALONE, 9.0), (ALONE, 8.0), (TOGETHER, 50.0), (TOGETHER, 9.0)], 0.0, False),
        ("auto", 8, [(ALONE, 9.0), (ALONE, 80.0), (TOGETHER, 2.0), (TOGETHER, 1.0)], 7.5, False),  # 80 s was a hiccup
    ],
)
def test_measured_times_decide_who_evaluates(
    where: str, ranks: int, seen: list[tuple[bool, float]], beside: float, expected: bool
) -> None:
    choice = Choice(where, ranks)
    for together, seconds in seen:
        choice.observe(together, seconds)
    assert choice.together(beside, send=0.5) is expected


@given(
    alone=st.floats(0.01, 100),
    together=st.floats(0.01, 100),
    beside=st.floats(0, 100),
    send=st.floats(0, 10),
    ranks=st.integers(2, 64),
)
def test_a_choice_costs_at_most_two_evaluations_by_all_ranks(
    alone: float, together: float, beside: float, send: float, ranks: int
) -> None:
    """Against a server that evaluates alone, whatever the two really take."""
    choice, held_up, waits = Choice("auto", ranks), 0.0, max(0.0, alone - beside)
    for _ in range(50):
        spread = choice.together(beside, send)
        choice.observe(spread, together if spread else alone)
        held_up += together if spread else waits
    assert held_up <= 50 * waits + 2 * together + 1e-9


def test_a_device_that_hangs_at_the_last_look_is_at_an_evaluation(tmp_path: Path) -> None:
    """A GPU is given all batches in no time: what it does with them shows when their sums are read."""
    said, seen, means = [""], list[str](), Sums.means

    def looked(self: Sums) -> dict[str, float]:
        seen.append(said[-1])
        return means(self)

    with (
        mock.patch.object(Alone, "doing", lambda self, what: said.append(what)),
        mock.patch.object(Sums, "means", looked),
    ):
        assert main([*QUIET, "rounds=2", "clients={total: 4, per_round: 1}", f"run.dir={tmp_path}"]) == 0
    assert seen == ["the evaluation of round 1", "the evaluation of round 2"] and said[-1] == ""


def test_so_it_is_when_all_ranks_evaluate() -> None:
    said, seen = [""], list[str]()
    comm = Alone(Topology(device="cpu"))
    world = World(load(None, [*QUIET]), comm.device)
    waits = mock.patch.object(evaluate, "settle", return_value=lambda: seen.append(said[-1]))
    with mock.patch.object(comm, "doing", said.append), waits:
        found = Evaluator(world, comm).together(world.initial.clone(), world.initial_buffers, 7)
    assert found.keys() >= {"test_loss", "test_accuracy"}
    assert (seen, said) == (["the evaluation of round 7"], ["", "the evaluation of round 7", ""])


def test_sums_of_several_ranks_are_those_of_one() -> None:
    values, names = torch.randn(30, dtype=torch.float64) * 1e6, ["a", "b"]
    whole, *shares = (Sums(torch.device("cpu")) for _ in range(4))
    for k, piece in enumerate(values.split(7)):
        whole.add({"a": piece, "b": piece.exp()})
        shares[k % 2].add({"a": piece, "b": piece.exp()})
    assert torch.equal(sum(share.table(names) for share in shares), whole.table(names))
    assert whole.table(["a"])[-1].tolist() == [1, 1, 1, 1], "one name has no row"


@pytest.mark.parametrize("held", [0, 5, 17, 2**16])
def test_sums_do_not_depend_on_when_they_are_made(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "HELD", held)
    values, sums = torch.randn(30, dtype=torch.float64) * 1e6, Sums(torch.device("cpu"))
    for k, piece in enumerate(values.split(7)):
        sums.add({"a": piece, "hits": piece > 0} | ({"late": piece} if k > 2 else {}))
        assert sum(len(v) for values in sums._held.values() for v in values) <= held
    assert sums.names == ["a", "hits", "late"]
    exact = {"a": math.fsum(values) / 30, "hits": int((values > 0).sum()) / 30, "late": math.fsum(values[21:]) / 9}
    assert sums.means() == pytest.approx(exact, rel=1e-12, abs=1e-9)


@contextlib.contextmanager
def hands() -> Iterator[Callable[[float], None]]:
    """Moves those of the clock."""
    now = 0.0

    def go(seconds: float) -> None:
        nonlocal now
        now += seconds

    with mock.patch("time.perf_counter", side_effect=lambda: now):
        yield go


class TestSeconds:
    def test_a_part_ends_when_the_device_has_done_it(self) -> None:
        with hands() as go:
            clock = Clock(settle=lambda: go(5.0))
            for part in ("broadcast", "checkpoint", "local", "reduce", "server"):
                with clock(part):
                    go(1.0)
            seconds = clock.read(local=6.0)
        assert (seconds["broadcast"], seconds["checkpoint"]) == (1.0, 1.0)  # transfers beside training go on
        assert (seconds["reduce"], seconds["server"], seconds["total"]) == (6.0, 6.0, 20.0)

    def test_an_evaluation_by_all_ranks_is_no_wait_of_the_server(self) -> None:
        with hands() as go:
            clock = Clock()
            with clock("evaluate"):
                go(4.0)
            with clock("reduce"):
                go(10.0)
            seconds = clock.read(local=9.0)
        assert (seconds["reduce"], seconds["evaluate"], seconds["total"]) == (1.0, 0.0, 14.0)

    def test_those_of_a_client_end_after_its_last_read_from_the_device(self, tmp_path: Path) -> None:
        late, real, length = 0.0, time.perf_counter, worker.length

        def read(vector: Tensor) -> Tensor:
            nonlocal late
            late += 1000.0
            return length(vector)

        watch = mock.Mock(perf_counter=lambda: real() + late)
        with mock.patch.object(worker, "length", read), mock.patch.object(client, "time", watch):
            assert main([*SMALL, "model=mlp", "rounds=1", f"run.dir={tmp_path}"]) == 0
        assert 4000 < metrics(tmp_path)[0]["workers"]["0"]["busy"] < 4100

    def test_what_is_copied_for_diagnostics_is_no_part_of_the_round(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late, real, copied = 0.0, time.perf_counter, Tape._copied

        def slow(tape: Tape, vector: Tensor) -> Tensor:
            nonlocal late
            late += 1000.0
            tape.seconds += 1000.0
            return copied(tape, vector)

        monkeypatch.setattr(Tape, "_copied", slow)
        monkeypatch.setattr(time, "perf_counter", lambda: real() + late)
        words = ["model=mlp", "rounds=1", "diagnostics={flatness_distance: {every: 1}}", f"run.dir={tmp_path}"]
        assert main([*SMALL, *words]) == 0
        seconds = metrics(tmp_path)[0]["seconds"]
        assert 4000 < seconds.pop("diagnostics") < 4100
        assert max(seconds.values()) < 100

    def test_only_the_last_worker_holds_a_round_up(self) -> None:
        trained = {7: {"seconds": 5.0, "copied": 3.0}, 8: {"seconds": 7.0, "copied": 0.5}, 9: {"copied": 1.0}}
        workers = {1: {"busy": 5.0}, 2: {"busy": 7.0}}
        assert later(workers, {7: 1, 8: 2, 9: 1}, trained) == 2.0
        assert later(workers, {7: 2, 8: 2, 9: 1}, trained) == 3.5

    def test_a_copy_is_not_charged_for_what_the_device_has_to_do_first(self) -> None:
        vector, waiting = mock.Mock(), [5.0]
        with hands() as go, mock.patch.object(tape, "settle", return_value=lambda: go(waiting.pop())):
            vector.detach().to.side_effect = lambda *_, **__: go(sum(waiting, 2.0))
            kept = Tape(["ends"])
            kept.arrived(vector)
        assert kept.seconds == 2.0
