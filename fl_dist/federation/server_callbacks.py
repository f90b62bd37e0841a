"""The built-in callbacks that need the workers' help: checkpoints, evaluation, diagnostics."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fl_dist.callbacks.base import Callback, RunContext
from fl_dist.common.vector_math import summarize_clients
from fl_dist.diagnostics import ScheduledDiagnostic
from fl_dist.federation.commands import Action, Command, EvaluatedModel, SaveScope
from fl_dist.federation.evaluation import EvaluationPlacement, Evaluator, Measured
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.loss_oracle import LossOracle
from fl_dist.federation.round_diagnostics import (
    StepHistory,
    diagnostic_context,
    pop_step_history,
    requirements_of,
    run_diagnostics,
)
from fl_dist.federation.round_records import PendingRecord
from fl_dist.federation.server import Server
from fl_dist.metrics.record import VALIDATION, RoundRecord
from fl_dist.metrics.summary import Summary
from fl_dist.storage.checkpoint import CheckpointFailedError
from fl_dist.storage.checkpoint_manager import CheckpointManager
from fl_dist.storage.checkpoint_writer import CheckpointWriter
from fl_dist.storage.run_folder import RunFolder


class NextRound(NamedTuple):
    """What is known when the command for a round is made up."""

    round_index: int
    is_interrupted: bool
    pending: PendingRecord | None
    """Of the last round, which may still have to be evaluated."""
    publishes_server_model: bool
    """Whether clients start from the server's model itself."""


class ServerCallback(Callback):
    """Beside the hooks of every callback: it may add to the next command, and to the record before others see it."""

    def on_command(self, command: Command, upcoming: NextRound) -> Command:
        return command

    def complete(self, pending: PendingRecord, is_last: bool) -> None:
        """Before other callbacks see the record; `is_last`: no round of the run follows."""


class Checkpoints(ServerCallback):
    """Decides what is saved when; a thread of each rank writes it."""

    def __init__(self, experiment: Experiment, folder: RunFolder, writer: CheckpointWriter, last_saved: int) -> None:
        assert writer.manager is not None
        self._config, self._folder, self._writer = experiment.config, folder, writer
        self._manager: CheckpointManager = writer.manager
        self._last_saved = last_saved

    def on_command(self, command: Command, upcoming: NextRound) -> Command:
        is_last = command.action is Action.STOP
        is_busy = self._writer.is_busy  # asked first: a writer that is done has left its result
        acknowledged, is_committed = self._manager.pop_result()
        if not is_committed:
            self._last_saved = self._manager.committed_round
        if self._manager.unrecoverable_error:
            raise CheckpointFailedError(self._manager.unrecoverable_error)
        # The last save waits for the previous one in its own thread, not here, where the other ranks would wait too.
        is_saving = self._is_due(upcoming, is_last) and (is_last or not is_busy)
        save = SaveScope.NOTHING
        if is_saving:
            self._folder.lock.check()
            self._last_saved = upcoming.round_index
            save = SaveScope.EVERYTHING if self._manager.has_missing_files else SaveScope.CHANGED
        return command._replace(save=save, acknowledged=acknowledged, is_committed=is_committed)

    def _is_due(self, upcoming: NextRound, is_last: bool) -> bool:
        every, unsaved = self._config.checkpoint.every, upcoming.round_index - self._last_saved
        if every > 0 and unsaved >= (1 if is_last else every):
            return True
        # A run that is interrupted can be resumed, even if it makes no checkpoints.
        return upcoming.is_interrupted and unsaved > 0 and upcoming.round_index < self._config.rounds

    def on_run_end(self, summary: Summary, context: RunContext) -> None:
        manager = self._manager
        if not summary["finished"] and manager.last_error:
            raise CheckpointFailedError(f"interrupted, and the run could not be saved: {manager.last_error}")
        if summary["finished"] and manager.failed_count and not manager.committed_count:
            raise CheckpointFailedError(f"the model is written, but no checkpoint could be: {manager.last_error}")


class Evaluation(ServerCallback):
    """Evaluates the model of a round: rank 0 alone while others train, or all ranks before they do."""

    def __init__(self, server: Server, evaluator: Evaluator) -> None:
        self._config, self._server, self._evaluator = server.experiment.config, server, evaluator
        where = evaluator.share.evaluator(self._config.evaluate.where)
        self._placement = EvaluationPlacement(where, evaluator.group.size)

    def on_command(self, command: Command, upcoming: NextRound) -> Command:
        pending = upcoming.pending
        if pending is None or not self._is_due(pending.round, command.is_finished):
            return command
        record = pending.record
        idle = record.seconds.local - (record.workers["0"].busy or 0.0)
        if not self._placement.uses_all_ranks(idle, record.seconds.broadcast):
            return command
        own = upcoming.publishes_server_model
        return command._replace(evaluate=EvaluatedModel.PUBLISHED if own else EvaluatedModel.SERVER)

    def _is_due(self, round_number: int, is_last: bool) -> bool:
        return is_last or round_number % self._config.evaluate.every == 0 or round_number == self._config.rounds

    def add(self, record: RoundRecord, measured: Measured, seconds: float, ranks: int) -> RoundRecord:
        """What so many ranks measured in so many seconds."""
        self._placement.observe(ranks > 1, seconds)
        metrics = {name: float(value) for name, value in measured.metrics.items()}
        best_is = self._server.experiment.task.primary_metric.best
        spread = summarize_clients(measured.clients, best_is) if measured.clients else {}
        validation = {f"{VALIDATION}{name}": value for name, value in spread.items() if name != "worst"}
        return record.with_test(metrics, validation, seconds, ranks)

    def complete(self, pending: PendingRecord, is_last: bool) -> None:
        if not self._is_due(pending.round, is_last) or pending.record.is_evaluated:
            return
        began = time.perf_counter()
        measured = self._evaluator.evaluate_alone(self._server.vars.x, self._server.buffers, pending.round)
        pending.record = self.add(pending.record, measured, time.perf_counter() - began, ranks=1)


class Diagnostics(ServerCallback):
    """Measures the round that was just made, by all ranks; the seconds are no part of the round's."""

    def __init__(self, server: Server) -> None:
        self._server = server
        needed = "previous step" in requirements_of(server.experiment.diagnostics)
        self._history = StepHistory() if needed else None
        self._before: Tensor | None = None

    def restore(self, tensors: dict[str, Tensor]) -> None:
        last = pop_step_history(tensors, self._server.experiment.device)
        if self._history is not None:
            self._history.last = last

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it."""
        return {} if self._history is None else self._history.tensors()

    def before_step(self) -> None:
        if self._history is not None:
            self._before = self._server.vars.x.clone()

    def after_step(self) -> None:
        if self._history is not None and self._before is not None:
            self._history.add(step=self._server.vars.x - self._before, update=self._server.update.clone())
            self._before = None

    def measure(
        self,
        due: Sequence[ScheduledDiagnostic],
        record: RoundRecord,
        oracle: LossOracle,
        start: Tensor,
        delay: float,
    ) -> RoundRecord:
        """`start`: the model that clients received; `delay`: seconds that recording took in training."""
        began = time.perf_counter()
        history = self._history or StepHistory()
        context = diagnostic_context(self._server, oracle, start, history, record.round)
        values = run_diagnostics(due, context, record.round)
        return record.with_diagnostics(values, delay + time.perf_counter() - began)
