"""Plain float64 reference of the federated algorithms, written from the formulas and nothing else.

Notation: x global model, z where clients start, y local model, q point where the gradient is taken,
r corrected gradient, d = y - z local update, u(v) = v/|v|, one L2 norm over all parameters, u(0) = 0.
Vectors are flat numpy arrays, variables of the clients are tables with one row per client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

Array = np.ndarray
Settings = dict[str, Any]  # hyper-parameters with their defaults
State = dict[str, Array]  # global model, buffers of the server, tables of the clients
Memory = dict[str, Any]  # model before the last round, last round of each client, FedGF's indicators
Sent = dict[int, dict[str, Any]]  # what each participant sends to the server

# Required hyper-parameters. "server_lr" may also be set for the others, instead of Problem's.
PARAMETERS = {
    "fedavg": [],
    "fedavgm": ["server_momentum"],
    "fedprox": ["prox"],
    "scaffold": [],
    "feddyn": ["dual"],
    "fedcm": ["mix"],
    "mimelite": ["mix"],
    "fedrobust": ["ascent_lr", "penalty"],
    "fedacg": ["lookahead", "prox_w"],
    "fedadam": ["server_lr", "beta1", "beta2", "tau"],
    "fedntd": ["distill", "temperature"],
    "fedsam": ["rho"],
    "fedasam": ["rho", "asam_eta"],
    "mofedsam": ["rho", "mix"],
    "fedgamma": ["rho"],
    "fedsmoo": ["rho", "dual"],
    "fedspeed": ["rho", "dual"],
    "fedlesam": ["rho"],
    "fedlesam_s": ["rho"],
    "fedlesam_d": ["rho", "dual"],
    "fedgf": ["rho", "rho_global", "threshold", "window"],
    "fedavg_nesterov": ["lookahead"],
    "fedsam_nesterov": ["lookahead", "rho"],
    "fednsam": ["lookahead", "rho"],
    "fednsam_minus_nesterov": ["lookahead", "rho"],
    "fednsam_s": ["lookahead", "rho"],
    "fednsam_d": ["lookahead", "rho", "dual"],
    "fedgmt": ["dual", "distill", "temperature", "ema_decay"],
    "fedgmt_v2": ["dual", "distill", "temperature", "ema_decay"],
}

# The algorithms of each rule (form B of fednsam starts ahead too).
LOCAL_SAM = {"fedsam", "mofedsam", "fedgamma", "fedspeed", "fedsam_nesterov"}  # q = y + rho u(g(y))
OLD_MODEL = {"fedlesam", "fedlesam_s", "fedlesam_d"}  # q = y + rho u(o_i - x)
AGAINST_M = {"fednsam", "fednsam_minus_nesterov", "fednsam_s", "fednsam_d"}  # q = y - rho u(m)
START_AHEAD = {"fedacg", "fedavg_nesterov", "fedsam_nesterov", "fednsam_s", "fednsam_d"}  # z = x + lambda m
CONTROL = {"scaffold", "fedgamma", "fedlesam_s", "fednsam_s"}  # r = g - c_i + c
DUAL_PROX = {"feddyn", "fedspeed", "fedsmoo", "fedlesam_d", "fednsam_d"}  # r = g + beta h_i + beta (y - z)
TEACHER = {"fedgmt", "fedgmt_v2"}  # cross-entropy + KL, r = gradient + beta h_i
DUAL = DUAL_PROX | TEACHER
MEAN_UPDATE = {"fedcm", "mofedsam"}  # r = mix g + (1 - mix) delta
MOMENTUM = {"fedavgm", "fednsam", "fednsam_minus_nesterov"} | START_AHEAD  # m <- lambda m + d_bar, x <- x + m
OWN_SERVER_STEP = MOMENTUM | DUAL | {"fedadam"}  # the others add the mean update, times server.lr

# Optional hyper-parameters with their defaults, and the values that a text may have.
OPTIONS: list[tuple[set[str], dict[str, Any]]] = [
    ({"fedspeed"}, {"alpha": 1.0, "normalise": True}),
    ({"fednsam"}, {"form": "B"}),
    ({"fednsam_minus_nesterov"}, {"reading": "i"}),
    ({"fedgmt_v2"}, {"first_teacher": "received", "elapsed": False}),
    (OLD_MODEL, {"direction": "own"}),
    (CONTROL, {"control": "option2"}),
    ({"fedrobust"}, {"ascent_steps": 1}),
]
CHOICES = {
    "form": ["A", "B"],
    "reading": ["i", "ii"],
    "first_teacher": ["received", "initial"],
    "direction": ["own", "last_update"],
    "control": ["option2", "gradients"],
}


@dataclass
class Problem:
    """Data, model, participants and local optimiser of one run."""

    x_train: np.ndarray
    y_train: np.ndarray
    client: np.ndarray  # client id of each row
    init: np.ndarray  # layers.0.weight (out x in, row-major), layers.0.bias, layers.1.weight, ...
    hidden: list[int]  # widths of the tanh layers; [] = linear softmax regression
    classes: int
    schedule: list[list[int]]  # clients of each round
    lr: float
    decay: float
    epochs: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    weights: str = "samples"  # samples | uniform
    server_lr: float = 1.0
    # (round, client, n_i) -> indices into the client's rows for all its local steps; None = full batch
    batches: Callable[[int, int, int], list[np.ndarray]] | None = None


def layer_sizes(problem: Problem) -> list[int]:
    """Width of the input, of the hidden layers and of the output."""
    return [problem.x_train.shape[1], *problem.hidden, problem.classes]


def is_weight(problem: Problem) -> Array:
    """True at the entries of weight matrices, False at biases."""
    parts = []
    for n_in, n_out in pairwise(layer_sizes(problem)):
        parts += [np.full(n_out * n_in, True), np.full(n_out, False)]
    return np.concatenate(parts)


def logits(theta: torch.Tensor, a: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Outputs of the tanh network for the rows of a."""
    position = 0
    for layer, (n_in, n_out) in enumerate(pairwise(sizes)):
        weight = theta[position : position + n_out * n_in].reshape(n_out, n_in)
        position += n_out * n_in
        bias = theta[position : position + n_out]
        position += n_out
        a = a @ weight.T + bias
        if layer < len(sizes) - 2:
            a = torch.tanh(a)
    return a


def cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean of -log softmax at the true labels."""
    return -torch.log_softmax(outputs, dim=1)[torch.arange(len(labels)), labels].mean()


def kl(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """Batch mean of KL(softmax(teacher/T) || softmax(student/T))."""
    log_t = torch.log_softmax(teacher / temperature, dim=1)
    log_s = torch.log_softmax(student / temperature, dim=1)
    return (log_t.exp() * (log_t - log_s)).sum(dim=1).mean()


def without_label(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Outputs with the column of the true label taken out of every row."""
    keep = torch.arange(outputs.shape[1])[None, :] != labels[:, None]
    return outputs[keep].reshape(len(labels), outputs.shape[1] - 1)


def ce_gradient(theta: Array, a: Array, labels: Array, sizes: list[int]) -> Array:
    """Gradient of the cross-entropy."""
    w = torch.tensor(theta, requires_grad=True)
    loss = cross_entropy(logits(w, torch.tensor(a), sizes), torch.tensor(labels))
    return torch.autograd.grad(loss, w)[0].numpy()


def distill_gradient(
    theta: Array, teacher: Array, a: Array, labels: Array, sizes: list[int], h: Settings, drop_label: bool
) -> Array:
    """Gradient of cross-entropy + gamma T^2 KL(teacher || student), with or without the true logit."""
    w, inputs, target = torch.tensor(theta, requires_grad=True), torch.tensor(a), torch.tensor(labels)
    student = logits(w, inputs, sizes)
    fixed = logits(torch.tensor(teacher), inputs, sizes)
    loss = cross_entropy(student, target)
    if drop_label:
        student, fixed = without_label(student, target), without_label(fixed, target)
    loss = loss + h["distill"] * h["temperature"] ** 2 * kl(fixed, student, h["temperature"])
    return torch.autograd.grad(loss, w)[0].numpy()


def affine_gradients(
    theta: Array, scale: Array, shift: Array, a: Array, labels: Array, sizes: list[int]
) -> tuple[Array, Array, Array]:
    """Gradients of the cross-entropy at the inputs scale*a + shift in the model, the scale and the shift."""
    w, s, b = (torch.tensor(value, requires_grad=True) for value in (theta, scale, shift))
    loss = cross_entropy(logits(w, s * torch.tensor(a) + b, sizes), torch.tensor(labels))
    g, g_scale, g_shift = torch.autograd.grad(loss, (w, s, b))
    return g.numpy(), g_scale.numpy(), g_shift.numpy()


def u(v: Array) -> Array:
    """Unit vector, zero for the zero vector."""
    norm = np.linalg.norm(v)
    return v / norm if norm > 0 else np.zeros_like(v)


