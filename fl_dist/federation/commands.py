"""The one message by which rank 0 tells every rank what to do next."""

from enum import IntEnum
from typing import NamedTuple, get_type_hints

import torch

from fl_dist.diagnostics.base import ALL_ROWS
from fl_dist.distributed.collectives import Collectives


class Action(IntEnum):
    """What a rank does; those after STOP are questions of the diagnostics."""

    TRAIN = 0
    STOP = 1
    LOSS = 2
    GRADIENT = 3
    HESSIAN_VECTOR_PRODUCT = 4
    CLIENT_METRICS = 5
    CLIENT_VALIDATION_METRICS = 6
    CLASS_ACCURACY = 7
    LOCAL_MEAN = 8
    LOCAL_VECTOR = 9
    LOCAL_DISTANCES = 10
    LOCAL_CHORDS = 11
    LOCAL_SHARPNESS = 12
    CLIENT_VARIABLES = 13
    FINE_TUNE = 14
    END_DIAGNOSTICS = 15


class SaveScope(IntEnum):
    """What a rank saves before the round."""

    NOTHING = 0
    CHANGED = 1
    EVERYTHING = 2


class EvaluatedModel(IntEnum):
    """Which model all ranks evaluate before the round."""

    NONE = 0
    PUBLISHED = 1
    """The one in the message, from which clients start."""
    SERVER = 2
    """The server's own, which follows in a broadcast."""


class Command(NamedTuple):
    action: Action
    save: SaveScope = SaveScope.NOTHING
    acknowledged: int = 0
    """Round of a checkpoint whose result is known now; 0: none."""
    is_committed: bool = True
    """Whether that checkpoint is complete; if not, its clients are dirty again."""
    evaluate: EvaluatedModel = EvaluatedModel.NONE
    is_finished: bool = False
    """Of STOP: the run is complete, and not only interrupted."""
    rows: int = ALL_ROWS
    """Of a question: the rows that it is about, as in `diagnostics.base`."""
    client: int = 0
    vector: int = 0
    """Of a question: which of the recorded vectors of local training."""
    rho: float = 0.0
    epochs: int = 0
    steps: int = 0
    lr: float = 0.0
    sample: int = 0
    """These four: of fine-tuning, as in `diagnostics.base`."""

    def encode(self) -> list[float]:
        return [float(value) for value in self]

    @staticmethod
    def decode(words: list[float]) -> "Command":
        return Command._make(kind(word) for word, kind in zip(words, _KINDS, strict=True))


_KINDS = tuple(get_type_hints(Command).values())
LENGTH = len(Command._fields)
"""Words of an encoded command: in float64, which holds every number of a command exactly."""


def send_command(command: Command, collectives: Collectives) -> None:
    """Between rounds; that of a round travels with the model, in the downlink."""
    collectives.broadcast(torch.tensor(command.encode(), dtype=torch.float64))


def receive_command(collectives: Collectives) -> Command:
    collectives.broadcast(words := torch.zeros(LENGTH, dtype=torch.float64))
    return Command.decode(words.tolist())
