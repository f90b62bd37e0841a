"""Diagnostics of a run that is there: its model, and the round that would come next, trained and then forgotten."""

import time
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_dist.core import Vars
from fl_dist.diagnostics import Planned
from fl_dist.engine.downlink import Orders
from fl_dist.engine.landscape import Landscape
from fl_dist.engine.measuring import Trail, measured, moment, needed, taken_out
from fl_dist.engine.server import Server
from fl_dist.engine.state import ClientStates, Read
from fl_dist.engine.tape import Tape
from fl_dist.engine.worker import Worker, messages
from fl_dist.engine.world import World
from fl_dist.machine.comm import Comm
from fl_dist.machine.copies import Copies

Found = dict[str, Any]
"""label, round, seconds and values of a diagnostic."""


class Probe:
    """On every rank alike; rank 0 has the numbers."""

    def __init__(self, world: World, comm: Comm, done: int, server: dict[str, Tensor], clients: Read) -> None:
        """`done`: rounds of the run; `server`: its variables after them, `buffers` among them."""
        self.world, self.comm, self.done, self._clients = world, comm, done, clients
        self.server = Server(world, list(comm.workers))
        self._trail = Trail(taken_out(server, world.device))
        self.server.buffers = server["buffers"].to(world.device)
        self.server.vars = Vars(**{n: server[n].to(world.device) for n in world.algorithm.server if n in server})
        self.landscape = Landscape(world, comm, ClientStates(world.template, comm, clients))

    def measure(self, due: list[Planned], spill: Path) -> list[Found]:
        """Those of the model alone, then those of a round; the run's folder is only read."""
        alone = [planned for planned in due if not needed([planned]) - {"walk"}]
        with_round = [planned for planned in due if planned not in alone]
        found = self._ask(alone, self.done, [], [], Tape([]), self.server.vars.x) if alone else []
        if with_round:
            found += self._next_round(with_round, spill)
        return found

    def _next_round(self, due: list[Planned], spill: Path) -> list[Found]:
        world, comm = self.world, self.comm
        index = self.done if world.schedule is None else min(self.done, len(world.schedule) - 1)
        cohort, worker = world.cohort(index), Worker(world, comm, self._clients, spill, Copies(comm.device))
        down, up = messages(world, comm.size)
        if comm.rank == 0:
            down.fill(self.server.publish(index, len(cohort)), self.server.buffers)
            down.order(Orders(), cohort, self.server.assign(cohort, {}))
        comm.broadcast(down.buffer)
        assignment = down.read_orders(cohort)[1]
        worker.tape, self.landscape.states = Tape(needed(due)), worker.states
        worker.run(index, cohort, assignment, down, up)
        up.seal()
        comm.reduce(up.buffer)
        trained = []
        if comm.rank == 0:
            before, (reports, _) = self.server.vars.x.clone(), up.read()
            trained = self.server.step(index, cohort, assignment, reports, up).survivors
            self._trail.add(step=self.server.vars.x - before, update=self.server.update)
        return self._ask(due, self.done + 1, cohort, trained, worker.tape, down.vars.x)

    def _ask(
        self, due: list[Planned], round_: int, cohort: list[int], trained: list[int], tape: Tape, start: Tensor
    ) -> list[Found]:
        landscape, rank = self.landscape, self.comm.rank
        landscape.open(self.server.buffers if rank == 0 else None, cohort, trained, tape.played)
        found = []
        if rank:
            landscape.serve()
        for planned in due if rank == 0 else ():
            began = time.perf_counter()
            at = moment(self.world, self.server, landscape, start, self._trail, round_)
            values = measured([planned], at, round_)
            seconds = round(time.perf_counter() - began, 6)
            found.append({"round": round_, "label": planned.label, "values": values[planned.label], "seconds": seconds})
        landscape.close()
        return found
