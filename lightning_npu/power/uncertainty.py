"""How far a window's energy may be off: what readings so far say about what happened between them.

A window's ``resolution_j`` is ``WIDTH * sqrt(V)``, where V is the variance in J^2 of its error, summed over its parts:

* **Between power readings** (no counter, or a counter that only adds up its own power readings): a sensor with period
  u shows one moment of each u. Let D1 and D2 be the mean squares of the difference between readings one and two periods
  apart, over the last 24 or so. A load that changes more slowly than u has D2 = 2 D1, one that changes faster has
  D2 = D1; hence a slow part L = D2 - D1 and a fast part N = D1 - D2 / 2, neither below 0. A step d at an unknown place
  in a period costs d^2 u^2 / 12 (10 is used: steps come in bursts), an unseen mean N u^2. Slow steps show where they
  are: of each change d that readings show, the share L / D1 counts there and then, and a tenth of their mean L counts
  everywhere: V = sum over periods of u^2 (0.9 d^2 L / D1 / 10 + 0.1 L / 10 + N). A counter that adds up readings
  takes each for the whole interval before it: a step is off by up to d u there, and d^2 / 6.7 counts. A gauge that
  takes half a second or more is slower than most loads, and what looks slow there may be a fast load that drifts
  through its phases: there V is at least u^2 times the variance of the last 512 readings.
* **Edges between counter updates**: at the fraction x of an interval of length u, V = J^2 u^2 x^2 (1 - x)^2 / 4.5 for a
  step J of power at an unknown place in it. J is what the power readings at both ends of the interval, or else the mean
  powers of its neighbours, leave open (see ``cells``): next to nothing in the middle of a plateau, half of the step
  where its place was computed. Loads faster than the updates show in neither; their swing is taken as up to 0.9 of the
  power unless readings agree with the means (:class:`Quickness`), or clear and rare steps were seen
  (``CounterError.step_w2``), and 2 x (1 - x) limited to 0.2 stands for x (1 - x).
* **The moment of an update**, known to +-h: V = (P h)^2 / 6 (it is rarely near the ends).
* **Edges on a counter too fast to interpolate**, taken as they are: the counter is behind by an age uniform in 0..u.
  With the powers P and Q at the two edges, V = (P^2 + Q^2) u^2 / 14 + (P - Q)^2 u^2 / 6: less than the variance, as the
  error is bounded by P u.

What no reading shows cannot be bounded: a load whose period is a multiple or a fraction of the sensor's looks constant
to a sensor that sees moments only. That holds for part-time counters and for gauges, not for counters that see all.
"""

from __future__ import annotations

import math

WIDTH = 2.7  # standard deviations that hold 99 % and a little more
HIDDEN = 0.9  # power may swing between two updates by this share of itself without a trace in their means,
HIDDEN_SLOW = 0.05  # by this where the load was seen to change slowly,
HIDDEN_READ = 0.03  # and by this where instantaneous readings agree with the means
CLEAR = 0.15  # changes of that share, root of mean square, are clear steps
OUTSIDE = 0.03  # means outside of the readings around them by more than this share hide a pulse
ROUGH = 0.015  # means of neighbours that differ by less than this share are equal
FAST = 8.0  # how much more than the means of neighbours the power of a fast load may change
PULSES = 0.03  # share of intervals with pulses in them from which on a load is a fast one,
PULSES_SLOW = 0.6  # and where the means' spread says that it is a slow one
QUICK = 0.94  # share of the evidence from which on steps are not placed
FAST_SPREAD, SLOW_SPREAD = 0.35, 0.6  # the means' spread over the readings', of fast loads and of slow ones
SWING = 1.5  # steps beyond this share of the mean power are not expected
STEP = 10.0  # 12 by an even distribution of the step's place
NOT_CENTRED = 1.5  # a part-time counter takes the power at its end for all of an interval: off by d u, not d u / 2
EVERYWHERE = 0.1  # share of the slow steps' variance that counts also where none is seen
PART_TIME = 0.2  # slopes that differ from the power readings by less than this share of the readings' changes are those
_CHANGE = 0.1  # changes of a reading by more than that share of it tell so,
_CHANGES = 3  # where there were so many of them
_CHANGE_MEMORY = 1.0 / 12.0
_MEMORY = 1.0 / 24.0  # weight of the newest reading in the running mean squares
_LONG_MEMORY = 1.0 / 64.0  # of spreads, which take some periods of a load
_TOLD = 16  # intervals that tell a spread


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

    def unseen_w2(self, change_w: float) -> tuple[float, float]:
        """Variances of a period's true mean about the trapezoid between its readings, in W^2.

        Args:
            change_w: change of the readings in that period.

        Returns:
            What any time may hide, and what a step of that change adds where it is seen.
        """
        slow = self._d1 - 2.0 * self.fast_w2
        here = slow / self._d1 * change_w**2 if self._d1 > 0 else 0.0
        return self.fast_w2 + EVERYWHERE * slow / STEP, (1.0 - EVERYWHERE) * here / STEP

    @property
    def smooth(self) -> float:
        """From 0 to 1: how much differences grow like those of a straight line, twice as far four times as large."""
        return min(max((self._d2 / self._d1 - 3.0) / 0.8, 0.0), 1.0) if self._d1 > 0 else 0.0

    @property
    def fast_w2(self) -> float:
        """The part N of it that changes faster than readings come, in W^2."""
        slow = min(max(self._d2 - self._d1, 0.0), self._d1)
        return 0.5 * (self._d1 - slow)


def half_width(variance_j2: float) -> float:
    """Half-width in joules that holds 99 % of errors with this variance."""
    return WIDTH * math.sqrt(max(variance_j2, 0.0))


