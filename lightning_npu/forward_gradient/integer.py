"""Integer arithmetic of forward gradients: quantise, perturb, accumulate, requantise, update; no float tensor.

Probes need accumulators of 32 bits: ``|w| <= 2**24``, ``z_shift <= 6``, ``eps_q <= 2**16`` and ``|z| <= 127`` keep
``w * 2**z_shift + eps_q * z`` below 2**31. Updates need a multiplication of 32 by 16 bits, as the requantisation of
every INT8 engine does, done here in 64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_npu.errors import InputError
from lightning_npu.forward_gradient.directions import key

MULTIPLIER_BITS, MOST_SHIFT = 15, 46
MOST_EPS, MOST_WEIGHT = 2**16, 2**24
_COEFFICIENT = 127
_ROUNDING_STREAM = -1  # no probe has this number


@dataclass(frozen=True)
class Grid:
    """The values that a tensor of integer weights stands for: ``scale * w`` with ``lower <= w <= upper``.

    Attributes:
        scale: value of one step: float64, without axes or, for scales per channel, with as many axes as the weights.
        lower: the smallest integer.
        upper: the largest integer.
    """

    scale: Tensor
    lower: int
    upper: int

    def __post_init__(self) -> None:
        if not -MOST_WEIGHT <= self.lower < self.upper <= MOST_WEIGHT:
            raise InputError(
                "The grid's bounds are wrong.",
                expected=f"integers between -{MOST_WEIGHT} and {MOST_WEIGHT}",
                got=(self.lower, self.upper),
            )
        if not bool((self.scale > 0).all() and torch.isfinite(self.scale).all()):
            raise InputError("A grid's scales must be positive and finite.", got=self.scale)

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest signed dtype that holds the bounds."""
        for dtype in (torch.int8, torch.int16):
            if torch.iinfo(dtype).min <= self.lower and self.upper <= torch.iinfo(dtype).max:
                return dtype
        return torch.int32

    def quantize(self, values: Tensor) -> Tensor:
        """The nearest integers to float ``values``, saturated, in :attr:`dtype`."""
        scaled = values.detach().to(torch.float64, copy=True).div_(self.scale.to(values.device))
        return scaled.round_().clamp_(self.lower, self.upper).to(self.dtype)

    def dequantize(self, weights: Tensor) -> Tensor:
        """What integers stand for, in float64."""
        return weights.double().mul_(self.scale.to(weights.device))


def grid_of(values: Tensor, *, bits: int, headroom: int) -> Grid:
    """A symmetric grid with one scale that holds ``values`` and leaves ``headroom`` bits above the largest.

    A tensor of zeros tells nothing; it gets a grid for values up to one.
    """
    largest = float(values.detach().abs().max()) if values.numel() else 0.0
    if not math.isfinite(largest):
        raise InputError(
            "Weights that are not finite have no grid.", expected="finite weights", got="NaN or infinity among them"
        )
    upper = 2 ** (bits - 1) - 1
    scale = (largest or 1.0) * 2.0**headroom / upper
    return Grid(torch.tensor(scale, dtype=torch.float64), -upper, upper)


def round_shift(value: Tensor, shift: Tensor | int) -> Tensor:
    """``value / 2**shift`` to the nearest integer, halves up: an addition and an arithmetic shift."""
    places = torch.as_tensor(shift, dtype=value.dtype, device=value.device)
    half = torch.bitwise_left_shift(torch.ones_like(places), places) >> 1
    return (value + half).bitwise_right_shift_(places)


def eps_steps(eps: float, grid: Grid, *, least: int) -> Tensor:
    """``eps`` in steps of the grid, at least ``least``, at most 65,536: int32, one per scale.

    Raises:
        InputError: it is wider than the grid.
    """
    steps = (eps / grid.scale).round().clamp_min(least)
    if bool((steps > grid.upper - grid.lower).any()):
        raise InputError(
            "eps is wider than the weights' grid.",
            expected=f"less than {(grid.upper - grid.lower) * float(grid.scale.min()):.3g}",
            got=eps,
            remedy="take an eps of a few hundredths of the largest weight",
        )
    return steps.clamp_max(MOST_EPS).to(torch.int32)


def quantize_direction(direction: Tensor, *, z_shift: int, largest: int) -> Tensor:
    """Float elements to int8 with scale ``2**-z_shift``, saturated."""
    return (direction * float(2**z_shift)).round_().clamp_(-largest, largest).to(torch.int8)


