"""The loop: plan, broadcast, local training, reduce, server step; evaluation and saving beside the next round."""

from torch import Tensor

from fl_dist.diagnostics import Planned
from fl_dist.engine.clock import Clock
from fl_dist.engine.coordinator import Coordinator, NoCoordinator
from fl_dist.engine.downlink import Orders
from fl_dist.engine.evaluate import Evaluator
from fl_dist.engine.landscape import Landscape
from fl_dist.engine.measuring import needed
from fl_dist.engine.state import Read
from fl_dist.engine.tape import Tape
from fl_dist.engine.worker import DEVICE, HOST, STOP, Worker, messages
from fl_dist.engine.world import World
from fl_dist.machine import faults
from fl_dist.machine.comm import Comm
from fl_dist.machine.copies import Copies
from fl_dist.machine.devices import settle
from fl_dist.machine.memory import device_bytes, host_bytes
from fl_dist.machine.signals import StopRequest
from fl_dist.storage.checkpoint import Damaged, Save, load_save, newest_round, read_client
from fl_dist.storage.folder import RunFolder
from fl_dist.storage.saver import Chief, Saver


def train(world: World, comm: Comm, folder: RunFolder, start: Save | None, stop: StopRequest) -> bool:
    """Run the rounds that are left. False if a signal ended the run before the last one."""
    session = Session(world, comm, folder, start, stop)
    index = start.manifest.round if start else 0
    try:
        while session.round(index):
            index += 1
        session.finish()
    finally:
        comm.doing("")  # a disk may be slow
        session.saver.close()
    return index == world.config.rounds


class Session:
    """What one rank holds from round to round."""

    def __init__(self, world: World, comm: Comm, folder: RunFolder, start: Save | None, stop: StopRequest) -> None:
        self.world, self.comm, self.stop, self.clock = world, comm, stop, Clock(settle(comm.device))
        copies, self.evaluator = Copies(comm.device), Evaluator(world, comm)
        self.saver = Saver(folder.checkpoints, comm, folder.record.id, copies, clients=bool(world.template))
        self.coordinator: Coordinator | NoCoordinator = NoCoordinator()
        if comm.rank == 0:
            keep = world.config.checkpoint.keep
            self.saver.chief = Chief(folder.checkpoints, folder.record.id, keep, start, folder.mark_saved)
            self.coordinator = Coordinator(world, comm, folder, self.saver, self.clock, self.evaluator, start)
        self.worker = Worker(world, comm, reader(folder, start), folder.path, copies)
        self.down, self.up = messages(world, comm.size)
        self.landscape = Landscape(world, comm, self.worker.states)

    def round(self, index: int) -> bool:
        """One round; False if, instead, the server said that the run ends here."""
        cohort = self.world.cohort(index) if index < self.world.config.rounds else []
        with self.clock("broadcast"):
            self.coordinator.order(index, cohort, self.worker.states.home, self.down)
            self.comm.broadcast(self.down.buffer)
        orders, assignment = self.down.read_orders(cohort)
        if not orders.stop:
            self.comm.begins(index, assignment)
        with self.clock("checkpoint"):
            self._save(index, orders)
        if orders.evaluate:
            self._evaluate(index, elsewhere=orders.evaluate > 1)
        if orders.stop:
            self.comm.leaves()
            return False
        self.coordinator.catch_up()
        self._look_ahead(index + 1)
        due = [planned for planned in self.world.diagnostics if planned.due(index)]
        self.worker.tape = Tape(needed(due)) if due else None
        with self.clock("local"):
            self.worker.run(index, cohort, assignment, self.down, self.up)
        self._signal()
        with self.clock("reduce"):
            faults.point("reduce")
            self.comm.reduce(self.up.buffer)
        self.coordinator.step(index, cohort, assignment, self.up)
        if due:
            self._diagnose(due, cohort)
        return True

    def _look_ahead(self, index: int) -> None:
        """A rank that waits for others draws the next cohort, which the others draw when they wait for it."""
        if self.comm.overlaps and self.comm.rank == 0 and index < self.world.config.rounds:
            self.world.cohort(index)

    def _evaluate(self, index: int, elsewhere: bool) -> None:
        """All ranks evaluate the model after `index` rounds; `elsewhere`: clients do not start from it."""
        with self.clock("evaluate"):
            x = self.down.vars.x
            if elsewhere:
                # Local training begins by overwriting its vector.
                x = self.coordinator.model(room=self.world.model.vector)
                self.comm.broadcast(x)
            metrics = self.evaluator.together(x, self.down.buffers, index)
        self.coordinator.tested(metrics, self.clock.parts["evaluate"], self.comm.size)

    def _signal(self) -> None:
        rank = 2 * self.comm.rank
        self.up.signal(STOP, int(self.stop.requested))
        self.up.signal(HOST + rank, host_bytes())
        self.up.signal(DEVICE + rank, device_bytes(self.comm.device))
        self.up.seal()

    def _diagnose(self, due: list[Planned], cohort: list[int]) -> None:
        """All ranks measure; only then may the next round begin, or a save be made, which so holds the numbers."""
        assert self.worker.tape is not None
        buffers, trained = self.coordinator.outcome()
        self.landscape.open(buffers, cohort, trained, self.worker.tape.played)
        if self.comm.rank:
            self.landscape.serve()
        else:
            self.coordinator.diagnose(due, self.landscape, self.down.vars.x)
        self.landscape.close()
        self.worker.tape = None

    def _save(self, index: int, orders: Orders) -> None:
        """Hear the fate of the last save, and begin to save the state after `index` rounds if that is ordered."""
        states = self.worker.states
        if orders.decided:
            states.decide(orders.decided, bool(orders.whole))
            if not orders.whole:
                self.saver.discard(orders.decided)
        if orders.save:
            if orders.stop:
                states.doubt()
            clients = states.hand_over(index, everything=orders.save > 1)
            server, extra = self.coordinator.snapshot()
            self.saver.start(index, clients, server, extra, last=bool(orders.stop))

    def finish(self) -> None:
        self.saver.join()
        self.coordinator.finish()


def reader(folder: RunFolder, start: Save | None) -> Read:
    """Reads a client's variables from the save that the run goes on from."""
    root, index = folder.checkpoints, dict(start.index) if start else {}

    def read(client: int) -> dict[str, Tensor] | None:
        if client not in index:
            return None
        try:
            return read_client(root, index[client])
        except Damaged:
            # Meanwhile rank 0 may have brought them along to a newer save.
            index.update(load_save(root, newest_round(root)).index)
            return read_client(root, index[client])

    return read
