"""Where a round's time goes."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fl_dist.metrics.record import PHASES, Seconds

SYNCHRONIZED = ("local", "reduce", "server")
"""At whose ends the host waits for the device anyway, or has nothing else to do."""


class RoundTimes(NamedTuple):
    """What was measured of a round."""

    total: float
    phases: dict[str, float]

    def to_seconds(self, local: float, excluded: float = 0.0) -> Seconds:
        """`local` is the busiest worker's time; of a server that waits, only the rest counts as reduce.

        `excluded`: seconds that are no part of the round.
        """
        total = self.total - excluded
        rest = total - local - sum(self.phases[phase] for phase in ("broadcast", "server", "evaluate"))
        # The evaluation in this round is that of the previous round's model, whose record holds it.
        phases = self.phases | {"local": local, "total": total, "evaluate": 0.0}
        phases["reduce"] = max(0.0, min(phases["reduce"], rest))
        return Seconds(**{phase: round(seconds, 6) for phase, seconds in phases.items()})


class RoundTimer:
    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        """`synchronize` waits for what the device was given, which else would count where the host waits next."""
        self._synchronize = synchronize
        self.restart()

    def restart(self) -> None:
        self.phases = dict.fromkeys(PHASES, 0.0)
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
            if phase in SYNCHRONIZED:
                self._synchronize()
        finally:
            self.phases[phase] += time.perf_counter() - began

    def read(self) -> RoundTimes:
        """Since the last restart."""
        return RoundTimes(time.perf_counter() - self._began, self.phases)
