"""Copies from the device to host memory that nobody waits for until somebody needs them."""

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

    def precede(self) -> None:
        """What the GPU is given from now on comes after all copies so far; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def arrive(self) -> None:
        """Wait for all copies so far."""
        if self._stream is not None:
            self._stream.synchronize()


HOST = Copies(torch.device("cpu"))
"""For tensors that lie in host memory anyway."""
