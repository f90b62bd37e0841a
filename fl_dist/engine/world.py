"""Everything that a configuration means and that every rank builds alike: data, clients, model, algorithm."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_dist import diagnostics
from fl_dist.algorithms import build
from fl_dist.common.contract import Mistake, what
from fl_dist.common.imports import source_hash, told
from fl_dist.common.randomness import seed_global, torch_seed
from fl_dist.common.registry import BadBuilder
from fl_dist.common.words import counted
from fl_dist.config import Config, ConfigError, import_paths, schedule
from fl_dist.core import Round, Vars
from fl_dist.data import Dataset, datasets, labels_of, normalise
from fl_dist.data.augment import augmentations
from fl_dist.data.partition import split
from fl_dist.engine import plan
from fl_dist.engine.client import DTYPES, Samples
from fl_dist.engine.flat import Flat
from fl_dist.engine.rows import Rows
from fl_dist.engine.state import Template
from fl_dist.machine import breakdown
from fl_dist.models import MadeFor, build_model, taken_over
from fl_dist.storage.folder import CODE
from fl_dist.tasks import Task, tasks, try_task


@dataclass(frozen=True)
class Facts:
    """What a reader of a run needs to know without its data."""

    shape: list[int]
    outputs: int
    vocabulary: int
    bytes: bool
    """Whether its rows are bytes, which are divided by 255."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    headline: dict[str, Any]