def settings(algorithm: str, hyper: dict[str, Any], problem: Problem) -> Settings:
    """All hyper-parameters of the algorithm, defaults filled in."""
    if algorithm not in PARAMETERS:
        raise ValueError(f"unknown algorithm {algorithm}")
    h: Settings = {"server_lr": problem.server_lr}
    for algorithms, defaults in OPTIONS:
        if algorithm in algorithms:
            h |= defaults
    unknown = set(hyper) - set(h) - set(PARAMETERS[algorithm])
    missing = set(PARAMETERS[algorithm]) - set(hyper)
    if unknown or missing:
        raise ValueError(f"{algorithm}: unknown {sorted(unknown)}, missing {sorted(missing)}")
    h |= hyper
    for name, allowed in CHOICES.items():
        if name in h and h[name] not in allowed:
            raise ValueError(f"{name} must be one of {allowed}")
    if algorithm == "fedavgm":
        h["lambda"] = h["server_momentum"]
    elif algorithm in MOMENTUM:
        h["lambda"] = h["lookahead"]
    if h.get("reading") == "ii":
        h["lambda"] = 0.0
    return h


def initial_state(algorithm: str, h: Settings, problem: Problem) -> State:
    """Global model, buffers of the server and tables of the clients before the first round."""
    x = np.array(problem.init, dtype=np.float64)
    n_clients, n_features = int(problem.client.max()) + 1, problem.x_train.shape[1]
    zero, zero_table = np.zeros_like(x), np.zeros((n_clients, x.size))
    unset = np.full((n_clients, x.size), np.nan)
    state = {"x": x}
    if algorithm in MOMENTUM or algorithm in {"mimelite", "fedadam"}:
        state["m"] = zero
    if algorithm == "fedadam":
        state["v"] = np.full_like(x, h["tau"] ** 2)
    if algorithm in MEAN_UPDATE:
        state["delta"] = zero
    if algorithm in CONTROL:
        state |= {"c": zero, "c_i": zero_table.copy()}
    if algorithm in DUAL:
        state |= {"h_bar": zero, "h_i": zero_table.copy()}
    if algorithm == "fedsmoo":
        state |= {"s": zero, "mu_i": zero_table.copy()}
    if algorithm in OLD_MODEL and h["direction"] == "own":
        state["o_i"] = unset.copy()
    if algorithm == "fedgf":
        state |= {"c_scalar": np.array(0.0), "divergence": np.array(0.0)}
    if algorithm == "fedgmt":
        state["ema"] = x
    if algorithm == "fedgmt_v2":
        state["e_i"] = np.tile(x, (n_clients, 1)) if h["first_teacher"] == "initial" else unset.copy()
    if algorithm == "fedrobust":
        state |= {"Lambda_i": np.ones((n_clients, n_features)), "b_i": np.zeros((n_clients, n_features))}
    return state


