"""The standing cross-check of an energy counter against integrated power."""

from __future__ import annotations

from collections import deque

SPAN_S = 10.0  # shorter spans say more about timing than about the counter
RATIOS = (0.7, 1.4)  # counters and gauges of sound boards agree better than that
_MARK_S = 1.0
_LEAST_J = 1.0


class CrossCheck:
    """Compares two cumulative energies over the last 10 s or a little more.

    Attributes:
        ratio: counter over integrated power; None until both cover 10 s.
    """

    def __init__(self) -> None:
        self.ratio: float | None = None
        self._marks: deque[tuple[float, float, float]] = deque()

    @property
    def sound(self) -> bool:
        """Whether the two agree, or cannot be compared yet."""
        return self.ratio is None or RATIOS[0] <= self.ratio <= RATIOS[1]

    def add(self, time_s: float, counter_j: float, power_j: float) -> None:
        """Take both cumulative energies at ``time_s``."""
        marks = self._marks
        if marks and time_s - marks[-1][0] < _MARK_S:
            return
        marks.append((time_s, counter_j, power_j))
        while len(marks) > 1 and time_s - marks[1][0] >= SPAN_S:
            marks.popleft()
        then_s, then_counter_j, then_power_j = marks[0]
        if time_s - then_s >= SPAN_S:
            by_counter, by_power = counter_j - then_counter_j, power_j - then_power_j
            if by_power >= _LEAST_J:
                self.ratio = by_counter / by_power

    def restart(self) -> None:
        """Begin a new span: one of the two was interrupted. The last ratio stays until there is a new one."""
        self._marks.clear()
