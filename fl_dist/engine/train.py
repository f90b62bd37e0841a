"""The loop: plan, broadcast, local training, reduce, server step; evaluation and saving beside the next round."""

from torch import Tensor

from fl_dist.engine.clock import Clock
from fl_dist.engine.coordinator import Coordinator, NoCoordinator
from fl_dist.engine.downlink import Downlink, Orders
from fl_dist.engine.state import Read
from fl_dist.engine.uplink import Uplink
from fl_dist.engine.worker import Worker
from fl_dist.engine.world import World
from fl_dist.machine import faults
from fl_dist.machine.comm import Comm, Lost
from fl_dist.machine.signals import StopRequest
from fl_dist.storage.checkpoint import Damaged, Save, load_save, newest_round, read_client
from fl_dist.storage.folder import RunFolder
from fl_dist.storage.saver import Chief, Saver


def train(world: World, comm: Comm, folder: RunFolder, start: Save | None, stop: StopRequest) -> bool:
    """Run the rounds that are left. False if a signal ended the run before the last one."""
    session = Session(world, comm, folder, start, stop)
    index = start.manifest.round if start else 0
    try:
        session.coordinator.catch_up()
        while session.round(index):
            index += 1
        session.finish()
    except Lost as e:
        raise e.during(index, session.assignment) from e
    finally:
        session.saver.close()
    return index == world.config.rounds


class Session:
    """What one rank holds from round to round."""

    def __init__(self, world: World, comm: Comm, folder: RunFolder, start: Save | None, stop: StopRequest) -> None:
        self.world, self.comm, self.stop, self.clock = world, comm, stop, Clock()
        self.saver = Saver(folder.checkpoints, comm, folder.record.id, world.config.comm.timeout)
        self.coordinator: Coordinator | NoCoordinator = NoCoordinator()
        if comm.rank == 0:
            keep = world.config.checkpoint.keep
            self.saver.chief = Chief(folder.checkpoints, folder.record.id, keep, start, folder.mark_saved)
            self.coordinator = Coordinator(world, list(comm.workers), folder, self.saver, self.clock, start)
        self.worker = Worker(world, comm, _reader(folder, start), folder.path)
        self.down = Downlink(world.published(), world.initial_buffers, world.largest, comm.device)
        self.assignment: dict[int, int] = {}
        reduce = world.config.comm.reduce
        self.up = Uplink(
            world.upload_sizes(), world.largest, reduce, comm.device, world.least_weight, numbers=world.numbers()
        )

    def round(self, index: int) -> bool:
        """One round; False if, instead, the server said that the run ends here."""
        cohort = self.world.cohort(index) if index < self.world.config.rounds else []
        with self.clock("broadcast"):
            self.coordinator.order(index, cohort, self.worker.states.home, self.down)
            self.comm.broadcast(self.down.buffer)
        orders, assignment = self.down.read_orders(cohort)
        self.assignment = assignment
        with self.clock("checkpoint"):
            self._save(index, orders)
        if orders.stop:
            return False
        if self.comm.overlaps:
            self.coordinator.catch_up()
        with self.clock("local"):
            self.worker.run(index, cohort, assignment, self.down, self.up)
        self.up.signal(0, int(self.stop.requested))
        with self.clock("reduce"):
            faults.point("reduce")
            self.comm.reduce(self.up.buffer)
        self.coordinator.step(index, cohort, assignment, self.up)
        if not self.comm.overlaps:
            self.coordinator.catch_up()
        return True

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
            self.saver.start(index, clients, *self.coordinator.snapshot())

    def finish(self) -> None:
        self.saver.finish()
        self.coordinator.finish()


def _reader(folder: RunFolder, start: Save | None) -> Read:
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
