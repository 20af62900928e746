"""From the losses of probes to the coefficient of each direction."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_npu.errors import InputError

ESTIMATORS = ("sign", "projected", "normalized")


def check_estimator(estimator: object) -> None:
    """Refuse what is not an estimator.

    Raises:
        InputError: it is not one of :data:`ESTIMATORS`.
    """
    if estimator not in ESTIMATORS:
        raise InputError("The estimator is wrong.", expected=f"one of {ESTIMATORS}", got=repr(estimator))


def coefficients(differences: Sequence[float], *, estimator: str, eps: float) -> list[float]:
    """One coefficient per probe; the gradient's estimate is the sum of coefficients times directions.

    Args:
        differences: per probe, ``loss(w + eps z) - loss(w - eps z)``.
        estimator: "sign" (Feng et al., 2024): the sign of the difference; "projected" (MeZO): the slope along the
            direction; "normalized" (after FZOO): the difference over the root mean square of this step's differences.
            All are divided by the number of probes.
        eps: how far probes are from the weights; used by "projected" only.
    """
    count = len(differences)
    if estimator == "sign":
        return [float((value > 0) - (value < 0)) / count for value in differences]
    if estimator == "projected":
        return [value / (2 * eps * count) for value in differences]
    size = math.sqrt(sum(value * value for value in differences) / count)
    return [value / (size * count) if size > 0 else 0.0 for value in differences]
