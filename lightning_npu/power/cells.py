"""What happens between two updates of an energy counter, as far as the intervals before and after tell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from lightning_npu.power.uncertainty import SWING

EDGE = 4.5  # 3 by an even distribution of the step's place; more, as its error is bounded and has no tails
_FLAT = 0.2  # intervals on one side of a step differ from each other by less than this share of the step
_LEAST_STEP = 0.1  # a step is a change by more than this share of the power
_SWINGS = 0.2  # how far a fast load leaves the straight line, in swings times the cell
_PLACED = 0.5  # share of a step that counts as unknown once it was placed
_UNSEEN = 4.0  # how much larger steps may be than the changes between the means of neighbours
_PULSE = 2.0  # height of a pulse of half a cell over the difference of the cell's mean from its ends


class Cells(Protocol):
    """Cells of a curve by index."""

    def __len__(self) -> int: ...
    def sequence(self, cell: int) -> bool: ...  # noqa: D102
    def length_s(self, cell: int) -> float: ...  # noqa: D102
    def step_w2(self, cell: int) -> float: ...  # noqa: D102
    def end_w(self, cell: int) -> float: ...  # noqa: D102
    def quick(self, cell: int) -> bool: ...  # noqa: D102
    def slope_w(self, cell: int) -> float: ...  # noqa: D102


@dataclass(frozen=True)
class Shape:
    """The curve within one cell.

    Attributes:
        length_s: length of the cell.
        before_w: power up to the step.
        after_w: power from the step on.
        fraction: where in the cell the step is; before and after are the same where none was found.
        step_w2: square of the single step that may hide in the cell.
        fast_w2: square of the swing that a load faster than the cell may have there.
        final: whether the cells that the shape depends on are there.
    """

    length_s: float
    before_w: float
    after_w: float
    fraction: float
    step_w2: float
    fast_w2: float
    final: bool

    def bend_j(self, x: float) -> float:
        """How far the curve lies above the straight line at a fraction of the cell, in joules."""
        change = (self.before_w - self.after_w) * self.length_s
        return change * (x * (1.0 - self.fraction) if x < self.fraction else self.fraction * (1.0 - x))

    def edge_j2(self, x: float) -> float:
        """Variance of the curve at a fraction of the cell, in J^2."""
        single = self.step_w2 * (x * (1.0 - x)) ** 2
        fast = self.fast_w2 * min(2.0 * x * (1.0 - x), _SWINGS) ** 2  # its swings do not wait for the middle
        return max(single, fast) * self.length_s**2 / EDGE


def cell_shape(cells: Cells, cell: int) -> Shape | None:
    """The shape of a cell between two updates of a counter; None of any other cell.

    A clean step of power shows as an interval whose mean lies between those of its neighbours, which are as flat as
    theirs; its place follows from the energy. Everything else, smooth loads above all, stays a straight line.
    """
    if not cells.sequence(cell):
        return None
    slope, length, fast_w2 = cells.slope_w(cell), cells.length_s(cell), cells.step_w2(cell)
    begin_w, end_w = cells.end_w(cell - 1), cells.end_w(cell)
    if not math.isnan(begin_w + end_w):
        return _between_readings(cells, cell, begin_w, end_w)
    before = cells.slope_w(cell - 1) if cells.sequence(cell - 1) else slope
    final = cell + 2 < len(cells)
    after = cells.slope_w(cell + 1) if cells.sequence(cell + 1) else slope
    rise, fall = slope - before, after - slope
    # a change that goes on in one direction lies in the cell by its smaller part, one that turns round by its larger
    seen = min(abs(rise), abs(fall)) if rise * fall >= 0 else max(abs(rise), abs(fall))
    if all(cells.sequence(cell + near) for near in (-2, -1, 1, 2)) and rise * fall > 0:
        step = abs(after - before)
        flat = abs(before - cells.slope_w(cell - 2)) + abs(after - cells.slope_w(cell + 2)) < _FLAT * step
        if flat and step > _LEAST_STEP * max(before, after):
            return Shape(length, before, after, fall / (after - before), (_PLACED * step) ** 2, fast_w2, True)
    hidden = min(_UNSEEN * seen, SWING * slope)  # neighbours show means, which swing less than the power does
    return Shape(length, slope, slope, 1.0, hidden**2, fast_w2, final)


def _between_readings(cells: Cells, cell: int, begin_w: float, end_w: float) -> Shape:
    """Shape by the instantaneous power at both ends of the cell."""
    slope, length, fast_w2 = cells.slope_w(cell), cells.length_s(cell), cells.step_w2(cell)
    change = end_w - begin_w
    final = cell + 1 < len(cells)
    if (
        not cells.quick(cell)
        and abs(change) > _LEAST_STEP * max(begin_w, end_w)
        and min(begin_w, end_w) < slope < max(begin_w, end_w)
    ):
        # a reading that averages over the step itself agrees with its cell's neighbour less than with the step
        odd = abs(cells.slope_w(cell + 1) - end_w) if cells.sequence(cell + 1) else 0.0
        odd = max(odd, abs(cells.slope_w(cell - 1) - begin_w) if cells.sequence(cell - 1) else 0.0)
        hidden = max(_PLACED * abs(change), odd)
        return Shape(length, begin_w, end_w, (end_w - slope) / change, hidden**2, fast_w2, final)
    hidden = _PULSE * max(abs(slope - begin_w), abs(slope - end_w))
    return Shape(length, slope, slope, 1.0, hidden**2, fast_w2, final)
