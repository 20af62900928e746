"""Runs a model on the side and leaves no trace: modes, weights, buffers, attributes and random state come back."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

_LARGE = 1000  # entries; what is in larger containers (replay buffers, datasets) is not looked into
_FOREIGN = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_npu", "numpy")


@contextmanager
def undisturbed(model: nn.Module, *, fused_attention: bool = True) -> Iterator[None]:
    """Within the block the model is in eval mode and computes no gradients; after it everything is as it was.

    Restored, also after an exception: the train/eval flag of every submodule, parameters and buffers, their gradients,
    attributes, what is in attributes (lists, dicts, sets, deques, the user's own objects, modules that are not
    registered, and the tensors in all of them), and the random state of Python, NumPy and torch (CPU and every CUDA
    device). Containers of more than 1000 entries are restored, but not what was changed inside their entries. Objects
    of torch and Lightning, such as optimizers and the Trainer, are not restored.

    Needs as much memory on the host as parameters and buffers take.

    Args:
        model: the model that is run.
        fused_attention: False turns torch's fused inference path of ``nn.TransformerEncoderLayer`` off, process-wide,
            for the length of the block: it is one opaque operator, which no tracer can look into.
    """
    modules = list(model.modules())
    snapshot = _Snapshot()
    for module in modules:
        snapshot.add(module)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    fused = torch.backends.mha.get_fastpath_enabled()
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if in_use else []
    try:
        # Not under inference mode: its tensors have no version counters, and those show in-place edits.
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.no_grad():
            for module in modules:
                module.training = False  # not .eval(): a module may override it with side effects
            if not fused_attention:
                torch.backends.mha.set_fastpath_enabled(False)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        snapshot.restore()


class _Snapshot:
    """What modules, and all that hangs on them, were like; each thing once."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}  # holds the things, so that no identity is used twice
        self._undo: list[Callable[[], None]] = []
        self._waiting: list[Any] = []

    def add(self, value: Any) -> None:
        """Keep what a module, a container, an object or a tensor is like now."""
        self._waiting.append(value)
        while self._waiting:  # no recursion: objects may be chained deeply
            value = self._waiting.pop()
            if id(value) not in self._known:
                self._known[id(value)] = value
                self._keep(value)

    def restore(self) -> None:
        """Put back what changed, and nothing else."""
        with torch.no_grad():
            for undo in self._undo:
                undo()

    def _keep(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and not value.is_meta and not is_lazy(value):
                self._undo.append(_undo_tensor(value))
                self._waiting.append(value.grad if value.is_leaf else None)
        elif isinstance(value, nn.Module):
            self._undo.append(_undo_mapping(vars(value)))
            self._waiting += [item for name, item in vars(value).items() if name not in _HOOKS]
        elif isinstance(value, dict):
            self._undo.append(_undo_mapping(value))
            self._look_into(list(value.values()))
        elif isinstance(value, list | set | deque):
            self._undo.append(_undo_items(value))
            self._look_into(list(value))
        elif isinstance(value, tuple):
            self._look_into(list(value))
        elif _is_own(value):
            self._undo.append(_undo_mapping(vars(value)))
            self._look_into(list(vars(value).values()))

    def _look_into(self, items: list[Any]) -> None:
        if len(items) <= _LARGE:
            self._waiting += items


_HOOKS = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}


def _is_own(value: Any) -> bool:
    """Whether a value is an object of the user's own classes, with attributes to restore."""
    package = type(value).__module__.partition(".")[0]
    if package in _FOREIGN or (package in sys.stdlib_module_names and package != "__main__"):
        return False
    return hasattr(value, "__dict__") and not isinstance(value, type | torch.utils.data.Dataset)


def _undo_mapping(mapping: dict[Any, Any]) -> Callable[[], None]:
    before = dict(mapping)

    def undo() -> None:
        for key in [key for key in mapping if key not in before]:
            del mapping[key]
        for key, value in before.items():
            if key not in mapping or mapping[key] is not value:
                mapping[key] = value
        if list(mapping) != list(before):  # the order of parameters is that of the optimizer
            mapping.clear()
            mapping.update(before)

    return undo


def _undo_items(value: Any) -> Callable[[], None]:
    before = list(value)

    def undo() -> None:
        now = list(value)
        if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
            return
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(before)

    return undo


def _undo_tensor(tensor: torch.Tensor) -> Callable[[], None]:
    data, requires_grad = tensor.data, tensor.requires_grad
    grad = tensor.grad if tensor.is_leaf else None
    saved = data.to("cpu", copy=True)

    def undo() -> None:
        if tensor.data.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
            tensor.data = data  # other values were assigned to it
        if not torch.equal(data.cpu(), saved):
            data.copy_(saved)
        if tensor.requires_grad != requires_grad and tensor.is_leaf:
            tensor.requires_grad_(requires_grad)
        if tensor.is_leaf and tensor.grad is not grad:
            tensor.grad = grad

    return undo
