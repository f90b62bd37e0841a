"""Rank 0 beside the training of others: the next command, the record of each round, and the callbacks."""

import contextlib
import json
import logging
import time
from functools import partial
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fl_dist.callbacks.always_on.console import Console, write_line
from fl_dist.callbacks.always_on.metrics_writer import MetricsWriter
from fl_dist.callbacks.always_on.wandb import WandbMirror
from fl_dist.callbacks.base import Callback, CallbackList, RunContext
from fl_dist.common.files import write_atomically
from fl_dist.diagnostics import ScheduledDiagnostic
from fl_dist.distributed import fault_injection
from fl_dist.distributed.devices import device_name
from fl_dist.distributed.process_group import ProcessGroup
from fl_dist.distributed.signals import StopRequest
from fl_dist.federation.commands import Action, Command
from fl_dist.federation.downlink import Downlink
from fl_dist.federation.evaluation import EvaluationResult, Evaluator
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.loss_oracle import LossOracle
from fl_dist.federation.oracle_worker import OracleWorker
from fl_dist.federation.round_diagnostics import RoundDiagnostics
from fl_dist.federation.round_records import PendingRecord, build_record, recording_delay, worker_loads
from fl_dist.federation.round_timer import RoundTimer
from fl_dist.federation.server import Server
from fl_dist.federation.server_callbacks import Checkpoints, Evaluation, NextRound, TrainedRound
from fl_dist.federation.uplink import ClientReport, Uplink
from fl_dist.metrics.file import MetricsFile
from fl_dist.metrics.record import RoundRecord
from fl_dist.metrics.summary import Summary, server_load, summarize
from fl_dist.models import PretrainedModule
from fl_dist.storage.checkpoint import Checkpoint, read_server
from fl_dist.storage.checkpoint_writer import CheckpointWriter
from fl_dist.storage.run_folder import METRICS, MODEL, SUMMARY, RunFolder

log = logging.getLogger(__name__)


