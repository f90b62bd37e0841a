"""The loop: plan, broadcast, local training, reduce, server step; evaluation and saving beside the next round."""

from fl_dist.callbacks.base import NO_CALLBACKS, CallbackList
from fl_dist.diagnostics import ScheduledDiagnostic
from fl_dist.distributed import fault_injection
from fl_dist.distributed.devices import synchronizer
from fl_dist.distributed.host_transfer import HostTransfer
from fl_dist.distributed.memory import AllocationMonitor, peak_device_bytes, resident_bytes
from fl_dist.distributed.process_group import ProcessGroup
from fl_dist.distributed.signals import StopRequest
from fl_dist.federation.client_state import client_reader
from fl_dist.federation.commands import Action, Command, EvaluatedModel, SaveScope
from fl_dist.federation.evaluation import Evaluator
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.oracle_worker import OracleWorker
from fl_dist.federation.round_diagnostics import requirements_of
from fl_dist.federation.round_timer import RoundTimer
from fl_dist.federation.server import Server
from fl_dist.federation.server_loop import ServerLoop
from fl_dist.federation.trajectory_recorder import TrajectoryRecorder
from fl_dist.federation.uplink import RankReport
from fl_dist.federation.worker import Worker, build_messages
from fl_dist.storage.checkpoint import Checkpoint
from fl_dist.storage.checkpoint_manager import CheckpointManager
from fl_dist.storage.checkpoint_writer import CheckpointWriter
from fl_dist.storage.run_folder import RunFolder


def train(
    experiment: Experiment,
    group: ProcessGroup,
    folder: RunFolder,
    start: Checkpoint | None,
    stop: StopRequest,
    callbacks: CallbackList,
) -> bool:
    """Run the remaining rounds. False if a signal ended the run before its last one."""
    loop = TrainingLoop(experiment, group, folder, start, stop, callbacks)
    index = start.manifest.round if start else 0
    try:
        while loop.run_round(index):
            index += 1
        loop.finish()
        return loop.is_finished
    finally:
        loop.close()


