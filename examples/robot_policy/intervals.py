"""95 % intervals: of a success rate, of the difference of two policies on the same environment seeds, of trainings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student

Z95 = 1.959963984540054


def wilson(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval for a success rate.

    Raises:
        ValueError: where there are no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"expected 0 <= successes <= trials and trials > 0, got {successes} of {trials}")
    rate = successes / trials
    centre = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_difference(
    ours: Sequence[bool], reference: Sequence[bool], z: float = Z95
) -> tuple[float, tuple[float, float]]:
    """Difference of two success rates over the same seeds, with Newcombe's score interval for paired proportions.

    It is method 10 of R. G. Newcombe, "Improved confidence intervals for the difference between binomial proportions
    based on paired data", Statistics in Medicine 17 (1998), 2635-2650: it holds at rates near 1, where the usual normal
    interval has no width.

    Args:
        ours: outcome on each seed.
        reference: outcome on each seed, in the same order.
        z: normal quantile.

    Returns:
        The rate of ``ours`` less that of ``reference``, and the interval.

    Raises:
        ValueError: where the two are empty or of different lengths.
    """
    n = len(ours)
    if n == 0 or n != len(reference):
        raise ValueError(f"expected two outcomes for each seed, got {n} and {len(reference)}")
    both = sum(o and r for o, r in zip(ours, reference, strict=True))
    only_ours, only_reference = sum(ours) - both, sum(reference) - both
    neither = n - both - only_ours - only_reference
    p_ours, p_reference = sum(ours) / n, sum(reference) / n
    difference = p_ours - p_reference

    margins = (both + only_ours) * (only_reference + neither) * (both + only_reference) * (only_ours + neither)
    correlation = 0.0
    if margins > 0:
        determinant = float(both * neither - only_ours * only_reference)
        if determinant > 0:
            determinant = max(determinant - n / 2, 0.0)  # the paper's continuity correction
        correlation = determinant / math.sqrt(margins)

    low_ours, high_ours = wilson(sum(ours), n, z)
    low_reference, high_reference = wilson(sum(reference), n, z)

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * correlation * a * b + b * b, 0.0))

    low = difference - reach(p_ours - low_ours, high_reference - p_reference)
    high = difference + reach(high_ours - p_ours, p_reference - low_reference)
    return difference, (low, high)


def over_trainings(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Mean of one figure per training, with Student's interval: it holds what one training differs from the next.

    Args:
        values: one figure of each training, such as the difference of two policies of the same training seed.

    Raises:
        ValueError: where there are fewer than two.
    """
    if len(values) < 2:
        raise ValueError(f"expected two or more trainings, got {len(values)}")
    mean = statistics.fmean(values)
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, (mean - half, mean + half)
