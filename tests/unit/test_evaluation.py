"""Promise: which ranks evaluate the global model affects only speed."""

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
from torch import Tensor, nn

from fl_dist.config import Topology, load
from fl_dist.distributed.failure_detector import FailureDetector
from fl_dist.distributed.process_group import single_process_group
from fl_dist.federation import evaluation, local_training, metric_sums, trajectory_recorder, worker
from fl_dist.federation.evaluation import EvaluationPlacement, Evaluator, MetricSums
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.round_records import recording_delay, worker_loads
from fl_dist.federation.round_timer import RoundTimer
from fl_dist.federation.trajectory_recorder import TrajectoryRecorder
from fl_dist.federation.uplink import ClientReport
from fl_dist.main import main
from tests.support.processes import NO_WANDB
from tests.support.run_folder import read_records

SMALL = (*NO_WANDB, "rounds=3", "clients={total: 6, per_round: 4}", "local={epochs: 1, batch_size: 10, lr: 0.05}")
SERVER_ONLY, ALL_RANKS = False, True


@pytest.mark.parametrize(
    ("where", "ranks", "observations", "local_seconds", "expected"),
    [
        ("server", 8, [(SERVER_ONLY, 9.0)] * 2, 0.0, False),
        ("workers", 8, [], 100.0, True),
        ("workers", 1, [], 0.0, False),
        ("auto", 1, [(SERVER_ONLY, 9.0)] * 2, 0.0, False),
        ("auto", 8, [], 0.0, False),  # nothing is measured yet
        ("auto", 8, [(SERVER_ONLY, 90.0)], 0.0, False),  # the first copies the rows to the device
        ("auto", 8, [(SERVER_ONLY, 90.0), (SERVER_ONLY, 8.0)], 0.0, True),  # 1 s and 0.5 s for sending
        ("auto", 8, [(SERVER_ONLY, 90.0), (SERVER_ONLY, 8.0)], 9.0, False),  # during training it costs nothing
        ("auto", 8, [(SERVER_ONLY, 90.0), (SERVER_ONLY, 8.0)], 6.0, True),  # 1.5 s instead of 2 s
        ("auto", 8, [(SERVER_ONLY, 90.0), (SERVER_ONLY, 8.0)], 7.0, False),  # 1.5 s instead of 1 s
        ("auto", 8, [(SERVER_ONLY, 90.0), (SERVER_ONLY, 8.0)], -3.0, True),
        ("auto", 2, [(SERVER_ONLY, 0.9), (SERVER_ONLY, 0.8)], 0.0, False),  # 0.4 s and 0.5 s for sending
        ("auto", 8, [(SERVER_ONLY, 9.0), (SERVER_ONLY, 8.0), (ALL_RANKS, 50.0)], 0.0, True),  # copies the rows again
        ("auto", 8, [(SERVER_ONLY, 9.0), (SERVER_ONLY, 8.0), (ALL_RANKS, 50.0), (ALL_RANKS, 9.0)], 0.0, False),
        (
            "auto",
            8,
            [(SERVER_ONLY, 9.0), (SERVER_ONLY, 80.0), (ALL_RANKS, 2.0), (ALL_RANKS, 1.0)],
            7.5,
            False,
        ),  # 80 s was an outlier
    ],
)
def test_measured_times_decide_which_ranks_evaluate(
    where: str, ranks: int, observations: list[tuple[bool, float]], local_seconds: float, expected: bool
) -> None:
    choice = EvaluationPlacement(where, ranks)
    for together, seconds in observations:
        choice.observe(together, seconds)
    assert choice.uses_all_ranks(local_seconds, send=0.5) is expected


@given(
    alone=st.floats(0.01, 100),
    together=st.floats(0.01, 100),
    local_seconds=st.floats(0, 100),
    send=st.floats(0, 10),
    ranks=st.integers(2, 64),
)
def test_the_choice_costs_at_most_two_evaluations_by_all_ranks(
    alone: float, together: float, local_seconds: float, send: float, ranks: int
) -> None:
    """Compared with a server that evaluates alone, for any true durations."""
    choice, delay, waits = EvaluationPlacement("auto", ranks), 0.0, max(0.0, alone - local_seconds)
    for _ in range(50):
        use_all = choice.uses_all_ranks(local_seconds, send)
        choice.observe(use_all, together if use_all else alone)
        delay += together if use_all else waits
    assert delay <= 50 * waits + 2 * together + 1e-9


