"""torch.compile for the passes of local steps."""

import shutil

from torch import Tensor, nn

from fl_dist.common.errors import UserError, describe_error


class CompileError(UserError):
    """A model that cannot be compiled here."""


class CompiledModule:
    """A module compiled for batches of one size, as one graph; other batches pass through the module as it is.

    Code for any size would depend on the size that a rank sees first, and so would the bits.
    """

    def __init__(self, module: nn.Module, batch_size: int) -> None:
        import torch._dynamo
        import torch._inductor.config  # these take seconds

        # Dynamo holds few graphs per function, and one process may run many configurations in turn.
        torch._dynamo.reset()
        torch._inductor.config.compile_threads = 1  # no processes of its own
        self._module, self._batch_size = module, batch_size
        self._compiled = torch.compile(module, fullgraph=True, dynamic=False)

    def __call__(self, x: Tensor) -> Tensor:
        is_compiled = len(x) == self._batch_size and self._module.training
        output: Tensor = self._compiled(x) if is_compiled else self._module(x)
        return output


def describe_compile_error(error: Exception) -> CompileError:
    """With the remedy, before any training."""
    remedy = "set local.compile=false"
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        remedy = f"install a C++ compiler (g++), or {remedy}"
    return CompileError(f"the model cannot be compiled: {describe_error(error)}; {remedy}")
