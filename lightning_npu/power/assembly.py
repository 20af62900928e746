"""How readings become knots of a board's curve: which of its sensors is believed, and what happens when one fails."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_npu.power.base import Board, Reading
from lightning_npu.power.counter import Broken, CounterTrack, Rejected, Step
from lightning_npu.power.crosscheck import RATIOS, SPAN_S, CrossCheck
from lightning_npu.power.integral import PowerIntegral, PowerTail
from lightning_npu.power.peaks import Peaks
from lightning_npu.power.series import Series, Span
from lightning_npu.power.trust import StateLog, plausible_counter, plausible_power
from lightning_npu.power.uncertainty import CounterError

FROZEN_S = 3.0  # a counter that stands still, or is silent, for longer is replaced by integrated power
GAP_POLLS = 5.0  # polling intervals without a reading that make a gap
GAP_S = 1.0  # no shorter silence is a gap
NPU_PERIOD_S = 0.1  # NPUs refresh their power reading about so often, as far as is known
GPU_AGE = 0.75  # GPUs hold a mean over a quarter to all of an update period: half a period, and half of that mean
_LEAST_J = 1.0  # energy that a counter must have missed to count as frozen: coarse ones stand still at idle
_TAIL_S = 60.0


class Assembly:
    """Takes readings and lays knots.

    Knots never change once laid. An energy counter lays them where there is one: at its updates if readings come faster
    than those, else at the readings. Integrated power lays them where there is no counter, while it is frozen or
    missing, and over a reset.

    Attributes:
        series: the curve so far; None before anything is known.
        power_w: the newest trusted power reading; None: none, or the board is lost.
        heard_s: time of the last reading that said anything.
        first_w: power at the curve's begin, to reach back from it.
    """

    def __init__(self, board: Board, poll_s: float) -> None:
        self.series: Series | None = None
        self.log = StateLog()
        self.peaks = Peaks()
        self.longest_gap_s = max(GAP_POLLS * poll_s, GAP_S)
        npu = board.kind == "npu"
        self.integral = PowerIntegral(
            board.averaging_s,
            self.longest_gap_s,
            usual_s=NPU_PERIOD_S if npu else 0.0,
            age=0.5 if npu else GPU_AGE,
        )
        self.tail = PowerTail(_TAIL_S)
        self.counter = CounterTrack(board, poll_s)
        self.counter_heard_s: float | None = None
        self.check = CrossCheck()
        self.power_w: float | None = None
        self.heard_s = -math.inf
        self.first_w: float | None = None
        self._board, self._poll_s = board, poll_s
        self._by_power = not board.counter
        self._level_j: float | None = None  # the curve's energy at the counter's last step
        self._half_s = 0.0  # how well the moment of that step is known
        self._counted_j = 0.0  # all that the counter has said
        self._integrated_j = 0.0  # all that power has said
        self._error = CounterError()
        self._fresh_w = math.nan  # power of the reading that is being taken
        self._silent_s = 0.0  # how long before it nothing was heard
        self._begin_s = math.nan
        self._last_s = -math.inf

    @property
    def newest_w(self) -> float | None:
        """Newest trusted power: a reading, or the curve's last slope; None: the board is lost, or nothing came yet."""
        if self.power_w is not None or self.series is None or len(self.series) < 2 or self.log.holds("lost"):
            return self.power_w
        return self.series.slope_w(len(self.series) - 1)

    @property
    def by_counter(self) -> bool:
        """Whether the counter lays the knots now."""
        return not self._by_power

    def add(self, reading: Reading) -> None:
        """Take a reading, later than all before; any other is ignored."""
        now_s = reading.time_s
        if not math.isfinite(now_s) or now_s <= self._last_s:
            return
        self._last_s = now_s
        if math.isnan(self._begin_s):
            self._begin_s = now_s
        power, refused = plausible_power(self._board, reading.power_w)
        if refused:
            self.log.moment("power", f"degraded: {refused}", now_s, now_s)
        self._fresh_w = math.nan if power is None else power
        value = plausible_counter(reading.energy_j)
        if reading.lost or (power is None and value is None):
            self._nothing(reading)
            return
        if now_s - self.heard_s > self.longest_gap_s and self.series is not None and not self.log.holds("lost"):
            self.log.moment("silence", f"degraded: no reading for {now_s - self.heard_s:.1f} s", self.heard_s, now_s)
        self.log.end("lost", now_s)
        self._silent_s = now_s - self.heard_s
        self.heard_s = now_s
        if power is not None:
            self._take_power(now_s, self._fresh_w)
        if value is not None:
            self.counter_heard_s = now_s
            self._take_counter(now_s, value)
        self._watch(now_s, reading.problem)

    def _nothing(self, reading: Reading) -> None:
        since_s = self.heard_s if math.isfinite(self.heard_s) else self._begin_s
        if reading.lost or reading.time_s - since_s > self.longest_gap_s:
            why = reading.problem or ("the driver says that the board is gone" if reading.lost else "no reading")
            self.log.begin("lost", f"lost: {why}", since_s, reading.time_s)
            self.power_w = None

    def _take_power(self, now_s: float, power_w: float) -> None:
        self.peaks.add(now_s, power_w)
        self.power_w = power_w
        begin_s = self.integral.time_s
        for span in self.integral.add(now_s, power_w):
            if begin_s is not None:
                self._integrated_j += span.energy_j
                self.tail.add(begin_s, span)
                begin_s = span.time_s
        if self._by_power:
            self._follow_power()

    def _follow_power(self) -> None:
        """Lay knots by integrated power, from the last knot on."""
        if self.series is None:
            if self.integral.time_s is None:
                return
            self.series = Series(self.integral.time_s)
            self.first_w = self.power_w
        for span in self.tail.after(self.series.last_s):
            self.series.append(span)
        self.tail.drop(self.series.last_s)

    def _bridge(self, until_s: float, unsure_j2: float = 0.0) -> None:
        """Continue the curve to a moment without the counter: by integrated power, else by the last slope."""
        if self.series is None or until_s <= self.series.last_s:
            return
        seconds = until_s - self.series.last_s
        span = self.tail.between(self.series.last_s, until_s, self.power_w)
        if span is None:
            slope = self.series.slope_w(len(self.series) - 1)
            span = Span(until_s, slope * seconds, gap_s=seconds, gap_j=slope * seconds)
        self.series.append(replace(span, variance_j2=span.variance_j2 + unsure_j2))
        self.tail.drop(until_s)

    def _take_counter(self, now_s: float, value_j: float) -> None:
        if not self.counter.is_open:
            self.counter.open(now_s, value_j)
            if self.series is None:
                self.series = Series(now_s)
            if not self._by_power:
                self._level_j = None
            return
        step = self.counter.add(now_s, value_j)
        if isinstance(step, Rejected):
            self.log.moment("jump", f"degraded: {step.why}; the reading was rejected", now_s, now_s)
        elif isinstance(step, Broken):
            self._reopen(now_s, value_j, step.why)
        elif isinstance(step, Step):
            self._take_step(step, now_s)

    def _reopen(self, now_s: float, value_j: float, why: str) -> None:
        since_s = self.series.last_s if self.series is not None else now_s
        self.log.moment("reset", f"degraded: {why}; bridged by integrated power", since_s, now_s)
        if not self._by_power:
            power = self.newest_w or 0.0
            # where the old counter ended and the new one began is known to an update, or to the placing of one
            sure_s = self._half_s if self.counter.resolved else self.counter.period_s or self._poll_s
            self._bridge(now_s, (power * sure_s) ** 2 / 6.0)
        self._level_j = None
        self.check.restart()
        self.counter.open(now_s, value_j)

    def _take_step(self, step: Step, now_s: float) -> None:
        series = self.series
        if series is None:
            return
        seconds = step.time_s - series.last_s
        energy = step.energy_j
        self._counted_j += energy
        if self._by_power:
            self._thaw(step, now_s)
            return
        # between updates the period is known better than the two moments are
        regular = step.resolved and step.period_s is not None and 0.5 < seconds / step.period_s < 1.5
        slope = energy / step.period_s if regular and step.period_s else energy / seconds if seconds > 0 else 0.0
        # an average over more than the interval says nothing about its end
        reading = self._fresh_w if self._board.averaging_s <= (step.period_s or 0.0) else math.nan
        self._error.step(slope, None if math.isnan(reading) else reading, regular=regular and not step.first)
        if self._level_j is None:
            target_j, own_j2 = self._first_level(series, step, energy)
        else:
            target_j, own_j2 = self._level_j + energy, self._error.own_j2(seconds)
        self._level_j, self._half_s = target_j, step.half_s
        if seconds <= 0:
            return
        step_w2 = self._error.step_w2(slope)
        silent_s = self._silent_s if self._silent_s > self.longest_gap_s else 0.0
        if silent_s > 0:  # the counter has bridged a gap: its sum is right, but what happened when is not known
            step_w2 = max(step_w2, self.integral.spread_w**2, slope**2)
        # an edge on a counter that is read as it is lags by the power at that moment, not by a mean over the last poll
        edge_w = slope if self.power_w is None else max(slope, self.power_w)
        in_sequence = step.resolved and not step.first and seconds < 1.5 * (step.period_s or seconds)
        series.append(
            Span(
                step.time_s,
                max(0.0, target_j - series.last_j),
                variance_j2=own_j2,
                step_w2=step_w2,
                knot_j2=(slope * step.half_s) ** 2 / 6.0,
                age_j=0.0 if step.resolved else edge_w * (step.period_s or self._poll_s),
                gap_s=silent_s,
                counted=True,
                update=in_sequence,
                end_w=reading,
                quick=self._error.quick,
            )
        )
        if self.first_w is None:
            self.first_w = slope
        self.tail.drop(series.last_s)
        self._compare(step.time_s, now_s)

    def _first_level(self, series: Series, step: Step, energy_j: float) -> tuple[float, float]:
        """Level of the first step after an opening, of which only the part after it belongs to the curve; variance."""
        if not step.resolved:
            return series.last_j + energy_j, 0.0
        seconds = step.time_s - series.last_s
        span = self.tail.between(series.last_s, step.time_s, self.power_w)
        if span is None:
            return series.last_j + 0.5 * energy_j, energy_j**2 / 12.0
        unsure_j2 = ((self.integral.spread_w * seconds) ** 2 + (self.integral.power_w * step.half_s) ** 2) / 3.0
        return series.last_j + min(energy_j, span.energy_j), unsure_j2

    def _thaw(self, step: Step, now_s: float) -> None:
        """The counter moves again, or came late: it takes over at its step, at the level that power has reached."""
        series = self.series
        if series is None:
            return
        self._bridge(step.time_s)
        self._level_j = series.at(step.time_s).energy_j
        self._by_power = False
        self.check.restart()
        for name in ("frozen", "missing"):
            self.log.end(name, now_s)

    def _compare(self, step_s: float, now_s: float) -> None:
        if self.integral.time_s is None:
            return
        beyond_j = self.integral.power_w * (step_s - self.integral.time_s)
        self.check.add(step_s, self._counted_j, self._integrated_j + beyond_j)
        if self.check.sound:
            self.log.end("ratio", now_s)
        elif self.check.ratio is not None:
            text = (
                f"degraded: the energy counter says {self.check.ratio:.2f} of integrated power "
                f"({RATIOS[0]} to {RATIOS[1]} is sound)"
            )
            self.log.begin("ratio", text, now_s - SPAN_S, now_s)

    def _watch(self, now_s: float, problem: str) -> None:
        """Let power take over from a counter that stands still or is silent."""
        if self._by_power or self.power_w is None or not (self._board.counter or self.counter_heard_s is not None):
            return
        begin_s = self.series.last_s if self.series is not None else self._begin_s
        heard_s = self.counter_heard_s if self.counter_heard_s is not None else self._begin_s
        if now_s - heard_s > FROZEN_S:
            why = f" ({problem})" if problem else ""
            self._take_over("missing", f"the energy counter cannot be read{why}", begin_s, now_s)
            self.counter.close()
        elif self.counter.is_open and now_s - self.counter.moved_s > FROZEN_S:
            missed = self.tail.between(begin_s, now_s, self.power_w)
            if missed is not None and missed.energy_j > _LEAST_J:
                self._take_over("frozen", f"the energy counter stands still at {self.power_w:.0f} W", begin_s, now_s)

    def _take_over(self, name: str, why: str, since_s: float, now_s: float) -> None:
        self.log.begin(name, f"degraded: {why}; power is integrated instead", since_s, now_s)
        self._by_power = True
        self._level_j = None
        self.check.restart()
        self._follow_power()
