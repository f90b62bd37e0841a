"""What a file of an algorithm imports: parts and what their hooks see, chains, and the registry of algorithms.

Parts see vectors, gradient oracles and numbers; no ranks, no data, no models.
Conventions: an update points downhill; `delta` is a client's y_K - z; gradient-like buffers point uphill.
"""

from collections.abc import Callable
from typing import Any

from fl_dist.algorithms.chain import Algorithm
from fl_dist.algorithms.chain_checks import ChainError
from fl_dist.algorithms.hook_types import Batch, Forward, ModelOutput, Number, Oracle, Round, Upload, Uploaded, Vars
from fl_dist.algorithms.part import Part, part_name, parts
from fl_dist.common.registry import Registry
from fl_dist.common.vector_math import ascend, unit_vector

__all__ = [
    "Algorithm",
    "Batch",
    "ChainError",
    "Forward",
    "ModelOutput",
    "Number",
    "Oracle",
    "Part",
    "Round",
    "Upload",
    "Uploaded",
    "Vars",
    "algorithms",
    "ascend",
    "build",
    "algorithm",
    "papers",
    "part_name",
    "parts",
    "unit_vector",
]

algorithms: Registry[Algorithm] = Registry("algorithm", Algorithm)
papers: dict[str, str] = {}


def build(settings: dict[str, Any]) -> Algorithm:
    """From `{name: ..., hyper-parameters}` or `{parts: [{name: settings}, ...]}`, already validated.

    The parts of `with` come after those of the algorithm.
    """
    own = {key: value for key, value in settings.items() if key not in ("name", "with")}
    base = Algorithm(*_build_parts(own["parts"])) if "parts" in own else algorithms.build(settings["name"], own)
    return Algorithm(*base.parts, *_build_parts(settings["with"])) if "with" in settings else base


def _build_parts(chain: list[dict[str, Any]]) -> list[Part]:
    return [parts.build(name, own) for part in chain for name, own in part.items()]


def algorithm(*, paper: str) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Decorator: register a builder as the algorithm of its name; its keywords are what a user may set."""

    def register(builder: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        papers[builder.__name__] = paper
        return algorithms.register(builder)

    return register
