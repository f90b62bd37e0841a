"""Every rank's half of the loss oracle: answers to rank 0's questions about losses over all clients' data.

Each rank works on its share of fixed pieces of the rows, and one reduce adds integers: the same bits on any number of
ranks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing

import torch
from torch import Tensor

from fl_dist.algorithms.core import unit_vector
from fl_dist.common.vector_math import norm
from fl_dist.diagnostics.base import RECORDED_STEP_FRACTIONS, FineTuning
from fl_dist.distributed import fault_injection
from fl_dist.distributed.process_group import ProcessGroup
from fl_dist.federation.client_state import ClientStateStore
from fl_dist.federation.commands import Action, Command, receive_command
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.fine_tuning import ClientFineTuning, sample_clients
from fl_dist.federation.fixed_point import FixedPoint, FixedPointSum, ScratchBuffers
from fl_dist.federation.loss_derivatives import count_correct, derivatives, measure, sharpness
from fl_dist.federation.measured_rows import MeasuredRows
from fl_dist.federation.measurement_share import MeasurementShare
from fl_dist.federation.metric_sums import bits_table
from fl_dist.federation.trajectory_recorder import RecordedVectors

MAX_ENTRY = 2.0**30
"""Largest entry of a piece's gradient or product."""
COUNT_UNIT = 2.0**-20
"""A piece's weight is its number of predictions times this, which is exact."""
VECTOR_NAMES = ("end", *(f"{kind}{k}" for k in range(len(RECORDED_STEP_FRACTIONS)) for kind in ("y", "delta")))
VECTORS_SENT = {
    Action.HESSIAN_VECTOR_PRODUCT: 2,
    Action.LOCAL_MEAN: 0,
    Action.LOCAL_VECTOR: 0,
    Action.LOCAL_SHARPNESS: 0,
    Action.CLIENT_VARIABLES: 0,
}
"""Vectors that follow a question, if not one."""


