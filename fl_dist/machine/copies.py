"""Copies from the device to host memory, and back, that nobody waits for until somebody needs them."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Copies:
    """On a GPU: into pinned memory, on a stream of their own, beside what is computed meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def of(self, tensor: Tensor) -> Tensor:
        """In host memory, once it has arrived; nobody may write to the tensor any more. On the CPU it is the tensor."""
        if self._stream is None:
            return tensor
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy = tensor.to("cpu", non_blocking=True)
        tensor.record_stream(self._stream)
        return copy

    def snapshot(self, tensor: Tensor) -> Tensor:
        """The same of a tensor that goes on to change: on the GPU, not before it was copied."""
        if self._stream is None:
            return tensor.clone()
        copy = self.of(tensor)
        torch.cuda.current_stream(tensor.device).wait_stream(self._stream)
        return copy

    def back(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the device of what is, or has been given to come, in host memory; the host does not wait."""
        if self._stream is None:
            return {name: tensor.clone() for name, tensor in tensors.items()}
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        pinned = {name: t if t.is_pinned() else t.pin_memory() for name, t in tensors.items()}
        return {name: t.to(self._stream.device, non_blocking=True) for name, t in pinned.items()}

    def room(self, size: int) -> int:
        """Bytes of host memory that a copy of so many takes: torch gives pinned memory in powers of two."""
        return size if self._stream is None else 1 << max(0, size - 1).bit_length()

    def arrive(self) -> None:
        """Wait for all copies so far."""
        if self._stream is not None:
            self._stream.synchronize()


HOST = Copies(torch.device("cpu"))
"""For tensors that lie in host memory anyway."""