class ServerLoop:
    def __init__(
        self,
        experiment: Experiment,
        group: ProcessGroup,
        folder: RunFolder,
        server: Server,
        writer: CheckpointWriter,
        timer: RoundTimer,
        evaluator: Evaluator,
        start: Checkpoint | None,
        callbacks: CallbackList,
    ) -> None:
        """`callbacks`: those that the configuration lists."""
        self.experiment, self.group, self.folder, self.server = experiment, group, folder, server
        self.writer, self.timer = writer, timer
        self.is_interrupted = False
        """A signal asked some rank to end the run."""
        self.stop_reason = ""
        """Why a callback ended the run."""
        self.is_finished = False
        """The run is complete; the last command said so to all ranks."""
        self._pending: PendingRecord | None = None
        """Of the last round, until it was evaluated and the callbacks have seen it."""
        self._assignment: dict[int, int] = {}
        self._trained: dict[int, ClientReport] = {}
        done = 0 if start is None else start.manifest.round
        self._metrics = MetricsFile(folder.path / METRICS)
        self._server_callbacks = (
            Checkpoints(experiment.config, folder, writer, done),
            Evaluation(server, evaluator),
            RoundDiagnostics(server),
        )
        # A record is on disk before anything else shows it. At the end the order is reversed: what could not be
        # written is reported last, when all else is done.
        own = (MetricsWriter(self._metrics), Console())
        self._always_on: list[Callback] = [*self._server_callbacks, *own]
        self._listed, self._wandb = callbacks, WandbMirror()
        self.records = self._restore(start)
        self.context = RunContext(
            config=experiment.config.model_copy(deep=True),
            folder=folder.path,
            primary_metric=experiment.task.primary_metric,
            rounds_done=done,
            state_dict=server.named_model,
            request_stop=self._request_stop,
        )
        try:
            for callback in self._callbacks():
                callback.on_run_begin(self.context)
        except Exception:
            self.close()
            raise

    def _callbacks(self) -> list[Callback]:
        return [*self._always_on, self._wandb, self._listed]

    def _request_stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def _restore(self, start: Checkpoint | None) -> list[RoundRecord]:
        """What a checkpoint holds of rank 0; returned are the records that callbacks have seen."""
        if start is None:
            return self._metrics.resume(-1)
        extra = start.manifest.extra
        tensors = read_server(self.folder.checkpoints, start.manifest)
        for callback in self._server_callbacks:
            callback.pop_tensors(tensors)
        self.server.restore(tensors)
        self.server.speeds.restore(extra["speeds"])
        # Whether the round counts as evaluated is decided again: the run may have more rounds now.
        record = RoundRecord.from_json(extra["row"]).without_test()
        self._pending = PendingRecord(record.round, lambda: record)
        self._listed.load_state_dict(extra.get("callbacks", {}))
        return self._metrics.resume(start.manifest.round - 1, [RoundRecord.from_json(row) for row in extra["rows"]])

    def sample_cohort(self, index: int) -> list[int]:
        """The clients of a round; nobody after the last one."""
        return self.experiment.cohort(index) if index < self.experiment.config.rounds else []

    def write_command(self, index: int, owners: dict[int, int], down: Downlink) -> None:
        """Fill the downlink: the model for round `index`, who trains whom, and what to do before that or instead."""
        cohort = self.sample_cohort(index)
        is_complete = bool(self.stop_reason) or index == self.experiment.config.rounds
        published = self.server.publish(index, len(cohort))
        own = published.x is self.server.vars.x
        upcoming = NextRound(index, self.is_interrupted, self._pending, own)
        command = Command(Action.TRAIN)
        if is_complete or self.is_interrupted:
            command, self.is_finished = Command(Action.STOP, is_finished=is_complete), is_complete
        for callback in self._server_callbacks:
            command = callback.on_command(command, upcoming)
        down.write(command, published, self.server.buffers, self.server.assign(cohort, owners))
        fault_injection.point("broadcast")

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Rank 0's part of a checkpoint, as it is now; the writer waits until copies have arrived."""
        transfer = self.writer.transfer
        tensors = {name: transfer.snapshot(tensor.detach()) for name, tensor in vars(self.server.vars).items()}
        tensors["buffers"] = transfer.snapshot(self.server.buffers)
        assert self._pending is not None
        extra = {
            "row": self._pending.record.to_json(),  # of the last round, which callbacks have not seen
            "rows": [record.to_json() for record in self._metrics.unwritten],  # which they have, but not the file
            "speeds": self.server.speeds.dump(),
            "device": device_name(self.experiment.device),
            "callbacks": self._listed.state_dict(),
        }
        for callback in self._server_callbacks:
            tensors |= callback.tensors()
        return tensors, extra

    def step(self, index: int, assignment: dict[int, int], up: Uplink, updates: Tensor | None) -> None:
        """The server step, and the record of the round; `updates`: those that were gathered."""
        with self.group.failure_detector.activity(f"the server step of round {index + 1}"):
            fault_injection.point("server")
            for callback in self._server_callbacks:
                callback.before_step()
            with self.timer("server"):
                clients, ranks = up.read_reports()
                step = self.server.step(index, assignment, clients, up, updates)
        for callback in self._server_callbacks:
            callback.after_step()
        self._assignment, self._trained = assignment, step.trained
        self.is_interrupted = self.is_interrupted or any(rank.stop_requested for rank in ranks)
        workers, times = list(self.group.workers), self.timer.read()
        build = partial(build_record, self.experiment, index, assignment, step, workers, ranks, times, time.time())
        self._pending = PendingRecord(index + 1, build)
        self.timer.restart()

    def diagnose(self, due: list[ScheduledDiagnostic], worker: OracleWorker, received: Tensor) -> None:
        assert self._pending is not None
        oracle = LossOracle(worker, list(self._trained))
        delay = recording_delay(worker_loads(list(self.group.workers), self._assignment, self._trained))
        for callback in self._server_callbacks:
            callback.on_diagnostics(self._pending, due, TrainedRound(oracle, received, delay))
        oracle.end()
        self.timer.restart()

    def add_evaluation(self, result: EvaluationResult, seconds: float) -> None:
        """What all ranks measured of the last round's model."""
        assert self._pending is not None
        for callback in self._server_callbacks:
            callback.on_evaluation(self._pending, result, seconds)

    def report_pending(self) -> None:
        """While others train: complete the record of the last round, and show it to all callbacks."""
        record = self._complete_pending()
        if record is not None:
            self._call_listed(record)

    def _complete_pending(self) -> RoundRecord | None:
        """Evaluate the last round's model if that is still to be done; those that are always on see the record."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        for callback in self._server_callbacks:
            callback.complete(pending, self.is_finished)
        self.records.append(pending.record)
        for always_on in self._always_on:
            always_on.on_round_end(pending.record, self.context)
        return pending.record

    def _call_listed(self, record: RoundRecord) -> None:
        with self.group.failure_detector.activity(f"the callbacks of round {record.round}"):
            self._listed.on_round_end(record, self.context)

    def finish(self, stop: StopRequest) -> None:
        """After the last round: the model, before anything of the user's may fail; the summary; the callbacks' end."""
        record = self._complete_pending()
        if self.is_finished:
            self._write_model()
        summary = self._write_summary()
        with contextlib.ExitStack() as stack:  # all of them, also if one fails
            stack.callback(self._wandb.on_run_end, summary, self.context)
            stack.callback(stop.disarm)  # everything is saved; W&B has a limit of its own
            for callback in (*self._always_on, self._listed):
                stack.callback(callback.on_run_end, summary, self.context)
            if record is not None:
                self._call_listed(record)
        if not self.is_finished:
            write_line(f"interrupted after round {self.records[-1].round}; start it again to resume")

    def close(self) -> None:
        """At the end of an attempt, also after an error; those that a configuration lists are not closed here."""
        for callback in (*self._always_on, self._wandb):
            callback.close()

    def _write_model(self) -> None:
        tensors, module = self.server.named_model(), self.experiment.model.module
        if isinstance(module, PretrainedModule):
            module.export(self.folder.path, tensors)
        write_atomically(self.folder.path / MODEL, save(tensors))  # the last file: with it the run is finished

    def _write_summary(self) -> Summary:
        evaluate, metric = self.experiment.config.evaluate, self.context.primary_metric
        summary = summarize(self.records, evaluate.final_window, metric, self.is_finished)
        if self.is_finished and self.records[-1].round < self.experiment.config.rounds:
            summary["stopped"] = self.stop_reason
        summary |= server_load(self.records)
        try:
            write_atomically(self.folder.path / SUMMARY, f"{json.dumps(summary, indent=1)}\n".encode())
        except OSError as e:
            log.warning("%s could not be written: %s; it follows from %s", SUMMARY, e.strerror, METRICS)
        return summary
