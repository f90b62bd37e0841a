"""Clients' own models: plain SGD from one model, of each client on its own training rows."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from fl_dist.algorithms import build
from fl_dist.common.randomness import generator
from fl_dist.common.vector_math import norm
from fl_dist.config import Local
from fl_dist.diagnostics.base import FineTuning
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.flat_model import FlatModel
from fl_dist.federation.local_training import ClientFailedError, LocalTraining, as_client_failure
from fl_dist.federation.trajectory_recorder import TrajectoryRecorder

log = logging.getLogger(__name__)


def sample_clients(experiment: Experiment, size: int) -> Sequence[int]:
    """So many of the clients that hold rows out, the same in every round; 0: all."""
    clients: Sequence[int] = experiment.client_data.validated_clients
    if not 0 < size < len(clients):
        return clients
    rng = generator(experiment.config.seed, "diagnostics clients")
    return [clients[position] for position in sorted(rng.choice(len(clients), size, replace=False))]


class ClientFineTuning:
    """Local training without the run's algorithm and optimiser, with the batches of a client's first round."""

    def __init__(self, experiment: Experiment, settings: FineTuning, progress: Callable[[], None]) -> None:
        self._experiment, local = experiment, _plain_sgd(experiment.config.local, settings)
        self._data, self._lr = experiment.client_data.with_local(local), local.lr
        self._algorithm = build({"name": "fedavg"})
        self._training = LocalTraining(experiment, self._algorithm, self._data, progress=progress)

    def close(self) -> None:
        self._training.close()

    def bind(self, model: FlatModel, client: int, x: Tensor, buffers: Tensor) -> bool:
        """Let `model` compute at the client's own one, trained from `x`; False if its training failed or diverged."""
        recorder = TrajectoryRecorder(["ends"])
        try:
            with as_client_failure():
                loss = self._train(client, x, buffers, recorder)
        except ClientFailedError as failure:
            log.warning("local steps of client %d: %s", client, failure, exc_info=failure.__cause__)
            return False
        end = recorder.records[client]["end"].to(x.device)
        model.bind(end)
        model.buffers.write(self._experiment.model.buffers.read())
        return math.isfinite(loss) and math.isfinite(norm(end))

    def _train(self, client: int, x: Tensor, buffers: Tensor, recorder: TrajectoryRecorder) -> float:
        round_ = replace(self._experiment.round(0, 1, client), lr=self._lr, steps=self._data.steps(client))
        s = self._algorithm.publish(self._algorithm.server_init(x), round_)
        state = self._algorithm.client_init(s, round_)
        result = self._training.run(client, s, buffers, state, round_, recorder)
        recorder.accept(client)
        return float(result.loss)


def _plain_sgd(local: Local, settings: FineTuning) -> Local:
    changes = {"epochs": settings.epochs, "steps": settings.steps or None, "lr": settings.lr or local.lr}
    plain = {"optimizer": {"name": "sgd"}, "momentum": 0.0, "weight_decay": 0.0, "clip": None}
    return local.model_copy(update=changes | plain)
