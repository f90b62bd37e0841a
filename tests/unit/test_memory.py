"""Memory: ranks share what a node and a GPU have, unless the configuration says how much each may use."""

import os
from types import SimpleNamespace

import pytest
import torch

from fl_dist.config import Topology
from fl_dist.distributed import memory
from fl_dist.distributed.memory import max_row_bytes, max_state_bytes

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("node_gb", "ranks", "state_gb"), [(1024, 8, 16), (256, 8, 8), (64, 1, 16), (64, 16, 1), (32, 1, 8)]
)
def test_ranks_share_a_quarter_of_the_nodes_memory(
    node_gb: int, ranks: int, state_gb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_host_bytes", lambda: 1e9 * node_gb)
    assert max_state_bytes(Topology(), ranks) == 1e9 * state_gb
    assert max_state_bytes(Topology(state_memory=3), ranks) == 3e9


def test_a_slurm_job_has_the_memory_that_it_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_MEM_PER_NODE", raising=False)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for requested, expected in ((None, total), ("0", total), ("64", 64 * 2**20), (str(10**9), total)):
        if requested is not None:
            monkeypatch.setenv("SLURM_MEM_PER_NODE", requested)
        assert memory._host_bytes() == expected


@pytest.mark.parametrize(
    ("gpu_gb", "oversubscribe", "rows_gb"), [(80, False, 16), (24, False, 6), (80, True, 5), (24, True, 1.5)]
)
def test_rows_take_a_quarter_of_a_gpu(
    gpu_gb: int, oversubscribe: bool, rows_gb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1e9 * gpu_gb))
    topology = Topology(oversubscribe=oversubscribe)
    assert max_row_bytes(topology, GPU, ranks_on_node=8) == 1e9 * rows_gb
    assert max_row_bytes(Topology(data_memory=3), GPU, ranks_on_node=8) == 3e9


def test_ranks_on_the_cpu_share_the_pages_of_their_rows() -> None:
    assert max_row_bytes(Topology(), torch.device("cpu"), ranks_on_node=8) == 16e9
