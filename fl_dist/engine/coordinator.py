"""Rank 0 beside its server step: gives orders, evaluates, reports, decides on saves, ends the run."""

import json
import logging
import os
import time
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import save

from fl_dist.engine.clock import Clock
from fl_dist.engine.downlink import Downlink, Orders
from fl_dist.engine.evaluate import Evaluator
from fl_dist.engine.server import Outcome, Server
from fl_dist.engine.uplink import Uplink
from fl_dist.engine.world import World
from fl_dist.machine import faults
from fl_dist.monitor.console import Console
from fl_dist.monitor.mirror import Mirror, open_mirror
from fl_dist.monitor.summary import summarise, summary_lines
from fl_dist.storage.checkpoint import NoCheckpoint, Save, read_server
from fl_dist.storage.folder import METRICS, MODEL, SUMMARY, RunFolder, write_atomically
from fl_dist.storage.metrics import MetricsFile, RowsLost
from fl_dist.storage.saver import Chief, Saver

log = logging.getLogger("fl_dist")
UNTESTED: dict[str, Any] = {"test_loss": None, "test_accuracy": None}
"""What a row says of its model on the test set if it was not evaluated, or if the task has no accuracy."""


class NoCoordinator:
    """The other ranks: no orders to give, nothing to report."""

    def order(self, index: int, cohort: list[int], home: dict[int, int], down: Downlink) -> None:
        pass

    def snapshot(self) -> tuple[None, dict[str, Any]]:
        return None, {}

    def step(self, index: int, cohort: list[int], assignment: dict[int, int], up: Uplink) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def finish(self) -> None:
        pass