class OracleWorker:
    """Between `open` and `close` it holds memory for two vectors and their sum."""

    def __init__(self, experiment: Experiment, group: ProcessGroup, states: ClientStateStore) -> None:
        self.experiment, self.group, self.states = experiment, group, states
        self.model = experiment.eval_model
        self.share = MeasurementShare(experiment, group)
        self.rows = MeasuredRows(experiment, self.share, group.failure_detector.progress)
        self.fetched: dict[str, Tensor] | None = None
        """On rank 0, the client's variables that were asked for last."""
        self._handlers: dict[Action, Callable[[Command], Tensor]] = {
            Action.LOSS: self._loss,
            Action.GRADIENT: lambda command: self._sum(self._derivatives(command)),
            Action.HESSIAN_VECTOR_PRODUCT: lambda command: self._sum(self._derivatives(command, self.points[1])),
            Action.CLIENT_METRICS: self._client_metrics,
            Action.CLIENT_VALIDATION_METRICS: self._client_metrics,
            Action.FINE_TUNE: self._fine_tuned_metrics,
            Action.CLASS_ACCURACY: self._class_accuracy,
            Action.LOCAL_MEAN: lambda command: self._sum_local(command, self._recorded),
            Action.LOCAL_VECTOR: lambda command: self._sum_local(command, {command.client} & self._recorded.keys()),
            Action.LOCAL_DISTANCES: self._local_distances,
            Action.LOCAL_CHORDS: self._local_distances,
            Action.LOCAL_SHARPNESS: self._local_sharpness,
        }

    def open(self, buffers: Tensor | None, cohort: Sequence[int], recorded: Mapping[int, RecordedVectors]) -> None:
        """On every rank: the round's cohort, and what this rank recorded of it; rank 0 knows the model's buffers."""
        size, device = self.model.size, self.experiment.device
        self.points = torch.zeros(2, size, dtype=self.model.vector.dtype, device=device)
        self.words = torch.zeros(2 * size + 2, dtype=torch.int64, device=device)
        headroom = math.ceil(math.log2(len(self.rows.all) + len(cohort) + 1))
        format_ = FixedPoint(MAX_ENTRY, 2.0 ** (62 - 30 - headroom), 2.0 ** (62 - headroom), 2)
        self.total = FixedPointSum(self.words[:-2].view(2, size), format_, ScratchBuffers(size, device))
        self.cohort, self._recorded = cohort, recorded
        self._buffers = self.model.buffers.new() if buffers is None else buffers.clone()
        self.group.collectives.broadcast(self._buffers)

    def close(self) -> None:
        self._recorded = {}
        del self.points, self.words, self.total

    def serve(self) -> None:
        """On ranks other than 0: answer until rank 0 is done."""
        while (command := receive_command(self.group.collectives)).action is not Action.END_DIAGNOSTICS:
            self.group.collectives.broadcast(self.points[: VECTORS_SENT.get(command.action, 1)])
            self.answer(command)

    def answer(self, command: Command) -> Tensor:
        """This rank's part, added to that of the others; rank 0 has the sum."""
        fault_injection.point("diagnose")
        if command.action is Action.CLIENT_VARIABLES:
            self.fetched = self.states.fetch_to_server(command.client)
            return self.words[:0]
        with self.group.failure_detector.activity(f"a diagnostic ({command.action.name.lower()})"):
            self.model.bind(self.points[0])
            self.model.buffers.write(self._buffers)
            self.model.module.eval()
            words = self._handlers[command.action](command)
        if words is not self.words:  # a table on the host; vectors are summed where they are read
            words = words.to(self.experiment.device)
        self.group.collectives.reduce(words)
        return words

    def _loss(self, command: Command) -> Tensor:
        return measure(self.model, self.experiment.task, self.rows.own_batches(command.rows)).table(["loss"])[0]

    def _derivatives(self, command: Command, vector: Tensor | None = None) -> Iterator[tuple[Tensor, int]]:
        return derivatives(self.model, self.experiment.task, self.rows.own_batches(command.rows), vector)

    def _class_accuracy(self, command: Command) -> Tensor:
        experiment = self.experiment
        return count_correct(
            self.model, experiment.task, self.rows.own_batches(command.rows), experiment.dataset.classes
        )

    def _client_metrics(self, command: Command) -> Tensor:
        """Of all clients on their training rows, or of those that hold rows out on these."""
        data = self.experiment.client_data
        if command.action is Action.CLIENT_VALIDATION_METRICS:
            numbers = self._measure_clients(data.validated_clients, data.validation)
            return bits_table(len(data.validated_clients), numbers)
        return bits_table(len(data.rows), self._measure_clients(range(len(data.rows)), data.rows))

    def _measure_clients(self, clients: Sequence[int], rows: Sequence[Tensor]) -> list[tuple[int, float]]:
        """Of this rank's share of the clients: the position in the list, and the metric on the client's `rows`."""
        return [(position, self._client_metric(rows[clients[position]])) for position in self.share.clients(clients)]

    def _fine_tuned_metrics(self, command: Command) -> Tensor:
        """Of the sampled clients, on their validation rows: the metric of the point, then those of their own models."""
        settings = FineTuning(command.epochs, command.steps, command.lr, command.sample)
        clients = sample_clients(self.experiment, settings.sample)
        own, rows = self.share.clients(clients), self.experiment.client_data.validation
        before, after = self._measure_clients(clients, rows), []
        with closing(ClientFineTuning(self.experiment, settings, self.group.failure_detector.progress)) as fine_tuning:
            for position in own:
                client = clients[position]
                is_finite = fine_tuning.bind(self.model, client, self.points[0], self._buffers)
                metric = self._client_metric(rows[client]) if is_finite else math.nan
                after.append((len(clients) + position, metric))
        return bits_table(2 * len(clients), before + after)

    def _client_metric(self, rows: Tensor) -> float:
        task = self.experiment.task
        means = measure(self.model, task, self.rows.batches(rows)).means()
        return task.metrics(means)[task.primary_metric.name]

    def _sum_local(self, command: Command, clients: Iterable[int]) -> Tensor:
        vectors = (self._recorded[client][VECTOR_NAMES[command.vector]] for client in clients)
        return self._sum((vector.to(self.points.device), 1) for vector in vectors)

    def _local_distances(self, command: Command) -> Tensor:
        """Of the recorded vectors to the point, or, of chords, between both scaled to length 1."""
        point, name = self.points[0], VECTOR_NAMES[command.vector]

        def distance(client: int) -> float:
            vector = self._recorded[client][name].to(point.device)
            if command.action is Action.LOCAL_CHORDS:
                return norm(unit_vector(vector.double()) - unit_vector(point.double()))
            return norm(vector - point)

        return self._per_client(distance)

    def _local_sharpness(self, command: Command) -> Tensor:
        def of_client(client: int) -> float:
            rows, end = self.experiment.client_data.rows[client], self._recorded[client]["end"].to(self.points.device)
            return sharpness(self.model, self.experiment.task, lambda: self.rows.batches(rows), end, command.rho)

        return self._per_client(of_client)

    def _per_client(self, value: Callable[[int], float]) -> Tensor:
        """A number of each client that this rank trained, at the client's position in the cohort."""
        own = ((position, client) for position, client in enumerate(self.cohort) if client in self._recorded)
        return bits_table(len(self.cohort), ((position, value(client)) for position, client in own))

    def _sum(self, vectors: Iterable[tuple[Tensor, int]]) -> Tensor:
        """The sum of vectors times their counts; then the counts, and how many could not be added."""
        self.words.zero_()
        for vector, count in vectors:
            low, high = torch.aminmax(vector)
            fits = max(abs(float(low)), abs(float(high))) * count * COUNT_UNIT <= MAX_ENTRY  # False for NaN
            self.words[-2 if fits else -1] += count
            if fits:
                self.total.add(vector, count * COUNT_UNIT)
        return self.words
