"""The highest power readings over time."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

_MOST = 1 << 17  # readings kept; beyond that the older half is thinned
_PAST = 2048  # readings kept of what lies before the moment that is forgotten


class Peaks:
    """Power readings, of which the past keeps the highest of each stretch only."""

    def __init__(self) -> None:
        self._time = array("d")
        self._power = array("d")

    def __len__(self) -> int:
        return len(self._time)

    def add(self, time_s: float, power_w: float) -> None:
        """Take a reading."""
        self._time.append(time_s)
        self._power.append(power_w)
        if len(self._time) > _MOST:
            self.thin(self._time[_MOST // 2])

    def within(self, t0_s: float, t1_s: float) -> float | None:
        """The highest reading in a span, ends included; None: there is none."""
        first, end = bisect_left(self._time, t0_s), bisect_right(self._time, t1_s)
        return max(self._power[first:end]) if end > first else None

    def thin(self, before_s: float) -> None:
        """Keep a bounded number of the readings before ``before_s``: the highest of each stretch."""
        end = bisect_left(self._time, before_s)
        if end <= _PAST:
            return
        stride = -(-2 * end // _PAST)
        kept = [max(range(a, min(a + stride, end)), key=self._power.__getitem__) for a in range(0, end, stride)]
        self._time = array("d", [self._time[index] for index in kept]) + self._time[end:]
        self._power = array("d", [self._power[index] for index in kept]) + self._power[end:]
