"""How near a compiled module's outputs are to those of the FP32 module, measured through the runtimes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightning_npu.artifact import OutputFidelity as OutputFidelity
from lightning_npu.errors import CompileError, FidelityError, InputError

if TYPE_CHECKING:
    from lightning_npu.runtimes.base import Runtime

LIMIT_DB = 200.0  # float32 itself ends near 150 dB; beyond this the figure means "equal" or "unrelated"
CENTRED_ALLOWANCE_DB = 17.0
FEWEST_SAMPLES = 4  # with fewer, a variance says nothing
_SAME = 1e-10  # a feature that varies by less than -100 dB of its power is a constant, up to FP32 rounding


@dataclass
class _Sums:
    """Sums over samples, so that memory does not grow with their number."""

    signal: float = 0.0
    noise: float = 0.0
    cosine: float = 0.0
    samples: int = 0
    max_abs_error: float = 0.0
    features: _Features | None = None

    def add(self, reference: torch.Tensor, candidate: torch.Tensor, batch_axis: int | None) -> None:
        if reference.shape != candidate.shape:
            raise InputError(
                "Two outputs of different shape cannot be compared.",
                expected=f"{list(reference.shape)}, as the reference",
                got=f"{list(candidate.shape)}",
                remedy="feed both the same inputs",
            )
        if reference.numel() == 0:
            raise InputError(
                "An empty output cannot be compared.",
                expected="at least one value",
                got=f"shape {list(reference.shape)}",
                remedy="feed at least one sample",
            )
        rows = [_rows(tensor, batch_axis) for tensor in (reference, candidate)]
        if not (torch.isfinite(rows[0]).all() and torch.isfinite(rows[1]).all()):
            rows = _without_equal_non_finite(*rows)
        ref, can = rows
        before = self.samples
        self.samples += ref.shape[0]
        if not (torch.isfinite(ref).all() and torch.isfinite(can).all()):
            self.noise = self.max_abs_error = math.inf
            return
        error = can - ref
        self.signal += ref.square().sum().item()
        self.noise += error.square().sum().item()
        self.max_abs_error = max(self.max_abs_error, error.abs().max().item())
        if self.features is None:
            self.features = _Features(*torch.zeros(3, ref.shape[1], dtype=torch.float64))
        self.features.add(ref, error, before)
        norms = ref.norm(dim=1), can.norm(dim=1)
        product = norms[0] * norms[1]
        cosine = torch.where(product > 0, (ref * can).sum(dim=1) / product, (norms[0] == norms[1]).double())
        self.cosine += cosine.clamp(-1, 1).sum().item()

    def result(self) -> OutputFidelity:
        if math.isinf(self.noise):
            return OutputFidelity(0.0, -LIMIT_DB, math.inf, -LIMIT_DB)
        plain_db = _decibels(self.signal, self.noise)
        centred_db = self.features.typical_db(self.samples) if self.features is not None else None
        centred_db = plain_db if centred_db is None else centred_db
        return OutputFidelity(self.cosine / self.samples, plain_db, self.max_abs_error, centred_db)


@dataclass
class _Features:
    """Per feature, over the samples so far: mean, squared distances from it, and squared errors."""

    mean: torch.Tensor
    spread: torch.Tensor
    noise: torch.Tensor

    def add(self, ref: torch.Tensor, error: torch.Tensor, before: int) -> None:
        """Merge a batch by Chan's update: it is exact where a difference of sums of squares would cancel."""
        mean, count = ref.mean(dim=0), ref.shape[0]
        shift = mean - self.mean
        self.spread += (ref - mean).square().sum(dim=0) + shift.square() * (before * count / (before + count))
        self.mean += shift * (count / (before + count))
        self.noise += error.square().sum(dim=0)

    def typical_db(self, samples: int) -> float | None:
        """Median over the features that vary; None where none does, or where there are too few samples to tell."""
        if samples < FEWEST_SAMPLES:
            return None
        variance, noise = self.spread / (samples - 1), self.noise / samples
        varies = variance > _SAME * (self.mean.square() + variance)
        if not varies.any():
            return None
        ratio = torch.where(noise > 0, variance / noise, math.inf)[varies].median().item()
        return LIMIT_DB if math.isinf(ratio) else _decibels(ratio, 1.0)


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return LIMIT_DB
    if signal == 0:
        return -LIMIT_DB
    return min(LIMIT_DB, max(-LIMIT_DB, 10 * (math.log10(signal) - math.log10(noise))))


