"""SHA-256 of weights, for comparing a checkpoint with what was compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes, as hex digits."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype}:{list(plain.shape)};".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def state_sha256(module: nn.Module) -> dict[str, str]:
    """SHA-256 of each tensor in the module's state dict, by name."""
    return {name: tensor_sha256(value) for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def digest(state: Mapping[str, str]) -> str:
    """One SHA-256 for named ones, whatever their order."""
    return hashlib.sha256("".join(f"{name}:{value};" for name, value in sorted(state.items())).encode()).hexdigest()


def state_digest(module: nn.Module) -> str:
    """One SHA-256 for all tensors in the module's state dict."""
    return digest(state_sha256(module))
