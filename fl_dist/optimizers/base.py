"""What an optimiser of local steps is: it turns the algorithm's direction into a step of the weights."""

from typing import Any

import torch
from torch import Tensor

from fl_dist.common.errors import describe_error
from fl_dist.common.hook_contract import HookContractError, check_hook_names, describe_value, require_same_kind
from fl_dist.common.registry import Registry

PREFIX = "optimizer."
"""Of an optimiser's variables among those of a client."""


class Optimizer:
    """Stateless: its variables are named tensors, new in each round or kept for each client (`keep`)."""

    def init(self, w: Tensor) -> dict[str, Tensor]:
        """The variables before the first step from `w`. None, unless overridden."""
        return {}

    def step(self, w: Tensor, direction: Tensor, state: dict[str, Tensor], lr: float) -> None:
        """Change `w` and the tensors of `state` in place; `direction` points uphill and may be overwritten."""
        raise NotImplementedError


optimizers: Registry[Optimizer] = Registry("optimizer", Optimizer, ("momentum", "weight_decay"))


def build_optimizer(section: dict[str, Any], momentum: float, weight_decay: float) -> Optimizer:
    """From `{name: ..., keep: ..., settings}`."""
    settings = {key: value for key, value in section.items() if key not in ("name", "keep")}
    return optimizers.build(section["name"], settings, momentum=momentum, weight_decay=weight_decay)


def client_variables(section: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a client keeps of the optimiser's variables between its rounds, by the names of client variables."""
    return {f"{PREFIX}{name}": tensor for name, tensor in state.items()} if section.get("keep") == "client" else {}


def pop_client_variables(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    """The optimiser's among a client's variables, removed from them; empty before the client's first round."""
    names = [name for name in variables if name.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): variables.pop(name) for name in names}


def check_optimizer(name: str, optimizer: Optimizer) -> None:
    """Two steps on a small vector: raise HookContractError unless they do what steps have to."""
    who, w = f"optimizer {name}", torch.ones(3)
    check_hook_names(who, optimizer, Optimizer)
    try:
        state = optimizer.init(w)
        _check_state(who, state, w)
        kinds = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}
        results = [optimizer.step(w, torch.ones(3), state, 0.1) for _ in range(2)]  # type: ignore[func-returns-value]
    except HookContractError:
        raise
    except Exception as e:
        raise HookContractError(f"{who} failed on a vector of 3 ones: {describe_error(e)}") from e
    if results != [None, None] or torch.equal(w, torch.ones(3)):
        raise HookContractError(f"{who}: step has to change `w` in place and return nothing, as w.sub_(direction * lr)")
    if state.keys() != kinds.keys():
        raise HookContractError(f"{who}: step changed the names in `state`; `init` has to give all of them")
    for key, kind in kinds.items():
        require_same_kind(f"{who}: its variable {key!r}", state[key], kind)


def _check_state(who: str, state: Any, w: Tensor) -> None:
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise HookContractError(f"{who}: init gave {describe_value(state)}, not a dict of tensors")
    for key, tensor in state.items():
        if tensor.data_ptr() == w.data_ptr():
            raise HookContractError(f"{who}: init gave `w` itself as {key!r}, which every step changes; give w.clone()")
