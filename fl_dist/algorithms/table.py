"""The table of all algorithms: builders with the paper each comes from."""

from collections.abc import Callable

from fl_dist.common.registry import Registry
from fl_dist.core import Algorithm

algorithms: Registry[Algorithm] = Registry("algorithm", Algorithm)
papers: dict[str, str] = {}


def entry(paper: str) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Decorator: the function builds the algorithm of its name; its keywords are what a user may set."""

    def register(builder: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        papers[builder.__name__] = paper
        return algorithms.register(builder)

    return register
