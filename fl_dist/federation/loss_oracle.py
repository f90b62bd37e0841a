"""Rank 0's half of the loss oracle: losses and their derivatives over all clients' data, as diagnostics see them."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from fl_dist.data import normalise
from fl_dist.diagnostics.base import ALL_ROWS, TEST_ROWS, FineTuning, MeasurementError
from fl_dist.federation.commands import Action, Command, send_command
from fl_dist.federation.metric_sums import mean_of_words, read_bits_table
from fl_dist.federation.oracle_worker import COUNT_UNIT, VECTOR_NAMES, OracleWorker

MAX_CLASSES = 1000


class LossOracle:
    """Asks all ranks and adds up their answers; `trained` are the round's clients that diagnostics see."""

    def __init__(self, worker: OracleWorker, trained: Sequence[int] = ()) -> None:
        self.worker, self.experiment, self.trained = worker, worker.experiment, trained

    def end(self) -> None:
        """Let the other ranks go on."""
        send_command(Command(Action.END_DIAGNOSTICS), self.worker.group.collectives)

    def loss(self, w: Tensor, rows: int = ALL_ROWS) -> float:
        return mean_of_words(self._ask(Command(Action.LOSS, rows=rows), w))

    def gradient(self, w: Tensor, rows: int = ALL_ROWS) -> Tensor:
        self._ask(Command(Action.GRADIENT, rows=rows), w)
        return self._mean("gradient")

    def hessian_vector_product(self, w: Tensor, v: Tensor, rows: int = ALL_ROWS) -> Tensor:
        self._ask(Command(Action.HESSIAN_VECTOR_PRODUCT, rows=rows), w, v)
        return self._mean("product of Hessian and vector")

    def clients(self, w: Tensor, on_validation: bool) -> list[float]:
        on_validation = on_validation and bool(self.experiment.client_data.validated_clients)
        action = Action.CLIENT_VALIDATION_METRICS if on_validation else Action.CLIENT_METRICS
        return read_bits_table(self._ask(Command(action), w))

    def fine_tune(self, w: Tensor, settings: FineTuning) -> tuple[list[float], list[float]]:
        numbers = read_bits_table(self._ask(Command(Action.FINE_TUNE, **settings._asdict()), w))
        return numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]

    def classes(self, w: Tensor) -> list[float | None]:
        if not self._predicts_classes:
            return []
        correct, total = self._ask(Command(Action.CLASS_ACCURACY, rows=TEST_ROWS), w).tolist()
        return [right / n if n else None for right, n in zip(correct, total, strict=True)]

    def count(self, rows: int = ALL_ROWS) -> int:
        return len(self.worker.rows.select(rows))

    @property
    def sizes(self) -> list[int]:
        return [self.experiment.client_data.counts[client] for client in self.trained]

    def mean(self, name: str) -> Tensor:
        self._ask(Command(Action.LOCAL_MEAN, vector=VECTOR_NAMES.index(name)))
        return self._mean(name)

    def vector(self, name: str, client: int) -> Tensor:
        if client not in self.trained:
            raise MeasurementError(f"client {client} did not train in this round; it trained {list(self.trained)}")
        self._ask(Command(Action.LOCAL_VECTOR, client=client, vector=VECTOR_NAMES.index(name)))
        return self._mean(name)

    def distances(self, name: str, point: Tensor) -> list[float]:
        return self._of_trained(Command(Action.LOCAL_DISTANCES, vector=VECTOR_NAMES.index(name)), point)

    def chordal_distances(self, name: str, point: Tensor) -> list[float]:
        return self._of_trained(Command(Action.LOCAL_CHORDS, vector=VECTOR_NAMES.index(name)), point)

    def sharpness(self, rho: float) -> list[float]:
        return self._of_trained(Command(Action.LOCAL_SHARPNESS, rho=rho))

    def client_variables(self, client: int) -> dict[str, Tensor]:
        """Those that the run keeps for the client, in host memory; none before its first round."""
        self._ask(Command(Action.CLIENT_VARIABLES, client=client))
        return self.worker.fetched or {}

    def _ask(self, command: Command, *vectors: Tensor) -> Tensor:
        worker, collectives = self.worker, self.worker.group.collectives
        send_command(command, collectives)
        for point, vector in zip(worker.points, vectors, strict=False):
            point.copy_(vector)
        collectives.broadcast(worker.points[: len(vectors)])
        return worker.answer(command)

    def _of_trained(self, command: Command, *vectors: Tensor) -> list[float]:
        numbers = dict(zip(self.worker.cohort, read_bits_table(self._ask(command, *vectors)), strict=True))
        return [numbers[client] for client in self.trained]

    def _mean(self, what: str) -> Tensor:
        """The sum over its count, in the model's precision."""
        count, not_added = self.worker.words[-2:].tolist()
        if not_added:
            raise MeasurementError(f"the {what} is not finite")
        return self.worker.total.mean_over(COUNT_UNIT * max(1, count), torch.empty_like(self.worker.model.vector))

    @cached_property
    def _predicts_classes(self) -> bool:
        """Whether the model predicts the class of a row, and not its tokens, say."""
        experiment = self.experiment
        if not experiment.task.logits or not 0 < experiment.dataset.classes <= MAX_CLASSES:
            return False
        rows = self.worker.rows.select(TEST_ROWS)[: experiment.config.evaluate.batch_size]
        x, y = next(experiment.test.load([rows]))
        _, target = experiment.task.batch(normalise(x, experiment.dataset, experiment.test.dtype), y)
        return target.shape == y.shape and bool((target == y).all())