class World:
    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.schedule = schedule(config)
        self.largest = plan.largest_cohort(config.clients, self.schedule)
        self._cohort: dict[int, list[int]] = {}
        self.algorithm = build(config.algorithm)
        self.diagnostics = diagnostics.plan(config.diagnostics)
        self.task, self.dataset = build_task(config), build_data(config)
        self._check_data()
        augment = augmentations.build(config.augment["name"], _settings(config.augment))
        rows = build_clients(config, self.dataset)
        most = 1e9 * config.topology.data_memory
        self.samples = Samples(self.dataset, self.task, rows, augment, config.local, device, most)
        self.made_for = MadeFor(self.dataset.shape, self.task.outputs(self.dataset), self.dataset.ids)
        self.model = Flat(self._module())
        self.twin = Flat(self._module(), self.model)
        self.twin.share_frozen(self.model)
        self._try_model()
        self.initial = self.model.vector.to("cpu", copy=True)
        """The model before the first round, in host memory."""
        self.initial_buffers = self.model.buffers.read(self.model.buffers.new())
        published = self.published()
        self.vectors_down = sum(tensor.numel() > 1 for tensor in vars(published).values())
        """Model-sized, to each client of a round."""
        self.template = self._template(published)
        counts = [len(rows) for rows in self.samples.rows]
        self.most_samples = max(counts)
        self.least_weight = min(counts) / self.most_samples if config.server.weighting == "samples" else 1.0

    @cached_property
    def _first(self) -> Tensor:
        return self.initial.to(self.device)

    @cached_property
    def _is_weight(self) -> Tensor:
        mask = torch.zeros_like(self.model.vector, dtype=torch.bool)
        for name, view in self.model.named(mask).items():
            view.fill_("weight" in name)
        return mask

    def _module(self) -> nn.Module:
        seed_global(torch_seed(self.config.seed, "model"), self.device)
        dtype = DTYPES[self.config.local.precision]
        return build_model(self.config.model, self.made_for, dtype).to(self.device)

    def _check_data(self) -> None:
        """That the data is what the task and the algorithm can use."""
        self.task.check(self.dataset)
        precision = self.config.local.precision
        for name in ("x_train", "x_test", "y_train", "y_test"):
            x: Tensor = getattr(self.dataset, name)
            # In the precision of training: 1e300 is infinite in float32. (A NaN is the least and the greatest value.)
            extremes = (
                torch.stack(torch.aminmax(x)).to(DTYPES[precision]) if x.is_floating_point() and x.numel() else x[:0]
            )
            if not bool(torch.isfinite(extremes).all()):
                raise ValueError(
                    f"data {self.config.data['name']}: {name} holds values that are not finite in {precision};"
                    " scale, replace or remove them"
                )
        have = {"logits": self.task.logits, "real inputs": self.dataset.is_real}
        for part in self.algorithm.parts:
            for need in part.needs:
                if not have[need]:
                    who = f"the part {type(part).__name__.lower()} of this algorithm"
                    raise ConfigError(f"{who} needs {LACKING[need].format(**self.config.model_dump())}")

    @torch.no_grad()
    def _try_model(self) -> None:
        """Two rows through the model: whether it can take them, and gives what the task wants."""
        self.twin.module.eval()
        x = normalise(self.dataset.x_test[:2].to(self.device), self.dataset, self.samples.dtype)
        x, y = self.task.batch(x, self.samples.data.y[:2][: len(x)])
        name, asked = self.config.model["name"], f"rows of shape {list(x.shape[1:])}"
        try:
            outputs = self.twin.module(x)
        except Exception as e:
            if breakdown.kind(e) is not None:
                raise
            ids = "" if self.dataset.is_real else " of ids, for which it needs an embedding"
            raise BadBuilder(f"model {name} cannot take {asked}{ids}: {told(e)}") from e
        if not isinstance(outputs, Tensor):
            raise BadBuilder(f"model {name} gave {what(outputs)} for {asked}; it has to give a tensor")
        if outputs.shape[-1] != self.made_for.outputs or outputs.shape[:1] != x.shape[:1]:
            wanted = f"{self.made_for.outputs} numbers for each, as task {self.config.task['name']} asks"
            raise BadBuilder(f"model {name} gave shape {list(outputs.shape)} for {len(x)} {asked}, not {wanted}")
        if not bool(torch.isfinite(outputs).all()):
            raise BadBuilder(f"model {name} gave values that are not finite for {asked}, before any training")
        try:
            try_task(self.task, self.config.task["name"], outputs, y)
        except Mistake:
            raise
        except Exception as e:
            if breakdown.kind(e) is not None:
                raise
            why = told(e)
            raise BadBuilder(
                f"task {self.config.task['name']} failed on outputs of shape {list(outputs.shape)}: {why}"
            ) from e

    def _template(self, published: Vars) -> Template:
        state = self.algorithm.client_init(published, self.round(0, 1))
        return {n: (tuple(t.shape), t.dtype) for n, t in vars(state).items()}

    def describe(self) -> list[str]:
        """What the run is made of, in a few lines."""
        data, rows = self.dataset, self.samples.rows
        shape = "x".join(map(str, data.shape))
        labels = labels_of(data.y_train.numpy())
        kinds = "" if labels is None else f" and {_span([len(np.unique(labels[r.numpy()])) for r in rows])} classes"
        return [
            f"task {self.config.task['name']}",
            f"data {self.config.data['name']}: {len(data.x_train):,} training and {len(data.x_test):,} test rows of "
            f"{shape}" + (f", {data.classes} classes" if data.classes else ""),
            f"{counted(len(rows), 'client')} by {self.config.partition['name']}: {_span([len(r) for r in rows])} rows"
            f"{kinds} each",
            f"model {self.config.model['name']}: {self.size()}",
            *self.notes,
            f"algorithm {self.config.algorithm.get('name', 'of parts')}: {self.algorithm.describe()}",
        ]

    def who_has_what(self) -> dict[str, Any]:
        """Rows of each client, and of each class, unless that is a long list."""
        rows, labels, kinds = self.samples.rows, labels_of(self.dataset.y_train.numpy()), self.dataset.classes
        sizes = [len(r) for r in rows]
        if labels is None or len(rows) * kinds > COUNTS:
            return {"sizes": sizes, "classes": None}
        return {"sizes": sizes, "classes": [np.bincount(labels[r.numpy()], minlength=kinds).tolist() for r in rows]}

    @cached_property
    def notes(self) -> list[str]:
        """What a user should hear of even if nobody looks into a log."""
        pretrained = self.config.model["pretrained"]
        return [] if pretrained is None else [taken_over(self.model.module, pretrained)]

    def size(self) -> str:
        """The model's parameters, in words."""
        frozen = sum(t.numel() for n, t in self.model.frozen.items() if n in dict(self.model.module.named_parameters()))
        whole = self.model.count + frozen
        part = f", {self.model.count:,} of them trained ({self.model.count / whole:.1%})" if frozen else ""
        return f"{whole:,} parameters{part}"

    def facts(self) -> Facts:
        shape, outputs, vocabulary = self.made_for
        data, headline = self.dataset, self.task.headline._asdict()
        return Facts(list(shape), outputs, vocabulary, data.x_train.dtype == torch.uint8, data.mean, data.std, headline)

    def contents(self) -> dict[str, str]:
        """Hashes of what the run is made of beyond its configuration: files may change behind their names."""
        data, frozen = self.dataset, self.model.frozen
        made = {
            "data": [data.x_train, data.y_train, data.x_test, data.y_test],
            "partition": [torch.cat(self.samples.rows), torch.tensor([len(rows) for rows in self.samples.rows])],
            "model": [self.initial, self.initial_buffers, *(frozen[name] for name in sorted(frozen))],
            "schedule": [torch.tensor(c) for c in self.schedule or []],
        }
        hashes = {name: hashed(tensors) for name, tensors in made.items()}
        named = import_paths(self.config)
        return hashes | ({CODE: source_hash(named)} if named else {})

    def cohort(self, index: int) -> list[int]:
        """The clients of a round; the last one is remembered, so that it may be drawn ahead of its time."""
        if index not in self._cohort:
            self._cohort = {index: plan.cohort(self.config.clients, self.schedule, self.config.seed, index)}
        return self._cohort[index]

    @cached_property
    def costs(self) -> list[int]:
        """Estimated work of each client's round: samples passed, times the passes of the algorithm."""
        forwards, backwards = self.algorithm.passes
        samples, epochs = self.samples, self.config.local.epochs
        return [
            min(epochs * samples.count(c), samples.steps(c) * samples.batch_size(c)) * (forwards + 2 * backwards)
            for c in range(len(samples.rows))
        ]

    @cached_property
    def test(self) -> Rows:
        """The test rows, on the device if the training rows leave them room there."""
        data, train = self.dataset, self.samples.data
        room = 1e9 * self.config.topology.data_memory - (train.x.nbytes if train.resident else 0)
        return Rows(data.x_test, data.y_test, self.device, self.samples.dtype, room)

    def weight(self, client: int, by: str) -> float:
        """A client's weight in a mean: at most 1, and independent of who else takes part."""
        return self.samples.count(client) / self.most_samples if by == "samples" else 1.0

    def round(self, index: int, participants: int, client: int | None = None) -> Round:
        return Round(
            index=index,
            lr=self.config.lr(index),
            participants=participants,
            clients=self.config.clients.total,
            first=lambda: self._first,
            weights=lambda: self._is_weight,
            channels=self.dataset.shape[0] if self.dataset.shape else 1,
            steps=0 if client is None else self.samples.steps(client),
            samples=0 if client is None else self.samples.count(client),
        )

    def upload_sizes(self) -> dict[str, int]:
        """Entries of each sum that goes up: the update, the buffers, the algorithm's own."""
        own = {n: u for n, u in self.algorithm.uploads.items() if self.sum_of(n) == n}
        uploads = {n: 1 if u.scalar else self.model.size for n, u in own.items()}
        return {UPDATE: self.model.size, BUFFERS: self.model.buffers.size, **uploads}

    def sum_of(self, name: str) -> str:
        """Under which name an upload is added up."""
        upload = self.algorithm.uploads[name]
        return UPDATE if upload.is_update and (upload.by == "samples" or self.least_weight == 1.0) else name

    def published(self) -> Vars:
        """Tensors of the shapes that go down."""
        s = self.algorithm.server_init(self.initial.to(self.device))
        return self.algorithm.publish(s, self.round(0, 1))

    def numbers(self) -> list[str]:
        """The sums among them that are of single numbers."""
        return [n for n, u in self.algorithm.uploads.items() if u.scalar]


