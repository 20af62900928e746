"""Tensors between torch and a runtime: to the host as runtimes take them, and back to where the model is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_npu.tensor_spec import TensorSpec

_streams: dict[torch.device, torch.cuda.Stream] = {}


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of host tensors on ``device``.

    On CUDA they are made on a side stream, so that they overlap with kernels that were launched before; the current
    stream waits for them before it goes on, so that every later use sees them.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    current = torch.cuda.current_stream(device)
    side = _streams.get(device)
    if side is None:
        side = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
    current.wait_stream(side)
    for copy in copies:  # the allocator must not hand their memory out again while the current stream reads it
        copy.record_stream(current)
    return copies


class Exchange:
    """Converts what has to be converted, and counts each copy that it costs by its reason.

    Attributes:
        copies: "input from device", "input dtype", "input layout", "output to device", "output dtype".
    """

    def __init__(self) -> None:
        self.copies: Counter[str] = Counter()

    def to_host(self, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Contiguous CPU tensors of the specs' dtypes; the same memory where it is so already."""
        return [self._ready(tensor.detach(), spec.torch_dtype) for tensor, spec in zip(tensors, specs, strict=True)]

    def from_host(self, outputs: list[Tensor], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """The outputs on ``device``, floating ones in ``dtype``."""
        if device.type != "cpu":
            self.copies["output to device"] += len(outputs)
            outputs = to_device(outputs, device)
        other = [tensor.is_floating_point() and tensor.dtype != dtype for tensor in outputs]
        if any(other):
            self.copies["output dtype"] += sum(other)
            outputs = [tensor.to(dtype) if cast else tensor for tensor, cast in zip(outputs, other, strict=True)]
        return outputs

    def _ready(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.device.type != "cpu":
            self.copies["input from device"] += 1
            tensor = tensor.to("cpu")
        if tensor.dtype != dtype:
            self.copies["input dtype"] += 1
            tensor = tensor.to(dtype)
        if not tensor.is_contiguous():
            self.copies["input layout"] += 1
            tensor = tensor.contiguous()
        return tensor
