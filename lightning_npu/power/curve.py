"""The energy of one board over time, from its readings: one cumulative curve, of which every window is a difference."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_npu.errors import InputError
from lightning_npu.power.assembly import Assembly
from lightning_npu.power.base import Board, BoardEnergy, Reading
from lightning_npu.power.difference import measure


class BoardCurve:
    """One board's cumulative energy, built from readings in order of time. Not thread-safe, has no clock.

    A window's energy is the difference of the curve at its two ends, so that nested, overlapping and adjacent windows
    always add up. What lies after the last knot of the curve is extrapolated with the newest power and not settled.

    Args:
        board: the board; its limit, wrap-around and averaging time are used.
        poll_s: nominal time between readings in seconds.
        gain: relative gain error that the sensor may have. What it is known to have is corrected outside, by
            :class:`~lightning_npu.power.calibration.Calibration`.

    Raises:
        InputError: no polling interval.
    """

    def __init__(self, board: Board, *, poll_s: float, gain: float = 0.05) -> None:
        if not poll_s > 0:
            raise InputError("Readings need a nominal interval.", expected="poll_s > 0", got=poll_s)
        self.board = board
        self._gain = gain
        self._assembly = Assembly(board, poll_s)

    def add(self, reading: Reading) -> None:
        """Take a reading, polls and window edges alike, in order of time; one that is not later is ignored.

        Costs microseconds and raises nothing, whatever the reading says.
        """
        self._assembly.add(reading)

    def energy(self, t0_s: float, t1_s: float) -> BoardEnergy | None:
        """Energy between two moments, by what is known now.

        Args:
            t0_s: begin of the window, on the clock of the readings.
            t1_s: its end, not before its begin.

        Returns:
            None where nothing at all is known of that span, which is never 0 J.

        Raises:
            InputError: the window ends before it begins.
        """
        if not t0_s <= t1_s:
            raise InputError("A window ends before it begins.", expected="t0_s <= t1_s", got=f"{t0_s} and {t1_s}")
        return measure(self._assembly, t0_s, t1_s, gain=self._gain)

    @property
    def state(self) -> str:
        """What holds now: "ok", "degraded: <why>" or "lost: <why>"."""
        return self._assembly.log.current

    @property
    def events(self) -> list[tuple[float, str]]:
        """Time and text of what changed the state, the newest 256."""
        return list(self._assembly.log.events)

    @property
    def power_w(self) -> float | None:
        """Newest trusted power in watts: a reading, or the counter's slope where there are none."""
        return self._assembly.newest_w

    @property
    def settled_s(self) -> float | None:
        """The moment before which later readings change nothing; None: nothing is known yet."""
        return None if self._assembly.series is None else self._assembly.series.last_s

    @property
    def update_period_s(self) -> tuple[float | None, float | None]:
        """Update periods in seconds of the counter and of the power sensor; None: absent, constant or not resolved."""
        return self._assembly.counter.period_s, self._assembly.integral.updates.period_s

    @property
    def counter_ratio(self) -> float | None:
        """Energy by the counter over energy by power, of the last 10 s or a little more; None: not both known."""
        return self._assembly.check.ratio

    def forget(self, before_s: float, keep: Sequence[float] = ()) -> None:
        """Reduce what is kept of the time before a moment to a bounded number of points; no energy is lost.

        Args:
            before_s: windows with an edge before that moment are interpolated between coarse points there,
            keep: except for edges at these moments, such as the begins of windows that are still open.
        """
        if self._assembly.series is not None:
            self._assembly.series.thin(before_s, keep)
        self._assembly.peaks.thin(before_s)

    def trace(self, limit: int) -> list[tuple[float, float]]:
        """Mean power over the whole life, at most ``limit`` points: (middle of a span in seconds, watts).

        Spans are as long as the points are apart, or equal: powers times lengths add up to the curve's energy.
        """
        return [] if self._assembly.series is None else self._assembly.series.bins(limit)