class Coordinator:
    def __init__(
        self, world: World, workers: list[int], folder: RunFolder, saver: Saver, clock: Clock, start: Save | None
    ) -> None:
        self.world, self.folder, self.saver, self.clock = world, folder, saver, clock
        self.server = Server(world, workers)
        self.evaluate = Evaluator(world, world.config.evaluate.batch_size)
        self.metrics = MetricsFile(folder.path / METRICS)
        self.stopping = False
        self._pending: dict[str, Any] | None = None
        done = 0 if start is None else start.manifest.round
        self.rows = self.metrics.resume(done - 1, start.manifest.extra["rows"] if start else ())
        if start is not None:
            self._restore(start)
        self.console = Console(world.config.rounds, done, world.task.headline)
        self.mirror: Mirror = open_mirror(world.config, folder.path)
        self._last_save = done
        assert saver.chief is not None
        self.chief: Chief = saver.chief

    def _restore(self, start: Save) -> None:
        tensors, extra = read_server(self.folder.checkpoints, start.manifest), start.manifest.extra
        self.server.buffers = tensors.pop("buffers").to(self.world.device)
        for name, tensor in tensors.items():
            setattr(self.server.vars, name, tensor.to(self.world.device))
        self.server.speeds.restore(extra["speeds"])
        # Whether the round counts as evaluated is decided anew: the run may have more rounds now.
        row = {k: v for k, v in extra["row"].items() if not k.startswith("test_")}
        self._pending = {"round": row["round"], **UNTESTED, **row}

    def order(self, index: int, cohort: list[int], home: dict[int, int], down: Downlink) -> None:
        """Fill the downlink: the model for round `index`, who runs whom, whether to save first or to stop."""
        rounds, every = self.world.config.rounds, self.world.config.checkpoint.every
        stop = self.stopping or index == rounds
        decided, whole = self.chief.take_fate()
        if not whole:
            self._last_save = self.chief.round
        if self.chief.hopeless:
            raise NoCheckpoint(self.chief.hopeless)
        due = every > 0 and index - self._last_save >= (1 if stop else every)
        # Whoever interrupts a run wants it back, even one that is not saved as it goes.
        due = due or (self.stopping and self._last_save < index < rounds)
        # The last save waits for the one before in its own thread, not here, where the other ranks would wait too.
        saving = due and (stop or not self.saver.busy)
        if saving:
            self.folder.check_lock()
            self._last_save = index
        down.fill(self.server.publish(index, len(cohort)), self.server.buffers)
        orders = Orders(saving * (2 if self.chief.vanished else 1), stop, decided, whole)
        down.order(orders, cohort, self.server.assign(cohort, home))
        faults.point("broadcast")

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The server's variables as they are now, for a save."""
        tensors = {n: t.detach().cpu().clone() for n, t in vars(self.server.vars).items()}
        tensors["buffers"] = self.server.buffers.cpu().clone()
        row, rows = self._pending or self.rows[-1], list(self.metrics.unwritten)
        return tensors, {"row": row, "rows": rows, "speeds": self.server.speeds.dump()}

    def step(self, index: int, cohort: list[int], assignment: dict[int, int], up: Uplink) -> None:
        faults.point("server")
        with self.clock("server"):
            outcome = self.server.step(index, cohort, assignment, up)
        self.stopping = self.stopping or up.signals()[0] > 0
        self._pending = self._row(outcome)
        self.clock.restart()

    def _row(self, outcome: Outcome) -> dict[str, Any]:
        row: dict[str, Any] = {"round": outcome.index + 1, **UNTESTED}
        facts = asdict(outcome)
        row |= {"train_loss": facts["train_loss"], "clients": len(outcome.survivors), "dropped": outcome.dropped}
        row |= {k: facts[k] for k in ("bytes_down", "bytes_up", "forwards", "backwards")}
        row |= {"lr": self.world.config.lr(outcome.index), "method": outcome.reports}
        row |= {"seconds": self.clock.read(outcome.local_seconds)}
        return row

    def catch_up(self) -> None:
        """Evaluate the model of the last round and report the round, if that is still to be done."""
        row, self._pending = self._pending, None
        if row is None:
            return
        every, rounds = self.world.config.evaluate.every, self.world.config.rounds
        if row["round"] % every == 0 or row["round"] == rounds:
            began = time.perf_counter()
            row |= self.evaluate(self.server.vars.x, self.server.buffers)
            row["seconds"]["evaluate"] = round(time.perf_counter() - began, 6)
        self._report(row)

    def _report(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        try:
            self.metrics.append(row)
        except OSError as e:
            log.warning("metrics.jsonl could not be written: %s; the row is kept and tried again", e.strerror)
        self.console.row(row)

    def finish(self) -> None:
        """After the last round: the model, the summary."""
        self.catch_up()
        self.console.close()
        if self.stopping and self.rows[-1]["round"] < self.world.config.rounds:
            self.mirror.close({})
            self._write_summary(finished=False)
            if self.chief.failure:
                raise NoCheckpoint(f"interrupted, and the run could not be saved: {self.chief.failure}")
            self.console.say(f"interrupted after round {self.rows[-1]['round']}; start it again to resume")
            return
        self._write_model()
        summary = self._write_summary(finished=True)
        for line in summary_lines(summary, self.world.task.headline, os.fspath(self.folder.path)):
            self.console.say(line)
        self.mirror.close(summary)
        if self.chief.failed and not self.chief.made:
            raise NoCheckpoint(f"the model is written, but no checkpoint could be: {self.chief.failure}")
        self._write_last_rows()

    def _write_summary(self, finished: bool) -> dict[str, Any]:
        summary = summarise(self.rows, self.world.config.evaluate.last, self.world.task.headline, finished)
        try:
            write_atomically(self.folder.path / SUMMARY, json.dumps(summary, indent=1).encode())
        except OSError as e:
            log.warning("%s could not be written: %s; it follows from %s", SUMMARY, e.strerror, METRICS)
        return summary

    def _write_last_rows(self) -> None:
        try:
            self.metrics.flush()
        except OSError as e:
            missing = len(self.metrics.unwritten)
            raise RowsLost(f"the model is written, but metrics.jsonl lacks {missing} rows: {e.strerror}") from None

    def _write_model(self) -> None:
        model = self.world.model
        named = model.named(self.server.vars.x) | model.buffers.named(self.server.buffers) | model.frozen
        tensors = {n: t.detach().cpu().contiguous().clone() for n, t in named.items()}
        write_atomically(self.folder.path / MODEL, save(tensors))
