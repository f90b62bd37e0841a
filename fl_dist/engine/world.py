"""Everything that a configuration means and that every rank builds alike: data, clients, model, algorithm."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_dist.algorithms import build
from fl_dist.common.randomness import seed_global, torch_seed
from fl_dist.common.words import counted
from fl_dist.config import Config, schedule
from fl_dist.core import Round, Vars
from fl_dist.data import datasets
from fl_dist.data.augment import augmentations
from fl_dist.data.partition import split
from fl_dist.engine import plan
from fl_dist.engine.client import DTYPES, Samples
from fl_dist.engine.flat import Flat
from fl_dist.engine.state import Template
from fl_dist.models import load_init, models


class World:
    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.schedule = schedule(config)
        self.largest = plan.largest_cohort(config.clients, self.schedule)
        self.algorithm = build(config.algorithm)
        self.dataset = datasets.build(config.data["name"], _settings(config.data))
        self._check_finite()
        labels, partition = self.dataset.y_train.numpy(), config.partition
        rows = split(
            partition["name"], _settings(partition), labels, config.clients.total, config.seed, self.dataset.client
        )
        augment = augmentations.build(config.augment["name"], _settings(config.augment))
        self.samples = Samples(self.dataset, rows, augment, config.local, device)
        self.model, self.twin = Flat(self._module()), Flat(self._module())
        self.initial = self.model.vector.clone()
        self.initial_buffers = self.model.buffers.read(self.model.buffers.new())
        self._is_weight = torch.zeros_like(self.initial, dtype=torch.bool)
        for name, view in self.model.named(self._is_weight).items():
            view.fill_("weight" in name)
        self.template = self._template()
        counts = [len(rows) for rows in self.samples.rows]
        self.most_samples = max(counts)
        self.least_weight = min(counts) / self.most_samples if config.server.weighting == "samples" else 1.0

    def _module(self) -> nn.Module:
        settings = _settings(self.config.model)
        init = settings.pop("init", None)
        seed_global(torch_seed(self.config.seed, "model"), self.device)
        module = models.build(self.config.model["name"], settings, self.dataset.shape, self.dataset.classes)
        if init is not None:
            load_init(module.to(DTYPES[self.config.local.precision]), init)
        return module.to(self.device, DTYPES[self.config.local.precision])

    def _check_finite(self) -> None:
        precision = self.config.local.precision
        for name in ("x_train", "x_test"):
            x: Tensor = getattr(self.dataset, name)
            # In the precision of training: 1e300 is infinite in float32. (A NaN is the least and the greatest value.)
            extremes = torch.stack(torch.aminmax(x)).to(DTYPES[precision]) if x.is_floating_point() else x[:0]
            if not bool(torch.isfinite(extremes).all()):
                raise ValueError(
                    f"data {self.config.data['name']}: {name} holds values that are not finite in {precision};"
                    " scale, replace or remove them"
                )

    def _template(self) -> Template:
        r = self.round(0, 1)
        state = self.algorithm.client_init(self.algorithm.publish(self.algorithm.server_init(self.initial), r), r)
        return {n: (tuple(t.shape), t.dtype) for n, t in vars(state).items()}

    def describe(self) -> list[str]:
        """What the run is made of, in a few lines."""
        data, y, rows = self.dataset, self.dataset.y_train.numpy(), self.samples.rows
        shape = "x".join(map(str, data.shape))
        sizes, kinds = [len(r) for r in rows], [len(np.unique(y[r.numpy()])) for r in rows]
        return [
            f"data {self.config.data['name']}: {len(y):,} training and {len(data.y_test):,} test rows of {shape}, "
            f"{data.classes} classes",
            f"{counted(len(rows), 'client')} by {self.config.partition['name']}: {_span(sizes)} rows and "
            f"{_span(kinds)} classes each",
            f"model {self.config.model['name']}: {self.model.count:,} parameters",
            f"algorithm {self.config.algorithm.get('name', 'of parts')}: {self.algorithm.describe()}",
        ]

    def contents(self) -> dict[str, str]:
        """Hashes of what the run is made of beyond its configuration: files may change behind their names."""
        data = self.dataset
        made = {
            "data": [data.x_train, data.y_train, data.x_test, data.y_test],
            "partition": [torch.cat(self.samples.rows), torch.tensor([len(rows) for rows in self.samples.rows])],
            "model": [self.initial, self.initial_buffers],
            "schedule": [torch.tensor(c) for c in self.schedule or []],
        }
        return {name: hashed(tensors) for name, tensors in made.items()}

    def cohort(self, index: int) -> list[int]:
        return plan.cohort(self.config.clients, self.schedule, self.config.seed, index)

    def cost(self, client: int) -> float:
        """Estimated work of a client's round: samples passed, times the passes of the algorithm."""
        forwards, backwards = self.algorithm.passes
        return self.config.local.epochs * self.samples.count(client) * (forwards + 2 * backwards)

    def weight(self, client: int, by: str) -> float:
        """A client's weight in a mean: at most 1, and independent of who else takes part."""
        return self.samples.count(client) / self.most_samples if by == "samples" else 1.0

    def round(self, index: int, participants: int, client: int | None = None) -> Round:
        return Round(
            index=index,
            lr=self.config.lr(index),
            participants=participants,
            clients=self.config.clients.total,
            initial=self.initial,
            is_weight=self._is_weight,
            channels=self.dataset.shape[0],
            steps=0 if client is None else self.samples.steps(client),
            samples=0 if client is None else self.samples.count(client),
        )

    def upload_sizes(self) -> dict[str, int]:
        """Entries of each sum that goes up: the update, the buffers, the algorithm's own."""
        uploads = {n: 1 if u.scalar else self.model.size for n, u in self.algorithm.uploads.items()}
        return {UPDATE: self.model.size, BUFFERS: self.model.buffers.size, **uploads}

    def published(self) -> Vars:
        """Tensors of the shapes that go down."""
        return self.algorithm.publish(self.algorithm.server_init(self.initial), self.round(0, 1))


UPDATE, BUFFERS = "update", "buffers"
HASHED = 1 << 30


def hashed(tensors: list[Tensor]) -> str:
    """SHA-256 of the tensors' shapes and bytes; of a tensor beyond HASHED bytes, of rows spread evenly over it."""
    digest = hashlib.sha256()
    for tensor in tensors:
        step = max(1, -(-tensor.nbytes // HASHED))
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor[::step].cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high} (mean {np.mean(values):.1f})"


def _settings(section: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in section.items() if k != "name"}
