"""Where a round's time goes."""

import contextlib
import time
from collections.abc import Iterator

PARTS = ("broadcast", "local", "reduce", "server", "evaluate", "checkpoint")


class Clock:
    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.parts = dict.fromkeys(PARTS, 0.0)
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.parts[part] += time.perf_counter() - began

    def read(self, local: float) -> dict[str, float]:
        """Seconds by part; `local` is the busiest worker's. A server that waits counts only the rest as reduce."""
        total = time.perf_counter() - self._began
        parts = self.parts | {"local": local, "total": total}
        parts["reduce"] = max(0.0, min(parts["reduce"], total - local - parts["broadcast"] - parts["server"]))
        return {k: round(v, 6) for k, v in parts.items()}
