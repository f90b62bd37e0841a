"""Every number of a record as TensorBoard scalars."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fl_dist.callbacks.base import Callback, RunContext, callbacks
from fl_dist.common.errors import UserError
from fl_dist.metrics.record import RoundRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@callbacks.register_as("tensorboard")
class TensorBoard(Callback):
    """Event files in the run folder, under the names that W&B shows: `tensorboard --logdir runs`."""

    def __init__(
        self, *, folder: Annotated[str, Field(min_length=1, description="folder inside the run folder")] = "tensorboard"
    ) -> None:
        self.folder = folder
        self._writer: SummaryWriter | None = None
        try:
            import torch.utils.tensorboard  # noqa: F401  (fails before training if it is not installed)
        except ImportError:
            raise UserError("callback tensorboard needs the package tensorboard: pip install tensorboard") from None

    def on_run_begin(self, context: RunContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Rounds after the checkpoint are run again: what an earlier attempt wrote of them is hidden.
        self._writer = SummaryWriter(str(context.folder / self.folder), purge_step=context.rounds_done)

    def on_round_end(self, record: RoundRecord, context: RunContext) -> None:
        assert self._writer is not None
        for name, value in record.scalars().items():
            self._writer.add_scalar(name, value, record.round, walltime=record.time)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
