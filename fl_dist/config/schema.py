"""The configuration's keys: type, default, range and one line each; what builders add is in their signatures."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fl_dist.common.registry import Strict

MOST = 10**7
"""Of what is counted (clients, epochs, images of a batch): a slip of the keyboard, not a plan, is beyond it."""
LONGEST = 1e8
"""Seconds, three years: clocks and libraries take no more than some such number."""


def key(description: str, **limits: Any) -> Any:
    return Field(description=description, **limits)


class Run(Strict):
    dir: Annotated[
        str | None, key("folder of the run (default: runs/<file>-<overrides>); an unfinished run there is resumed")
    ] = None


class Clients(Strict):
    total: Annotated[int, key("number of clients", ge=1, le=MOST)] = 100
    per_round: Annotated[int, key("clients of a round (bernoulli: on average)", ge=1, le=MOST)] = 10
    sampling: Annotated[
        Literal["uniform", "bernoulli"], key("without replacement, or each client with probability per_round/total")
    ] = "uniform"
    schedule: Annotated[
        list[list[int]] | str | None,
        key("instead of sampling: client ids of every round, or a YAML or JSON file with them"),
    ] = None
    on_failure: Annotated[
        Literal["drop", "retry", "stop"],
        key("a client that fails: leave it out, try once more and then leave it out, or stop"),
    ] = "stop"
    deadline: Annotated[float | None, key("seconds of local training after which a client counts as failed", gt=0)] = (
        None
    )
    min_survivors: Annotated[int, key("the run stops when fewer clients of a round than this are left", ge=1)] = 1


class Local(Strict):
    epochs: Annotated[int, key("passes over the client's data in a round", ge=1, le=MOST)] = 5
    steps: Annotated[int | None, key("most steps of a client in a round, whatever the epochs", ge=1, le=MOST)] = None
    batch_size: Annotated[int | Literal["full"], key("samples of a batch; full: the client's whole data")] = 50
    lr: Annotated[float, key("learning rate of the first round", gt=0)] = 0.01
    lr_decay: Annotated[float, key("factor on the rate after each round", gt=0, le=1)] = 0.998
    momentum: Annotated[float, key("heavy-ball momentum, new in each round", ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, key("weight decay", ge=0)] = 1.0e-5
    clip: Annotated[float | None, key("largest L2 norm of a step's direction", gt=0)] = None
    precision: Annotated[
        Literal["float64", "float32", "tf32", "bf16"],
        key("arithmetic; tf32: float32, with faster, coarser products (GPUs only); bf16: autocast, weights float32"),
    ] = "float32"


class Server(Strict):
    lr: Annotated[float, key("factor on the mean update", gt=0)] = 1.0
    weighting: Annotated[Literal["samples", "uniform"], key("weights of the clients' updates")] = "samples"


class Communication(Strict):
    reduce: Annotated[
        Literal["exact", "float32"], key("exact: integer sums, the same bits on any number of workers")
    ] = "exact"
    timeout: Annotated[
        float,
        key("seconds without progress (a step, a test batch, a message) after which a rank is stuck", gt=0, le=LONGEST),
    ] = 300.0
    meeting: Annotated[float, key("seconds that the first rank to start waits for the last", gt=0, le=LONGEST)] = 600.0


class Topology(Strict):
    server: Annotated[Literal["dedicated", "shared"], key("rank 0 only serves and evaluates, or also trains")] = (
        "dedicated"
    )
    threads: Annotated[int, key("CPU threads of each rank", ge=1, le=256)] = 1
    state_memory: Annotated[
        float, key("GB of clients' variables that a rank holds in memory; what is beyond lies in mapped files", ge=0)
    ] = 16.0
    data_memory: Annotated[
        float, key("GB of rows that a rank's device holds; more are read from files ahead of their use", ge=0)
    ] = 16.0
    device: Annotated[Literal["auto", "cpu", "cuda"], key("auto: the GPU of the local rank, if there is one")] = "auto"
    oversubscribe: Annotated[bool, key("allow more ranks than GPUs on a node (over gloo)")] = False


class Checkpoint(Strict):
    every: Annotated[int, key("rounds between saves; 0: never", ge=0)] = 1
    keep: Annotated[int, key("checkpoints kept", ge=1)] = 2
    grace: Annotated[float, key("seconds that the current round may take to end after a signal", ge=0, le=LONGEST)] = (
        60.0
    )


class Evaluate(Strict):
    every: Annotated[int, key("rounds between evaluations on the test set; the last round always counts", ge=1)] = 1
    batch_size: Annotated[int, key("test rows of a batch", ge=1, le=MOST)] = 200
    where: Annotated[
        Literal["auto", "server", "workers"],
        key("by rank 0 beside the next round, by all ranks before it, or whichever measured times favour"),
    ] = "auto"
    last: Annotated[int, key("rounds over which the final accuracy is averaged", ge=1)] = 50


class Wandb(Strict):
    mode: Annotated[
        Literal["auto", "online", "offline", "disabled"], key("auto: online if an account is configured, else offline")
    ] = "auto"
    project: Annotated[str, key("W&B project")] = "fl_dist"
    entity: Annotated[str | None, key("W&B team or user")] = None
    group: Annotated[str | None, key("W&B group (default of a sweep's runs: its name)")] = None
    job_type: Annotated[str | None, key("W&B job type (default of a sweep's runs: their row)")] = None
    tags: Annotated[list[str], key("W&B tags")] = []


class Monitor(Strict):
    wandb: Wandb = Wandb()


class Weights(Strict):
    """Keys of `model` beside its builder's settings."""

    init: Annotated[str | None, key("a .safetensors file with every parameter by name, to start from")] = None
    pretrained: Annotated[
        str | None, key("a .safetensors file: what it shares with the model by name and shape is taken over")
    ] = None
    train: Annotated[
        list[str] | None,
        key("names of the parameters to train, with * for any text; the others stay as they are and are never sent"),
    ] = None


