"""Tables of all algorithms, computed from their chains: messages, passes, memory, and what papers print of them."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fl_dist.algorithms import algorithms, papers, parts
from fl_dist.algorithms.core import Algorithm
from fl_dist.algorithms.memory_needs import FLOAT_BYTES, VECTOR_SIZE, OnDemandVectors, is_model_sized, memory_needs
from fl_dist.algorithms.paper_costs import PAPER_COSTS, PublishedCost
from fl_dist.algorithms.part import changes_upload
from fl_dist.algorithms.privacy_accountant import has_opacus
from fl_dist.common.formatting import align_columns, format_bytes
from fl_dist.optimizers.base import Optimizer, optimizers

ALGORITHM_COLUMNS = ("algorithm", "paper", "parts", "passes per step", "down", "up", "client memory")
ALGORITHM_LEGEND = (
    "F, B: forward and backward passes of a local step. down, up: model-sized messages per client and round. "
    "client memory: model-sized vectors, what is received and what is kept between rounds."
)
REPORT_COLUMNS = ("reported each round", "by the part", "meaning")
UPLOAD_COLUMNS = ("part", "up", "kept by a client", "worker", "rank 0")
UPLOAD_LEGEND = (
    "Parts that change what a client sends or what the server makes of it, added to any algorithm by algorithm.with. "
    "They need no passes. up: bytes of a client's update, in units of a float32 vector, of a model with "
    "1,000,000 parameters. kept by a client: model-sized vectors between rounds. worker, rank 0: device memory in "
    "addition to the algorithm's, in bytes per parameter; parts that need all updates also hold these in the host "
    "memory of rank 0, 4 bytes per parameter and client of the round."
)
MEMORY_COLUMNS = ("algorithm", "worker", "rank 0")
MEMORY_LEGEND = (
    "The most that a GPU holds at a time, {unit}; rank 0 is a dedicated server. In float32, with the exact reduce and "
    "local.optimizer={optimizer}, whose variables are {bytes} bytes per parameter of a worker. More: activations, "
    "rows, 16 MB in which sums are converted, 4 bytes per frozen parameter; 8 per sum if clients are very unequal, and "
    "for dual variables if not all are of one size."
)
PAPER_COLUMNS = (
    "algorithm",
    "passes per step",
    "down",
    "up",
    "communication",
    "computation",
    "client memory",
    "differs",
)
PAPER_LEGEND = (
    "In brackets: the paper's number. communication: messages of a client and round, in units of FedAvg's 2. "
    "computation: of a local step, in units of FedAvg's, if a backward pass takes as long as two forward passes."
)


class DryRun:
    """A chain on a small vector instead of a model, up to the first local step; counts messages, memory and passes."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm, self.round = algorithm, OnDemandVectors().round()
        self.received = algorithm.publish(algorithm.server_init(torch.zeros(VECTOR_SIZE)), self.round)
        self.state = algorithm.client_init(self.received, self.round)
        self.downloads = sum(map(is_model_sized, vars(self.received).values()))
        self.state_vectors = sum(map(is_model_sized, vars(self.state).values()))
        self.full_passes = self.backwards = 0

    def begin(self) -> "DryRun":
        self.algorithm.begin(self.received, self.state, self.round, self._full_gradient)
        return self

    def step(self) -> "DryRun":
        self.algorithm.oracle(self._gradient, self.received, self.state, self.round)(self.received.x.clone())
        return self

    def _full_gradient(self) -> Tensor:
        self.full_passes += 1
        return torch.zeros(VECTOR_SIZE)

    def _gradient(self, w: Tensor) -> Tensor:
        self.backwards += 1
        return torch.zeros(VECTOR_SIZE)


def algorithm_row(name: str) -> tuple[str, ...]:
    """The cells under ALGORITHM_COLUMNS, with default settings."""
    algorithm = algorithms.build(name, {})
    run = DryRun(algorithm)
    uploads = 1 + sum(upload.message and not upload.scalar for upload in algorithm.uploads.values())
    counts = map(str, (run.downloads, uploads, run.downloads + run.state_vectors))
    return name, papers[name], algorithm.describe(), _passes(algorithm), *counts


def report_rows() -> Iterable[tuple[str, ...]]:
    """The cells under REPORT_COLUMNS."""
    for name in parts:
        for report, meaning in parts.build(name, {}).reports.items():
            yield report, name, meaning


