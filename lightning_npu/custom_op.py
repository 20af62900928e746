"""The operator that ``torch.compile`` sees in place of an ``NPUFrozenModule``: opaque, but with known shapes."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_npu.module import NPUFrozenModule

_handles = itertools.count(1)
_modules: weakref.WeakValueDictionary[int, NPUFrozenModule] = weakref.WeakValueDictionary()


def register(module: NPUFrozenModule) -> int:
    """A number by which the operator finds ``module`` in this process, as long as it lives."""
    handle = next(_handles)
    _modules[handle] = module
    return handle


@torch.library.custom_op("lightning_npu::encode", mutates_args=())
def encode(tensors: list[Tensor], handle: int, dtype: torch.dtype) -> list[Tensor]:
    """Encode a batch with the module of this number; graph compilers see its shapes only."""
    module = _modules[handle]
    return [output if output.is_contiguous() else output.contiguous() for output in module.encode(tensors, dtype)]


@encode.register_fake
def _encode_shapes(tensors: list[Tensor], handle: int, dtype: torch.dtype) -> list[Tensor]:
    module = _modules[handle]
    batch: Any = next(
        (t.shape[s.batch_axis] for s, t in zip(module._inputs, tensors, strict=True) if s.batch_axis is not None),
        1,
    )
    outputs = []
    for spec in module._outputs:
        shape: list[Any] = [batch if axis == spec.batch_axis else size for axis, size in enumerate(spec.shape)]
        kind = dtype if spec.torch_dtype.is_floating_point else spec.torch_dtype
        outputs.append(torch.empty(shape, dtype=kind, device=tensors[0].device))
    return outputs
