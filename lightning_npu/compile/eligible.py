"""Whether a module is of a kind that can be compiled at all, asked before anything is run."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from lightning_npu.errors import CompileError


def require_eligible(module: nn.Module, name: str | None = None) -> None:
    """Refuse a module in half precision, and one that was built under inference mode.

    Args:
        module: what will be compiled.
        name: what to call it; default: its class.

    Raises:
        CompileError: it is one of these.
    """
    called = f"'{name}'" if name else type(module).__name__
    tensors = list(itertools.chain(module.parameters(), module.buffers()))
    half = [tensor for tensor in tensors if tensor.dtype in (torch.bfloat16, torch.float16)]
    if half:
        raise CompileError(
            f"{called} is in half precision.",
            expected="FP32 weights: an artifact is made from them and compared with them",
            got=f"{len(half)} of {len(tensors)} parameters and buffers in {half[0].dtype}",
            remedy="offload in FP32 first (module.float()), then convert what stays in torch",
        )
    if any(tensor.is_inference() for tensor in tensors):
        raise CompileError(
            f"{called} was built or loaded under torch.inference_mode(), and such tensors cannot be traced.",
            expected="ordinary parameters and buffers",
            remedy="build the model outside torch.inference_mode(), or take copy.deepcopy(model) outside of it",
        )