def _rows(tensor: torch.Tensor, batch_axis: int | None) -> torch.Tensor:
    """One row of float64 per sample."""
    values = tensor.detach().to("cpu", torch.float64)
    if batch_axis is None or values.ndim == 0:
        return values.reshape(1, -1)
    return values.movedim(batch_axis, 0).reshape(values.shape[batch_axis], -1)


def _without_equal_non_finite(reference: torch.Tensor, candidate: torch.Tensor) -> list[torch.Tensor]:
    """Both with zero wherever they hold the same infinity or both hold NaN."""
    same = (reference == candidate) | (reference.isnan() & candidate.isnan())
    same &= ~reference.isfinite()
    return [torch.where(same, 0.0, tensor) for tensor in (reference, candidate)]


def compare(reference: torch.Tensor, candidate: torch.Tensor, *, batch_axis: int | None = 0) -> OutputFidelity:
    r"""Compare one output with its reference.

    With reference values :math:`r` and candidate values :math:`c`, in float64:

    - ``sqnr_db`` :math:`= 10 \log_{10} (\sum r^2 / \sum (c - r)^2)` over all values, kept within +-200 dB;
      200 for equal tensors, -200 where a reference of zeros meets anything else.
    - ``cosine`` :math:`= \langle r_i, c_i \rangle / (|r_i| |c_i|)`, where :math:`r_i` holds all values of sample
      :math:`i`, averaged over the samples; two samples of zeros count as 1, one of them as 0.
    - ``max_abs_error`` :math:`= \max |c - r|`.
    - ``centred_sqnr_db`` is the median over features of :math:`10 \log_{10} (\mathrm{var}(r_f) / \overline{(c_f -
      r_f)^2})`, where a feature :math:`f` is one place of the output without its batch axis, and both means are over
      samples. A head sees nothing but what varies; an offset or a few strong channels lift ``sqnr_db`` though all else
      is lost. Constant features do not count. It is ``sqnr_db`` where no feature varies, and below 4 samples.

    The same infinity or NaN at the same place in both counts as no error (masks hold infinities). A value that is
    not finite in only one of them makes the output worthless: cosine 0, -200 dB, infinite error.

    Args:
        reference: any shape and dtype.
        candidate: the same shape.
        batch_axis: the axis that counts samples; None takes the whole tensor as one sample.

    Raises:
        InputError: the shapes differ, or there are no values.
    """
    sums = _Sums()
    sums.add(reference, candidate, batch_axis)
    return sums.result()


def measure(
    reference: Runtime, candidate: Runtime, batches: Iterable[Sequence[torch.Tensor]]
) -> dict[str, OutputFidelity]:
    """Run both on the same batches and compare every output.

    Args:
        reference: runs the FP32 model.
        candidate: runs the compiled model.
        batches: inputs that were not used to calibrate; consumed one by one, nothing is kept.

    Returns:
        fidelity per output name, pooled over all batches.

    Raises:
        CompileError: there was no batch, or the two have different outputs.
    """
    names = [spec.name for spec in candidate.outputs]
    if names != [spec.name for spec in reference.outputs]:
        raise CompileError(
            "Fidelity cannot be measured: the two models have different outputs.",
            expected=[spec.name for spec in reference.outputs],
            got=names,
            remedy="compare two files that were made from one module",
        )
    sums = {name: _Sums() for name in names}
    batch_count = 0
    for batch in batches:
        pairs = zip(candidate.outputs, reference.run(batch), candidate.run(batch), strict=True)
        for spec, expected, actual in pairs:
            sums[spec.name].add(expected, actual, spec.batch_axis)
        batch_count += 1
    if batch_count == 0:
        raise CompileError(
            "Fidelity cannot be measured without inputs.",
            expected="at least one batch that was not used to calibrate",
            got="no batch",
            remedy="give more calibration batches, or check that the loader is not empty",
        )
    return {name: total.result() for name, total in sums.items()}


