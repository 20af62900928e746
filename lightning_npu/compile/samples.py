"""Calibration data: taken from an iterable of inputs, checked, and divided into what calibrates and what judges."""

from __future__ import annotations

import hashlib
import inspect
import warnings
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

    def spread(self, count: int) -> Samples:
        """``count`` of the samples, evenly spread over all: neighbours in a recording look alike."""
        index = torch.linspace(0, self.count - 1, count).round().long()
        parts = tuple(
            tensor if spec.batch_axis is None else tensor.index_select(spec.batch_axis, index)
            for spec, tensor in zip(self.specs, self.tensors, strict=True)
        )
        return Samples(self.specs, parts, count)

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
            raise _misfit(item, number, error) from error
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
    _warn_of_shared(specs, taken)
    tensors = tuple(
        column[0] if spec.batch_axis is None else torch.cat(column, dim=spec.batch_axis)
        for spec, column in zip(specs, (list(column) for column in zip(*taken, strict=True)), strict=True)
    )
    samples = Samples(tuple(specs), tensors, count)
    return samples if count <= limit else samples.part(0, limit)


def divide(samples: Samples, *, holdout: int, calibrating: int | None = None) -> tuple[Samples, Samples]:
    """What calibrates and what judges fidelity: the last samples are held out, a fifth of all at most ``holdout``.

    The last ones, not scattered ones: neighbours in a recording look alike, and would make the judgement too kind.
    Warns where most of them are among those that calibrate, as with a loader that repeats a batch.

    Args:
        samples: all of them.
        holdout: how many judge at most.
        calibrating: how many calibrate at most; what is left then judges, up to ``holdout``.

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
    if calibrating is not None and samples.count - kept > calibrating:
        kept = min(holdout, samples.count - calibrating)
    start = samples.count - kept
    used = samples.part(0, start if calibrating is None else min(start, calibrating))
    judging = samples.part(start, samples.count)
    known = set(_digests(used))
    again = sum(digest in known for digest in _digests(judging))
    if 2 * again > kept:
        warnings.warn(
            f"Fidelity is judged on samples that calibrated: {again} of the {kept} last calibration samples occur "
            f"among the {used.count} first, too. Give more varied calibration data, not a batch that repeats.",
            stacklevel=5,
        )
    return used, judging


def as_call(item: Any, signature: CallSignature) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """One calibration item as positional and keyword arguments."""
    if _is_call(item):
        return tuple(item.args), dict(item.kwargs)
    if isinstance(item, Mapping) and set(item) <= {parameter.name for parameter in signature.parameters}:
        return (), dict(item)
    if isinstance(item, (tuple, list)):
        return tuple(item), {}
    return (item,), {}


def unusable(tensor: Tensor) -> int:
    """How many NaN and infinite values a floating tensor holds; none in an additive mask, which is all 0 and -inf."""
    finite = torch.isfinite(tensor)
    bad = int((~finite).sum())
    if bad and bool((finite & (tensor == 0) | (tensor == -torch.inf)).all()):
        return 0
    return bad


def _misfit(item: Any, number: int, error: InputError) -> InputError:
    if _is_call(item):  # recorded from the running model
        return InputError(
            f"The model calls the submodule in more than one way: call {number} differs from the first. {error.what}",
            expected=error.expected,
            got=error.got,
            remedy="an artifact stands for one way of calling: bring all calls to one size and to the same arguments, "
            "pass run=lambda model, batch: ... that makes calls of one kind only, or offload a part inside that is "
            "always called alike; batch_axis=[...] if samples are counted along another axis than 0, None for inputs "
            "that all samples share",
        )
    return InputError(
        f"Calibration item {number} does not fit: {error.what}",
        expected=error.expected,
        got=error.got,
        remedy="give calibration inputs of the same kind as the example inputs; if an input is shared by all samples "
        "or counts them along another axis than 0, say so by batch_axis=[...], with None for a shared input",
    )


def _warn_of_shared(specs: Sequence[TensorSpec], taken: Sequence[Sequence[Tensor]]) -> None:
    """Batches of one sample do not show whether an input belongs to the sample or to all samples."""
    batched = [spec for spec in specs if spec.batch_axis is not None]
    if len(batched) < 2 or len(taken) < 2 or any(common_batch(specs, item) != 1 for item in taken):
        return
    alike = [
        spec.batch_axis is not None and all(torch.equal(item[index], taken[0][index]) for item in taken[1:])
        for index, spec in enumerate(specs)
    ]
    if not any(alike) or sum(alike) == len(batched):
        return
    axes = [None if same else spec.batch_axis for spec, same in zip(specs, alike, strict=True)]
    names = ", ".join(f"'{spec.name}'" for spec, same in zip(specs, alike, strict=True) if same)
    warnings.warn(
        f"Input {names} is taken to hold one value per sample, but is the same for all {len(taken)} calibration "
        f"samples. If it is shared by all samples, pass batch_axis={axes}; larger batches are refused otherwise.",
        stacklevel=3,
    )


def _digests(samples: Samples) -> list[str]:
    return [samples.part(index, index + 1).sha256() for index in range(samples.count)]


def _is_call(item: Any) -> bool:
    return hasattr(item, "args") and hasattr(item, "kwargs") and not isinstance(item, inspect.BoundArguments)


def _refuse_non_finite(specs: Sequence[TensorSpec], tensors: Sequence[Tensor], number: int) -> None:
    for spec, tensor in zip(specs, tensors, strict=True):
        if tensor.is_floating_point():
            bad = unusable(tensor)
            if bad:
                raise InputError(
                    f"Calibration item {number} holds NaN or infinity in input '{spec.name}'.",
                    expected="finite values, since activation ranges are taken from them; a mask of 0 and -inf is fine",
                    got=f"{bad} of {tensor.numel()} values",
                    remedy="clean the data, or fix the step that normalises it",
                )
