"""Runs a model on the side and leaves no trace: modes, buffers, attributes and random state come back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module, *, fused_attention: bool = True) -> Iterator[None]:
    """Within the block the model is in eval mode and computes no gradients; after it everything is as it was.

    Restored, also after an exception: the train/eval flag of every submodule, buffers, attributes that ``forward``
    set (tensors and lists included), and the random state of Python, NumPy and torch (CPU and every CUDA device).

    Args:
        model: the model that is run.
        fused_attention: False turns torch's fused inference path of ``nn.TransformerEncoderLayer`` off, process-wide,
            for the length of the block: it is one opaque operator, which no tracer can look into.
    """
    snapshots = [_Snapshot(module) for module in model.modules()]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    fused = torch.backends.mha.get_fastpath_enabled()
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if in_use else []
    try:
        # Not under inference mode: its tensors have no version counters, and those show in-place edits.
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.no_grad():
            for snapshot in snapshots:
                snapshot.module.training = False  # not .eval(): a module may override it with side effects
            if not fused_attention:
                torch.backends.mha.set_fastpath_enabled(False)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for snapshot in snapshots:
            snapshot.restore()


class _Snapshot:
    """What one module (not its children) was like."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(vars(module))
        registries: list[dict[str, Any]] = [module._parameters, module._buffers, module._modules]
        self.registries = [(registry, dict(registry)) for registry in registries]
        self.lists = [(value, list(value)) for value in self.attributes.values() if isinstance(value, list)]
        tensors: list[Any] = [*module._buffers.values(), *self.attributes.values()]
        self.tensors = [(t, t.detach().clone()) for t in tensors if isinstance(t, torch.Tensor)]

    def restore(self) -> None:
        """Put back what changed, and nothing else."""
        attributes = vars(self.module)
        for name in [name for name in attributes if name not in self.attributes]:
            del attributes[name]
        attributes.update(self.attributes)
        for registry, entries in self.registries:
            if registry != entries or list(registry) != list(entries):
                registry.clear()
                registry.update(entries)
        for value, items in self.lists:
            value[:] = items
        with torch.no_grad():
            for tensor, saved in self.tensors:
                if not torch.equal(tensor, saved):
                    tensor.copy_(saved)
