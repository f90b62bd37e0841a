"""Diagnostics of an existing run: of its model, and of the round that would come next, trained and then dropped."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_dist.diagnostics import ScheduledDiagnostic
from fl_dist.distributed.host_transfer import HostTransfer
from fl_dist.distributed.process_group import ProcessGroup
from fl_dist.federation.client_state import ClientStateStore, ReadClient
from fl_dist.federation.commands import Action, Command
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.loss_oracle import LossOracle
from fl_dist.federation.oracle_worker import OracleWorker
from fl_dist.federation.round_diagnostics import (
    StepHistory,
    diagnostic_context,
    pop_step_history,
    requirements_of,
    run_diagnostics,
)
from fl_dist.federation.server import Server
from fl_dist.federation.trajectory_recorder import RecordedVectors, TrajectoryRecorder
from fl_dist.federation.worker import Worker, build_messages

NO_ROUND = {"train_client", "validation rows"}
"""Requirements that need no round of training."""
Measurement = dict[str, Any]
"""label, round, seconds and values of a diagnostic."""


class PostHocDiagnostics:
    """The same on every rank; rank 0 has the numbers."""

    def __init__(
        self,
        experiment: Experiment,
        group: ProcessGroup,
        rounds: int,
        tensors: dict[str, Tensor],
        read_client: ReadClient,
    ) -> None:
        """`rounds`: those of the run; `tensors`: the server's variables after them, `buffers` among them."""
        self.experiment, self.group, self.rounds, self._read_client = experiment, group, rounds, read_client
        self.server = Server(experiment, list(group.workers), experiment.pop_server_vars())
        self._history = StepHistory(pop_step_history(tensors, experiment.device))
        self.server.restore(tensors)

    def measure(self, due: list[ScheduledDiagnostic], spill_folder: Path) -> list[Measurement]:
        """Those of the model alone, then those of a round; the run folder is only read."""
        of_model = [scheduled for scheduled in due if not requirements_of([scheduled]) - NO_ROUND]
        of_round = [scheduled for scheduled in due if scheduled not in of_model]
        measurements: list[Measurement] = []
        if of_model:
            states = ClientStateStore(
                self.experiment.template, self.group.rank, self.group.collectives, self._read_client
            )
            measurements += self._measure(of_model, self.rounds, states, [], [], {}, self.server.vars.x)
        if of_round:
            measurements += self._measure_next_round(of_round, spill_folder)
        return measurements

    def _measure_next_round(self, due: list[ScheduledDiagnostic], spill_folder: Path) -> list[Measurement]:
        experiment, group, server = self.experiment, self.group, self.server
        index = self.rounds if experiment.schedule is None else min(self.rounds, len(experiment.schedule) - 1)
        cohort = experiment.cohort(index)
        worker = Worker(experiment, group, self._read_client, spill_folder, HostTransfer(group.device))
        down, up = build_messages(experiment, group.size)
        if group.rank == 0:
            published, assignment = server.publish(index, len(cohort)), server.assign(cohort, {})
            down.write(Command(Action.TRAIN), published, server.buffers, assignment)
        group.collectives.broadcast(down.buffer)
        _, assignment = down.read()
        worker.recorder = recorder = TrajectoryRecorder(requirements_of(due))
        worker.run(index, assignment, down, up)
        up.copy_reports()
        group.collectives.reduce(up.buffer)
        updates = worker.gather(assignment, down.vars.x, up)
        trained: list[int] = []
        if group.rank == 0:
            before, (reports, _) = server.vars.x.clone(), up.read_reports()
            trained = list(server.step(index, assignment, reports, up, updates).trained)
            self._history.add(step=server.vars.x - before, update=server.update)
        return self._measure(due, self.rounds + 1, worker.states, cohort, trained, recorder.records, down.vars.x)

    def _measure(
        self,
        due: list[ScheduledDiagnostic],
        round_: int,
        states: ClientStateStore,
        cohort: list[int],
        trained: list[int],
        recorded: Mapping[int, RecordedVectors],
        start: Tensor,
    ) -> list[Measurement]:
        worker, measurements = OracleWorker(self.experiment, self.group, states), list[Measurement]()
        worker.open(self.server.buffers if self.group.rank == 0 else None, cohort, recorded)
        if self.group.rank:
            worker.serve()
        else:
            oracle = LossOracle(worker, trained)
            for scheduled in due:
                began = time.perf_counter()
                context = diagnostic_context(self.server, oracle, start, self._history, round_)
                values = run_diagnostics([scheduled], context, round_)[scheduled.label]
                seconds = round(time.perf_counter() - began, 6)
                measurements.append({"round": round_, "label": scheduled.label, "values": values, "seconds": seconds})
            oracle.end()
        worker.close()
        return measurements
