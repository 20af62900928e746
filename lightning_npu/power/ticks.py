"""When a sensor refreshes: the moments at which its value changed, known better than the polls that saw the change."""

from __future__ import annotations

from collections import deque

_HISTORY = 64  # updates over which the period is measured
_MIN_UPDATES = 6  # updates before a period is believed
_PAIRS = 512  # pairs of readings that say how fast a counter moves


class TickClock:
    """Estimates the moments of a sensor's updates, which come at a nearly regular period.

    Each change of value happened in a bracket: after the last reading of the old value, not after the first reading of
    the new one. The clock carries the interval that holds the last update one period on, widens it by what it knows of
    the period's error and of the irregularity seen, and intersects it with the new bracket. The estimate is the middle
    of what is left: always inside the bracket, so that irregular updates cost precision and never correctness.

    Attributes:
        period_s: the period in seconds; None until enough updates were seen.
    """

    def __init__(self) -> None:
        self.period_s: float | None = None
        self._low = self._high = 0.0
        self._count = 0
        self._jitter_s = 0.0
        self._history: deque[tuple[int, float, float]] = deque(maxlen=_HISTORY)

    def add(self, low_s: float, high_s: float) -> tuple[float, float]:
        """Take a bracket in which the value changed, once or more; return the last update's time and its half-width.

        Args:
            low_s: time of the last reading of the old value.
            high_s: time of the first reading of the new value.
        """
        period = self.period_s
        if period is None or not self._history:
            self._low, self._high = low_s, high_s
            self._count += 1
        else:
            self._advance(low_s, high_s, period)
        middle, half = 0.5 * (self._low + self._high), 0.5 * (self._high - self._low)
        self._history.append((self._count, middle, half))
        self._measure_period()
        return middle, half

    def restart(self) -> None:
        """Forget the phase, after a gap or a reset; the period stays."""
        self._history.clear()

    def _advance(self, low_s: float, high_s: float, period: float) -> None:
        middle = 0.5 * (self._low + self._high)
        # several updates may hide in a wide bracket: the value read is that of the last one
        target = 0.5 * (low_s + high_s) if high_s - low_s < period else high_s - 0.5 * period
        steps = max(1, round((target - middle) / period))
        self._count += steps
        slack = steps * self._period_error() + self._jitter_s
        low, high = self._low + steps * period - slack, self._high + steps * period + slack
        if low <= high_s and high >= low_s:
            self._low, self._high = max(low, low_s), min(high, high_s)
            self._jitter_s *= 0.99
            return
        miss = low - high_s if low > high_s else low_s - high
        self._jitter_s = min(max(self._jitter_s, 0.5 * miss) + 0.25 * miss, 0.5 * period)
        reach = 2.0 * (miss + slack)
        if miss > 0.25 * period:
            self._low, self._high = low_s, high_s
        elif low > high_s:
            self._low, self._high = max(low_s, high_s - reach), high_s
        else:
            self._low, self._high = low_s, min(high_s, low_s + reach)

    def _period_error(self) -> float:
        if len(self._history) < 2:
            return 0.0
        (first, _, half_first), (last, _, half_last) = self._history[0], self._history[-1]
        return 0.5 * (half_first + half_last) / max(1, last - first) + 1e-6

    def _measure_period(self) -> None:
        if len(self._history) < _MIN_UPDATES:
            return
        (first, start, _), (last, end, _) = self._history[0], self._history[-1]
        if last > first:
            self.period_s = (end - start) / (last - first)


class ChangeRate:
    """Update period of a value from pairs of consecutive readings, whatever their spacing.

    No period is shorter than the longest pair of equal readings. Pairs no longer than that hold one update at most, so
    that their time over their changes is an unbiased estimate of the period, also where most readings are too far
    apart to tell single updates.
    """

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, bool]] = deque(maxlen=_PAIRS)
        self._period_s: float | None = None
        self._stale = 0

    def add(self, gap_s: float, changed: bool) -> None:
        """Take two consecutive readings ``gap_s`` apart."""
        self._pairs.append((gap_s, changed))
        self._stale += 1

    @property
    def period_s(self) -> float | None:
        """The period in seconds; None where no two equal readings, or no change at all, was seen."""
        if self._stale > 0 and (self._stale >= 32 or len(self._pairs) < 128):
            self._stale = 0
            self._period_s = self._measure()
        return self._period_s

    def _measure(self) -> float | None:
        longest = max((gap for gap, changed in self._pairs if not changed), default=0.0)
        usable = [(gap, changed) for gap, changed in self._pairs if gap <= longest]
        changes = sum(1 for _, changed in usable if changed)
        if changes < 2:
            return None
        return max(longest, sum(gap for gap, _ in usable) / changes)
