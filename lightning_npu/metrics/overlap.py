"""How near a training step comes to the slower of the two devices that share it."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_npu.errors import InputError
from lightning_npu.metrics.base import LedgerMetric


def overlap_efficiency(step_s: float, train_s: float, npu_s: float) -> float:
    """``max(train_s, npu_s) / step_s``: 1.0 is the physical limit of a pipeline of two devices.

    >>> overlap_efficiency(step_s=0.060, train_s=0.040, npu_s=0.020)  # one after the other
    0.6666666666666667
    >>> overlap_efficiency(step_s=0.040, train_s=0.040, npu_s=0.020)  # all of the NPU's time is hidden
    1.0

    Args:
        step_s: seconds of a step with both devices at work.
        train_s: seconds of a step while the NPU answers at once; never ``step_s`` less what was waited.
        npu_s: seconds of a step's work on the NPU while the training takes no time.

    Returns:
        the share; NaN where a time is NaN or the step took none. Above 1.0 the times are of different conditions.

    Raises:
        InputError: a time is negative.
    """
    for name, value in (("step_s", step_s), ("train_s", train_s), ("npu_s", npu_s)):
        _check(name, value)
    if math.isnan(step_s + train_s + npu_s) or step_s == 0:
        return math.nan
    return max(train_s, npu_s) / step_s


class OverlapEfficiency(LedgerMetric):
    """Overlap efficiency of the mean step; higher is better, 1.0 is the limit.

    The three times come from different moments (two calibrations and the run), so each is averaged by itself.

    >>> metric = OverlapEfficiency()
    >>> metric.update(train_s=0.040, npu_s=0.020)
    >>> for step_s in (0.041, 0.043):
    ...     metric.update(step_s)
    >>> metric.compute()
    tensor(0.9524, dtype=torch.float64)

    Ranks step together, so their limit is that of the slowest device of any rank, over the mean step of all.

    Args:
        kwargs: see ``torchmetrics.Metric``.
    """

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(columns=6, **kwargs)  # seconds and steps of step, train and npu

    def update(
        self, step_s: float | None = None, *, train_s: float | None = None, npu_s: float | None = None, steps: int = 1
    ) -> None:
        """Add what was measured; None for what was not.

        Args:
            step_s: as for :func:`overlap_efficiency`, like the others.
            train_s: seconds.
            npu_s: seconds.
            steps: over how many steps each time is a mean.

        Raises:
            InputError: a time is negative or not finite, or ``steps`` is not positive.
        """
        if steps < 1:
            raise InputError(
                "A time cannot be a mean over no step.",
                expected="steps of 1 or more",
                got=repr(steps),
                remedy="leave the update out where nothing was measured",
            )
        row: list[float] = []
        for name, value in (("step_s", step_s), ("train_s", train_s), ("npu_s", npu_s)):
            if value is not None:
                _check(name, value, finite=True)
            row += (0.0, 0.0) if value is None else (float(value) * steps, float(steps))
        self._write({0: tuple(row)})

    def compute(self) -> Tensor:
        """The share; float64, NaN until all three times were measured."""
        rows = list(self._rows().values())
        steps = math.fsum(row[2] for row in rows)
        limits = [(row[3] / row[4], row[5] / row[6]) for row in rows if row[4] and row[6]]
        if not steps or not limits:
            return self._result(math.nan)
        train_s, npu_s = max(limits, key=max)
        return self._result(overlap_efficiency(math.fsum(row[1] for row in rows) / steps, train_s, npu_s))


def _check(name: str, value: float, *, finite: bool = False) -> None:
    if value < 0 or math.isinf(value) or (finite and math.isnan(value)):
        raise InputError(
            f"'{name}' is no duration.",
            expected="seconds, 0 or more",
            got=repr(value),
            remedy="measure with a monotonic clock, and pass None for what was not measured",
        )
