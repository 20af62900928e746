"""Whether samples are independent along the axis that is taken for the batch; otherwise splitting changes results."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_npu.compile import export_check
from lightning_npu.compile.flat import FlatModule
from lightning_npu.compile.samples import Samples
from lightning_npu.errors import CompileError
from lightning_npu.tensor_spec import TensorSpec

TOLERANCE = 1e-3  # of an output's largest value: far above FP32 rounding, below the error of 8 bits
_SAMPLES = 3


def require_independent(flat: FlatModule, outputs: Sequence[TensorSpec], samples: Samples) -> None:
    """Refuse a module whose outputs for one sample depend on the other samples of its batch.

    Where the batch is fixed to the size of the example's, the module may mix samples as it likes: a warning says that
    it is right for calls of this size only.

    Args:
        flat: the FP32 module.
        outputs: what its outputs look like.
        samples: real inputs, two samples or more.

    Raises:
        CompileError: names the output, the axis that was taken for the batch, and the remedies.
    """
    found = mixing_output(flat, outputs, samples)
    if found is None:
        return
    fixed = next((spec.static_batch for spec in samples.specs if spec.static_batch is not None), None)
    if fixed is None or fixed != export_check.samples(flat.example, samples.specs):
        raise mixing_error(*found, samples.specs)
    warnings.warn(
        f"Output '{found[0]}' mixes samples: it is right for calls of exactly {fixed} samples, and wrong for any other "
        "number, which is split and filled up. If another axis counts samples, pass batch_axis=[...] instead.",
        stacklevel=5,
    )


def mixing_output(flat: FlatModule, outputs: Sequence[TensorSpec], samples: Samples) -> tuple[str, float] | None:
    """The output in which a sample depends on the others most, and by how much; None if they are independent.

    A batch of different samples is compared with batches that hold the first of them only, and the last only. In
    torch, at one batch size, so that all runs round alike.

    Args:
        flat: the FP32 module.
        outputs: what its outputs look like.
        samples: real inputs, two samples or more.
    """
    fixed = next((spec.static_batch for spec in samples.specs if spec.static_batch is not None), None)
    count = max(2, fixed or _SAMPLES)
    mixed = samples.spread(count).tensors
    first, last = _repeated(samples.specs, mixed, 0), _repeated(samples.specs, mixed, count - 1)
    if all(torch.equal(a, b) for a, b in zip(first, last, strict=True)):
        mixed = export_check.with_samples(samples.part(0, 1).tensors, samples.specs, count)
        last = _repeated(samples.specs, mixed, count - 1)
    try:
        whole, again = _run(flat, mixed), _run(flat, mixed)
    except Exception:
        if fixed == 1:  # it takes single samples only, so there is nothing that could be mixed
            return None
        raise
    if any(_difference(a, b) > TOLERANCE for a, b in zip(whole, again, strict=True)):
        return None  # randomness, which the check of the export names
    worst = ("", 0.0)
    for row, alone in ((0, _run(flat, first)), (count - 1, _run(flat, last))):
        for spec, a, b in zip(outputs, whole, alone, strict=True):
            if spec.batch_axis is not None:
                a = a.narrow(spec.batch_axis, row, 1).expand_as(b)
            worst = max(worst, (spec.name, _difference(a, b)), key=lambda pair: pair[1])
    return worst if worst[1] > TOLERANCE else None


def mixing_error(name: str, difference: float, inputs: Sequence[TensorSpec]) -> CompileError:
    """What to tell whoever compiles a module that mixes samples."""
    axes = ", ".join(f"axis {spec.batch_axis} of '{spec.name}'" for spec in inputs if spec.batch_axis is not None)
    return CompileError(
        f"Output '{name}' mixes samples: that of one sample changes when the others in its batch do.",
        expected=f"samples that are independent along the batch axis, which is taken to be {axes}",
        got=f"a change by {difference:.2g} of the output's largest value",
        remedy="pass batch_axis=[...] with the axes that count samples, such as batch_axis=1 for modules that take "
        "the sequence first; if samples really are to be mixed, pass batch_size=N with the size of the whole batch",
    )


def _repeated(specs: Sequence[TensorSpec], tensors: Sequence[Tensor], row: int) -> tuple[Tensor, ...]:
    return tuple(
        tensor
        if spec.batch_axis is None
        else tensor.narrow(spec.batch_axis, row, 1).repeat_interleave(tensor.shape[spec.batch_axis], spec.batch_axis)
        for spec, tensor in zip(specs, tensors, strict=True)
    )


def _run(flat: FlatModule, tensors: Sequence[Tensor]) -> list[Tensor]:
    device = flat.example[0].device
    with torch.no_grad():
        return [output.detach().cpu() for output in flat(*(tensor.to(device) for tensor in tensors))]


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest difference by the largest value; of integers, the share that differs."""
    if a.shape != b.shape:
        return float("inf")
    if not a.is_floating_point():
        share = (a != b).double().mean().item() if a.numel() else 0.0
        return share if share > 0.01 else 0.0  # a tie may break either way
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs().double())
    if not error.numel():
        return 0.0
    scale = a[a.isfinite()].abs().max().item() if a.isfinite().any() else 0.0
    return float("inf") if error.isnan().any() else error.max().item() / max(scale, 1e-6)