@contextlib.contextmanager
def record_activity(running: list[str], name: str) -> Iterator[None]:
    """An activity that is in the list while it runs."""
    running.append(name)
    yield
    running.remove(name)


def test_a_hang_at_the_final_read_is_reported_as_evaluation(tmp_path: Path) -> None:
    """A GPU queues all batches at once; a hang appears only when the sums are read."""
    running, activities, means = list[str](), list[str](), MetricSums.means

    def record_and_read(self: MetricSums) -> dict[str, float]:
        activities.append(running[-1])
        return means(self)

    with (
        mock.patch.object(FailureDetector, "activity", lambda self, name: record_activity(running, name)),
        mock.patch.object(MetricSums, "means", record_and_read),
    ):
        assert main([*NO_WANDB, "rounds=2", "clients={total: 4, per_round: 1}", f"run.dir={tmp_path}"]) == 0
    assert activities == ["the evaluation of round 1", "the evaluation of round 2"] and not running


def test_a_hang_with_all_ranks_evaluating_is_reported_as_evaluation() -> None:
    running, activities = list[str](), list[str]()
    group = single_process_group(Topology(device="cpu"))
    experiment = Experiment(load(None, [*NO_WANDB]), group.device)
    waits = mock.patch.object(evaluation, "synchronizer", return_value=lambda: activities.append(running[-1]))
    with mock.patch.object(group.failure_detector, "activity", lambda name: record_activity(running, name)), waits:
        measured = Evaluator(experiment, group).evaluate_together(
            experiment.initial.clone(), experiment.initial_buffers, 7
        )
    assert measured.metrics.keys() >= {"loss", "accuracy"}
    assert (activities, running) == (["the evaluation of round 7"], [])