def train_client(
    algorithm: str, h: Settings, problem: Problem, state: State, memory: Memory, z: Array, t: int, i: int
) -> dict[str, Any]:
    """Local steps of client i in round t: renews its rows of the tables, returns what the server needs."""
    x, x_prev, eta, beta = state["x"], memory["x_prev"], problem.lr * problem.decay**t, h.get("dual", 0.0)
    sizes, weight = layer_sizes(problem), is_weight(problem)
    rows = np.flatnonzero(problem.client == i)
    data, target = problem.x_train[rows].astype(np.float64), problem.y_train[rows].astype(np.int64)
    batches = [np.arange(len(rows))] * problem.epochs if problem.batches is None else problem.batches(t, i, len(rows))
    n_steps = len(batches)

    # Quantities that stay fixed during the round.
    epsilon = np.zeros_like(x)  # q - y where it is the same in all local steps
    if algorithm in OLD_MODEL:
        if h["direction"] == "own" and not np.isnan(state["o_i"][i]).any():
            epsilon = h["rho"] * u(state["o_i"][i] - x)
        if h["direction"] == "last_update" and x_prev is not None:
            epsilon = h["rho"] * u(x_prev - x)
    if algorithm in AGAINST_M:
        epsilon = -h["rho"] * u(state["m"])
        if h.get("form") == "A":
            epsilon = epsilon + h["lambda"] * state["m"]
    if algorithm == "fedgf" and x_prev is not None:
        x_tilde = x + h["rho_global"] * u(x_prev - x)
    if algorithm == "fedgmt":
        teacher = state["ema"]
    if algorithm == "fedgmt_v2":
        if np.isnan(state["e_i"][i]).any():
            state["e_i"][i] = x
        else:
            # A teacher that starts as x_0 counts as last renewed in round 0.
            rounds = t - memory["last_active"].get(i, 0) if h["elapsed"] else 1
            keep = h["ema_decay"] ** rounds
            state["e_i"][i] = keep * state["e_i"][i] + (1 - keep) * x
        teacher = state["e_i"][i]

    y, buf, sum_g = z.copy(), np.zeros_like(x), np.zeros_like(x)
    for batch in batches:
        a, labels = data[batch], target[batch]

        # Evaluation point q and gradient g there.
        if algorithm in LOCAL_SAM:
            g_y = ce_gradient(y, a, labels, sizes)
            q = y + h["rho"] * (u(g_y) if h.get("normalise", True) else g_y)
            g = ce_gradient(q, a, labels, sizes)
            if algorithm == "fedspeed":
                g = (1 - h["alpha"]) * g_y + h["alpha"] * g
        elif algorithm == "fedasam":
            scale = np.where(weight, np.abs(y) + h["asam_eta"], 1.0)
            q = y + h["rho"] * scale * u(scale * ce_gradient(y, a, labels, sizes))
            g = ce_gradient(q, a, labels, sizes)
        elif algorithm == "fedsmoo":
            s_k = h["rho"] * u(ce_gradient(y, a, labels, sizes) - state["mu_i"][i] - state["s"])
            state["mu_i"][i] = state["mu_i"][i] + (s_k - state["s"])
            g = ce_gradient(y + s_k, a, labels, sizes)
        elif algorithm == "fedgf":
            q = y + h["rho"] * u(ce_gradient(y, a, labels, sizes))
            if x_prev is not None:
                q = state["c_scalar"] * x_tilde + (1 - state["c_scalar"]) * q
            g = ce_gradient(q, a, labels, sizes)
        elif algorithm == "fedntd":
            g = distill_gradient(y, x, a, labels, sizes, h, drop_label=True)
        elif algorithm in TEACHER:
            g = distill_gradient(y, teacher, a, labels, sizes, h, drop_label=False)
        elif algorithm == "fedrobust":
            # All ascent steps are made at the old y; the last one is simultaneous with the descent step.
            for _ in range(h["ascent_steps"]):
                scale, shift = state["Lambda_i"][i].copy(), state["b_i"][i].copy()
                g, g_scale, g_shift = affine_gradients(y, scale, shift, a, labels, sizes)
                state["Lambda_i"][i] = scale + h["ascent_lr"] * (g_scale - 2 * h["penalty"] * (scale - 1))
                state["b_i"][i] = shift + h["ascent_lr"] * (g_shift - 2 * h["penalty"] * shift)
        else:
            g = ce_gradient(y + epsilon, a, labels, sizes)
        sum_g = sum_g + g

        # Corrected gradient r.
        if algorithm == "fedprox":
            r = g + h["prox"] * (y - x)
        elif algorithm == "fedacg":
            r = g + 2 * h["prox_w"] * (y - z)
        elif algorithm in CONTROL:
            r = g - state["c_i"][i] + state["c"]
        elif algorithm in DUAL_PROX:
            r = g + beta * state["h_i"][i] + beta * (y - z)
        elif algorithm in TEACHER:
            r = g + beta * state["h_i"][i]
        elif algorithm in MEAN_UPDATE:
            r = h["mix"] * g + (1 - h["mix"]) * state["delta"]
        elif algorithm == "mimelite":
            r = h["mix"] * g + (1 - h["mix"]) * state["m"]
        else:
            r = g

        # Clipping, weight decay at y, heavy ball.
        if problem.clip is not None and np.linalg.norm(r) > problem.clip:
            r = r * (problem.clip / np.linalg.norm(r))
        r = r + problem.weight_decay * y
        buf = problem.momentum * buf + r
        y = y - eta * buf

    # End of the client's round.
    sent: dict[str, Any] = {"y": y, "steps": n_steps}
    if algorithm in CONTROL:
        if h["control"] == "option2":
            c_new = state["c_i"][i] - state["c"] + (z - y) / (eta * n_steps)
        else:
            c_new = sum_g / n_steps
        sent["c_change"] = c_new - state["c_i"][i]
        state["c_i"][i] = c_new
    if algorithm in DUAL:
        state["h_i"][i] = state["h_i"][i] + (y - z)
    if algorithm == "fedsmoo":
        sent["s"] = state["mu_i"][i] - s_k
    if algorithm == "mimelite":
        sent["full_gradient"] = ce_gradient(x, data, target, sizes)
    if algorithm in OLD_MODEL and h["direction"] == "own":
        state["o_i"][i] = x
    return sent


