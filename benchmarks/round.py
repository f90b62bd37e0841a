"""What a round costs beside its bare local steps, measured in one run with interleaved repeats.

    python -m benchmarks.round [--case cnn|evaluated|protocol|checkpoint|all] [--method fedgmt] [--repeats N]

One server and two workers with one thread each. In turn, and in the same processes, they run a round of the engine and
the same forward and backward passes in a plain PyTorch loop; the table shows medians and their ratio.
"""

import argparse
import contextlib
import io
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fl_dist import config as configuration
from fl_dist.engine.train import Session
from fl_dist.engine.world import World
from fl_dist.machine.comm import Cluster
from fl_dist.machine.place import find
from fl_dist.machine.signals import StopRequest
from fl_dist.storage.folder import RunFolder

WORKERS = 2
NEVER = 10**6


@dataclass(frozen=True)
class Case:
    name: str
    limit: float
    settings: tuple[str, ...]
    wire: bool = False
    """Count one bare broadcast and reduce of the same bytes to the bare side."""
    against: tuple[str, ...] | None = None
    """Compare with the engine under these settings instead of with bare steps."""


CNN = ("model.name=cnn", "clients.total=100", "clients.per_round=10", "partition.name=iid")
ONE_EPOCH, TWO_EPOCHS = "local.epochs=1", "local.epochs=2"
FIVE_EPOCHS = "local.epochs=5"
"""The configuration's default: the share of evaluation depends on how long a round is."""
QUIET = ("checkpoint.every=0", f"evaluate.every={NEVER}")
METHODS = ("fedavg", "fedsam", "fedgmt")


def cases(which: str, method: str) -> list[Case]:
    cnn = [Case(f"{a}", 1.05, (*CNN, ONE_EPOCH, f"algorithm.name={a}", *QUIET)) for a in METHODS]
    evaluated = [
        Case(
            f"{a}, evaluated",
            1.10,
            (*CNN, FIVE_EPOCHS, f"algorithm.name={a}", "checkpoint.every=0", "evaluate.every=1"),
        )
        for a in METHODS
    ]
    protocol = [
        Case(
            f"{a}, protocol",
            1.5,
            (
                *("data.name=digits", "partition.name=iid", "model.name=mlp", "model.hidden=[32]"),
                *("clients.total=100", "clients.per_round=10", "local.epochs=1", "local.batch_size=full"),
                *(f"algorithm.name={a}", *QUIET),
            ),
            wire=True,
        )
        for a in METHODS
    ]
    saving = [
        Case(
            "fedgmt, saving every round",
            1.02,
            (*CNN, TWO_EPOCHS, "algorithm.name=fedgmt", f"evaluate.every={NEVER}", "checkpoint.every=1"),
            against=(*CNN, TWO_EPOCHS, "algorithm.name=fedgmt", *QUIET),
        )
    ]
    table = {"cnn": cnn, "evaluated": evaluated, "protocol": protocol, "checkpoint": saving}
    return [c for k, v in table.items() if which in (k, "all") for c in v if c.name.startswith(method)]


def cifar_shaped(folder: Path) -> Path:
    """50,000 + 2,000 images of noise: timing does not depend on what they show."""
    path = folder / "cifar_shaped.npz"
    rng = np.random.default_rng(0)
    arrays = {
        f"{kind}_{part}": array
        for part, n in (("train", 50_000), ("test", 2_000))
        for kind, array in (
            ("x", rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)),
            ("y", rng.integers(0, 10, n)),
        )
    }
    np.savez(path, **arrays)
    return path


