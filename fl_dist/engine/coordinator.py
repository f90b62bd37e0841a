"""Rank 0 beside its server step: gives orders, evaluates, reports, decides on saves, ends the run."""

import json
import logging
import os
import time
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fl_dist.common.terminal import width
from fl_dist.diagnostics import Planned
from fl_dist.engine.clock import Clock
from fl_dist.engine.downlink import Downlink, Orders
from fl_dist.engine.evaluate import Choice, Evaluator
from fl_dist.engine.landscape import Landscape
from fl_dist.engine.measuring import Trail, measured, moment, needed, taken_out
from fl_dist.engine.record import add_test, new_row, untested
from fl_dist.engine.server import Server
from fl_dist.engine.uplink import Uplink
from fl_dist.engine.world import World
from fl_dist.machine import faults
from fl_dist.machine.comm import Comm
from fl_dist.machine.devices import device_name
from fl_dist.monitor.console import Console
from fl_dist.monitor.mirror import Mirror, open_mirror
from fl_dist.monitor.summary import server_worth, summarise, summary_lines
from fl_dist.storage.checkpoint import NoCheckpoint, Save, read_server
from fl_dist.storage.folder import METRICS, MODEL, SUMMARY, RunFolder, write_atomically
from fl_dist.storage.metrics import MetricsFile, RowsLost
from fl_dist.storage.saver import Chief, Saver

log = logging.getLogger("fl_dist")


class NoCoordinator:
    """The other ranks: no orders to give, nothing to report."""

    def order(self, index: int, cohort: list[int], home: dict[int, int], down: Downlink) -> None:
        pass

    def snapshot(self) -> tuple[None, dict[str, Any]]:
        return None, {}

    def step(self, index: int, cohort: list[int], assignment: dict[int, int], up: Uplink) -> None:
        pass

    def model(self, room: Tensor) -> Tensor:
        return room

    def tested(self, metrics: dict[str, float], seconds: float, ranks: int) -> None:
        pass

    def outcome(self) -> tuple[None, list[int]]:
        return None, []

    def diagnose(self, due: list[Planned], landscape: Landscape, start: Tensor) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def finish(self) -> None:
        pass


