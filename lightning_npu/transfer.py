"""Features from page-locked host memory to a GPU, beside what the GPU computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