class Bare:
    """The same passes as a plain loop: a module, torch.optim.SGD, float data in memory."""

    def __init__(self, world: World, session: Session) -> None:
        self.world, self.session = world, session
        self.model, self.teacher = world._module(), world._module()
        local = world.config.local
        self.make = lambda: torch.optim.SGD(
            self.model.parameters(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay
        )
        x = world.dataset.x_train
        self.x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
        self.y = world.dataset.y_train
        self.down, self.up = torch.zeros_like(session.down.buffer), torch.zeros_like(session.up.buffer)
        self.passes = world.algorithm.passes

    def round(self, index: int, assignment: dict[int, int], wire: bool) -> None:
        if wire:
            dist.broadcast(self.down, src=0)
        for client, worker in assignment.items():
            if worker == dist.get_rank():
                self._client(client)
        if wire:
            dist.reduce(self.up, dst=0)

    def _client(self, client: int) -> None:
        optimiser = self.make()
        rows, size = self.world.samples.rows[client], self.world.samples.batch_size(client)
        for _ in range(self.world.config.local.epochs):
            for batch in rows[torch.randperm(len(rows))].split(size):
                self._step(optimiser, self.x[batch], self.y[batch])

    def _step(self, optimiser: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimiser.zero_grad()
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        if self.passes == (2, 1):
            with torch.no_grad():
                taught = F.log_softmax(self.teacher(x) / 3, dim=1)
            kl = F.kl_div(F.log_softmax(logits / 3, dim=1), taught, reduction="batchmean", log_target=True)
            loss = loss + 9 * kl
        loss.backward()
        if self.passes == (2, 2):
            optimiser.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
        optimiser.step()


def timed(action: object, *arguments: object) -> float:
    dist.barrier()
    began = time.perf_counter()
    action(*arguments)
    dist.barrier()
    return time.perf_counter() - began


def open_session(settings: tuple[str, ...], data: Path, folder: Path, comm: Cluster) -> Session:
    overrides = [*settings, "monitor.wandb.mode=disabled", f"rounds={NEVER}", f"run.dir={folder}"]
    if not any(s.startswith("data.name") for s in settings):
        overrides += ["data.name=npz", f"data.path={data}"]
    config = configuration.load(None, overrides)
    run = RunFolder(folder)
    if comm.rank == 0:
        run.claim(config)
    return Session(World(config, comm.device), comm, run, None, StopRequest(0.0))


def measure(case: Case, repeats: int, data: Path, folder: Path, comm: Cluster) -> None:
    session = open_session(case.settings, data, folder / "measured", comm)
    other = open_session(case.against, data, folder / "against", comm) if case.against else None
    bare = Bare(session.world, session)
    times: dict[str, list[float]] = {"round": [], "bare": []}
    parts: dict[str, list[float]] = {}
    for index in range(repeats + 1):
        with contextlib.redirect_stdout(io.StringIO()):
            seconds = timed(session.round, index)
        cohort = session.world.cohort(index)
        _, assignment = session.down.read_orders(cohort)
        with contextlib.redirect_stdout(io.StringIO()):
            plain = timed(other.round, index) if other else timed(bare.round, index, assignment, case.wire)
        if index:
            times["round"].append(seconds)
            times["bare"].append(plain)
            row = (
                getattr(session.coordinator, "_pending", None)
                or (getattr(session.coordinator, "rows", None) or [None])[-1]
            )
            for part, value in (row["seconds"] if row else {}).items():
                parts.setdefault(part, []).append(value)
    session.saver.join()
    if comm.rank == 0:
        report(case, times, parts)


def report(case: Case, times: dict[str, list[float]], parts: dict[str, list[float]]) -> None:
    whole, bare = (statistics.median(times[k]) for k in ("round", "bare"))
    where = "  ".join(f"{k} {1000 * statistics.median(v):.1f}" for k, v in parts.items() if k != "total")
    verdict = "ok" if whole / bare <= case.limit else "OVER"
    print(
        f"{case.name:28} {1000 * whole:9.1f} ms {1000 * bare:9.1f} ms   {whole / bare:5.3f}   <= {case.limit:.2f}"
        f"  {verdict:4}  ms: {where}",
        flush=True,
    )


def rank_main(which: str, method: str, repeats: int, folder: Path) -> None:
    torch.set_num_threads(1)
    basis = configuration.load(None, [])
    place = find()
    assert place is not None
    comm = Cluster(place, basis.topology, basis.comm, StopRequest(0.0))
    if comm.rank == 0:
        print(f"{'':28} {'round':>12} {'bare':>12}   ratio   limit")
    for k, case in enumerate(cases(which, method)):
        measure(case, repeats, folder / "cifar_shaped.npz", folder / str(k), comm)
    comm.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(which: str, method: str, repeats: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        cifar_shaped(Path(folder))
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.round", "--case", which, "--method", method]
        command += ["--repeats", str(repeats)]
        ranks = []
        for rank in range(WORKERS + 1):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORKERS + 1, "LOCAL_WORLD_SIZE": WORKERS + 1}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            env = os.environ | {k: str(v) for k, v in place.items()}
            ranks.append(subprocess.Popen([*command, "--folder", folder], env=env))
        try:
            return max(abs(rank.wait()) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="all", choices=["cnn", "evaluated", "protocol", "checkpoint", "all"])
    parser.add_argument("--method", default="", choices=["", *METHODS], help="only this one")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is None:
        return launch(given.case, given.method, given.repeats)
    rank_main(given.case, given.method, given.repeats, given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