def displacement(z: Tensor, eps: Tensor, *, sign: int, z_shift: int) -> Tensor:
    """``(sign * eps * z) >> z_shift``, rounded: by how much a probe moves weights that do not saturate.

    Since ``w * 2**z_shift`` leaves nothing to round, ``(w * 2**z_shift + sign * eps * z) >> z_shift`` is ``w`` plus
    this, whatever ``w`` is: a probe can be taken back.

    Args:
        z: int8, as :func:`quantize_direction` gives.
        eps: int32, as :func:`eps_steps` gives.
        sign: +1 or -1.
        z_shift: scale of ``z``.

    Returns:
        int32, below 2**23.
    """
    steps = z.to(torch.int32).mul_(eps.to(z.device) * sign)
    if z_shift:
        steps.add_(2 ** (z_shift - 1)).bitwise_right_shift_(z_shift)
    return steps


def integer_coefficients(coefficients: list[float]) -> tuple[list[int], float]:
    """Coefficients of the probes as integers and the value of one: -1, 0, +1 for signs, else 8 bits."""
    largest = max((abs(value) for value in coefficients), default=0.0)
    if largest == 0:
        return [0] * len(coefficients), 1.0
    if all(abs(value) in (0.0, largest) for value in coefficients):
        return [round(value / largest) for value in coefficients], largest
    return [round(value / largest * _COEFFICIENT) for value in coefficients], largest / _COEFFICIENT


def multiplier(step: Tensor) -> tuple[Tensor, Tensor]:
    """Real factors as ``M / 2**k``, ``M`` of 15 bits, ``0 <= k <= 46``: both int64, in the shape of ``step``.

    Raises:
        InputError: a factor is beyond every grid.
    """
    if not bool((step <= MOST_WEIGHT).all()):
        raise InputError(
            "The learning rate moves integer weights by more than their whole grid.",
            expected=f"at most {MOST_WEIGHT} steps of the grid per unit of the gradient",
            got=f"{float(step.max()):.3g} steps",
            remedy="lower lr; a start is 1e-3 to 3e-2 times the largest weight",
        )
    exponent = torch.floor(torch.log2(step.clamp_min(torch.finfo(torch.float64).tiny)))
    shift = (MULTIPLIER_BITS - 1 - exponent).clamp(0, MOST_SHIFT)
    factor = torch.round(step * torch.exp2(shift))
    return factor.to(torch.int64), shift.to(torch.int64)


def noise(shape: torch.Size, *, seed: int, step: int, index: int) -> Tensor:
    """Uniform integers of 46 bits for stochastic rounding, a function of seed, step and index alone: int64."""
    stream = np.random.Philox(key=key(seed, step, _ROUNDING_STREAM, index))
    words = np.asarray(stream.random_raw(math.prod(shape)), dtype=np.uint64) >> np.uint64(64 - MOST_SHIFT)
    drawn: Tensor = torch.from_numpy(words.astype(np.int64))
    return drawn.view(shape)


def update_steps(
    gradient: Tensor,
    factor: Tensor,
    shift: Tensor,
    *,
    rounding: str,
    random: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bits: int = 8,
) -> tuple[Tensor, Tensor | None]:
    """``gradient * factor / 2**shift`` in whole steps of the grid.

    Args:
        gradient: int32 sums of integer coefficients times ``z``.
        factor: as :func:`multiplier` gives.
        shift: as :func:`multiplier` gives.
        rounding: "nearest", "floor", "stochastic" or "error_feedback".
        random: for "stochastic", as :func:`noise` gives.
        residual: for "error_feedback", what earlier roundings cut off, in units of ``2**-residual_bits`` steps.
        residual_bits: see above.

    Returns:
        Steps to subtract from the weights, int64, and the new residual (None without error feedback), which lies in
        ``[-2**(residual_bits - 1), 2**(residual_bits - 1))``.
    """
    product = gradient.to(torch.int64).mul_(factor)
    if rounding == "nearest":
        return round_shift(product, shift), None
    if rounding == "floor":
        return product >> shift, None
    if rounding == "stochastic":
        if random is None:
            raise ValueError("stochastic rounding needs random integers")
        mask = (torch.ones_like(shift) << shift) - 1
        return (product + (random & mask)) >> shift, None
    if residual is None:
        raise ValueError("error feedback needs a residual")
    right, left = (shift - residual_bits).clamp_min(0), (residual_bits - shift).clamp_min(0)
    total = round_shift(product, right).bitwise_left_shift_(left).add_(residual)
    steps = round_shift(total, residual_bits)
    return steps, total.sub_(steps << residual_bits).to(residual.dtype)


def residual_dtype(bits: int) -> torch.dtype:
    """The narrowest dtype for a residual of ``bits`` fraction bits."""
    return torch.int8 if bits <= 8 else torch.int16


def apply_steps(weights: Tensor, steps: Tensor, grid: Grid) -> Tensor:
    """``sat(w - steps)`` in the dtype of ``weights``."""
    return weights.to(torch.int64).sub_(steps).clamp_(grid.lower, grid.upper).to(weights.dtype)