def upload_rows() -> Iterable[tuple[str, ...]]:
    """The cells under UPLOAD_COLUMNS, with default settings."""
    optimizer = optimizers.build("sgd", {}, momentum=0.0, weight_decay=0.0)
    base = memory_needs(Algorithm(), optimizer)
    for name in parts:
        part = parts.build(name, {})
        if changes_upload(part) and ("opacus" not in part.needs or has_opacus()):
            chain = Algorithm(part)
            run, needs = DryRun(chain), memory_needs(chain, optimizer)
            r = replace(run.round, parameter_count=10**6)
            share = chain.upload_bytes(r, FLOAT_BYTES) / (FLOAT_BYTES * r.parameter_count)
            more = needs.worker - base.worker, needs.server - base.server
            yield name, f"{share:.3g}", *map(str, (run.state_vectors, *more))


def _passes(algorithm: Algorithm) -> str:
    forwards, backwards = algorithm.passes
    text = f"{forwards}F {backwards}B"
    run = DryRun(algorithm).begin()
    text += " + full pass per round" if run.full_passes else ""
    # A published number controls the local step; at 1 it may save passes.
    numbers = [name for name in algorithm.published if getattr(run.received, name).dim() == 0]
    for name in numbers:
        at_one = DryRun(algorithm)
        setattr(at_one.received, name, torch.ones(()))
        saved = backwards - at_one.begin().step().backwards
        text += f" ({forwards - saved}F {backwards - saved}B at {name} = 1)" if saved else ""
    return text


def memory_rows(parameters: int, optimizer: Optimizer) -> Iterable[tuple[str, ...]]:
    """The cells under MEMORY_COLUMNS; in bytes per parameter if `parameters` is 0."""
    for name in algorithms:
        needs = memory_needs(algorithms.build(name, {}), optimizer)
        yield name, *(format_bytes(parameters * n) if parameters else str(n) for n in needs)


def paper_rows(paper: str) -> Iterable[tuple[str, ...]]:
    """The cells under PAPER_COLUMNS: our counts and, in brackets, what the paper prints."""
    for name, published in PAPER_COSTS[paper].methods.items():
        _, _, _, passes, down, up, memory = algorithm_row(name)
        forwards, backwards = algorithms.build(name, {}).passes
        own = PublishedCost((int(down) + int(up)) / 2, round((forwards + 2 * backwards) / 3, 2), int(memory))
        pairs = dict(zip(own._fields, zip(own, published, strict=True), strict=True))
        cells = (f"{a:g}" if b is None else f"{a:g} ({b:g})" for a, b in pairs.values())
        yield name, passes, down, up, *cells, ", ".join(key for key, (a, b) in pairs.items() if b not in (None, a))


def markdown_table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    head, *body = rows
    for cells in (head, ["---"] * len(head), *body):
        yield f"| {' | '.join(cells)} |"


def table_lines(arguments: argparse.Namespace) -> list[str]:
    """The table that the command line asks for, and its legend."""
    table = markdown_table if arguments.markdown else align_columns
    if arguments.memory:
        n, name = arguments.parameters, arguments.optimizer or "sgd"
        optimizer = optimizers.build(name, {}, momentum=0.9, weight_decay=0.0)
        variables = FLOAT_BYTES * sum(map(is_model_sized, optimizer.init(torch.zeros(VECTOR_SIZE)).values()))
        unit = f"of a model with {n:,} parameters" if n else "in bytes per parameter"
        legend = MEMORY_LEGEND.format(unit=unit, optimizer=name, bytes=variables)
        lines = [*table([MEMORY_COLUMNS, *memory_rows(n, optimizer)]), "", legend]
    elif arguments.paper:
        source, _, remark = PAPER_COSTS[arguments.paper]
        lines = [*table([PAPER_COLUMNS, *paper_rows(arguments.paper)]), "", f"{source}. {remark}", "", PAPER_LEGEND]
    else:
        lines = [*table([ALGORITHM_COLUMNS, *map(algorithm_row, algorithms)]), "", ALGORITHM_LEGEND, ""]
        lines += [*table([UPLOAD_COLUMNS, *upload_rows()]), "", UPLOAD_LEGEND, ""]
        lines += table([REPORT_COLUMNS, *report_rows()])
    return lines
