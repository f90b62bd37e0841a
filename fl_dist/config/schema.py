"""The keys of a configuration: type, default, range and one line each. Builders add theirs by their signatures."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fl_dist.common.registry import StrictModel
from fl_dist.optimizers.schedules import Rate, build_rate

MAX_COUNT = 10**7
"""Of clients, epochs, rows of a batch: larger numbers are typing errors."""
MAX_SECONDS = 1e8
"""Three years: clocks and libraries accept no longer times."""


def key(description: str, **limits: Any) -> Any:
    return Field(description=description, **limits)


class Run(StrictModel):
    dir: Annotated[
        str | None, key("folder of the run (default: runs/<file>-<overrides>); an unfinished run there is resumed")
    ] = None


class Clients(StrictModel):
    total: Annotated[int, key("number of clients", ge=1, le=MAX_COUNT)] = 100
    per_round: Annotated[int, key("clients per round (bernoulli: on average)", ge=1, le=MAX_COUNT)] = 10
    sampling: Annotated[
        Literal["uniform", "bernoulli"], key("without replacement, or each client with probability per_round/total")
    ] = "uniform"
    schedule: Annotated[
        list[list[int]] | str | None,
        key("instead of sampling: client ids of every round, or a YAML or JSON file with them"),
    ] = None
    placement: Annotated[
        Literal["balanced", "process"],
        key("on whichever worker ends first, or each on a worker of its own, which alone holds its rows"),
    ] = "balanced"
    on_failure: Annotated[
        Literal["drop", "retry", "stop"],
        key("a client that fails: leave it out, try once more and then leave it out, or stop"),
    ] = "stop"
    deadline: Annotated[float | None, key("seconds of local training after which a client counts as failed", gt=0)] = (
        None
    )
    validation: Annotated[
        float, key("share of each client's rows that is never trained on: its own validation rows", ge=0, lt=1)
    ] = 0.0
    min_survivors: Annotated[int, key("the run stops when fewer clients of a round than this are left", ge=1)] = 1


class Local(StrictModel):
    epochs: Annotated[int, key("passes over the client's data per round", ge=1, le=MAX_COUNT)] = 5
    steps: Annotated[
        int | None, key("maximum steps of a client per round, whatever the epochs", ge=1, le=MAX_COUNT)
    ] = None
    batch_size: Annotated[int | Literal["full"], key("samples per batch; full: the client's whole data")] = 50
    lr: Annotated[float, key("learning rate, before its schedule", gt=0)] = 0.01
    lr_decay: Annotated[float, key("factor on the rate after each round, of the schedule exponential", gt=0, le=1)] = (
        0.998
    )
    schedule: Annotated[dict[str, Any], key("schedule of lr over the rounds")] = {"name": "exponential"}
    optimizer: Annotated[dict[str, Any], key("how a direction becomes a step")] = {"name": "sgd"}
    momentum: Annotated[float, key("heavy-ball momentum of sgd", ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, key("weight decay", ge=0)] = 1.0e-5
    clip: Annotated[float | None, key("maximum L2 norm of a step's direction", gt=0)] = None
    precision: Annotated[
        Literal["float64", "float32", "tf32", "bf16"],
        key("arithmetic; tf32: float32, with faster, coarser products (GPUs only); bf16: autocast, weights float32"),
    ] = "float32"
    compile: Annotated[
        bool, key("local steps by torch.compile: a minute at the start, then faster steps for some models")
    ] = False
    memory_format: Annotated[
        Literal["channels_last", "contiguous"],
        key("layout of images in memory; contiguous: NCHW, which may be faster for float32 on a GPU"),
    ] = "channels_last"


class Server(StrictModel):
    lr: Annotated[float, key("factor on the mean update, before its schedule", gt=0)] = 1.0
    schedule: Annotated[dict[str, Any], key("schedule of lr over the rounds")] = {"name": "constant"}
    weighting: Annotated[Literal["samples", "uniform"], key("weights of the clients' updates")] = "samples"


class Communication(StrictModel):
    reduce: Annotated[
        Literal["exact", "float32", "gather"],
        key(
            "exact: integer sums, the same bits on any number of workers; gather: rank 0 receives every client's update"
        ),
    ] = "exact"
    timeout: Annotated[
        float,
        key(
            "seconds without progress (a step, a test batch, a message) after which a rank is stuck",
            gt=0,
            le=MAX_SECONDS,
        ),
    ] = 300.0
    rendezvous_timeout: Annotated[
        float, key("seconds that the first rank to start waits for the last", gt=0, le=MAX_SECONDS)
    ] = 600.0


class Topology(StrictModel):
    server: Annotated[Literal["dedicated", "shared"], key("rank 0 only serves and evaluates, or also trains")] = (
        "dedicated"
    )
    threads: Annotated[int, key("CPU threads of each rank", ge=1, le=256)] = 1
    state_memory: Annotated[
        float | None,
        key(
            "GB of clients' variables that a rank holds in memory; the rest is in mapped files (default: the rank's "
            "share of a quarter of the node's memory, at most 16)",
            ge=0,
        ),
    ] = None
    data_memory: Annotated[
        float | None,
        key(
            "GB of rows that a rank's device holds; more are prefetched from files (default: 16, on a GPU at most a "
            "quarter of its memory)",
            ge=0,
        ),
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], key("auto: the GPU of the local rank, if there is one")] = "auto"
    oversubscribe: Annotated[bool, key("allow more ranks than GPUs on a node (over gloo)")] = False


class Checkpoint(StrictModel):
    every: Annotated[int, key("rounds between saves; 0: never", ge=0)] = 1
    keep: Annotated[int, key("number of checkpoints to keep", ge=1)] = 2
    grace: Annotated[
        float, key("seconds that the current round may take to end after a signal", ge=0, le=MAX_SECONDS)
    ] = 60.0


class Evaluate(StrictModel):
    every: Annotated[int, key("rounds between evaluations on the test set; the last round always counts", ge=1)] = 1
    batch_size: Annotated[int, key("test rows per batch", ge=1, le=MAX_COUNT)] = 200
    where: Annotated[
        Literal["auto", "server", "workers"],
        key("by rank 0 beside the next round, by all ranks before it, or whichever measured times favour"),
    ] = "auto"
    final_window: Annotated[int, key("last rounds over which the final accuracy is averaged", ge=1)] = 50


class Wandb(StrictModel):
    mode: Annotated[
        Literal["auto", "online", "offline", "disabled"], key("auto: online if an account is configured, else offline")
    ] = "auto"
    project: Annotated[str, key("W&B project")] = "fl_dist"
    entity: Annotated[str | None, key("W&B team or user")] = None
    group: Annotated[str | None, key("W&B group (default of a sweep's runs: its name)")] = None
    job_type: Annotated[str | None, key("W&B job type (default of a sweep's runs: their row)")] = None
    tags: Annotated[list[str], key("W&B tags")] = []


class Monitor(StrictModel):
    wandb: Wandb = Wandb()


class Config(StrictModel):
    seed: Annotated[int, key("source of all randomness", ge=0)] = 0
    rounds: Annotated[int, key("communication rounds; a run may be resumed with more", ge=1, le=10**9)] = 500
    run: Run = Run()
    task: Annotated[dict[str, Any], key("what is learnt and measured")] = {"name": "classification"}
    data: Annotated[dict[str, Any], key("data set and its settings")] = {"name": "digits"}
    augment: Annotated[dict[str, Any], key("augmentation of training batches")] = {"name": "none"}
    partition: Annotated[dict[str, Any], key("how the training data is split over the clients")] = {"name": "dirichlet"}
    model: Annotated[dict[str, Any], key("model and its settings, plus init, pretrained and train")] = {"name": "cnn"}
    clients: Clients = Clients()
    algorithm: Annotated[
        dict[str, Any], key("algorithm and its hyper-parameters, or {parts: [...]}; with: [...] adds parts")
    ] = {"name": "fedavg"}
    local: Local = Local()
    server: Server = Server()
    comm: Communication = Communication()
    topology: Topology = Topology()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    monitor: Monitor = Monitor()
    callbacks: Annotated[list[Any], key("what happens beside the rounds: names, each with its settings")] = []
    diagnostics: Annotated[dict[str, Any], key("diagnostics measured during training, by label")] = {}

    def local_rate(self) -> Rate:
        """The learning rate of the local steps in each round."""
        return build_rate(self.local.lr, self.local.schedule, self.rounds, self.local.lr_decay)

    def server_rate(self) -> Rate:
        """The factor on the mean update in each round."""
        return build_rate(self.server.lr, self.server.schedule, self.rounds)


LAYOUT_KEYS = (
    *("run", "data.root", "data.local", "clients.placement"),
    *("checkpoint", "monitor", "diagnostics", "callbacks"),
    *("comm.timeout", "comm.rendezvous_timeout", "evaluate.where"),
    *(f"topology.{key}" for key in ("server", "device", "state_memory", "data_memory", "oversubscribe")),
)
"""Keys that may differ between a run and its resumption: no result depends on them."""
RENAMED_KEYS = {
    "comm.meeting": "comm.rendezvous_timeout",
    "evaluate.last": "evaluate.final_window",
    "table.last": "table.final_window",
    "table.also": "table.extra_columns",
}
"""Former keys of configurations and sweeps: errors name the new key, recorded configurations are read with it."""
