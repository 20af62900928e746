"""A cumulative curve of energy over time as knots in flat arrays; thinning old detail loses no energy."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_npu.power.cells import EDGE, cell_shape

PAST_KNOTS = 2048  # knots kept of what lies before the moment that is forgotten
MOST_KNOTS = 1 << 17  # beyond that the older half is thinned unasked


@dataclass(frozen=True)
class Span:
    """What lies between a knot and the one before it.

    Attributes:
        time_s: the moment of the knot.
        energy_j: energy since the last knot.
        variance_j2: of the energy's own error, where it is not exact.
        step_w2: mean square of the change of power within, for edges that fall into it.
        knot_j2: variance of the curve at the knot, from the time of the knot.
        age_j: how far the knot may be behind the truth, where the counter is taken as it is read.
        gap_s: how much of it was bridged without a reading.
        gap_j: what that may have cost.
        counted: whether an energy counter vouches for it, or integrated power.
        update: whether it lies between two updates of a counter in sequence, so that its neighbours tell its shape.
        end_w: the power at its end, where an instantaneous reading came with it; else NaN.
        quick: whether power is likely to change more than once within, so that no step can be placed.
        reach_s: its own error is one and the same over so much time around it.
    """

    time_s: float
    energy_j: float
    variance_j2: float = 0.0
    step_w2: float = 0.0
    knot_j2: float = 0.0
    age_j: float = 0.0
    gap_s: float = 0.0
    gap_j: float = 0.0
    counted: bool = False
    update: bool = False
    end_w: float = math.nan
    quick: bool = False
    reach_s: float = 0.0


@dataclass(frozen=True)
class Point:
    """The curve at one moment: sums since its start, and the variance of an edge laid there."""

    energy_j: float
    variance_j2: float
    gap_s: float
    gap_j: float
    counted_s: float
    edge_j2: float
    age_j: float
    cell: int
    fraction: float
    reach_s: float
    final: bool


class Series:
    """Knots in order of time. Between two of them everything grows linearly."""

    _CUMULATIVE = ("_energy", "_variance", "_gap_s", "_gap_j", "_counted")

    def __init__(self, start_s: float) -> None:
        self._time = array("d", (start_s,))
        self._energy, self._variance = array("d", (0.0,)), array("d", (0.0,))
        self._gap_s, self._gap_j, self._counted = array("d", (0.0,)), array("d", (0.0,)), array("d", (0.0,))
        self._step, self._knot, self._age = array("d", (0.0,)), array("d", (0.0,)), array("d", (0.0,))
        self._update, self._end_w = array("b", (0,)), array("d", (math.nan,))
        self._reach, self._quick = array("d", (0.0,)), array("b", (0,))
        self._keep: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self._time)

    @property
    def first_s(self) -> float:
        """Time of the first knot."""
        return self._time[0]

    @property
    def last_s(self) -> float:
        """Time of the last knot."""
        return self._time[-1]

    @property
    def last_j(self) -> float:
        """Energy up to the last knot."""
        return self._energy[-1]

    def append(self, span: Span) -> None:
        """Add a knot; one that is not later than the last adds its energy to that."""
        if span.time_s <= self._time[-1]:
            self._energy[-1] += span.energy_j
            self._variance[-1] += span.variance_j2
            self._gap_j[-1] += span.gap_j
            return
        seconds = span.time_s - self._time[-1]
        self._time.append(span.time_s)
        self._energy.append(self._energy[-1] + span.energy_j)
        self._variance.append(self._variance[-1] + span.variance_j2)
        self._gap_s.append(self._gap_s[-1] + min(span.gap_s, seconds))
        self._gap_j.append(self._gap_j[-1] + span.gap_j)
        self._counted.append(self._counted[-1] + (seconds if span.counted else 0.0))
        self._step.append(span.step_w2)
        self._knot.append(span.knot_j2)
        self._age.append(span.age_j)
        self._update.append(span.update)
        self._end_w.append(span.end_w)
        self._reach.append(span.reach_s)
        self._quick.append(span.quick)
        if len(self._time) > MOST_KNOTS:
            self.thin(self._time[MOST_KNOTS // 2], self._keep)

    def at(self, time_s: float) -> Point:
        """The curve at ``time_s``, held at its ends beyond them."""
        time_s = min(max(time_s, self._time[0]), self._time[-1])
        right = min(bisect_left(self._time, time_s), len(self._time) - 1)
        left = max(right - 1, 0)
        length = self._time[right] - self._time[left]
        x = (time_s - self._time[left]) / length if length > 0 else 1.0

        def between(values: array[float]) -> float:
            return values[right] - (1.0 - x) * (values[right] - values[left]) if right > left else values[right]

        shape = cell_shape(self, right)
        within = shape.edge_j2(x) if shape else self._step[right] * length**2 * (x * (1.0 - x)) ** 2 / EDGE
        knots = (1.0 - x) ** 2 * self._knot[left] + x**2 * self._knot[right]
        return Point(
            energy_j=between(self._energy) + (shape.bend_j(x) if shape else 0.0),
            variance_j2=between(self._variance),
            gap_s=between(self._gap_s),
            gap_j=between(self._gap_j),
            counted_s=between(self._counted),
            edge_j2=within + knots,
            # the power of that moment may be that of the cell before, its own or the one after
            age_j=max(self._age[left : right + 2]),
            cell=right,
            fraction=x,
            reach_s=self._reach[right],
            final=shape.final if shape else right + 1 < len(self._time) or (right > 0 and self._age[right] == 0),
        )

    def within_cell(self, cell: int, share: float) -> float:
        """Variance of a span that covers ``share`` of one cell's time and nothing else, in J^2."""
        shape = cell_shape(self, cell)
        length = self._time[cell] - self._time[cell - 1] if cell > 0 else 0.0
        step_w2 = max(shape.step_w2, shape.fast_w2) if shape else self._step[cell]
        own = self._variance[cell] - self._variance[cell - 1] if cell > 0 else 0.0
        return step_w2 * length**2 * (share * (1.0 - share)) ** 2 / EDGE + own * share**2

    def sequence(self, cell: int) -> bool:
        """Whether a cell lies between two updates of a counter in sequence."""
        return 0 < cell < len(self._time) and bool(self._update[cell])

    def length_s(self, cell: int) -> float:
        """Length of a cell."""
        return self._time[cell] - self._time[cell - 1]

    def step_w2(self, cell: int) -> float:
        """Mean square of the steps of power to expect within a cell."""
        return self._step[cell]

    def end_w(self, cell: int) -> float:
        """Power reading at the end of a cell; NaN: none."""
        return self._end_w[cell]

    def quick(self, cell: int) -> bool:
        """Whether power is likely to change more than once within a cell."""
        return bool(self._quick[cell])

    def slope_w(self, cell: int) -> float:
        """Mean power over a cell."""
        if cell <= 0:
            return 0.0
        return (self._energy[cell] - self._energy[cell - 1]) / (self._time[cell] - self._time[cell - 1])

    def thin(self, before_s: float, keep: Sequence[float] = ()) -> None:
        """Reduce the knots before ``before_s`` to a bounded number, evenly spread, and those around ``keep``."""
        self._keep = keep
        end = bisect_left(self._time, before_s) - 1  # the knot before the moment stays
        if end <= PAST_KNOTS:
            return
        wanted = {0, *range(end, len(self._time))}
        # bins of equal time, of which the first knot stays
        width = 2.0 * (self._time[end] - self._time[0]) / PAST_KNOTS
        last_bin = -1
        for index in range(end):
            this_bin = int((self._time[index] - self._time[0]) / width)
            if this_bin != last_bin:
                wanted.add(index)
                last_bin = this_bin
        for moment in keep:
            place = bisect_right(self._time, moment)
            wanted.update(range(max(place - 2, 0), min(place + 2, len(self._time))))
        kept = sorted(wanted)
        step = array(
            "d", (max(self._step[a + 1 : b + 1], default=0.0) for a, b in zip([-1, *kept], kept, strict=False))
        )
        # a cell that was merged no longer lies between two updates
        update = array("b", (self._update[b] and a == b - 1 for a, b in zip([-1, *kept], kept, strict=False)))
        for name in ("_time", *self._CUMULATIVE, "_knot", "_age", "_end_w", "_reach", "_quick"):
            values = getattr(self, name)
            setattr(self, name, array(values.typecode, (values[index] for index in kept)))
        self._step, self._update = step, update

    def bins(self, limit: int) -> list[tuple[float, float]]:
        """Middle and mean power of at most ``limit`` spans that cover the whole curve."""
        spans = len(self._time) - 1
        if spans < 1 or limit < 1:
            return []
        if spans <= limit:
            edges = list(self._time)
        else:
            width = (self._time[-1] - self._time[0]) / limit
            edges = [self._time[0] + width * index for index in range(limit)] + [self._time[-1]]
        energies = [self.at(edge).energy_j for edge in edges]
        return [
            (0.5 * (a + b), (later - earlier) / (b - a))
            for a, b, earlier, later in zip(edges, edges[1:], energies, energies[1:], strict=False)
            if b > a
        ]
