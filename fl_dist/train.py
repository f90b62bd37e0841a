"""The loop: plan, broadcast, local training, reduce, server step; evaluation and saving beside the next round."""

from fl_dist import faults
from fl_dist.checkpoint import Manifest, Saver, read_file
from fl_dist.clock import Clock
from fl_dist.comm import Comm
from fl_dist.downlink import Downlink
from fl_dist.folder import RunFolder
from fl_dist.head import Head, NoHead
from fl_dist.signals import StopRequest
from fl_dist.sums import Uplink
from fl_dist.worker import Worker
from fl_dist.world import World


def train(world: World, comm: Comm, folder: RunFolder, start: Manifest | None, stop: StopRequest) -> bool:
    """Run the rounds that are left. False if the run ends well but not a single checkpoint could be made."""
    config, clock = world.config, Clock()
    saver = Saver(folder.checkpoints, comm, config.checkpoint.keep)
    head = Head(world, list(comm.workers), folder, saver, clock, start) if comm.rank == 0 else NoHead()
    worker = Worker(world, comm, _reader(folder, start))
    down = Downlink(world.published(), world.initial_buffers, world.largest, comm.device)
    up = Uplink(world.upload_sizes(), world.largest, config.comm.reduce, comm.device)
    if comm.rank == 0:
        saver.resume(start)
    for index in range(start.round if start else 0, config.rounds + 1):
        cohort = world.cohort(index) if index < config.rounds else []
        with clock("broadcast"):
            head.order(index, cohort, worker.states.home, down)
            comm.broadcast(down.buffer)
        save, last, assignment = down.read_orders(cohort)
        with clock("checkpoint"):
            if save:
                worker.states.unsaved |= saver.take_back()
                saver.start(index, worker.states.take_unsaved(), *head.snapshot())
        if last:
            break
        if comm.overlaps:
            head.catch_up()
        with clock("local"):
            worker.run(index, cohort, assignment, down, up)
        up.signal(0, int(stop.requested))
        with clock("reduce"):
            faults.point("reduce")
            comm.reduce(up.buffer)
        head.step(index, cohort, assignment, up)
        if not comm.overlaps:
            head.catch_up()
    saver.join()
    return head.finish()


def _reader(folder: RunFolder, start: Manifest | None):
    """Reads a client's variables from the save that the run goes on from."""

    def read(client: int):
        name = start.clients.get(str(client)) if start else None
        return read_file(folder.checkpoints, name, start.files[name]) if name else None

    return read
