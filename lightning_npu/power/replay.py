"""A recorded power trace in the place of sensors."""

from __future__ import annotations

import bisect
import math
import threading
import time
from pathlib import Path
from typing import ClassVar

from lightning_npu.errors import InputError, PowerUnavailableError
from lightning_npu.power.base import Board, PowerSource, Reading, SourceRecipe
from lightning_npu.power.host import host_id
from lightning_npu.power.trace_file import Trace, TraceRow, read_trace


class ReplaySource(PowerSource):
    """Plays a recorded trace against the clock: its boards, kinds and readings, as if they were here and now.

    Each board says at every moment what its last recorded reading was, as a sensor does between two updates. What was
    measured was measured elsewhere, so the boards are marked: their keys and names say "replayed", and
    ``Board.simulated`` is set.

    Args:
        trace: a file that ``trace_file.write_trace`` wrote, or a :class:`~lightning_npu.power.trace_file.Trace`.
        offset_s: where in the trace to begin, in seconds after its first reading.
        start_s: the moment of ``time.monotonic()`` at which it begins; None: the first call of :meth:`boards`.
        loop: begin again at the end, the counters counting on; otherwise the boards are lost there.

    Raises:
        InputError: an offset that is negative, not finite or beyond the trace's end, or a trace without duration that
            should loop.
    """

    name: ClassVar[str] = "replay"

    def __init__(
        self, trace: str | Path | Trace, *, offset_s: float = 0.0, start_s: float | None = None, loop: bool = False
    ) -> None:
        self._path = None if isinstance(trace, Trace) else Path(trace)
        self._trace = trace if isinstance(trace, Trace) else None
        if not (math.isfinite(offset_s) and offset_s >= 0):
            raise InputError("offset_s is wrong.", expected="a finite number of seconds from 0 on", got=offset_s)
        self._offset_s, self._start_s, self._loop = offset_s, start_s, loop
        self._lock = threading.Lock()
        self._recorded: dict[str, _Recorded] = {}
        self._boards: tuple[Board, ...] | None = None
        if self._trace is not None:
            self._check(self._trace)

    @classmethod
    def available(cls) -> str:
        """Always; it needs a recorded trace."""
        return "ok: plays a recorded trace; made in code by ReplaySource(path)"

    def boards(self) -> tuple[Board, ...]:
        """The boards of the trace; the first call begins to play it.

        Raises:
            PowerUnavailableError: the file is not there or no power trace.
        """
        with self._lock:
            if self._boards is None:
                trace = self._load()
                boards = {key: _board(key, kind, trace) for key, kind in trace.boards.items()}
                self._recorded = {
                    board.key: _Recorded(trace.of(key), trace.rows[0].t_s, trace.rows[-1].t_s)
                    for key, board in boards.items()
                }
                self._boards = tuple(boards.values())
                if self._start_s is None:
                    self._start_s = time.monotonic()
            return self._boards

    def read(self, board: Board, *, power: bool = True) -> Reading:
        """The last reading that was recorded before this moment of the trace."""
        self.boards()
        assert self._start_s is not None
        now = time.monotonic()
        return self._recorded[board.key].at(now, now - self._start_s + self._offset_s, power=power, loop=self._loop)

    def recipe(self) -> SourceRecipe | None:
        """The same file from the same moment on; None for a trace that is in no file."""
        if self._path is None:
            return None
        self.boards()
        options = {"offset_s": self._offset_s, "start_s": self._start_s, "loop": self._loop}
        return SourceRecipe(f"{__name__}:ReplaySource", {"trace": str(self._path.absolute()), **options})

    def _load(self) -> Trace:
        if self._trace is None:
            assert self._path is not None
            try:
                trace = read_trace(self._path)
                self._check(trace)
            except InputError as error:
                raise PowerUnavailableError(
                    error.what, expected=error.expected, got=error.got, remedy=error.remedy
                ) from error
            self._trace = trace
        return self._trace

    def _check(self, trace: Trace) -> None:
        length_s = trace.rows[-1].t_s - trace.rows[0].t_s
        if self._offset_s > length_s:
            raise InputError(
                "offset_s lies beyond the trace's end.", expected=f"at most {length_s:g} s", got=f"{self._offset_s:g} s"
            )
        if self._loop and length_s == 0:
            raise InputError("A trace that loops needs a duration.", expected="readings at two moments", got="one")


class _Recorded:
    """One board's readings, looked up by the seconds that have been played."""

    def __init__(self, rows: tuple[TraceRow, ...], begin_s: float, end_s: float) -> None:
        self._rows = rows
        self._times = [row.t_s for row in rows]
        self._begin_s, self._length_s = begin_s, end_s - begin_s
        energies = [row.energy_j for row in rows if row.energy_j is not None]
        self._per_round_j = energies[-1] - energies[0] if energies else 0.0
        self._powers = any(row.power_w is not None for row in rows)
        self._counts = bool(energies)

    def at(self, now_s: float, played_s: float, *, power: bool, loop: bool) -> Reading:
        rounds = 0
        if loop and played_s >= 0:
            rounds, played_s = int(played_s // self._length_s), played_s % self._length_s
        elif played_s > self._length_s:
            return Reading(now_s, problem="the recorded trace has ended", lost=True)
        index = bisect.bisect_right(self._times, self._begin_s + played_s) - 1
        if index < 0:
            return Reading(now_s, problem="the recorded trace has no reading yet")
        row = self._rows[index]
        energy_j = None if row.energy_j is None else row.energy_j + rounds * self._per_round_j
        missing = [
            what
            for what, wanted, value in (
                ("power", power and self._powers, row.power_w),
                ("energy counter", self._counts, energy_j),
            )
            if wanted and value is None
        ]
        problem = f"{' and '.join(missing)}: missing in the recorded trace" if missing else ""
        return Reading(now_s, row.power_w if power else None, energy_j, problem)


def _board(key: str, kind: str, trace: Trace) -> Board:
    counter = any(row.energy_j is not None for row in trace.of(key))
    return Board(f"{host_id()}/replayed:{key}", kind, f"replayed {key}", counter=counter, simulated=True)
