"""The operator that ``torch.compile`` sees in place of an ``NPUFrozenModule``: opaque, but with known shapes."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_npu.forward_gradient.vjp import refuse_second_derivatives

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
def encode(tensors: list[Tensor], handle: int, dtype: torch.dtype, ahead: bool) -> list[Tensor]:
    """Encode a batch with the module of this number; graph compilers see its shapes only."""
    outputs = _modules[handle].encode(tensors, dtype, ahead=ahead)
    return [output if output.is_contiguous() else output.contiguous() for output in outputs]


@encode.register_fake
def _encode_shapes(tensors: list[Tensor], handle: int, dtype: torch.dtype, ahead: bool) -> list[Tensor]:
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


@torch.library.custom_op("lightning_npu::vjp", mutates_args=())
def vjp(tensors: list[Tensor], gradients: list[Tensor], handle: int, wanted: list[bool]) -> list[Tensor]:
    """Estimate the gradient of the inputs of the module of this number from that of its outputs; wanted ones only."""
    estimates = _modules[handle].vjp(tensors, gradients, wanted)
    return [estimate.contiguous() for estimate in estimates if estimate is not None]


@vjp.register_fake
def _vjp_shapes(tensors: list[Tensor], gradients: list[Tensor], handle: int, wanted: list[bool]) -> list[Tensor]:
    pairs = zip(tensors, wanted, strict=True)
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor, want in pairs if want]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.handle, _, _ = inputs
    ctx.wanted = [tensor.requires_grad for tensor in tensors]
    module = _modules[ctx.handle]
    if module._gradient is not None:
        module._gradient.check(module, tensors)
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    refuse_second_derivatives()
    estimates = iter(vjp(list(ctx.saved_tensors), list(gradients), ctx.handle, ctx.wanted))
    return [next(estimates) if want else None for want in ctx.wanted], None, None, None


encode.register_autograd(_backward, setup_context=_keep)
