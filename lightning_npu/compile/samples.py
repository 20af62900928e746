"""Calibration data: taken from an iterable of inputs, checked, and divided into what calibrates and what judges."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_npu.errors import InputError
from lightning_npu.signature import CallSignature
from lightning_npu.tensor_spec import TensorSpec, common_batch


@dataclass(frozen=True)
class Samples:
    """Inputs of a module, sample by sample.

    Attributes:
        specs: what each input looks like.
        tensors: one tensor per input with all samples along its batch axis, on the CPU.
        count: the number of samples.
    """

    specs: tuple[TensorSpec, ...]
    tensors: tuple[Tensor, ...]
    count: int

    def part(self, start: int, stop: int) -> Samples:
        """The samples ``start`` to ``stop``."""
        parts = tuple(
            tensor if spec.batch_axis is None else tensor.narrow(spec.batch_axis, start, stop - start)
            for spec, tensor in zip(self.specs, self.tensors, strict=True)
        )
        return Samples(self.specs, parts, stop - start)

    def batches(self, size: int) -> Iterator[list[Tensor]]:
        """Contiguous batches of ``size``; the last may be smaller where the batch is dynamic, else it is filled up.

        A fixed batch is filled with its own last sample, so that no batch is dropped.
        """
        fixed = any(spec.static_batch is not None for spec in self.specs)
        for start in range(0, self.count, size):
            part = self.part(start, min(start + size, self.count))
            if fixed and part.count < size:
                part = part.filled(size)
            yield [tensor.contiguous() for tensor in part.tensors]

    def filled(self, size: int) -> Samples:
        """The same with its last sample repeated until there are ``size``."""
        index = torch.arange(size).clamp_max(self.count - 1)
        tensors = tuple(
            tensor if spec.batch_axis is None else tensor.index_select(spec.batch_axis, index)
            for spec, tensor in zip(self.specs, self.tensors, strict=True)
        )
        return Samples(self.specs, tensors, size)

    def sha256(self) -> str:
        """SHA-256 over names, shapes and bytes."""
        digest = hashlib.sha256()
        for spec, tensor in zip(self.specs, self.tensors, strict=True):
            digest.update(f"{spec.name}:{list(tensor.shape)}:{spec.dtype};".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def collect(
    calibration: Iterable[Any], signature: CallSignature, specs: Sequence[TensorSpec], *, limit: int
) -> Samples:
    """Take up to ``limit`` samples from an iterable of inputs.

    Args:
        calibration: each item one call's inputs: a tensor, a tuple of positional arguments, a mapping of keyword
            arguments, or an object with ``args`` and ``kwargs``.
        signature: how the module is called.
        specs: what the flat inputs look like.
        limit: how many samples to take at most; the iterable is not read further.

    Raises:
        InputError: it is empty, or an item has another structure, shape or dtype, or holds NaN or infinity.
    """
    taken: list[list[Tensor]] = []
    count = 0
    for number, item in enumerate(calibration):
        args, kwargs = as_call(item, signature)
        try:
            flat = [tensor.detach().cpu() for tensor in signature.flatten(args, kwargs)]
            for spec, tensor in zip(specs, flat, strict=True):
                spec.check(tensor)
            size = common_batch(specs, flat) or 1
        except InputError as error:
            raise InputError(
                f"Calibration item {number} does not fit: {error.what}",
                expected=error.expected,
                got=error.got,
                remedy="give calibration inputs of the same kind as the example inputs",
            ) from error
        _refuse_non_finite(specs, flat, number)
        taken.append([tensor.to(spec.torch_dtype) for spec, tensor in zip(specs, flat, strict=True)])
        count += size
        if count >= limit:
            break
    if count == 0:
        raise InputError(
            "The calibration data is empty.",
            expected="an iterable with at least one batch of real inputs",
            got="no item" if not taken else "items without samples",
            remedy="give a loader over data like that of the training; a generator can be read only once",
        )
    tensors = tuple(
        column[0] if spec.batch_axis is None else torch.cat(column, dim=spec.batch_axis)
        for spec, column in zip(specs, (list(column) for column in zip(*taken, strict=True)), strict=True)
    )
    samples = Samples(tuple(specs), tensors, count)
    return samples if count <= limit else samples.part(0, limit)


def divide(samples: Samples, *, holdout: int) -> tuple[Samples, Samples]:
    """What calibrates and what judges fidelity: the last samples are held out, a fifth of all at most ``holdout``.

    The last ones, not scattered ones: neighbours in a recording look alike, and would make the judgement too kind.

    Raises:
        InputError: there are fewer than two samples.
    """
    if samples.count < 2:
        raise InputError(
            "There is one calibration sample only.",
            expected="at least 2: fidelity is judged on samples that did not calibrate; 100 or more are good",
            got="1",
            remedy="give more calibration data",
        )
    kept = max(1, min(holdout, samples.count // 5))
    return samples.part(0, samples.count - kept), samples.part(samples.count - kept, samples.count)


def as_call(item: Any, signature: CallSignature) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """One calibration item as positional and keyword arguments."""
    if hasattr(item, "args") and hasattr(item, "kwargs") and not isinstance(item, inspect.BoundArguments):
        return tuple(item.args), dict(item.kwargs)
    if isinstance(item, Mapping) and set(item) <= {parameter.name for parameter in signature.parameters}:
        return (), dict(item)
    if isinstance(item, (tuple, list)):
        return tuple(item), {}
    return (item,), {}


def _refuse_non_finite(specs: Sequence[TensorSpec], tensors: Sequence[Tensor], number: int) -> None:
    for spec, tensor in zip(specs, tensors, strict=True):
        if tensor.is_floating_point():
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                raise InputError(
                    f"Calibration item {number} holds NaN or infinity in input '{spec.name}'.",
                    expected="finite values: activation ranges are taken from them",
                    got=f"{bad} of {tensor.numel()} values",
                    remedy="clean the data, or fix the step that normalises it",
                )
