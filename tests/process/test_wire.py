"""Small messages between ranks of one machine go past gloo, large ones do not."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fl_dist.machine.wire import MOST
from tests.support.processes import QUIET, run_ranks


class WithoutGloo(nn.Linear):
    """A model in whose runs no collective of torch works."""

    def __init__(self, shape: tuple[int, ...], outputs: int, *, more: int = 0) -> None:
        super().__init__(torch.Size(shape).numel(), outputs)
        self.more = nn.Parameter(torch.zeros(more)) if more else None

    def forward(self, x: Tensor) -> Tensor:
        def refuse(*_: object, **options: object) -> None:
            raise RuntimeError("this went through gloo")

        torch.distributed.broadcast = torch.distributed.reduce = refuse
        return super().forward(x.flatten(1))


@pytest.mark.parametrize(("more", "codes"), [(0, [0, 0, 0]), (MOST // 4, [1, 1, 1])])
def test_ranks_of_one_machine_send_what_is_small_without_gloo(more: int, codes: list[int], tmp_path: Path) -> None:
    model = f"model={{name: 'tests.process.test_wire:WithoutGloo', more: {more}}}"
    small = (*QUIET, "rounds=2", "clients={total: 4, per_round: 4}", "partition=iid", "local.epochs=1")
    ended, outputs = run_ranks(3, [*small, model, f"run.dir={tmp_path}"])
    assert ended == codes, outputs
    assert ("this went through gloo" in outputs[0]) == any(codes)
