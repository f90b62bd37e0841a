"""Everything that a configuration means and that every rank builds alike: data, clients, model, algorithm."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fl_dist import diagnostics
from fl_dist.algorithms import build
from fl_dist.algorithms.core import Round, Vars
from fl_dist.callbacks.base import Measurements
from fl_dist.common.randomness import seed_global, torch_seed
from fl_dist.config import Config
from fl_dist.config.client_schedule import read_schedule
from fl_dist.data.augmentation import augmentations
from fl_dist.data.dataset import fill_empty_splits
from fl_dist.distributed.bf16 import ensure_weights_work
from fl_dist.distributed.memory import max_row_bytes
from fl_dist.distributed.process_group import ProcessGroup
from fl_dist.federation import sampling
from fl_dist.federation.batch_loader import BatchLoader
from fl_dist.federation.checks import check_buffers, check_data, check_model
from fl_dist.federation.client_data import DTYPES, ClientData
from fl_dist.federation.client_rows import ClientRows, build_data, divide_rows
from fl_dist.federation.client_state import StateTemplate, template_of
from fl_dist.federation.flat_model import FlatModel
from fl_dist.federation.local_rows import gather_local_rows
from fl_dist.models import ModelInterface, build_model
from fl_dist.optimizers.base import build_optimizer, client_variables
from fl_dist.tasks import Task, tasks

UPDATE, BUFFERS = "update", "buffers"
"""Names of the sums that every algorithm sends."""


class Experiment:
    """A configuration made real: data, clients, model and algorithm, the same on every rank."""

    def __init__(self, config: Config, device: torch.device, group: ProcessGroup | None = None) -> None:
        """Without a group, this process holds the rows of all clients."""
        self.config, self.device = config, device
        self.schedule = read_schedule(config)
        self.max_cohort = sampling.max_cohort_size(config.clients, self.schedule)
        self._cohort: dict[int, list[int]] = {}
        self.algorithm = build(config.algorithm)
        self.optimizer = build_optimizer(config.local.optimizer, config.local.momentum, config.local.weight_decay)
        self.local_rate, self.server_rate = config.local_rate(), config.server_rate()
        self.diagnostics = diagnostics.build_diagnostics(config.diagnostics)
        self.task = build_task(config)
        self.client_rows, self.model_interface = self._load_rows(group)
        self.dataset = self.client_rows.dataset
        augment = augmentations.build(config.augment["name"], _settings(config.augment))
        self._max_row_bytes = max_row_bytes(config.topology, device, 1 if group is None else group.ranks_on_node)
        self.client_data = ClientData(self.client_rows, self.task, augment, config.local, device, self._max_row_bytes)
        self.model = FlatModel(self._build_module(self.config.model).to(device))
        check_buffers(config, self.algorithm, self.model)
        self.eval_model = self._build_eval_model()
        """The same network for teachers and evaluation; it has no vector of its own."""
        checked = fill_empty_splits(self.dataset)
        metrics = check_model(config, self.task, checked, self.eval_model, self.model_interface)
        self.measurements = Measurements(self.task.primary_metric, metrics, tuple(self.algorithm.reports))
        self.initial = self.model.vector.to("cpu", copy=True)
        """The model before the first round, in host memory."""
        self.initial_buffers = self.model.buffers.read()
        self._server_vars: Vars | None = self.algorithm.server_init(self.initial.to(device))
        published = self.algorithm.publish(self._server_vars, self.round(0, 1))
        self.template = self._template(published)
        self.published = template_of(vars(published))
        """Shapes and types of what the server publishes."""
        self.update_bytes = self.algorithm.upload_bytes(self.round(0, 1), self.model.vector.element_size())
        """That a real client would send for its update."""
        self.vectors_per_download = sum(tensor.numel() > 1 for tensor in vars(published).values())
        """Model-sized, to each client of a round."""
        counts = self.client_data.counts
        self.max_samples = max(counts)
        self.min_weight = min(counts) / self.max_samples if config.server.weighting == "samples" else 1.0

    def _load_rows(self, group: ProcessGroup | None) -> tuple[ClientRows, ModelInterface]:
        """The rows, checked; of a data set that all ranks read, those that this rank does not hold are freed."""
        data = build_data(self.config, group)
        checked = fill_empty_splits(data)
        check_data(self.config, self.task, checked, self.algorithm)
        vocabulary, per_token = checked.vocabulary_size, self.task.per_token
        interface = ModelInterface(checked.shape, self.task.outputs(checked), vocabulary, per_token)
        if self.config.data["local"] and group is not None:
            return gather_local_rows(self.config, data, interface, group), interface
        return divide_rows(self.config, data, group), interface

    @cached_property
    def _first(self) -> Tensor:
        return self.initial.to(self.device)

    def _build_module(self, section: dict[str, Any]) -> nn.Module:
        seed_global(torch_seed(self.config.seed, "model"), self.device)
        local = self.config.local
        # Compilers know no kernels of oneDNN's layouts.
        module = build_model(section, self.model_interface, DTYPES[local.precision], for_training=not local.compile)
        ensure_weights_work(module, self.device)
        return module

    def _build_eval_model(self) -> FlatModel:
        """Weights come from the first model: files of weights are read once."""
        module = self._build_module({**self.config.model, "init": None, "pretrained": None})
        self.model.share_frozen(module)
        # What is trained comes with the vector.
        parameters = dict(self.model.module.named_parameters(remove_duplicate=False))
        rest = {name: value for name, value in self.model.module.state_dict().items() if name not in parameters}
        module.load_state_dict(rest, strict=False)
        return FlatModel(module, self.model)

    def pop_server_vars(self) -> Vars:
        """The server's first variables, once: a rank that is not the server drops them."""
        assert self._server_vars is not None
        variables, self._server_vars = self._server_vars, None
        return variables

    def _template(self, published: Vars) -> StateTemplate:
        state = self.algorithm.client_init(published, self.round(0, 1))
        optimizer_vars = client_variables(self.config.local.optimizer, self.optimizer.init(published.x))
        return template_of(vars(state) | optimizer_vars)

    def cohort(self, index: int) -> list[int]:
        """The clients of a round; the last one is cached, so that it may be drawn ahead."""
        if index not in self._cohort:
            self._cohort = {index: sampling.sample_cohort(self.config.clients, self.schedule, self.config.seed, index)}
        return self._cohort[index]

    @cached_property
    def costs(self) -> list[int]:
        """Estimated work of each client's round: samples passed, times the passes of the algorithm."""
        forwards, backwards = self.algorithm.passes
        data, epochs = self.client_data, self.config.local.epochs
        return [
            min(epochs * count, data.steps(c) * data.batch_size(c)) * (forwards + 2 * backwards)
            for c, count in enumerate(data.counts)
        ]

    @cached_property
    def test(self) -> BatchLoader:
        """The test rows, on the device if the training rows leave them room there."""
        data, train = self.dataset, self.client_data.data
        room = self._max_row_bytes - (train.bytes if train.is_resident else 0)
        return BatchLoader(data.x_test, data.y_test, self.device, train.dtype, room, train.image_format)

    def weight(self, client: int, by: str) -> float:
        """A client's weight in a mean: at most 1, and independent of who else takes part."""
        return self.client_data.counts[client] / self.max_samples if by == "samples" else 1.0

    def round(self, index: int, participants: int, client: int | None = None) -> Round:
        clients = self.config.clients
        return Round(
            index=index,
            lr=self.local_rate(index),
            participants=participants,
            clients=clients.total,
            get_initial=lambda: self._first,
            get_weight_mask=lambda: self.model.weight_mask,
            get_parameter_mask=lambda: self.model.parameter_mask,
            parameter_count=self.model.count,
            channels=self.dataset.shape[0] if self.dataset.shape else 1,
            seed=self.config.seed,
            sampling_rate=1.0 if self.schedule is not None else clients.per_round / clients.total,
            expected_participants=self._expected_participants(index),
            client=client,
            steps=0 if client is None else self.client_data.steps(client),
            samples=0 if client is None else self.client_data.counts[client],
        )

    def _expected_participants(self, index: int) -> int:
        if self.schedule is None:
            return self.config.clients.per_round
        return len(self.schedule[index]) if index < len(self.schedule) else 0  # the last model is published too

    def upload_sizes(self) -> dict[str, int]:
        """Entries of each sum that goes up: the update, the buffers, the algorithm's own."""
        own = {n: u for n, u in self.algorithm.uploads.items() if self.sum_name(n) == n}
        uploads = {n: 1 if u.scalar else self.model.size for n, u in own.items()}
        return {UPDATE: 0 if self.gathers else self.model.size, BUFFERS: self.model.buffers.size, **uploads}

    @property
    def gathers(self) -> bool:
        """Whether each client's update goes to rank 0 by itself, and is no part of a sum."""
        return self.config.comm.reduce == "gather"

    def sum_name(self, name: str) -> str:
        """Under which name an upload is added up."""
        upload = self.algorithm.uploads[name]
        return UPDATE if upload.is_update and (upload.by == "samples" or self.min_weight == 1.0) else name

    def scalar_uploads(self) -> list[str]:
        """The uploads that are single numbers."""
        return [n for n, u in self.algorithm.uploads.items() if u.scalar]


def build_task(config: Config) -> Task:
    return tasks.build(config.task["name"], _settings(config.task))


def _settings(section: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in section.items() if k != "name"}
