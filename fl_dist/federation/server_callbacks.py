"""Callbacks that need the workers' help: what they are, checkpoints and evaluation."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fl_dist.callbacks.base import Callback, RunContext
from fl_dist.common.vector_math import summarize_clients
from fl_dist.config import Config
from fl_dist.diagnostics import ScheduledDiagnostic
from fl_dist.federation.commands import Action, Command, EvaluatedModel, SaveScope
from fl_dist.federation.evaluation import EvaluationPlacement, EvaluationResult, Evaluator
from fl_dist.federation.loss_oracle import LossOracle
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


class TrainedRound(NamedTuple):
    """What diagnostics may ask of a round."""

    oracle: LossOracle
    received: Tensor
    """The model that clients received."""
    recording_seconds: float
    """Which recording took in training."""


class ServerCallback(Callback):
    """Beside the hooks of every callback, those of rank 0 between two rounds. Every hook is optional."""

    def on_command(self, command: Command, upcoming: NextRound) -> Command:
        """The next command, with what this callback adds to it."""
        return command

    def on_evaluation(self, pending: PendingRecord, result: EvaluationResult, seconds: float) -> None:
        """All ranks have evaluated the model of the record, because the command said so."""

    def before_step(self) -> None:
        """Before the server step."""

    def after_step(self) -> None:
        """After the server step."""

    def on_diagnostics(self, pending: PendingRecord, due: Sequence[ScheduledDiagnostic], round_: TrainedRound) -> None:
        """All ranks wait for questions about the round that was just made."""

    def complete(self, pending: PendingRecord, is_last: bool) -> None:
        """Before other callbacks see the record; `is_last`: no round of the run follows."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this callback."""
        return {}

    def pop_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take what `tensors` returned out of those of a checkpoint."""


class Checkpoints(ServerCallback):
    """Decides what is saved when; a thread of each rank writes it."""

    def __init__(self, config: Config, folder: RunFolder, writer: CheckpointWriter, last_saved: int) -> None:
        assert writer.manager is not None
        self._config, self._folder, self._writer = config, folder, writer
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
        where = evaluator.share.choose_evaluator(self._config.evaluate.where)
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

    def on_evaluation(self, pending: PendingRecord, result: EvaluationResult, seconds: float) -> None:
        pending.record = self._add(pending.record, result, seconds, self._evaluator.group.size)

    def _add(self, record: RoundRecord, result: EvaluationResult, seconds: float, ranks: int) -> RoundRecord:
        """What so many ranks measured in so many seconds."""
        self._placement.observe(ranks > 1, seconds)
        metrics = {name: float(value) for name, value in result.metrics.items()}
        best_is = self._server.experiment.task.primary_metric.best
        spread = summarize_clients(result.clients, best_is) if result.clients else {}
        validation = {f"{VALIDATION}{name}": value for name, value in spread.items() if name != "worst"}
        return record.with_test(metrics, validation, seconds, ranks)

    def complete(self, pending: PendingRecord, is_last: bool) -> None:
        if not self._is_due(pending.round, is_last) or pending.record.is_evaluated:
            return
        began = time.perf_counter()
        result = self._evaluator.evaluate_alone(self._server.vars.x, self._server.buffers, pending.round)
        pending.record = self._add(pending.record, result, time.perf_counter() - began, ranks=1)
