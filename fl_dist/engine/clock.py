"""Where a round's time goes."""

import contextlib
import time
from collections.abc import Callable, Iterator

PARTS = ("broadcast", "local", "reduce", "server", "evaluate", "checkpoint")
SETTLED = ("local", "reduce", "server")
"""At whose ends the host waits for the device anyway, or has nothing else to do."""


class Clock:
    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        """`settle` waits for what the device was given, which else would count where the host waits next."""
        self._settle = settle
        self.restart()

    def restart(self) -> None:
        self.parts = dict.fromkeys(PARTS, 0.0)
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
            if part in SETTLED:
                self._settle()
        finally:
            self.parts[part] += time.perf_counter() - began

    def read(self, local: float, apart: float = 0.0) -> dict[str, float]:
        """Seconds by part; `local` is the busiest worker's. A server that waits counts only the rest as reduce.

        `apart`: seconds that are no part of the round.
        """
        total = time.perf_counter() - self._began - apart
        rest = total - local - sum(self.parts[part] for part in ("broadcast", "server", "evaluate"))
        # What was evaluated meanwhile is the model of the round before, whose row tells of it.
        parts = self.parts | {"local": local, "total": total, "evaluate": 0.0}
        parts["reduce"] = max(0.0, min(parts["reduce"], rest))
        return {k: round(v, 6) for k, v in parts.items()}
