"""What an energy counter says from reading to reading: updates, resets, wrap-arounds, jumps, freezes."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_npu.power.base import Board
from lightning_npu.power.ticks import ChangeRate, TickClock
from lightning_npu.power.trust import bound_w, unwrap

RESOLVED_POLLS = 1.5  # a period of so many polling intervals lets single updates be told
_JUMP_CONFIRMATIONS = 3  # readings that go on from a jump until the counter is believed again
_FIRST_AGE_S = 0.2  # how old the first value may be


@dataclass(frozen=True)
class Step:
    """The counter went on.

    Attributes:
        time_s: the moment of its value: the update where it is resolved, else the reading.
        half_s: half-width of that moment.
        energy_j: energy since the last step.
        period_s: update period; None: unknown.
        resolved: whether ``time_s`` is an update's.
        first: whether it is the first since the counter was (re)opened, from a moment between updates.
    """

    time_s: float
    half_s: float
    energy_j: float
    period_s: float | None
    resolved: bool
    first: bool


@dataclass(frozen=True)
class Broken:
    """The counter cannot be continued from its last value: it starts anew from this reading."""

    why: str


@dataclass(frozen=True)
class Rejected:
    """A value that cannot be true; it is as if it had not come."""

    why: str


class CounterTrack:
    """Follows one counter.

    Attributes:
        moved_s: when it was last seen to move, or was opened.
    """

    def __init__(self, board: Board, poll_s: float) -> None:
        self.moved_s = 0.0
        self._board = board
        self._poll_s = poll_s
        self._rate = ChangeRate()
        self._clock = TickClock()
        self._read_s = 0.0
        self._value_j: float | None = None
        self._since_s = 0.0  # the earliest moment at which the last value can have become true
        self._first = True
        self._jump: tuple[float, float, int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a value to go on from."""
        return self._value_j is not None

    @property
    def period_s(self) -> float | None:
        """Update period as seen."""
        rough, fine = self._rate.period_s, self._clock.period_s
        # the clock counts updates, and is right unless several went by unseen
        return fine if rough is not None and fine is not None and abs(fine - rough) < 0.2 * rough else rough

    @property
    def resolved(self) -> bool:
        """Whether readings come fast enough to tell single updates."""
        period = self._rate.period_s
        return period is not None and period >= RESOLVED_POLLS * self._poll_s

    def open(self, time_s: float, value_j: float) -> None:
        """Go on from ``value_j``, whatever was before."""
        self._read_s, self._value_j, self.moved_s = time_s, value_j, time_s
        self._since_s = time_s - max(_FIRST_AGE_S, 2.0 * self._poll_s)
        self._first = True
        self._jump = None
        self._clock.restart()

    def close(self) -> None:
        """Forget the value: the next one opens the counter anew."""
        self._value_j = None
        self._clock.restart()

    def add(self, time_s: float, value_j: float) -> Step | Broken | Rejected | None:
        """Take a valid reading of the open counter; None where it says nothing new."""
        if self._value_j is None:
            raise ValueError("the counter was not opened")
        most_j = bound_w(self._board) * (time_s - self._since_s)
        energy = unwrap(self._board, self._value_j, value_j, most_j)
        if energy is None:
            return Broken("the energy counter stepped back")
        if energy > most_j:
            return self._suspect(time_s, value_j, energy)
        self._jump = None
        self._rate.add(time_s - self._read_s, energy > 0)
        low, self._read_s = self._read_s, time_s
        if energy <= 0:
            longest_s = 2.0 * self.period_s if self.period_s is not None else 0.4 * self._poll_s
            if self.resolved or self._first or time_s - self.moved_s > longest_s:
                return None  # nothing to lay a knot for: an update may come, or the counter is frozen
            return Step(time_s, 0.0, 0.0, self.period_s, resolved=False, first=False)
        moment, half = time_s, 0.0
        known = self._clock.period_s
        if known is None or time_s - low < known or self.resolved:
            moment, half = self._clock.add(low, time_s)
        first, self._first = self._first, False
        self._since_s, self._value_j, self.moved_s = low, value_j, time_s
        if self.resolved:
            return Step(moment, half, energy, self.period_s, resolved=True, first=first)
        return Step(time_s, 0.0, energy, self.period_s, resolved=False, first=first)

    def _suspect(self, time_s: float, value_j: float, energy_j: float) -> Broken | Rejected:
        seen = 1
        if self._jump is not None:
            jumped_s, jumped_j, count = self._jump
            most_j = bound_w(self._board) * (time_s - jumped_s + self._poll_s)
            seen = count + 1 if 0 <= value_j - jumped_j <= most_j else 1
        self._jump = (time_s, value_j, seen)
        why = f"the energy counter jumped by {energy_j:.0f} J, more than the board can use in that time"
        return Broken(why) if seen >= _JUMP_CONFIRMATIONS else Rejected(why)
