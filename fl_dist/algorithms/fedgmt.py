"""FedGMT: Li et al., One Arrow, Two Hawks: Sharpness-aware Minimization for Federated Learning via Global Model
Trajectory, ICML 2025.

    loss = CE + gamma tau^2 KL(softmax(f_e/tau) || softmax(f_y/tau));  r = grad loss(y) + beta h_i
    h_i <- h_i + (y_K - x);  h <- h + (1/N) sum_i (y_iK - x);  x <- sum_i p_i y_iK + h;  e <- alpha e + (1-alpha) x
    v2: the client keeps its own e_i <- alpha e_i + (1-alpha) x when it is active; the server keeps no e

beta here is 1/beta of the paper. There is no proximal term: the KL stands in for it. Algorithm 1 prints both EMAs;
line 7 is v2's, line 18 is the first version's. v2's first teacher is the model received (x_0 as an option).
"""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Batch, Forward, ModelOutput, Number, Part, Round, Vars, algorithm, parts
from fl_dist.algorithms.feddyn import Dual, DualWeight
from fl_dist.algorithms.fedntd import Distill, Temperature, distillation

EmaDecay = Annotated[float, Field(ge=0, lt=1, description="alpha, share of the old teacher that stays")]
FirstTeacher = Annotated[
    Literal["received", "initial"],
    Field(description="teacher of a client's first round: the model received, or averaged from x_0"),
]
Elapsed = Annotated[bool, Field(description="decay by the number of rounds since the client was active")]


class Teacher(Part):
    """Distils from an average of the global models so far."""

    extra_passes = (1, 0)
    needs = ("logits",)
    role = "teacher"

    def __init__(self, *, distill: Distill = 1.0, temperature: Temperature = 3.0, ema_decay: EmaDecay = 0.95) -> None:
        self.weight, self.temperature, self.decay = distill, temperature, ema_decay

    def teacher(self, s: Vars, i: Vars) -> Tensor:
        """The average."""
        raise NotImplementedError

    def penalty(self, output: ModelOutput, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Tensor:
        teacher = forward(self.teacher(s, i), batch[0])
        return self.weight * distillation(teacher.logits, output.logits, self.temperature)


@parts.register
class Trajectory(Teacher):
    """Distils from an average of the global models so far, kept by the server."""

    server = ("ema",)
    published = ("ema",)
    reports: ClassVar = {"ema_distance": "distance of the teacher from the model"}

    def server_init(self, x: Tensor) -> dict[str, Tensor]:
        return {"ema": x.clone()}

    def teacher(self, s: Vars, i: Vars) -> Tensor:
        return s.ema

    def after_update(self, s: Vars, r: Round) -> None:
        s.ema.lerp_(s.x, 1 - self.decay)

    def report(self, s: Vars, mean: Vars, r: Round) -> dict[str, Number]:
        return {"ema_distance": torch.dist(s.ema, s.x)}


@parts.register
class ClientTrajectory(Teacher):
    """The same with an average of its own for each client, so that nothing more is sent."""

    client = ("e_i", "last")

    def __init__(
        self,
        *,
        distill: Distill = 1.0,
        temperature: Temperature = 3.0,
        ema_decay: EmaDecay = 0.5,
        first_teacher: FirstTeacher = "received",
        elapsed: Elapsed = False,
    ) -> None:
        super().__init__(distill=distill, temperature=temperature, ema_decay=ema_decay)
        self.first, self.elapsed = first_teacher, elapsed

    def client_init(self, s: Vars, r: Round) -> dict[str, Tensor]:
        start = s.x if self.first == "received" else r.initial
        return {"e_i": start.clone(), "last": s.x.new_zeros(())}

    def begin(self, s: Vars, i: Vars, r: Round, full: object) -> None:
        rounds = r.index - float(i.last) if self.elapsed else 1.0
        i.e_i.lerp_(s.x, 1 - self.decay**rounds)
        i.last.fill_(r.index)

    def teacher(self, s: Vars, i: Vars) -> Tensor:
        return i.e_i


@algorithm(paper="Li et al. 2025")
def fedgmt(
    *, dual: DualWeight = 0.1, distill: Distill = 1.0, temperature: Temperature = 3.0, ema_decay: EmaDecay = 0.95
) -> Algorithm:
    """The paper's values on images; 1/100 for dual on AG News."""
    teacher = Trajectory(distill=distill, temperature=temperature, ema_decay=ema_decay)
    return Algorithm(Dual(weight=dual, prox=False), teacher)


@algorithm(paper="Li et al. 2025")
def fedgmt_v2(
    *,
    dual: DualWeight = 0.1,
    distill: Distill = 1.0,
    temperature: Temperature = 3.0,
    ema_decay: EmaDecay = 0.5,
    first_teacher: FirstTeacher = "received",
    elapsed: Elapsed = False,
) -> Algorithm:
    """The paper's values."""
    teacher = ClientTrajectory(
        distill=distill, temperature=temperature, ema_decay=ema_decay, first_teacher=first_teacher, elapsed=elapsed
    )
    return Algorithm(Dual(weight=dual, prox=False), teacher)
