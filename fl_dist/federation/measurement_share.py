"""Which part of a measurement over all rows this rank computes."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from fl_dist.distributed.process_group import ProcessGroup
from fl_dist.federation.experiment import Experiment

Where = Literal["auto", "server", "workers"]


class MeasurementShare:
    """Every n-th piece and client; if a client's rows are only on its worker, those of this rank's client."""

    def __init__(self, experiment: Experiment, group: ProcessGroup) -> None:
        self._rank, self._size = group.rank, group.size
        rows, self._validated = experiment.client_rows, experiment.client_data.validated_clients
        self._workers, self._own_rows = rows.workers, range(rows.first, rows.first + len(rows.dataset.y_train))
        self._is_local: bool = experiment.config.data["local"]

    def clients(self, clients: Sequence[int]) -> Sequence[int]:
        """Positions in the list of the clients that this rank measures."""
        if self._workers is None:
            return range(self._rank, len(clients), self._size)
        return [position for position, client in enumerate(clients) if self._workers[client] == self._rank]

    def training_pieces(self, rows: Tensor, size: int) -> Sequence[Tensor]:
        """Pieces of these training rows."""
        if self._workers is not None:
            rows = rows[(rows >= self._own_rows.start) & (rows < self._own_rows.stop)]
        pieces: Sequence[Tensor] = rows.split(size) if len(rows) else ()
        return pieces if self._workers is not None else pieces[self._rank :: self._size]

    @property
    def test_pieces(self) -> slice:
        """Of the pieces of the test rows, which of local data rank 0 alone has."""
        return slice(self._rank, None, 1 if self._is_local else self._size)

    def choose_evaluator(self, where: Where) -> Where:
        """Who evaluates a model: as configured, unless only some ranks have the rows that this takes."""
        if self._workers is not None and self._validated:
            return "workers"
        return "server" if self._is_local else where