class Quickness:
    """How likely it is that power changes more than once between two updates of a counter.

    Two things tell. Means over a load's slow changes vary as much as readings of its power do, means over fast ones
    vary less. And a mean that lies outside of the readings at both ends of its interval holds a pulse. The second
    alone takes a load of about one change per update for a fast one: a reading that averages over a change is a little
    off the plateau that the mean is on.
    """

    def __init__(self) -> None:
        self._pulses = 0.0  # running share of intervals with a pulse
        self._slopes, self._readings = Spread(), Spread()

    def add(self, slope_w: float, before_w: float, after_w: float, *, regular: bool) -> None:
        """Take the mean of an interval and the readings at its ends.

        Args:
            slope_w: mean power.
            before_w: reading at its begin.
            after_w: reading at its end.
            regular: whether the interval's length is well known.
        """
        outside = max(min(before_w, after_w) - slope_w, slope_w - max(before_w, after_w), 0.0)
        self._pulses += 0.25 * _MEMORY * (float(outside > OUTSIDE * slope_w) - self._pulses)
        if regular:
            self._slopes.add(slope_w)
            self._readings.add(after_w)

    @property
    def doubtful(self) -> float:
        """From 0 to 1: how far pulses say so, on their own; readings older than their interval make some too."""
        return min(self._pulses / PULSES, 1.0)

    @property
    def quick(self) -> bool:
        """Whether it is so likely that no step should be placed."""
        quick, limit = 0.0, PULSES
        if self._readings.count > _TOLD and self._readings.deviation > OUTSIDE * self._readings.mean:
            spread = self._slopes.deviation / self._readings.deviation
            quick = min(max((SLOW_SPREAD - spread) / (SLOW_SPREAD - FAST_SPREAD), 0.0), 1.0)
            limit += (PULSES_SLOW - PULSES) * (1.0 - quick)
        return max(quick, self._pulses / limit) > QUICK


class Spread:
    """Running mean and standard deviation of the last 64 values or so."""

    def __init__(self) -> None:
        self.count, self.mean, self._variance = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        """Take the next value."""
        self.count += 1
        weight, off = max(1.0 / self.count, _LONG_MEMORY), value - self.mean
        self.mean += weight * off
        self._variance += weight * ((1.0 - weight) * off**2 - self._variance)

    @property
    def deviation(self) -> float:
        """Standard deviation."""
        return math.sqrt(max(self._variance, 0.0))


class CounterError:
    """What the knots of a counter may be off, from its slopes and the power readings beside it."""

    def __init__(self) -> None:
        self._slopes = Variogram()
        self._off = 0.0  # running mean of |slope - reading| over the reading's change, where it changed
        self._changes = 0
        self._rough = 0.0  # running share of intervals that differ from both neighbours
        self._quickness = Quickness()
        self._slope_w: float | None = None
        self._rise_w = 0.0
        self._reading_w: float | None = None
        self._by_readings = False

    def step(self, slope_w: float, reading_w: float | None, *, regular: bool) -> None:
        """Take the mean power between two updates, and the instantaneous reading that came with the later one.

        Args:
            slope_w: mean power.
            reading_w: the reading; None: there is none, or it averages over more than the interval.
            regular: whether the time between the two updates is well known.
        """
        self._slopes.add(slope_w)
        if self._slope_w is not None:
            rise = abs(slope_w - self._slope_w)
            least = ROUGH * max(slope_w, self._slope_w)
            self._rough += _MEMORY * (float(rise > least and self._rise_w > least) - self._rough)
            self._rise_w = rise
        self._by_readings = reading_w is not None and self._reading_w is not None
        if reading_w is not None and self._reading_w is not None:
            self._quickness.add(slope_w, self._reading_w, reading_w, regular=regular)
            if (change := abs(reading_w - self._reading_w)) > _CHANGE * max(reading_w, self._reading_w):
                self._changes += 1
                weight = max(_CHANGE_MEMORY, 1.0 / self._changes)
                self._off += weight * (min(abs(slope_w - reading_w) / change, 1.0) - self._off)
        self._slope_w, self._reading_w = slope_w, reading_w

    @property
    def part_time(self) -> bool:
        """Whether the counter adds up its power readings, which may see a part of the time only."""
        return self._changes >= _CHANGES and self._off < PART_TIME

    @property
    def quick(self) -> bool:
        """Whether no step can be placed between two updates: power changes more than once, or the mean is none."""
        return self._quickness.quick or self.part_time

    def own_j2(self, seconds: float) -> float:
        """Variance of the energy between two updates."""
        if not self.part_time:
            return 0.0
        anywhere_w2, step_w2 = self._slopes.unseen_w2(self._rise_w)
        return (anywhere_w2 + NOT_CENTRED * step_w2) * seconds**2

    def step_w2(self, slope_w: float) -> float:
        """Square of the steps of power that may hide between two updates, whatever the neighbours show."""
        if self._by_readings:
            return ((HIDDEN_READ + (HIDDEN - HIDDEN_READ) * self._quickness.doubtful) * slope_w) ** 2
        visible = self._slopes.step_w2
        # a load of clean steps hides little; one that looks constant, or never rests, may be a fast one
        calm = min(max((0.5 - self._rough) / 0.35, 0.0), 1.0) * min(visible / ((CLEAR * slope_w) ** 2 + 1e-12), 1.0)
        floor_w2 = ((HIDDEN - (HIDDEN - HIDDEN_SLOW) * calm) * slope_w) ** 2
        # means that change from each to the next may be those of a load faster than them, unless they do so smoothly
        fast = min(max((self._rough - 0.25) / 0.4, 0.0), 1.0) * (1.0 - self._slopes.smooth)
        return max(floor_w2, fast * min(FAST**2 * visible, (SWING * slope_w) ** 2))
