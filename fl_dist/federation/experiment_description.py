"""An experiment in words, facts and hashes: for logs and readers, and to compare ranks and attempts."""

from typing import Any

import numpy as np
import torch

from fl_dist.algorithms.core import part_name
from fl_dist.common.formatting import pluralize
from fl_dist.common.hashing import hash_tensors
from fl_dist.common.imports import hash_sources
from fl_dist.common.rows import main_tensor
from fl_dist.config.builder_sections import user_import_paths
from fl_dist.federation.experiment import Experiment
from fl_dist.models import PretrainedModule, describe_pretrained
from fl_dist.storage.run_folder import CODE

MAX_CLASS_COUNTS = 200_000
"""Clients times classes up to which a run folder holds the class counts of each client."""


def describe(experiment: Experiment) -> list[str]:
    """What the run is made of, in a few lines."""
    config, data, sizes = experiment.config, experiment.dataset, experiment.client_data.counts
    counts = experiment.client_rows.class_counts()
    classes = "" if counts is None else f" and {_range([int(np.count_nonzero(own)) for own in counts])} classes"
    rows_held_out = sum(len(own) for own in experiment.client_data.validation)
    here = " on this rank" if experiment.client_rows.workers is not None else ""
    held_out = f", and {rows_held_out:,} validation rows in all" if rows_held_out else ""
    return [
        f"task {config.task['name']}",
        f"data {config.data['name']}{here}: {len(data.y_train):,} training and {len(data.y_test):,} test rows of "
        f"{'x'.join(map(str, data.shape))}" + (f", {data.classes} classes" if data.classes else ""),
        f"{pluralize(len(sizes), 'client')} by {config.partition['name']}: {_range(sizes)} rows{classes} each"
        f"{held_out}",
        f"model {config.model['name']}: {describe_size(experiment)}",
        *describe_weights(experiment),
        f"algorithm {config.algorithm.get('name', 'of parts')}: {experiment.algorithm.describe()}",
    ]


def describe_weights(experiment: Experiment) -> list[str]:
    """Where weights come from, other than from the seed."""
    module, pretrained = experiment.model.module, experiment.config.model["pretrained"]
    origin = [module.origin] if isinstance(module, PretrainedModule) and module.origin else []
    return origin + ([] if pretrained is None else [describe_pretrained(module, pretrained)])


def describe_assumptions(experiment: Experiment) -> list[str]:
    """Which parts of the algorithm are no longer their paper's with the run's optimiser."""
    local = experiment.config.local
    name, is_sgd = local.optimizer["name"], local.optimizer["name"] == "sgd"
    parts = [part_name(part) for part in experiment.algorithm.parts if part.assumes_sgd]
    if not parts or (is_sgd and local.momentum == 0):
        return []
    cause = f"local.momentum={local.momentum:g}" if is_sgd else f"local.optimizer={name}"
    part = " and ".join(parts)
    return [f"part {part} takes updates for steps of sgd without momentum; with {cause} it is another method"]


def describe_cohorts(experiment: Experiment) -> str:
    """How many clients take part in a round."""
    clients = experiment.config.clients
    total = pluralize(clients.total, "client")
    if experiment.schedule is None and clients.sampling == "bernoulli":
        return f"{clients.per_round} of {total} per round on average"
    return f"{experiment.max_cohort} of {total} per round"


def describe_size(experiment: Experiment) -> str:
    model = experiment.model
    names = {name for name, _ in model.module.named_parameters()}
    frozen = sum(tensor.numel() for name, tensor in model.frozen.items() if name in names)
    total = model.count + frozen
    trained = f", {model.count:,} of them trained ({model.count / total:.1%})" if frozen else ""
    return f"{total:,} parameters{trained}"


def client_class_counts(experiment: Experiment) -> dict[str, Any]:
    """Rows of each client, and of each class, unless that is a long list."""
    sizes, counts = experiment.client_data.counts, experiment.client_rows.class_counts()
    if counts is None or len(sizes) * experiment.dataset.classes > MAX_CLASS_COUNTS:
        return {"sizes": sizes, "classes": None}
    return {"sizes": sizes, "classes": [own.tolist() for own in counts]}


def data_facts(experiment: Experiment) -> dict[str, Any]:
    """What a reader of a run needs to know without its data."""
    interface, data = experiment.model_interface, experiment.dataset
    return {
        "shape": list(interface.shape),
        "outputs": interface.outputs,
        "vocabulary": interface.vocabulary,
        "per_token": interface.per_token,
        "bytes": main_tensor(data.x_train).dtype == torch.uint8,  # which are divided by 255
        "mean": data.mean,
        "std": data.std,
        "primary_metric": experiment.task.primary_metric._asdict(),
    }


def content_hashes(experiment: Experiment) -> dict[str, str]:
    """Hashes of what the run is made of beyond its configuration: files may change behind their names."""
    frozen = experiment.model.frozen
    contents = {
        "model": [experiment.initial, experiment.initial_buffers, *(frozen[name] for name in sorted(frozen))],
        "schedule": [torch.tensor(cohort) for cohort in experiment.schedule or []],
    }
    hashes = experiment.client_rows.hashes() | {name: hash_tensors(tensors) for name, tensors in contents.items()}
    user_code = user_import_paths(experiment.config)
    return hashes | ({CODE: hash_sources(user_code)} if user_code else {})


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high} (mean {np.mean(values):.1f})"