def update_server(
    algorithm: str, h: Settings, problem: Problem, state: State, memory: Memory, z: Array, t: int, sent: Sent
) -> None:
    """Aggregation of round t: replaces the global model and the buffers of the server.

    server_lr multiplies d_bar in x of the averaging servers and the step of FedAdam, nothing else: momentum
    and dual servers have no rate in their formulas, and delta, c and FedGF's distance are taken before it.
    """
    x, eta, n_clients = state["x"], problem.lr * problem.decay**t, int(problem.client.max()) + 1
    n = {i: float((problem.client == i).sum()) if problem.weights == "samples" else 1.0 for i in sent}
    p = {i: n[i] / sum(n.values()) for i in sent}
    d = {i: sent[i]["y"] - z for i in sent}
    d_bar = sum(p[i] * d[i] for i in sent)

    if algorithm in DUAL:
        state["h_bar"] = state["h_bar"] + sum(d[i] for i in sent) / n_clients
    if algorithm in MOMENTUM:
        state["m"] = h["lambda"] * state["m"] + d_bar
        state["x"] = x + state["m"]
        if algorithm in DUAL:
            state["x"] = state["x"] + state["h_bar"]
    elif algorithm in DUAL:
        state["x"] = x + d_bar + state["h_bar"]
    elif algorithm == "fedadam":
        state["m"] = h["beta1"] * state["m"] + (1 - h["beta1"]) * d_bar
        state["v"] = h["beta2"] * state["v"] + (1 - h["beta2"]) * d_bar**2
        state["x"] = x + h["server_lr"] * state["m"] / (np.sqrt(state["v"]) + h["tau"])
    else:
        state["x"] = x + h["server_lr"] * d_bar

    if algorithm in CONTROL:
        state["c"] = state["c"] + sum(sent[i]["c_change"] for i in sent) / n_clients
    if algorithm in MEAN_UPDATE:
        state["delta"] = -sum(p[i] * d[i] / (eta * sent[i]["steps"]) for i in sent)
    if algorithm == "mimelite":
        mean_gradient = sum(p[i] * sent[i]["full_gradient"] for i in sent)
        state["m"] = (1 - h["mix"]) * state["m"] + h["mix"] * mean_gradient
    if algorithm == "fedsmoo":
        state["s"] = h["rho"] * u(sum(sent[i]["s"] for i in sent) / len(sent))
    if algorithm == "fedgf":
        state["divergence"] = np.array(sum(np.linalg.norm(d[i]) for i in sent) / len(sent))
        memory["indicators"].append(float(state["divergence"] > h["threshold"]))
        window = memory["indicators"][-h["window"] :]
        state["c_scalar"] = np.array(sum(window) / len(window))
    if algorithm == "fedgmt":
        state["ema"] = h["ema_decay"] * state["ema"] + (1 - h["ema_decay"]) * state["x"]


def run(algorithm: str, hyper: dict[str, Any], problem: Problem) -> dict[str, np.ndarray]:
    """Trajectory of all variables: index t = after t rounds; z and y_end (NaN = absent) per round."""
    h = settings(algorithm, hyper, problem)
    state = initial_state(algorithm, h, problem)
    history = {name: [value.copy()] for name, value in state.items()}
    history |= {"z": [], "y_end": []}
    n_clients = int(problem.client.max()) + 1
    memory: Memory = {"x_prev": None, "last_active": {}, "indicators": []}

    for t, participants in enumerate(problem.schedule):
        x, z = state["x"], state["x"]
        if algorithm in START_AHEAD or h.get("form") == "B":
            z = x + h["lambda"] * state["m"]
        sent = {i: train_client(algorithm, h, problem, state, memory, z, t, i) for i in participants}
        update_server(algorithm, h, problem, state, memory, z, t, sent)
        memory["x_prev"] = x
        memory["last_active"] |= {i: t for i in participants}

        y_end = np.full((n_clients, x.size), np.nan)
        for i in participants:
            y_end[i] = sent[i]["y"]
        history["z"].append(z.copy())
        history["y_end"].append(y_end)
        for name, value in state.items():
            history[name].append(value.copy())
    return {name: np.array(values) for name, values in history.items()}
