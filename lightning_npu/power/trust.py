"""Which readings of a board can be true, and what its state is at any moment."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from lightning_npu.power.base import Board

LIMIT_MARGIN = 1.2  # boards overshoot their limit for milliseconds, sensors never by more
NO_LIMIT_W = 10_000.0  # no single board draws more; a reading beyond is a glitch
REPEAT_S = 10.0  # the same trouble again within that time is no new event
_KEEP = 256  # state changes kept

OK = "ok"


def plausible_power(board: Board, power_w: float | None) -> tuple[float | None, str]:
    """Return the power if it can be true, else None; and a phrase when it was refused, "" when it was only missing."""
    if power_w is None or not math.isfinite(power_w) or power_w < 0:
        return None, ""  # -1 is how vendors spell "unavailable"
    if power_w > bound_w(board):
        return (
            None,
            f"a power reading of {power_w:.0f} W was rejected (no more than {bound_w(board):.0f} W can be true)",
        )
    return power_w, ""


def plausible_counter(energy_j: float | None) -> float | None:
    """Return the counter's value if it is one, else None."""
    if energy_j is None or not math.isfinite(energy_j) or energy_j < 0:
        return None
    return energy_j


def bound_w(board: Board) -> float:
    """The power in watts beyond which nothing this board says can be true."""
    if board.limit_w is None or not math.isfinite(board.limit_w) or board.limit_w <= 0:
        return NO_LIMIT_W
    return LIMIT_MARGIN * board.limit_w


def unwrap(board: Board, before_j: float, now_j: float, most_j: float) -> float | None:
    """Energy between two counter values; None where the step back is no wrap-around but a reset.

    Args:
        board: says where its counter wraps.
        before_j: the earlier value.
        now_j: the later value.
        most_j: the most that the board can have used in between.
    """
    if now_j >= before_j:
        return now_j - before_j
    if board.wrap_j is None or before_j > board.wrap_j:
        return None
    step = board.wrap_j - before_j + now_j
    return step if step <= most_j else None


@dataclass
class _Mark:
    begin_s: float
    end_s: float  # infinity while it lasts
    text: str  # "degraded: ..." or "lost: ..."


class StateLog:
    """What is wrong with a board now, and what was wrong when.

    Conditions have a name each, begin and end; the state of a moment or a span is the worst condition in it.
    """

    def __init__(self) -> None:
        self.events: deque[tuple[float, str]] = deque(maxlen=_KEEP)
        self._marks: deque[_Mark] = deque(maxlen=_KEEP)
        self._open: dict[str, _Mark] = {}
        self._moments: dict[str, _Mark] = {}
        self._last = OK

    @property
    def current(self) -> str:
        """The worst condition that lasts."""
        return _worst([mark.text for mark in self._open.values()])

    def begin(self, name: str, text: str, since_s: float, now_s: float) -> None:
        """A condition holds since ``since_s``; it was noticed at ``now_s``. Again while it holds: nothing happens."""
        if name in self._open:
            return
        mark = _Mark(since_s, math.inf, text)
        self._open[name] = mark
        self._marks.append(mark)
        self._changed(now_s)

    def end(self, name: str, now_s: float) -> None:
        """The condition no longer holds; nothing happens where it did not."""
        mark = self._open.pop(name, None)
        if mark is not None:
            mark.end_s = now_s
            self._changed(now_s)

    def moment(self, name: str, text: str, begin_s: float, end_s: float) -> None:
        """Something that is already over: windows that hold it are coloured by it. Repeats are one event."""
        last = self._moments.get(name)
        if last is not None and begin_s - last.end_s < REPEAT_S:
            last.end_s = end_s
            return
        mark = _Mark(begin_s, end_s, text)
        self._moments[name] = mark
        self._marks.append(mark)
        self.events.append((end_s, text))

    def holds(self, name: str) -> bool:
        """Whether the condition holds now."""
        return name in self._open

    def within(self, t0_s: float, t1_s: float) -> str:
        """The worst state in a span."""
        past = [mark.text for mark in self._marks if mark.begin_s < t1_s and mark.end_s > t0_s]
        lasting = [mark.text for mark in self._open.values() if mark.begin_s < t1_s]
        return _worst(past + lasting)

    def _changed(self, now_s: float) -> None:
        state = self.current
        if state != self._last:
            self._last = state
            self.events.append((now_s, state))


def _worst(texts: list[str]) -> str:
    lost = [text for text in texts if text.startswith("lost")]
    return lost[-1] if lost else texts[-1] if texts else OK
