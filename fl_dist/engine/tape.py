"""What diagnostics want of a client's local training: where it ended, and some of its steps on the way."""

import time
from collections.abc import Collection

from torch import Tensor

from fl_dist.diagnostics.base import MARKS, Need
from fl_dist.machine.devices import settle

Kept = dict[str, Tensor]
"""Vectors of one client by name: `end`; `y0`, `delta0`, ... of the steps of MARKS. In host memory."""


class Tape:
    """Records one client after another; `played` are those that were trained."""

    def __init__(self, needs: Collection[Need]) -> None:
        self._ends, self._steps = "ends" in needs, "steps" in needs
        self.played: dict[int, Kept] = {}
        self.seconds = 0.0
        """What the client at hand was held up."""
        self._kept: Kept = {}
        self._marks: dict[int, list[int]] = {}
        self._now: list[int] = []

    def begin(self, steps: int) -> None:
        """A client, or another attempt at one, begins."""
        self._kept, self._marks, self._now, self.seconds = {}, {}, [], 0.0
        for k, share in enumerate(MARKS if self._steps else ()):
            self._marks.setdefault(min(int(share * steps), steps - 1), []).append(k)

    def step(self, number: int, w: Tensor) -> None:
        """A local step begins at `w`."""
        self._now = self._marks.get(number, [])
        for k in self._now:
            self._kept[f"y{k}"] = self._copied(w)

    def asked(self, point: Tensor) -> None:
        """The step took a gradient at `point`; the last one counts, as the point that it looked at."""
        for k in self._now:
            self._kept[f"delta{k}"] = self._copied(point).sub_(self._kept[f"y{k}"])

    def arrived(self, w: Tensor) -> None:
        """The last step ended at `w`."""
        if self._ends:
            self._kept["end"] = self._copied(w)

    def end(self, client: int) -> None:
        """What the client sends can be used."""
        self.played[client] = self._kept

    def _copied(self, vector: Tensor) -> Tensor:
        settle(vector.device)()  # what the device was given so far is training
        began = time.perf_counter()
        copy = vector.detach().to("cpu", copy=True)
        self.seconds += time.perf_counter() - began
        return copy


class Way(Tape):
    """Records the points of one client's way, about POINTS of them."""

    def __init__(self, steps: int) -> None:
        super().__init__(())
        self.points: list[Tensor] = []
        self._every = -(-steps // POINTS)

    def step(self, number: int, w: Tensor) -> None:
        if number % self._every == 0:
            self.arrived(w)

    def arrived(self, w: Tensor) -> None:
        self.points.append(w.detach().clone())


POINTS = 20