class RecordsAutocast(nn.Linear):
    modes = set[tuple[bool, bool]]()
    """Whether it was training, and whether in bfloat16."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(torch.Size(shape).numel(), outputs)

    def forward(self, x: Tensor) -> Tensor:
        self.modes.add((self.training, torch.is_autocast_enabled("cpu")))
        return super().forward(x.flatten(1))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_run_is_evaluated_in_the_precision_of_training(precision: str) -> None:
    model = "model=tests.unit.test_evaluation:RecordsAutocast"
    experiment = Experiment(load(None, [*NO_WANDB, model, f"local.precision={precision}"]), torch.device("cpu"))
    RecordsAutocast.modes.clear()  # of the check of the model
    group = single_process_group(Topology(device="cpu"))
    Evaluator(experiment, group).evaluate_alone(experiment.initial.clone(), experiment.initial_buffers, 1)
    assert RecordsAutocast.modes == {(False, precision == "bf16")}


def test_sums_of_several_ranks_equal_those_of_one() -> None:
    values, names = torch.randn(30, dtype=torch.float64) * 1e6, ["a", "b"]
    total, *shares = (MetricSums(torch.device("cpu")) for _ in range(4))
    for k, piece in enumerate(values.split(7)):
        total.add({"a": piece, "b": piece.exp()})
        shares[k % 2].add({"a": piece, "b": piece.exp()})
    assert torch.equal(sum(share.table(names) for share in shares), total.table(names))
    assert total.table(["a"])[-1].tolist() == [1, 1, 1, 1], "a missing name has no row"


@pytest.mark.parametrize("max_pending", [0, 5, 17, 2**16])
def test_sums_do_not_depend_on_when_they_are_flushed(max_pending: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_sums, "MAX_PENDING", max_pending)
    values, sums = torch.randn(30, dtype=torch.float64) * 1e6, MetricSums(torch.device("cpu"))
    for k, piece in enumerate(values.split(7)):
        sums.add({"a": piece, "hits": piece > 0} | ({"late": piece} if k > 2 else {}))
        assert sum(len(v) for values in sums._pending.values() for v in values) <= max_pending
    assert sums.names == ["a", "hits", "late"]
    exact = {"a": math.fsum(values) / 30, "hits": int((values > 0).sum()) / 30, "late": math.fsum(values[21:]) / 9}
    assert sums.means() == pytest.approx(exact, rel=1e-12, abs=1e-9)


@contextlib.contextmanager
def fake_clock() -> Iterator[Callable[[float], None]]:
    """A fake clock; yields the function that advances it."""
    now = 0.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    with mock.patch("time.perf_counter", side_effect=lambda: now):
        yield advance


class TestSeconds:
    def test_a_phase_ends_when_the_device_has_finished_it(self) -> None:
        with fake_clock() as advance:
            clock = RoundTimer(synchronize=lambda: advance(5.0))
            for part in ("broadcast", "checkpoint", "local", "reduce", "server"):
                with clock(part):
                    advance(1.0)
            seconds = clock.read().to_seconds(local=6.0)
        assert (seconds.broadcast, seconds.checkpoint) == (1.0, 1.0)  # transfers overlap with training
        assert (seconds.reduce, seconds.server, seconds.total) == (6.0, 6.0, 20.0)

    def test_an_evaluation_by_all_ranks_does_not_count_as_server_wait(self) -> None:
        with fake_clock() as advance:
            clock = RoundTimer()
            with clock("evaluate"):
                advance(4.0)
            with clock("reduce"):
                advance(10.0)
            seconds = clock.read().to_seconds(local=9.0)
        assert (seconds.reduce, seconds.evaluate, seconds.total) == (1.0, 0.0, 14.0)

    def test_a_clients_seconds_include_its_last_read_from_the_device(self, tmp_path: Path) -> None:
        offset, original_clock, original_norm = 0.0, time.perf_counter, worker.float64_norm

        def read(vector: Tensor) -> Tensor:
            nonlocal offset
            offset += 1000.0
            return original_norm(vector)

        fake_time = mock.Mock(perf_counter=lambda: original_clock() + offset)
        with mock.patch.object(worker, "float64_norm", read), mock.patch.object(local_training, "time", fake_time):
            assert main([*SMALL, "model=mlp", "rounds=1", f"run.dir={tmp_path}"]) == 0
        assert 4000 < read_records(tmp_path)[0]["workers"]["0"]["busy"] < 4100

    def test_copies_for_diagnostics_do_not_count_as_round_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offset, original_clock, original_copy = 0.0, time.perf_counter, TrajectoryRecorder._copy

        def copy_slowly(recorder: TrajectoryRecorder, vector: Tensor) -> Tensor:
            nonlocal offset
            offset += 1000.0
            recorder.seconds += 1000.0
            return original_copy(recorder, vector)

        monkeypatch.setattr(TrajectoryRecorder, "_copy", copy_slowly)
        monkeypatch.setattr(time, "perf_counter", lambda: original_clock() + offset)
        settings = ["model=mlp", "rounds=1", "diagnostics={flatness_distance: {every: 1}}", f"run.dir={tmp_path}"]
        assert main([*SMALL, *settings]) == 0
        seconds = read_records(tmp_path)[0]["seconds"]
        assert 4000 < seconds.pop("diagnostics") < 4100
        assert max(seconds.values()) < 100

    def test_only_the_slowest_worker_delays_a_round(self) -> None:
        trained = {
            7: ClientReport(seconds=5.0, recording_seconds=3.0),
            8: ClientReport(seconds=7.0, recording_seconds=0.5),
            9: ClientReport(recording_seconds=1.0),
        }
        assert recording_delay(worker_loads([1, 2], {7: 1, 8: 2, 9: 1}, trained)) == 2.0
        assert recording_delay(worker_loads([1, 2], {7: 2, 8: 2, 9: 1}, trained)) == 3.5

    def test_the_time_of_a_copy_excludes_earlier_work_of_the_device(self) -> None:
        vector, waiting = mock.Mock(), [5.0]
        with (
            fake_clock() as advance,
            mock.patch.object(trajectory_recorder, "synchronizer", return_value=lambda: advance(waiting.pop())),
        ):
            vector.detach().to.side_effect = lambda *_, **__: advance(sum(waiting, 2.0))
            recorder = TrajectoryRecorder(["ends"])
            recorder.record_end(vector)
        assert recorder.seconds == 2.0
