"""How far a window's energy may be off: what readings so far say about what happened between them.

A window's ``resolution_j`` is ``WIDTH * sqrt(V)``, where V is the variance in J^2 of its error, summed over its parts:

* **Between power readings** (no counter, or a counter that only adds up its own power readings): a sensor with period
  u shows one moment of each u. Let D1 and D2 be the mean squares of the difference between readings one and two periods
  apart, over the last readings. A load that changes more slowly than u has D2 = 2 D1, one that changes faster has
  D2 = D1; hence a slow part L = D2 - D1 and a fast part N = D1 - D2 / 2, neither below 0. A step at an unknown place
  in a period costs L u^2 / 12, an unseen mean N u^2: V = sum over periods of u^2 (L / 12 + N).
* **Edges between counter updates**: linear interpolation at the fraction x of an update's interval, with a step of
  mean square D1 (of the interval's mean powers) at an unknown place: V = D1 u^2 x^2 (1 - x)^2 / 3 per edge.
* **The moment of an update**, known to +-h: V = (P h)^2 / 3.
* **Edges on a counter too fast to interpolate**, taken as they are: the counter is behind by an age uniform in 0..u, so
  an edge is off by P u / 2 on average, with the variance P^2 u^2 / 12; averages of the two edges partly cancel.
"""

from __future__ import annotations

import math

WIDTH = 2.7  # standard deviations that hold 99 % and a little more
HIDDEN = 0.5  # power may swing unseen between two updates by this share of itself
PART_TIME = 0.1  # slopes that differ from the power readings by less than this share of their changes are those
_MEMORY = 1.0 / 24.0  # weight of the newest reading in the running mean squares


class Variogram:
    """Running mean squares of differences, one and two readings apart, of evenly spaced readings in watts."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._before: float | None = None
        self._d1 = 0.0
        self._d2 = 0.0
        self._seen = 0

    def add(self, power_w: float) -> None:
        """Take the next reading."""
        if self._last is not None:
            self._seen += 1
            weight = max(_MEMORY, 1.0 / self._seen)
            d1 = (power_w - self._last) ** 2
            # until there is a second difference the load counts as slow
            d2 = (power_w - self._before) ** 2 if self._before is not None else 2.0 * d1
            self._d1 += weight * (d1 - self._d1)
            self._d2 += weight * (d2 - self._d2)
        self._before, self._last = self._last, power_w

    def restart(self) -> None:
        """Forget the last readings, after a gap; the mean squares stay."""
        self._last = self._before = None

    @property
    def step_w2(self) -> float:
        """Mean square of the change from one reading to the next, in W^2."""
        return self._d1

    @property
    def unseen_w2(self) -> float:
        """Variance of a period's true mean about the trapezoid between its readings, in W^2: L / 12 + N."""
        slow = min(max(self._d2 - self._d1, 0.0), self._d1)
        fast = max(self._d1 - slow, 0.0) / 2.0
        return slow / 12.0 + fast


def half_width(variance_j2: float) -> float:
    """Half-width in joules that holds 99 % of errors with this variance."""
    return WIDTH * math.sqrt(max(variance_j2, 0.0))


class CounterError:
    """What the knots of a counter may be off, from its slopes and the power readings beside it.

    Args:
        averaging_s: averaging time of the power readings; 0: instantaneous or unknown.
    """

    def __init__(self, averaging_s: float) -> None:
        self._averaging_s = averaging_s
        self._slopes = Variogram()
        self._difference_w = 0.0
        self._change_w = 0.0
        self._slope: float | None = None

    def step(self, slope_w: float, power_w: float | None) -> None:
        """Take the mean power between two updates, and the power reading that came with the later one."""
        self._slopes.add(slope_w)
        if self._slope is not None and power_w is not None:
            self._difference_w += _MEMORY * (abs(slope_w - power_w) - self._difference_w)
            self._change_w += _MEMORY * (abs(slope_w - self._slope) - self._change_w)
        self._slope = slope_w

    @property
    def part_time(self) -> bool:
        """Whether the counter adds up its power readings, which may see a part of the time only."""
        return self._change_w > 0 and self._difference_w < PART_TIME * self._change_w

    def own_j2(self, seconds: float) -> float:
        """Variance of the energy between two updates."""
        return self._slopes.unseen_w2 * seconds**2 if self.part_time else 0.0

    def step_w2(self, slope_w: float, readings_w2: float) -> float:
        """Mean square of the steps of power to expect between two updates."""
        return max(self._slopes.step_w2, readings_w2, (HIDDEN * slope_w) ** 2)
