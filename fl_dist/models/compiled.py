"""torch.compile for the passes of local steps."""

import shutil

from torch import Tensor, nn

from fl_dist.common.errors import UserError, describe_error
from fl_dist.common.rows import Rows, call_module, count_rows


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

    def __call__(self, x: Tensor | None = None, **named: Tensor) -> Tensor:
        rows: Rows = named if x is None else x
        is_compiled = count_rows(rows) == self._batch_size and self._module.training
        output: Tensor = call_module(self._compiled if is_compiled else self._module, rows)
        return output


def describe_compile_error(error: Exception) -> CompileError:
    """With the remedy, before any training."""
    remedy = "set local.compile=false"
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        remedy = f"install a C++ compiler (g++), or {remedy}"
    return CompileError(f"the model cannot be compiled: {describe_error(error)}; {remedy}")
