"""Which options of ``ForwardGradient`` are right, and which go together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from lightning_npu.errors import InputError
from lightning_npu.forward_gradient.fixed_point import FixedPoint

DDP_MODES = ("average", "directions")

_RANGES = {
    "lr": (0.0, math.inf, False, "0 or more"),
    "eps": (0.0, math.inf, True, "more than 0"),
    "momentum": (0.0, 0.9999, False, "from 0 to below 1"),
    "sam_rho": (0.0, math.inf, False, "0 or more"),
    "density": (0.0, 1.0, True, "above 0, at most 1"),
}
_OF_GROUPS = ("lr", "eps")
_OF_ALL = frozenset(
    {
        "m",
        "estimator",
        "distribution",
        "momentum",
        "guide",
        "kernel_norm",
        "sam_rho",
        "density",
        "fixed_point",
        "first_order",
        "ddp",
        "seed",
    }
)
_OF_THE_GRID = ("weight_bits", "headroom", "residual_bits")


def check_numbers(*, lr: Any, eps: Any, m: Any, momentum: Any, sam_rho: Any, density: Any, seed: Any, ddp: Any) -> None:
    """Refuse numbers that are none or out of range.

    Raises:
        InputError: naming the option.
    """
    for name, number in (("lr", lr), ("eps", eps), ("momentum", momentum), ("sam_rho", sam_rho), ("density", density)):
        _check_real(name, number)
    for name, value, fewest, limit in (("m", m, 1, 1024), ("seed", seed, -(2**62), 2**62)):
        if not isinstance(value, Integral) or isinstance(value, bool) or not fewest <= int(value) <= limit:
            raise InputError(f"{name} is wrong.", expected=f"an integer from {fewest} to {limit}", got=repr(value))
    if ddp not in DDP_MODES:
        raise InputError("ddp is wrong.", expected=f"one of {DDP_MODES}", got=repr(ddp))


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse a parameter group's options that are wrong, or would have no effect; others' keys are left alone.

    Raises:
        InputError: naming the option.
    """
    without = sorted(_OF_ALL & set(group))
    if without:
        raise InputError(
            "These are options of the whole optimizer; in a parameter group they would have no effect.",
            expected=f"options {_OF_GROUPS} in groups",
            got=without,
            remedy="pass them to ForwardGradient(...), or make one ForwardGradient for each group",
        )
    for name in _OF_GROUPS:
        if name in group:
            _check_real(name, group[name])


def require_same_grid(saved: Mapping[str, Any] | None, own: FixedPoint | None) -> None:
    """Refuse an optimizer's state whose scales and remainders are of another integer grid.

    Args:
        saved: options of the saved optimizer's ``fixed_point``; None for none.
        own: of the one that loads it.

    Raises:
        InputError: with what differs.
    """
    there = None if saved is None else {name: saved[name] for name in _OF_THE_GRID}
    here = None if own is None else {name: getattr(own, name) for name in _OF_THE_GRID}
    if there != here:
        raise InputError(
            "The state was saved with other integers than this optimizer's.",
            expected=f"fixed_point with {here}" if here else "fixed_point=None",
            got=f"fixed_point with {there}" if there else "fixed_point=None",
            remedy="build the optimizer with the options that it was saved with, or load the weights alone",
        )


def guide_options(guide: Mapping[str, float] | None, distribution: str) -> tuple[float, float] | None:
    """``(beta, alpha)`` of momentum-guided sampling.

    Raises:
        InputError: other keys, numbers out of 0..1, or directions that are not Gaussian.
    """
    if guide is None:
        return None
    right = isinstance(guide, Mapping) and set(guide) == {"beta", "alpha"}
    if not right or not all(isinstance(v, Real) and 0 <= float(v) <= 1 for v in guide.values()):
        raise InputError("guide is wrong.", expected="{'beta': 0..1, 'alpha': 0..1}", got=repr(guide))
    if distribution != "gaussian":
        raise InputError(
            "Guided directions are not of two values.",
            expected="distribution='gaussian' with guide",
            got=f"distribution={distribution!r}",
            remedy="leave guide out, or take Gaussian directions",
        )
    return float(guide["beta"]), float(guide["alpha"])


def require_integer_options(
    fixed_point: object, *, estimator: str, momentum: float, guide: tuple[float, float] | None
) -> None:
    """Refuse what cannot be done in integers.

    Raises:
        InputError: naming the option and what to take instead.
    """
    if not isinstance(fixed_point, FixedPoint):
        raise InputError("fixed_point is wrong.", expected="None or a FixedPoint", got=repr(fixed_point))
    if estimator == "projected":
        raise InputError(
            "Slopes along directions have no static range, which an integer gradient needs.",
            expected="estimator='sign' or 'normalized' with fixed_point",
            got="estimator='projected'",
            remedy="take 'normalized'",
        )
    if momentum or guide is not None:
        raise InputError(
            "momentum and guide keep a float buffer per weight; fixed_point keeps weights in integers only.",
            expected="neither of them with fixed_point",
            got=f"momentum={momentum}, guide={guide}",
            remedy="leave them out; to average over more directions, raise m",
        )


def _check_real(name: str, value: Any) -> None:
    least, most, above, expected = _RANGES[name]
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not least <= float(value) <= most or (above and float(value) == least):
        raise InputError(f"{name} is wrong.", expected=f"a number, {expected}", got=repr(value))
