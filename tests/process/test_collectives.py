"""Tensors between real ranks."""

from pathlib import Path

from tests.support.processes import run, torchrun

REDUCE = """
import torch
from fl_dist.config import load
from fl_dist.distributed.collectives import MAX_GATHERED_BYTES
from fl_dist.distributed.process_group import connect
from fl_dist.distributed.rank_info import find_rank
from fl_dist.distributed.signals import StopRequest

config = load(None, [])
group = connect(find_rank(), config.topology, config.comm, StopRequest(0.0))
for dtype in (torch.int64, torch.float32):
    most = MAX_GATHERED_BYTES // group.size // dtype.itemsize
    for entries in (1, most, most + 1):
        values = torch.arange(entries, dtype=dtype) % 1000
        tensor = values * 10**group.rank
        group.collectives.reduce(tensor)
        if group.rank == 0:
            assert torch.equal(tensor, values * 111), (dtype, entries)
group.close()
"""


def test_reduces_of_all_sizes_add_up_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)
    code, output = run(torchrun(3, str(script)))
    assert code == 0, output