def check(fidelity: Mapping[str, OutputFidelity], *, min_sqnr_db: float, recipe: str, precision: str) -> None:
    """Refuse a compiled module that is too far from the FP32 module.

    What varies between samples in the median feature is held to 17 dB less than the whole, so to 3 dB by default. At 0
    dB a feature is worth no more than its mean, a constant; at 3 dB its error has half the power of what varies. In
    images of one scene most of a feature is common to all samples: sound 8-bit encoders, post-norm Transformers among
    them, have 14 to 35 dB on shuffled data and 5 to 11 dB on the consecutive frames of one recording, which hardly
    vary. Features that collapsed into the rounding of an offset or of a strong channel are below 0 dB.

    Args:
        fidelity: per output name.
        min_sqnr_db: what every output must reach, in decibels.
        recipe: the quantisation recipe it was built with.
        precision: what the file is: "a8w8", "a16w8", "mixed" or "fp32".

    Raises:
        FidelityError: names the worst output, its figures, the threshold and the remedies in the order to try them.
    """
    if not fidelity:
        raise CompileError("There is no fidelity to check.", expected="figures of at least one output", got="none")
    remedy = "in this order: " + "; ".join(f"{n}) {text}" for n, text in enumerate(_remedies(recipe, precision), 1))
    name, worst = min(fidelity.items(), key=lambda item: item[1].sqnr_db)
    if worst.sqnr_db >= min_sqnr_db:  # false for NaN, which must not pass
        _check_centred(fidelity, min_sqnr_db - CENTRED_ALLOWANCE_DB, remedy)
        return
    failed = [output for output, figures in fidelity.items() if not figures.sqnr_db >= min_sqnr_db]
    raise FidelityError(
        f"Output '{name}' of the compiled module ({precision}, recipe '{recipe}') is too far from the FP32 module; "
        f"{len(failed)} of {len(fidelity)} outputs are.",
        expected=f"{min_sqnr_db:.1f} dB or more (min_sqnr_db)",
        got=f"{worst.sqnr_db:.1f} dB, cosine {worst.cosine:.4f}, largest error {worst.max_abs_error:.3g}",
        remedy=remedy,
    )


def _check_centred(fidelity: Mapping[str, OutputFidelity], least_db: float, remedy: str) -> None:
    centred = {name: item.centred_sqnr_db for name, item in fidelity.items() if item.centred_sqnr_db is not None}
    if not centred:
        return
    name, worst_db = min(centred.items(), key=lambda item: item[1])
    if worst_db >= least_db:
        return
    raise FidelityError(
        f"Output '{name}' of the compiled module has lost what varies between samples: an offset or a few strong "
        "channels take up the 8-bit scale, and the typical feature is rounded away.",
        expected=f"{least_db:.1f} dB or more in the median feature, its mean taken off (min_sqnr_db - "
        f"{CENTRED_ALLOWANCE_DB:g})",
        got=f"{worst_db:.1f} dB, though {fidelity[name].sqnr_db:.1f} dB over all values",
        remedy=f"cut before the layer that adds the offset or scales the channels (a last normalisation can stay in "
        f"torch); make sure that the last calibration samples differ from each other; or, {remedy}",
    )


def _remedies(recipe: str, precision: str) -> list[str]:
    remedies = ["make sure the weights are trained: a random network amplifies rounding"]
    if precision == "fp32":
        return [*remedies, "report it: an FP32 file should be exact"]
    if recipe == "fast":
        remedies.append("recipe='faithful'")
    remedies.append("calibrate on more and more varied inputs, preprocessed as in use")
    if precision != "a16w8":
        remedies.append("precision='a16w8'")
    remedies.append("cut elsewhere: errors are largest right after convolutions, smaller after later encoder layers")
    remedies.append("lower min_sqnr_db, if the policy succeeds as often with the compiled module as without")
    return remedies


def format_table(fidelity: Mapping[str, OutputFidelity]) -> str:
    """The figures as lines of text, one output a line, under a header."""
    width = max([len("output"), *(len(name) for name in fidelity)])
    lines = [f"{'output':<{width}}  {'SQNR dB':>8}  {'centred':>8}  {'cosine':>8}  {'max error':>10}"]
    for name, figures in fidelity.items():
        centred = "-" if figures.centred_sqnr_db is None else f"{figures.centred_sqnr_db:.1f}"
        lines.append(
            f"{name:<{width}}  {figures.sqnr_db:8.1f}  {centred:>8}  {figures.cosine:8.5f}  "
            f"{figures.max_abs_error:10.3g}"
        )
    return "\n".join(lines)
