"""Rounds of readings: when each board is read, and how long one that cannot be read is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from lightning_npu.power.base import Board, PowerSource, Reading

JITTER = 0.25  # of the interval; enough where the sensor is slower than the polls
WIDE_JITTER = 0.5  # polls of a faster one: with less, a load as long as the interval is seen in one phase for seconds
TRIES = 3  # failed reads in a row before a board is left alone: one hiccup should not cost a second of readings
FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S = 0.25, 30.0
_PLAIN = (float, type(None))  # what a reading is made of, nearly always
_NOTHING: AbstractContextManager[object] = nullcontext()


def back_off_s(failures: int) -> float:
    """How long to wait after so many failures in a row: 0 s for the first few, then 0.25, 0.5, 1 .. 30 s."""
    return 0.0 if failures < TRIES else min(FIRST_BACK_OFF_S * 2.0 ** min(failures - TRIES, 10), LONGEST_BACK_OFF_S)


def find_boards(source: PowerSource) -> tuple[Board, ...]:
    """The boards of a source, checked here so that a wrong one cannot fail later, in the middle of a training.

    Raises:
        TypeError: something that is no board, or whose numbers are none.
        Exception: whatever the source raises.
    """
    boards = tuple(source.boards())
    for board in boards:
        numbers = (board.limit_w, board.wrap_j, board.averaging_s) if isinstance(board, Board) else ("",)
        if not all(value is None or isinstance(value, (int, float)) for value in numbers):
            raise TypeError(f"the source named {board!r}, which is no Board or has numbers that are none")
    return boards


def read(source: PowerSource, board: Board, *, power: bool = True) -> Reading:
    """A reading whatever the source does: what it raises, or gives in place of one, becomes the reading's problem."""
    started = time.monotonic()
    try:
        reading = source.read(board, power=power)
        if not isinstance(reading, Reading):
            raise TypeError(f"the source gave {reading!r}, which is no Reading")
        values = (reading.power_w, reading.energy_j)
        if type(reading.time_s) is float and type(values[0]) in _PLAIN and type(values[1]) in _PLAIN:
            return reading
        # numbers of NumPy and the like
        power_w, energy_j = (None if value is None else float(value) for value in values)
        return replace(reading, time_s=float(reading.time_s), power_w=power_w, energy_j=energy_j)
    except (Exception, SystemExit) as error:  # bindings were seen that end the process
        return Reading((started + time.monotonic()) / 2, problem=f"{type(error).__name__}: {error}")


class Poller:
    """Reads the boards of one source in rounds.

    Rounds come ``interval_s`` apart, each interval longer or shorter by up to a quarter at random (by up to half where
    a GPU has no counter), so that a load that repeats at the same pace is not always seen in the same phase. The
    numbers are this object's own: training's random states are left alone. A source that takes long is left in peace
    for at least as long as a round took.

    Args:
        source: what to read.
        boards: its boards that are polled here.
        interval_s: the mean time between two rounds.
        sink: called with a board's position and its reading.
        lock: held over each pair of a reading and its ``sink``, so that readings of others keep their order.
        seed: for the jitter.
    """

    def __init__(
        self,
        source: PowerSource,
        boards: Sequence[Board],
        interval_s: float,
        sink: Callable[[int, Reading], None],
        *,
        lock: AbstractContextManager[object] = _NOTHING,
        seed: int = 0,
    ) -> None:
        self._source, self._boards, self._interval_s, self._sink, self._lock = source, boards, interval_s, sink, lock
        fast_gauge = any(not board.counter and board.kind == "gpu" for board in boards)
        self._jitter = WIDE_JITTER if fast_gauge else JITTER
        self._state = (seed or time.monotonic_ns()) & 0xFFFFFFFF
        self._next_s = time.monotonic()
        self._due_s = [0.0] * len(boards)
        self.failures = [0] * len(boards)
        self.call_s = 0.0
        """How long a reading takes lately, in seconds."""

    def round(self, *, everything: bool = False) -> float:
        """Read the boards that are due.

        Args:
            everything: read those in back-off too.

        Returns:
            When the next round should start, in ``time.monotonic()``.
        """
        started = time.monotonic()
        for index, board in enumerate(self._boards):
            if self._due_s[index] <= started or everything:
                self._poll(index, board)
        ended = time.monotonic()
        self._next_s = max(self._next_s + self._interval(), ended + min(ended - started, 1.0))
        if self._due_s:
            self._next_s = max(self._next_s, min(self._due_s))
        return self._next_s

    def _poll(self, index: int, board: Board) -> None:
        with self._lock:
            started = time.monotonic()
            reading = read(self._source, board)
            took_s = time.monotonic() - started
            self._sink(index, reading)
        self.call_s += (took_s - self.call_s) * 0.2
        failed = reading.power_w is None and reading.energy_j is None
        self.failures[index] = self.failures[index] + 1 if failed else 0
        wait_s = back_off_s(self.failures[index])
        self._due_s[index] = started + wait_s if wait_s else 0.0

    def _interval(self) -> float:
        self._state = (1664525 * self._state + 1013904223) & 0xFFFFFFFF  # Numerical Recipes' generator
        return self._interval_s * (1 + self._jitter * (self._state / 2**31 - 1))