UPDATE, BUFFERS = "update", "buffers"
HASHED = 1 << 30
COUNTS = 200_000
"""Clients times classes up to which a run remembers who has how many of what."""
LACKING = {
    "logits": "logits of classes, which the task {task[name]} does not have",
    "real inputs": "numbers as inputs, and the data {data[name]} holds ids",
}


def build_task(config: Config) -> Task:
    return tasks.build(config.task["name"], _settings(config.task))


def build_data(config: Config) -> Dataset:
    return datasets.build(config.data["name"], _settings(config.data))


def build_clients(config: Config, data: Dataset) -> list[np.ndarray]:
    """The training rows of each client."""
    name, settings = config.partition["name"], _settings(config.partition)
    return split(name, settings, data.y_train.numpy(), config.clients.total, config.seed, data.client)


def hashed(tensors: list[Tensor]) -> str:
    """SHA-256 of the tensors' shapes and bytes; of a tensor beyond HASHED bytes, of rows spread evenly over it."""
    digest = hashlib.sha256()
    for tensor in tensors:
        step = max(1, -(-tensor.nbytes // HASHED))
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        if tensor.numel():
            rows = tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)
            digest.update(rows[::step].cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high} (mean {np.mean(values):.1f})"


def _settings(section: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in section.items() if k != "name"}