class Watch(Strict):
    """Keys of a diagnostic beside its settings."""

    name: Annotated[str | None, key("what is measured (default: as the label says)")] = None
    every: Annotated[int, key("rounds between measurements", ge=1)] = 10


COMMON: dict[str, type[Strict]] = {"model": Weights}
"""Keys of a section that are there whichever builder is named."""


class Config(Strict):
    seed: Annotated[int, key("source of all randomness", ge=0)] = 0
    rounds: Annotated[int, key("communication rounds; a run may be resumed with more", ge=1, le=10**9)] = 500
    run: Run = Run()
    task: Annotated[dict[str, Any], key("what is learnt and measured")] = {"name": "classification"}
    data: Annotated[dict[str, Any], key("data set and its settings")] = {"name": "digits"}
    augment: Annotated[dict[str, Any], key("augmentation of training batches")] = {"name": "none"}
    partition: Annotated[dict[str, Any], key("how the training data is split over the clients")] = {"name": "dirichlet"}
    model: Annotated[dict[str, Any], key("model and its settings, beside init, pretrained and train")] = {"name": "cnn"}
    clients: Clients = Clients()
    algorithm: Annotated[dict[str, Any], key("algorithm and its hyper-parameters, or {parts: [...]}")] = {
        "name": "fedavg"
    }
    local: Local = Local()
    server: Server = Server()
    comm: Communication = Communication()
    topology: Topology = Topology()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    monitor: Monitor = Monitor()
    diagnostics: Annotated[dict[str, Any], key("what is measured of the model on the way, by label")] = {}

    def lr(self, index: int) -> float:
        return self.local.lr * self.local.lr_decay**index


# What may differ between a run and its resumption without changing a result.
_PLACE = tuple(f"topology.{key}" for key in ("server", "device", "state_memory", "data_memory", "oversubscribe"))
_SPEED = ("comm.timeout", "comm.meeting", "evaluate.where")
LAYOUT = ("run", "data.root", *_SPEED, "checkpoint", "monitor", "diagnostics", *_PLACE)
