"""How near features are to their FP32 reference, streamed over batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_npu.compile.fidelity import LIMIT_DB
from lightning_npu.errors import InputError
from lightning_npu.metrics.base import HostMetric

FIGURES = ("cosine", "sqnr_db", "max_abs_error", "worst_cosine", "worst_sqnr_db")
_STATES = ("signal", "noise", "cosine_sum", "samples", "max_abs_error", "worst_cosine", "worst_sqnr_db")
_REDUCTIONS = ("sum", "sum", "sum", "sum", "max", "min", "min")
_DEFAULTS = (0.0, 0.0, 0.0, 0.0, 0.0, math.inf, math.inf)

_MERGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.Tensor.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

Outputs: TypeAlias = "Tensor | Sequence[Tensor] | Mapping[str, Tensor]"


def feature_fidelity(candidate: Tensor, reference: Tensor, *, batch_axis: int | None = 0) -> dict[str, float]:
    """Compare features with their reference.

    >>> reference = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    >>> figures = feature_fidelity(reference + torch.tensor([[0.0, 0.0], [0.2, 0.0]]), reference)
    >>> {name: round(value, 4) for name, value in figures.items()}
    {'cosine': 0.9975, 'sqnr_db': 28.6034, 'max_abs_error': 0.2, 'worst_cosine': 0.995, 'worst_sqnr_db': 20.0}

    Args:
        candidate: features to judge; any shape, real dtype.
        reference: what they should be, of the same shape.
        batch_axis: the axis that counts samples; None takes the whole tensor as one sample.

    Returns:
        ``cosine``, ``sqnr_db`` and ``max_abs_error`` as :func:`lightning_npu.compile.fidelity.compare` defines them
        (it takes the reference first), ``worst_cosine`` and ``worst_sqnr_db`` of the worst sample. NaN where there is
        no sample.

    Raises:
        InputError: the shapes differ, or the values are complex.
    """
    return _figures(_sums(candidate, reference, batch_axis).tolist())


class FeatureFidelity(HostMetric):
    """Fidelity of a module's outputs over all updates and ranks.

    Sums over samples are kept, not ratios: the figures are those of all samples at once, however they came in batches.

    >>> metric = FeatureFidelity()
    >>> reference = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    >>> metric.update(1.01 * reference, reference)
    >>> metric.update(reference, reference)
    >>> round(metric.compute()["sqnr_db"].item(), 2)
    43.01

    With several outputs, the figures are named ``"<output>/<figure>"``. ``figure`` picks one and gives that of the
    worst output, a single number for ``LightningModule.log``, early stopping or checkpoints:

    >>> metric = FeatureFidelity(["tokens", "summary"], figure="sqnr_db")
    >>> metric.update({"tokens": 1.1 * reference, "summary": 1.01 * reference}, [reference, reference])
    >>> round(metric.compute().item(), 2)
    20.0

    Args:
        outputs: names of the outputs, in their order; default: one output without a name.
        figure: one of ``cosine``, ``sqnr_db``, ``max_abs_error``, ``worst_cosine``, ``worst_sqnr_db``; default: all.
        batch_axis: the axis that counts samples; None takes each tensor as one sample. A mapping where outputs differ.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        InputError: no or doubled outputs, or an unknown figure.
    """

    signal: Tensor
    noise: Tensor
    cosine_sum: Tensor
    samples: Tensor
    max_abs_error: Tensor
    worst_cosine: Tensor
    worst_sqnr_db: Tensor

    def __init__(
        self,
        outputs: Sequence[str] | None = None,
        *,
        figure: str | None = None,
        batch_axis: int | Mapping[str, int | None] | None = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if outputs is not None and (isinstance(outputs, str) or not outputs or len(set(outputs)) != len(outputs)):
            raise InputError(
                "The outputs have no names to tell them apart.",
                expected="a list of different names",
                got=repr(outputs),
                remedy="leave 'outputs' out for a single output",
            )
        if figure is not None and figure not in FIGURES:
            raise InputError(
                "There is no such figure.", expected=f"one of {', '.join(FIGURES)}", got=repr(figure), remedy="pick one"
            )
        self.outputs = ("",) if outputs is None else tuple(outputs)
        self.figure = figure
        axes = batch_axis if isinstance(batch_axis, Mapping) else dict.fromkeys(self.outputs, batch_axis)
        self.batch_axes = [axes.get(name, 0) for name in self.outputs]
        for state, value, reduction in zip(_STATES, _DEFAULTS, _REDUCTIONS, strict=True):
            default = torch.full((len(self.outputs),), value, dtype=torch.float64, device="cpu")
            self.add_state(state, default=default, dist_reduce_fx=reduction)

    def update(self, candidate: Outputs, reference: Outputs) -> None:
        """Add a batch.

        Args:
            candidate: the outputs to judge: a tensor, tensors in the order of ``outputs``, or a mapping by name.
            reference: what they should be; each of the same shape.

        Raises:
            InputError: an output is missing, shapes differ, or values are complex. Nothing was added then.
        """
        pairs = zip(self._tensors(candidate), self._tensors(reference), self.batch_axes, strict=True)
        batch = torch.stack([_sums(*pair).cpu() for pair in pairs], dim=1)
        for state, reduction, values in zip(_STATES, _REDUCTIONS, batch, strict=True):
            setattr(self, state, _MERGE[reduction](getattr(self, state), values))

    def compute(self) -> Tensor | dict[str, Tensor]:
        """One number if ``figure`` was given, else all figures of all outputs; float64, NaN without samples."""
        sums = torch.stack([getattr(self, state) for state in _STATES], dim=1).tolist()
        by_output = {name: _figures(row) for name, row in zip(self.outputs, sums, strict=True)}
        if self.figure is not None:
            values = [figures[self.figure] for figures in by_output.values()]
            worst = max if self.figure == "max_abs_error" else min
            return self._result(math.nan if any(map(math.isnan, values)) else worst(values))
        return {
            f"{name}/{figure}" if name else figure: self._result(value)
            for name, figures in by_output.items()
            for figure, value in figures.items()
        }

    def _tensors(self, outputs: Outputs) -> list[Tensor]:
        if isinstance(outputs, Tensor):
            tensors = [outputs]
        elif isinstance(outputs, Mapping):
            tensors = [outputs[name] for name in self.outputs if name in outputs]
        else:
            tensors = list(outputs)
        if len(tensors) != len(self.outputs):
            got = list(outputs) if isinstance(outputs, Mapping) else f"{len(tensors)}"
            raise InputError(
                "The outputs are not those that the metric was made for.",
                expected=f"{len(self.outputs)}: {list(self.outputs)}",
                got=got,
                remedy="name all outputs in FeatureFidelity(outputs=...)",
            )
        return tensors


def _sums(candidate: Tensor, reference: Tensor, batch_axis: int | None) -> Tensor:
    """The states of one batch, float64 of shape (7,), on the device of the features: nothing else has to leave it."""
    if candidate.shape != reference.shape or candidate.is_complex() or reference.is_complex():
        raise InputError(
            "Two outputs cannot be compared.",
            expected=f"real values of shape {list(reference.shape)}, as the reference",
            got=f"{candidate.dtype} of shape {list(candidate.shape)}, reference {reference.dtype}",
            remedy="feed both the same inputs; compare torch.view_as_real(...) of complex features",
        )
    if reference.numel() == 0:
        return torch.tensor(_DEFAULTS, dtype=torch.float64)
    device = torch.device("cpu") if reference.device.type == "mps" else reference.device  # MPS has no float64
    ref, can = (_by_sample(tensor.detach().to(device, torch.float64), batch_axis) for tensor in (reference, candidate))
    finite = ref.isfinite() & can.isfinite()
    wrong = ~(finite | (ref == can) | (ref.isnan() & can.isnan()))  # masks hold equal infinities
    ref, can = (torch.where(finite, tensor, 0.0) for tensor in (ref, can))
    error = torch.where(wrong, math.inf, can - ref)
    broken = wrong.any(dim=1)
    signal, noise = ref.square().sum(dim=1), error.square().sum(dim=1)
    norms = ref.norm(dim=1), can.norm(dim=1)
    product = norms[0] * norms[1]
    cosine = torch.where(product > 0, (ref * can).sum(dim=1) / product, (norms[0] == norms[1]).double()).clamp(-1, 1)
    cosine = torch.where(broken, 0.0, cosine)
    db = torch.where(noise == 0, LIMIT_DB, 10 * (signal.log10() - noise.log10()).clamp(-LIMIT_DB / 10, LIMIT_DB / 10))
    db = torch.where(noise.isinf(), -LIMIT_DB, db)
    samples = torch.full_like(noise.sum(), ref.shape[0])
    return torch.stack((signal.sum(), noise.sum(), cosine.sum(), samples, error.abs().max(), cosine.min(), db.min()))


def _by_sample(values: Tensor, batch_axis: int | None) -> Tensor:
    if batch_axis is None or values.ndim == 0:
        return values.reshape(1, -1)
    return values.movedim(batch_axis, 0).reshape(values.shape[batch_axis], -1)


def _figures(sums: Sequence[float]) -> dict[str, float]:
    signal, noise, cosine, samples, max_abs_error, worst_cosine, worst_db = sums
    if not samples:
        values = (math.nan,) * len(FIGURES)
    elif math.isinf(noise):
        values = (0.0, -LIMIT_DB, math.inf, worst_cosine, -LIMIT_DB)
    else:
        values = (cosine / samples, _decibels(signal, noise), max_abs_error, worst_cosine, worst_db)
    return dict(zip(FIGURES, values, strict=True))


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return LIMIT_DB
    if signal == 0:
        return -LIMIT_DB
    return min(LIMIT_DB, max(-LIMIT_DB, 10 * (math.log10(signal) - math.log10(noise))))
