"""Client state moves with its client, in memory or in files."""

from pathlib import Path

import torch

from fl_dist.algorithms.core import Vars
from fl_dist.distributed.collectives import LocalCollectives
from fl_dist.federation.client_state import ClientStateStore
from fl_dist.main import main
from tests.support.processes import NO_WANDB
from tests.support.run_folder import model_hash


class QueueCollectives(LocalCollectives):
    """Two ranks in one process: one receives what the other sends."""

    def __init__(self) -> None:
        self.queue: list[torch.Tensor] = []

    def exchange(self, sends: list, receives: list) -> None:
        self.queue.extend(t for t, _ in sends)
        for buffer, _ in receives:
            buffer.copy_(self.queue.pop(0))


def test_client_state_moves_with_the_client() -> None:
    template = {"h": ((5,), torch.float32), "k": ((), torch.float64)}
    collectives = QueueCollectives()
    one, two = (ClientStateStore(template, rank, collectives, lambda c: None) for rank in (1, 2))
    for states in (one, two):
        states.move({3: 1})
    assert one.load(3) is None
    one.store(3, Vars(h=torch.arange(5.0), k=torch.tensor(0.1, dtype=torch.float64)))
    for states in (one, two):
        states.move({3: 2})
    moved = two.load(3)
    assert moved is not None
    assert torch.equal(moved.h, torch.arange(5.0)) and float(moved.k) == 0.1
    for states in (one, two):
        states.move({4: 1})
    for states in (one, two):  # client 4 failed in its first round and has no state
        states.move({4: 2})
    assert two.load(4) is None
    moved.h.zero_()
    assert torch.equal(two.load(3).h, torch.arange(5.0)), "load returns a copy"
    assert one.load(3) is None


def test_states_beyond_the_memory_limit_are_spilled_and_change_nothing(tmp_path: Path) -> None:
    template = {"h": ((1000,), torch.float32)}
    states = ClientStateStore(template, 0, LocalCollectives(), lambda c: None, max_bytes=8100, spill_folder=tmp_path)
    for client in range(5):
        states.store(client, Vars(h=torch.full((1000,), float(client))))
    maps = Path("/proc/self/maps").read_text()
    assert maps.count(str(tmp_path / ".state-")) == 3
    assert [float(states.load(c).h[7]) for c in range(5)] == [0, 1, 2, 3, 4]
    assert not list(tmp_path.iterdir())
    small = [*NO_WANDB, "rounds=3", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}"]
    for name, memory in (("memory", 1.0), ("files", 0.0)):
        assert main([*small, f"topology.state_memory={memory}", f"run.dir={tmp_path / name}"]) == 0
    assert model_hash(tmp_path / "memory") == model_hash(tmp_path / "files")
