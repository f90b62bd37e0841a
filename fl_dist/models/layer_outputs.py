"""The outputs of the layers that an algorithm's parts name."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fl_dist.common.errors import ModelError
from fl_dist.common.formatting import suggest
from fl_dist.models.onednn_layout import split_off_dense


class LayerOutputs:
    """Hooks that record the outputs of named layers in a forward pass."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._outputs: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        layers = dict(module.named_modules())
        for name in names:
            if name not in layers:
                raise ModelError(
                    f"a part asks for the layer {name!r} of the model; {suggest(name, filter(None, layers))}"
                )
            self._handles.append(layers[name].register_forward_hook(self._hook(name)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[..., Tensor]:
        def record(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            self._outputs[name], following = split_off_dense(output)
            return following

        return record

    def pop(self, dtype: torch.dtype) -> dict[str, Tensor]:
        outputs, self._outputs = self._outputs, {}
        return {name: output.to(dtype) for name, output in outputs.items()}
