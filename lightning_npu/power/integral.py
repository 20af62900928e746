"""Energy from power readings: the trapezoid on the times to which the readings belong.

Where polls are fast enough to tell a gauge's updates, each update counts once, at its own moment: readings of a value
that is held would weigh it by how many polls happened to see it. Between two updates, the first value holds for a
quarter of the time, the last for another, and their mean between: a step at an unknown place is in the mean a ramp, and
this follows one in steps, while a window within a plateau still sees the plateau.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from lightning_npu.power.series import Span
from lightning_npu.power.ticks import GaugePeriod
from lightning_npu.power.uncertainty import Variogram

_HISTORY = 512  # readings from which the spread of the power is known
_MIN_SPREAD = 0.05  # share of the power that an unseen change may have, where none was seen
_TOLD = 0.75  # polls no further apart than this share of a period tell every update
_HELD = 1.5  # so many periods without a change hold an update that changed nothing
_RAMP = 0.5  # share of the time between two updates that has the mean of both
_SLOW_S = 0.5  # gauges slower than that see loads that are faster: the mean has all of it


class PowerIntegral:
    """Turns power readings into spans of energy.

    Args:
        averaging_s: a reading is the mean over this many past seconds; it belongs to the middle of them.
        longest_gap_s: readings further apart than that leave a gap, bridged linearly.
        usual_s: update period to assume where none can be seen; 0: none.
        age: mean age of a reading of unknown averaging time, in update periods.
    """

    def __init__(self, averaging_s: float, longest_gap_s: float, *, usual_s: float = 0.0, age: float = 0.5) -> None:
        self.updates = GaugePeriod()
        self.time_s: float | None = None  # the moment to which the last reading belongs
        self.power_w = 0.0
        self._averaging_s, self._longest_gap_s = averaging_s, longest_gap_s
        self._usual_s, self._age = usual_s, age
        self._read_s = self._update_s = 0.0
        self._again_s = -math.inf  # when a reading last said nothing new
        self._recent: deque[float] = deque(maxlen=_HISTORY)
        self._mean_w = self._variance_w2 = 0.0  # of about as many readings
        self._variogram = Variogram()
        self._spaced_s = 0.0  # when the variogram last took a reading

    @property
    def lag_s(self) -> float:
        """How long before it is read a value was true, on average."""
        if self.updates.period_s is None:
            # nothing tells a slow gauge from a slow load; a prior is used unless updates came closer than that
            held = 0.5 * self._usual_s if (self.updates.bound_s or 0.0) >= self._usual_s else 0.0
        else:
            held = (0.5 if self._averaging_s > 0 else self._age) * self.updates.period_s
        return 0.5 * self._averaging_s + held

    @property
    def period_s(self) -> float:
        """Update period as known, else the longest that it may be; 0 before any was seen."""
        return self.updates.period_s or self.updates.bound_s or 0.0

    @property
    def step_w2(self) -> float:
        """Mean square of the change from one update to the next."""
        return self._variogram.step_w2

    @property
    def spread_w(self) -> float:
        """How far the power may be from what it was, by what was seen lately."""
        if not self._recent:
            return 0.0
        return max(max(self._recent) - min(self._recent), _MIN_SPREAD * max(self._recent))

    def add(self, time_s: float, power_w: float) -> list[Span]:
        """Take a reading; return the spans that it adds: none for one that only says again what an update has said."""
        before_s, self._read_s = self._read_s, time_s
        changed = power_w != self.power_w
        if self.time_s is not None and changed:
            self.updates.change(before_s, time_s, power_w)
        self._take(power_w)
        if self.time_s is None:
            self.time_s, self.power_w, self._update_s = time_s - self.lag_s, power_w, time_s
            self._spaced_s = self.time_s
            self._variogram.add(power_w)
            return []
        period = self.updates.period_s or 0.0
        told = time_s - before_s <= _TOLD * period
        if told and not changed:
            if time_s - self._update_s < _HELD * period:
                self._again_s = time_s
                return []
            self._update_s += period
        else:  # some time since the last reading, and within the last period
            self._update_s = time_s - 0.5 * min(time_s - before_s, period or math.inf)
        # an update's value is as old, when it comes, as a reading of any time less half a period
        belongs_s = self._update_s - self.lag_s + 0.5 * period if told else time_s - self.lag_s
        begin_s, begin_w, self.power_w = self.time_s, self.power_w, power_w
        if belongs_s <= begin_s:  # the lag has just become known
            return []
        spans = []
        if not told and begin_s < (held_s := min(self._again_s - self.lag_s, belongs_s)):
            # the polls that told updates end here, and the last of them still saw the old value
            spans, begin_s = self._spans(begin_s, held_s, begin_w, begin_w), held_s
        self.time_s = belongs_s
        if time_s - before_s > self._longest_gap_s:
            return [*spans, self._gap(belongs_s, belongs_s - begin_s, begin_w)]
        return [*spans, *self._spans(begin_s, belongs_s, begin_w, power_w, ramp=told)]

    def _take(self, power_w: float) -> None:
        self._recent.append(power_w)
        weight = 1.0 / len(self._recent)
        off_w = power_w - self._mean_w
        self._mean_w += weight * off_w
        self._variance_w2 += weight * ((1.0 - weight) * off_w**2 - self._variance_w2)

    def _gap(self, belongs_s: float, seconds: float, begin_w: float) -> Span:
        self._variogram.restart()
        self._variogram.add(self.power_w)
        self._spaced_s = belongs_s
        low_w, high_w = min(begin_w, self.power_w), max(begin_w, self.power_w)
        energy = 0.5 * (begin_w + self.power_w) * seconds
        known = list(self._recent)[:-1]
        if known and min(known) <= low_w and high_w <= max(known):
            energy = seconds * sum(known) / len(known)  # nothing new: the mean says more than where it was cut off
        # nobody saw it: the power may have been off by all of itself, or by as much as it was seen to change
        return Span(belongs_s, energy, gap_s=seconds, gap_j=max(self.spread_w, high_w) * seconds)

    def _spans(self, begin_s: float, end_s: float, begin_w: float, end_w: float, *, ramp: bool = False) -> list[Span]:
        seconds, period = end_s - begin_s, self.period_s
        if seconds <= 0:
            return []
        if end_s - self._spaced_s >= 0.8 * period:
            self._variogram.add(end_w)
            self._spaced_s = end_s
        # readings within one period say the same thing: their errors add up, not their squares
        reach_s = max(period, seconds)
        anywhere_w2, step_w2 = self._variogram.unseen_w2(end_w - begin_w)
        if period >= _SLOW_S:  # a slow change may as well be a fast one, seen now in this phase and then in that
            anywhere_w2, step_w2 = max(anywhere_w2 + step_w2, self._variance_w2), 0.0
        unseen_j2 = (anywhere_w2 * seconds + step_w2 * reach_s) * reach_s
        mean_w, flat_s = 0.5 * (begin_w + end_w), 0.5 * (1.0 - _RAMP) * seconds
        if not ramp or begin_w == end_w or period >= _SLOW_S:
            return [Span(end_s, mean_w * seconds, unseen_j2, reach_s=period)]
        parts = ((begin_s + flat_s, begin_w, flat_s), (end_s - flat_s, mean_w, _RAMP * seconds), (end_s, end_w, flat_s))
        return [
            Span(at_s, watts * part_s, unseen_j2 * part_s / seconds, reach_s=period) for at_s, watts, part_s in parts
        ]


class PowerTail:
    """Spans of integrated power that lie after the curve's last knot: what the curve would go on with.

    Args:
        keep_s: how long before the newest span one is kept.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._spans: deque[tuple[float, Span]] = deque()

    def add(self, begin_s: float, span: Span) -> None:
        """Take the next span."""
        self._spans.append((begin_s, span))
        while self._spans[0][1].time_s < span.time_s - self._keep_s:
            self._spans.popleft()

    def drop(self, before_s: float) -> None:
        """Forget the spans that end before a moment."""
        while self._spans and self._spans[0][1].time_s <= before_s:
            self._spans.popleft()

    def between(self, begin_s: float, end_s: float, power_w: float | None) -> Span | None:
        """One span from ``begin_s`` to ``end_s``; what no span covers is filled with the nearest reading.

        Args:
            begin_s: begin of the span.
            end_s: its end.
            power_w: the newest power, for what lies after the last span; None: there is none.

        Returns:
            None where there is nothing to fill it from.
        """
        if not self._spans and power_w is None:
            return None
        parts = [part for part in (_cut(a, span, begin_s, end_s) for a, span in self._spans) if part is not None]
        energy = sum(part.energy_j for part in parts)
        last_s = max(begin_s, min(end_s, self._spans[-1][1].time_s)) if self._spans else begin_s
        if end_s > last_s:
            a, span = self._spans[-1] if self._spans else (0.0, Span(1.0, 0.0))
            level = power_w if power_w is not None else span.energy_j / max(span.time_s - a, 1e-9)
            energy += level * (end_s - last_s)
        if self._spans and self._spans[0][0] > begin_s:
            a, span = self._spans[0]
            energy += span.energy_j / (span.time_s - a) * (min(a, end_s) - begin_s)
        return Span(
            end_s,
            energy,
            variance_j2=sum(part.variance_j2 for part in parts),
            gap_s=sum(part.gap_s for part in parts),
            gap_j=sum(part.gap_j for part in parts),
        )

    def after(self, begin_s: float) -> list[Span]:
        """The spans from ``begin_s`` on: the first is cut there, or reaches back to it where it begins later."""
        cut = [(max(a, begin_s), _cut(a, span, begin_s, span.time_s)) for a, span in self._spans]
        parts = [(a, part) for a, part in cut if part is not None]
        if not parts:
            return []
        (first_s, first), rest = parts[0], [part for _, part in parts[1:]]
        if first_s > begin_s:
            longer = (first.time_s - begin_s) / (first.time_s - first_s)
            first = replace(first, energy_j=first.energy_j * longer, variance_j2=first.variance_j2 * longer**2)
        return [first, *rest]


def _cut(span_begin_s: float, span: Span, begin_s: float, end_s: float) -> Span | None:
    low, high = max(span_begin_s, begin_s), min(span.time_s, end_s)
    if high <= low:
        return None
    share = (high - low) / (span.time_s - span_begin_s)
    if share >= 1.0:
        return span
    return replace(
        span,
        time_s=high,
        energy_j=span.energy_j * share,
        variance_j2=span.variance_j2 * share**2,
        gap_s=span.gap_s * share,
        gap_j=span.gap_j * share,
    )