class TrainingLoop:
    """What one rank holds from round to round."""

    def __init__(
        self,
        experiment: Experiment,
        group: ProcessGroup,
        folder: RunFolder,
        start: Checkpoint | None,
        stop: StopRequest,
        callbacks: CallbackList = NO_CALLBACKS,
    ) -> None:
        self.experiment, self.group, self.stop, self.is_finished = experiment, group, stop, False
        self.timer, self._allocations = RoundTimer(synchronizer(group.device)), AllocationMonitor(group.device)
        transfer, self.evaluator = HostTransfer(group.device), Evaluator(experiment, group)
        run_id, server_vars = folder.info.id, experiment.pop_server_vars()
        root, has_state, keep = folder.checkpoints, bool(experiment.template), experiment.config.checkpoint.keep
        manager = CheckpointManager(root, run_id, keep, start, folder.mark_has_checkpoint) if group.rank == 0 else None
        self.writer = CheckpointWriter(root, group, run_id, manager, transfer, has_state)
        self.worker = Worker(experiment, group, client_reader(root, start), folder.path, transfer)
        self.down, self.up = build_messages(experiment, group.size)
        self.oracle_worker = OracleWorker(experiment, group, self.worker.states)
        self.server_loop: ServerLoop | None = None
        """On rank 0."""
        if group.rank == 0:
            server = Server(experiment, list(group.workers), server_vars)
            self.server_loop = ServerLoop(  # last: it begins what has to be closed
                experiment, group, folder, server, self.writer, self.timer, self.evaluator, start, callbacks
            )

    def close(self) -> None:
        """At the end of an attempt, also after an error."""
        try:
            if self.server_loop is not None:
                self.server_loop.close()
        finally:
            self.writer.close()

    def run_round(self, index: int) -> bool:
        """One round; False if, instead, the server said that the run ends here."""
        with self.timer("broadcast"):
            if self.server_loop is not None:
                self.server_loop.write_command(index, self.worker.states.owners, self.down)
            self.group.collectives.broadcast(self.down.buffer)
        command, assignment = self.down.read()
        if command.action is Action.TRAIN:
            self.group.failure_detector.begin_round(index, assignment)
        with self.timer("checkpoint"):
            self._save(index, command)
        if command.evaluate is not EvaluatedModel.NONE:
            self._evaluate(index, command.evaluate)
        if command.action is Action.STOP:
            self.is_finished = command.is_finished
            self.group.failure_detector.disarm()
            return False
        if self.server_loop is not None:
            self.server_loop.report_pending()
            if self.group.has_dedicated_server:
                self.server_loop.sample_cohort(index + 1)  # while others train
        self._train(index, assignment)
        return True

    def _train(self, index: int, assignment: dict[int, int]) -> None:
        """Local training, the reduce, the server step and, if some are due, diagnostics."""
        due = [scheduled for scheduled in self.experiment.diagnostics if scheduled.is_due(index)]
        self.worker.recorder = TrajectoryRecorder(requirements_of(due)) if due else None
        with self.timer("local"):
            self.worker.run(index, assignment, self.down, self.up)
        self._allocations.check()
        memory = resident_bytes(), peak_device_bytes(self.group.device)
        self.up.report_rank(self.group.rank, RankReport(int(self.stop.is_requested), *memory))
        self.up.copy_reports()
        with self.timer("reduce"):
            fault_injection.point("reduce")
            self.group.collectives.reduce(self.up.buffer)
            updates = self.worker.gather(assignment, self.down.vars.x, self.up)
        if self.server_loop is not None:
            self.server_loop.step(index, assignment, self.up, updates)
        if due:
            self._diagnose(due, list(assignment))

    def _evaluate(self, index: int, which: EvaluatedModel) -> None:
        """All ranks evaluate the model after `index` rounds."""
        with self.timer("evaluate"):
            x = self.down.vars.x
            if which is EvaluatedModel.SERVER:
                # Local training begins by overwriting its vector, which so has room for another model.
                x = self.experiment.model.vector if self.server_loop is None else self.server_loop.server.vars.x
                self.group.collectives.broadcast(x)
            result = self.evaluator.evaluate_together(x, self.down.buffers, index)
        if self.server_loop is not None:
            self.server_loop.add_evaluation(result, self.timer.phases["evaluate"])

    def _diagnose(self, due: list[ScheduledDiagnostic], cohort: list[int]) -> None:
        """All ranks measure before the next round begins or a checkpoint is made, which then holds the numbers."""
        assert self.worker.recorder is not None
        buffers = None if self.server_loop is None else self.server_loop.server.buffers
        self.oracle_worker.open(buffers, cohort, self.worker.recorder.records)
        if self.server_loop is None:
            self.oracle_worker.serve()
        else:
            self.server_loop.diagnose(due, self.oracle_worker, self.down.vars.x)
        self.oracle_worker.close()
        self.worker.recorder = None

    def _save(self, index: int, command: Command) -> None:
        """Acknowledge the result of the last checkpoint, and begin one of the state after `index` rounds if ordered."""
        states = self.worker.states
        if command.acknowledged:
            states.acknowledge(command.acknowledged, command.is_committed)
            if not command.is_committed:
                self.writer.discard(command.acknowledged)
        if command.save is not SaveScope.NOTHING:
            is_last = command.action is Action.STOP
            if is_last:
                states.requeue_pending()
            clients = states.collect_dirty(index, everything=command.save is SaveScope.EVERYTHING)
            server, extra = (None, {}) if self.server_loop is None else self.server_loop.snapshot()
            self.writer.start(index, clients, server, extra, is_last)

    def finish(self) -> None:
        self.writer.join()
        if self.server_loop is not None:
            self.server_loop.finish(self.stop)
