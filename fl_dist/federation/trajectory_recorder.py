"""What diagnostics need of a client's local training: where it ended, and some of its steps."""

import time
from collections.abc import Collection

from torch import Tensor

from fl_dist.diagnostics.base import RECORDED_STEP_FRACTIONS, Requirement
from fl_dist.distributed.devices import synchronizer

RecordedVectors = dict[str, Tensor]
"""Vectors of one client by name: `end`; `y0`, `delta0`, ... of RECORDED_STEP_FRACTIONS. In host memory."""

MAX_POINTS = 20


class TrajectoryRecorder:
    """Records one client after another; `records` holds those that were trained."""

    def __init__(self, needs: Collection[Requirement]) -> None:
        self._ends, self._steps = "ends" in needs, "steps" in needs
        self.records: dict[int, RecordedVectors] = {}
        self.seconds = 0.0
        """By which recording delayed the current client."""
        self._vectors: RecordedVectors = {}
        self._marks: dict[int, list[int]] = {}
        self._current: list[int] = []

    def begin(self, steps: int) -> None:
        """A client, or another attempt at one, begins."""
        self._vectors, self._marks, self._current, self.seconds = {}, {}, [], 0.0
        for k, share in enumerate(RECORDED_STEP_FRACTIONS if self._steps else ()):
            self._marks.setdefault(min(int(share * steps), steps - 1), []).append(k)

    def step(self, number: int, w: Tensor) -> None:
        """A local step begins at `w`."""
        self._current = self._marks.get(number, [])
        for k in self._current:
            self._vectors[f"y{k}"] = self._copy(w)

    def record_gradient_point(self, point: Tensor) -> None:
        """The step took a gradient at `point`; the last one counts, as the point that it looked at."""
        for k in self._current:
            self._vectors[f"delta{k}"] = self._copy(point).sub_(self._vectors[f"y{k}"])

    def record_end(self, w: Tensor) -> None:
        """The last step ended at `w`."""
        if self._ends:
            self._vectors["end"] = self._copy(w)

    def accept(self, client: int) -> None:
        """What the client sends can be used."""
        self.records[client] = self._vectors

    def _copy(self, vector: Tensor) -> Tensor:
        synchronizer(vector.device)()  # what the device was given so far is training
        began = time.perf_counter()
        copy = vector.detach().to("cpu", copy=True)
        self.seconds += time.perf_counter() - began
        return copy


class Trajectory(TrajectoryRecorder):
    """Records about MAX_POINTS points of one client's trajectory."""

    def __init__(self, steps: int) -> None:
        super().__init__(())
        self.points: list[Tensor] = []
        self._every = -(-steps // MAX_POINTS)

    def step(self, number: int, w: Tensor) -> None:
        if number % self._every == 0:
            self.record_end(w)

    def record_end(self, w: Tensor) -> None:
        self.points.append(w.detach().clone())