class Coordinator:
    def __init__(
        self,
        world: World,
        comm: Comm,
        folder: RunFolder,
        saver: Saver,
        clock: Clock,
        evaluator: Evaluator,
        start: Save | None,
    ) -> None:
        self.world, self.comm, self.folder, self.saver, self.clock = world, comm, folder, saver, clock
        self.server = Server(world, list(comm.workers))
        self.evaluator, self.choice = evaluator, Choice(world.config.evaluate.where, comm.size)
        self.metrics = MetricsFile(folder.path / METRICS)
        self.stopping = False
        self._pending: dict[str, Any] | None = None
        self._trained: list[int] = []
        self._held_up = 0.0
        self._trail = Trail() if "previous step" in needed(world.diagnostics) else None
        done = 0 if start is None else start.manifest.round
        self.rows = self.metrics.resume(done - 1, start.manifest.extra["rows"] if start else ())
        if start is not None:
            self._restore(start)
        self.console = Console(world.config.rounds, done, world.task.headline)
        self.mirror: Mirror = open_mirror(world.config, folder.path, world.task.headline)
        self._last_save = done
        assert saver.chief is not None
        self.chief: Chief = saver.chief

    def _restore(self, start: Save) -> None:
        tensors, extra = read_server(self.folder.checkpoints, start.manifest), start.manifest.extra
        self.server.buffers = tensors.pop("buffers").to(self.world.device)
        trail = taken_out(tensors, self.world.device)
        if self._trail is not None:
            self._trail.last = trail
        for name, tensor in tensors.items():
            setattr(self.server.vars, name, tensor.to(self.world.device))
        self.server.speeds.restore(extra["speeds"])
        # Whether the round counts as evaluated is decided anew: the run may have more rounds now.
        self._pending = untested(extra["row"])

    def order(self, index: int, cohort: list[int], home: dict[int, int], down: Downlink) -> None:
        """Fill the downlink: the model for round `index`, who runs whom, whether to save first or to stop."""
        rounds, every = self.world.config.rounds, self.world.config.checkpoint.every
        stop = self.stopping or index == rounds
        busy = self.saver.busy  # asked first: who is done then has said how it went
        decided, whole = self.chief.take_fate()
        if not whole:
            self._last_save = self.chief.round
        if self.chief.hopeless:
            raise NoCheckpoint(self.chief.hopeless)
        due = every > 0 and index - self._last_save >= (1 if stop else every)
        # Whoever interrupts a run wants it back, even one that is not saved as it goes.
        due = due or (self.stopping and self._last_save < index < rounds)
        # The last save waits for the one before in its own thread, not here, where the other ranks would wait too.
        saving = due and (stop or not busy)
        if saving:
            self.folder.check_lock()
            self._last_save = index
        published = self.server.publish(index, len(cohort))
        down.fill(published, self.server.buffers)
        evaluate = self._together() * (1 if published.x is self.server.vars.x else 2)
        orders = Orders(saving * (2 if self.chief.vanished else 1), stop, decided, whole, evaluate)
        down.order(orders, cohort, self.server.assign(cohort, home))
        faults.point("broadcast")

    def _together(self) -> bool:
        """Whether all ranks shall evaluate the model of the last round."""
        row = self._pending
        if row is None or not self._due(row):
            return False
        seconds, own = row["seconds"], row["workers"]["0"].get("busy", 0.0)
        return self.choice.together(seconds["local"] - own, seconds["broadcast"])

    def _due(self, row: dict[str, Any]) -> bool:
        return row["round"] % self.world.config.evaluate.every == 0 or row["round"] == self.world.config.rounds

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The server's variables as they are now, for a save, which waits until they have arrived."""
        copies = self.saver.copies
        tensors = {n: copies.snapshot(t.detach()) for n, t in vars(self.server.vars).items()}
        tensors["buffers"] = copies.snapshot(self.server.buffers)
        if self._trail is not None:
            tensors |= self._trail.tensors()
        assert self._pending is not None
        # The row is a copy: while it is written, the evaluation adds to it.
        row, rows, device = dict(self._pending), list(self.metrics.unwritten), device_name(self.world.device)
        return tensors, {"row": row, "rows": rows, "speeds": self.server.speeds.dump(), "device": device}

    def step(self, index: int, cohort: list[int], assignment: dict[int, int], up: Uplink) -> None:
        self.comm.doing(f"the server step of round {index + 1}")
        faults.point("server")
        before = None if self._trail is None else self.server.vars.x.clone()
        with self.clock("server"):
            reports, (stop, *memory) = up.read()
            outcome = self.server.step(index, cohort, assignment, reports, up)
        self.comm.doing("")
        if self._trail is not None and before is not None:
            self._trail.add(step=self.server.vars.x - before, update=self.server.update.clone())
        self._trained = outcome.survivors
        self.stopping = self.stopping or stop > 0
        self._held_up = outcome.held_up
        seconds = self.clock.read(max(did["busy"] for did in outcome.workers.values()), outcome.held_up)
        self._pending = new_row(outcome, self.world.config.lr(index), seconds, memory[0::2], memory[1::2])
        self.clock.restart()

    def outcome(self) -> tuple[Tensor, list[int]]:
        """After a server step: the buffers that go with the new model, and who was trained."""
        return self.server.buffers, self._trained

    def diagnose(self, due: list[Planned], landscape: Landscape, start: Tensor) -> None:
        """Measure the round that was just made; its seconds are no part of the round's."""
        assert self._pending is not None
        began, row = time.perf_counter(), self._pending
        at = moment(self.world, self.server, landscape, start, self._trail or Trail(), row["round"])
        row["diagnostics"] = measured(due, at, row["round"])
        row["seconds"]["diagnostics"] = round(self._held_up + time.perf_counter() - began, 6)
        self.clock.restart()

    def model(self, room: Tensor) -> Tensor:
        """That of the last round, which is not always the one that clients start from; on other ranks, room for it."""
        return self.server.vars.x

    def tested(self, metrics: dict[str, float], seconds: float, ranks: int) -> None:
        """What the model of the last round is worth, as so many ranks found in so many seconds."""
        assert self._pending is not None
        add_test(self._pending, metrics, seconds, ranks)
        self.choice.observe(ranks > 1, seconds)

    def catch_up(self) -> None:
        """While others train: evaluate the last round's model and report it, if these are still to be done."""
        row = self._pending
        if row is None:
            return
        if self._due(row) and row["test_loss"] is None:
            began = time.perf_counter()
            metrics = self.evaluator.alone(self.server.vars.x, self.server.buffers, row["round"])
            self.tested(metrics, time.perf_counter() - began, ranks=1)
        self._pending = None
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
        for line in summary_lines(summary, self.world.task.headline, os.fspath(self.folder.path), width()):
            self.console.say(line)
        self.mirror.close(summary)
        if self.chief.failed and not self.chief.made:
            raise NoCheckpoint(f"the model is written, but no checkpoint could be: {self.chief.failure}")
        self._write_last_rows()

    def _write_summary(self, finished: bool) -> dict[str, Any]:
        evaluate = self.world.config.evaluate
        summary = summarise(self.rows, evaluate.last, self.world.task.headline, finished)
        summary |= server_worth(self.rows, spreads=evaluate.where != "server")
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
