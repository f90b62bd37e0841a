"""Asynchronous copies between device and host memory."""

from collections.abc import Mapping

import torch
from torch import Tensor


class HostTransfer:
    """On a GPU: through pinned memory, on a separate stream, while the GPU computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy, complete after `synchronize`; the tensor must not change any more. On the CPU, the tensor itself."""
        if self._stream is None:
            return tensor
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy = tensor.to("cpu", non_blocking=True)
        tensor.record_stream(self._stream)
        return copy

    def snapshot(self, tensor: Tensor) -> Tensor:
        """The same for a tensor that changes later: the GPU waits for the copy before it computes further."""
        if self._stream is None:
            return tensor.clone()
        copy = self.to_host(tensor)
        torch.cuda.current_stream(tensor.device).wait_stream(self._stream)
        return copy

    def to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the device, also of host tensors that are still being copied; the host does not wait."""
        if self._stream is None:
            return {name: tensor.clone() for name, tensor in tensors.items()}
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        pinned = {name: t if t.is_pinned() else t.pin_memory() for name, t in tensors.items()}
        return {name: t.to(self._stream.device, non_blocking=True) for name, t in pinned.items()}

    def pinned_bytes(self, size: int) -> int:
        """Bytes of host memory for a copy of this size: torch allocates pinned memory in powers of two."""
        return size if self._stream is None else 1 << max(0, size - 1).bit_length()

    def synchronize(self) -> None:
        """Wait for all copies so far."""
        if self._stream is not None:
            self._stream.synchronize()


NO_TRANSFER = HostTransfer(torch.device("cpu"))
"""For tensors in host memory."""
