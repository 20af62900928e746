"""When a sensor refreshes: the moments at which its value changed, known better than the polls that saw the change."""

from __future__ import annotations

from collections import deque

_HISTORY = 256  # updates over which the period is measured
_MIN_UPDATES = 6  # updates before a period is believed
_SURE = 8  # changes that a new measurement of a period takes
_FADE = 0.995
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
        predicted = middle + steps * period
        miss = max(low - high_s, low_s - high, 0.0)
        # an irregular update shows as a miss; what was missed by is remembered for some hundred updates
        self._jitter_s = min(max(_FADE * self._jitter_s, miss), 0.5 * period)
        low, high = max(low, low_s), min(high, high_s)
        if low > high:  # the nearest end of the bracket
            low = high = high_s if predicted > high_s else low_s
        least = slack + self._jitter_s
        middle = 0.5 * (low + high)
        self._low, self._high = max(min(low, middle - least), low_s), min(max(high, middle + least), high_s)

    def _period_error(self) -> float:
        if len(self._history) < 2:
            return 0.0
        (first, _, half_first), (last, _, half_last) = self._history[0], self._history[-1]
        return (half_first + half_last) / max(1, last - first) + 1e-6

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
        """The period in seconds; None where equal readings or changes were never seen."""
        if self._stale > 0 and (self._stale >= 32 or len(self._pairs) < 128):
            self._stale = 0
            # polls that have become too slow to tell updates do not unmake what faster ones have told
            self._period_s = self._measure() or self._period_s
        return self._period_s

    def _measure(self) -> float | None:
        longest = max((gap for gap, changed in self._pairs if not changed), default=0.0)
        if longest <= 0.0:
            return None
        usable = [(gap, changed) for gap, changed in self._pairs if gap <= longest]
        changes = sum(1 for _, changed in usable if changed)
        if changes < (2 if self._period_s is None else _SURE):
            return None
        return max(longest, sum(gap for gap, _ in usable) / changes)


class GaugePeriod:
    """Update period of a gauge, whose equal readings may mean that it was not updated or that the load is constant.

    Two changes lie at least one period apart, so that the shortest span between changes bounds the period. It is
    believed to be the period where the readings around it were close enough to have seen a shorter one.

    Attributes:
        period_s: the period where it is known; None otherwise.
        bound_s: no period is longer; None before two changes were seen.
    """

    _BELIEVED_S = (
        0.15  # longer ones are believed of noisy readings only: a slow load changes as rarely as a slow sensor
    )
    _LIVELY = 0.7  # share of new values among changes from which on readings count as noisy

    def __init__(self) -> None:
        self.period_s: float | None = None
        self.bound_s: float | None = None
        self._gaps: deque[tuple[float, float]] = deque(maxlen=128)  # least and most time between two changes
        self._last: tuple[float, float] | None = None
        self._values: deque[float] = deque(maxlen=16)
        self._lively = 0.0

    def change(self, low_s: float, high_s: float, value: float) -> None:
        """The reading changed to ``value`` after ``low_s`` and not after ``high_s``."""
        self._lively += (float(value not in self._values) - self._lively) / 16.0
        self._values.append(value)
        if self._last is not None:
            self._gaps.append((low_s - self._last[1], high_s - self._last[0]))
            self._measure()
        self._last = (low_s, high_s)

    def _measure(self) -> None:
        most = min(longest for _, longest in self._gaps)
        self.bound_s = most if self.bound_s is None else min(self.bound_s, most)
        sharp = [(low, high) for low, high in self._gaps if high - low <= 0.6 * high and high < 1.5 * most]
        if len(sharp) < 3:
            return
        guess = sum(0.5 * (low + high) for low, high in sharp) / len(sharp)
        if self.bound_s < 0.9 * guess:
            return
        if guess <= self._BELIEVED_S or self._lively >= self._LIVELY or self._on_grid(guess):
            self.period_s = guess

    def _on_grid(self, period_s: float) -> bool:
        """Whether all spans are multiples of a period, and not all the same: loads are not like that."""
        fine = [0.5 * (low + high) for low, high in self._gaps if high - low <= 0.3 * period_s]
        multiples = [round(gap / period_s) for gap in fine]
        fits = sum(1 for gap, n in zip(fine, multiples, strict=True) if abs(gap - n * period_s) < 0.1 * period_s)
        return len(fine) >= 8 and fits >= 0.95 * len(fine) and sum(1 for n in multiples if n > 1) >= 0.2 * len(fine)
