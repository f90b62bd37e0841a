"""Low-rank adapters of the package peft on a language model; LoRA: Hu et al. (2022)."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from safetensors.torch import save
from torch import Tensor, nn

from fl_dist.common.errors import ModelError, error_message
from fl_dist.common.files import write_atomically
from fl_dist.common.formatting import suggest
from fl_dist.common.imports import without_broken_torchvision
from fl_dist.common.registry import StrictModel

ADAPTER_WEIGHTS, ADAPTER_SETTINGS = "adapter_model.safetensors", "adapter_config.json"
"""Files of an adapter in peft's format."""


class Lora(StrictModel):
    """Settings of the adapters."""

    r: Annotated[int, Field(ge=1, le=10**4, description="rank of the adapters")] = 8
    alpha: Annotated[int, Field(ge=1, description="their output is scaled by alpha/r")] = 16
    dropout: Annotated[float, Field(ge=0, lt=1, description="share of their input that is dropped in training")] = 0.0
    targets: Annotated[
        list[str] | Literal["all-linear"] | None,
        Field(description="names of the layers that get one; null: those that peft names for the model"),
    ] = None


def add_adapters(network: Any, lora: Lora, kind: str) -> Any:
    """The network within a model of peft, of which the adapters are trained, and the head of a classifier."""
    peft = _import_peft()
    if isinstance(lora.targets, list):
        _check_targets(network, lora.targets)
    config = peft.LoraConfig(
        task_type=kind, r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=lora.targets
    )
    try:
        adapted = peft.get_peft_model(network, config)
    except ValueError as error:
        layers = ", ".join(_matrix_layers(network))
        raise ModelError(f"model.lora: {error_message(error)}; set model.lora.targets: {layers}") from None
    for layer in adapted.modules():
        if isinstance(layer, peft.utils.ModulesToSaveWrapper):
            _convert_inputs(layer)
    return adapted


def file_names(adapted: Any) -> dict[str, str]:
    """The names of the adapter's tensors in peft's files, and in the network."""
    names: dict[str, str] = _import_peft().get_peft_model_state_dict(
        adapted, {name: name for name in adapted.state_dict()}, save_embedding_layers=False
    )
    return names


def write_adapter(adapted: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """Tensors by their names in peft's files."""
    folder.mkdir(exist_ok=True)
    write_atomically(folder / ADAPTER_WEIGHTS, save(tensors, {"format": "pt"}))
    adapted.peft_config["default"].save_pretrained(str(folder))


def _import_peft() -> Any:
    try:
        with without_broken_torchvision():
            import peft
    except ImportError as error:
        raise ModelError(
            f"model.lora needs the package peft ({error_message(error)}): pip install 'fl_dist[llm]'"
        ) from None
    return peft


def _check_targets(network: Any, targets: list[str]) -> None:
    names = [name for name, _ in network.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            hint = suggest(target, _matrix_layers(network))
            raise ModelError(f"model.lora.targets: no layer is named {target!r}; {hint}")


def _matrix_layers(network: Any) -> list[str]:
    """The last parts of the names of layers with a matrix, without embeddings."""
    return sorted({name.rpartition(".")[2] for name, module in network.named_modules() if _has_matrix(module)})


def _has_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _convert_inputs(head: nn.Module) -> None:
    """Convert what a trained head gets from a base in half precision."""

    def convert(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        dtype = next(layer.parameters()).dtype
        return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

    for layer in head.modules():
        if list(layer.parameters(recurse=False)):
            layer.register_forward_pre_hook(convert)
