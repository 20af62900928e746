"""What users ask an energy monitor for: spans of time, over all of its boards."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_npu.power.base import BoardEnergy
from lightning_npu.power.sampling import Feed
from lightning_npu.power.total import combine

if TYPE_CHECKING:
    from lightning_npu.power.session import Session


class Window:
    """A span of time whose energy is asked for; made by :meth:`EnergyMonitor.window` or :meth:`EnergyMonitor.begin`.

    Windows may nest, overlap, and begin and end in different threads: each is a difference on the same curves, so
    parts add up to the whole. Figures are computed when asked for, from what is known by then; while the window is
    open they tell of the time so far. The latest readings may come a moment after a window's end: ``settled`` says
    whether figures can still change. A window is used once.

    Attributes:
        name: for the caller's use.
        started_s: ``time.monotonic()`` when it began; NaN before.
        ended_s: when it ended; None while it is open. The monitor's ``stop()`` ends the windows that are open.
    """

    def __init__(self, session: Callable[[], Session | None], name: str = "") -> None:
        self.name = name
        self.started_s = math.nan
        self.ended_s: float | None = None
        self._find_session: Callable[[], Session | None] | None = session
        self._session: Session | None = None
        self._feeds: tuple[Feed, ...] = ()
        self._final: dict[str, BoardEnergy] | None = None
        self._missing: dict[str, str] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> Window:
        return self.begin()

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self) -> Window:
        """Begin now; a window that has begun is left as it is."""
        if math.isnan(self.started_s):
            session = self._find_session() if self._find_session is not None else None
            if session is not None:
                session.edge()
            self.started_s = time.monotonic()  # after the readings: their cost is not the caller's
            if session is not None:
                self._feeds = session.feeds
                self._session = session
                session.add(self)
        return self

    def end(self) -> Window:
        """End now; a window that has ended is left as it is."""
        now_s = time.monotonic()
        if self.ended_s is None and not math.isnan(self.started_s):
            self.end_at(now_s)
            if self._session is not None:
                self._session.edge()
        return self

    def end_at(self, moment_s: float) -> None:
        """End at a moment that has passed, without readings of its own."""
        if self.ended_s is None:
            self.ended_s = max(moment_s, self.started_s)
        self._find_session = None  # an ended window does not keep its monitor running

    @property
    def duration_s(self) -> float:
        """Seconds from beginning to end, or to now; 0 before the beginning."""
        return 0.0 if math.isnan(self.started_s) else self._end_s() - self.started_s

    @property
    def by_board(self) -> dict[str, BoardEnergy]:
        """Energy of each board that could be read, by its key."""
        return self._measure()

    @property
    def missing(self) -> dict[str, str]:
        """Why the energy of the other boards is not known, by key. They are not in :attr:`energy_j`."""
        self._measure()
        return dict(self._missing)

    @property
    def by_kind(self) -> dict[str, BoardEnergy]:
        """The boards of each kind together: "gpu", "npu", "cpu"."""
        by_board = self._measure()
        kinds: dict[str, dict[str, BoardEnergy]] = {}
        for feed in self._session.feeds if self._session is not None else ():
            if feed.board.key in by_board:
                kinds.setdefault(feed.board.kind, {})[feed.board.key] = by_board[feed.board.key]
        return {kind: combine(energies) for kind, energies in sorted(kinds.items())}

    @property
    def total(self) -> BoardEnergy | None:
        """All boards together; None where none could be read."""
        by_board = self._measure()
        if not by_board:
            return None
        total = combine(by_board)
        return replace(total, coverage=0.0) if self._missing else total

    @property
    def energy_j(self) -> float | None:
        """Gross energy in joules; None, never 0, where no board could be read."""
        total = self.total
        return None if total is None else total.energy_j

    @property
    def uncertainty_j(self) -> float | None:
        """Half-width in joules of the interval that holds the true energy in 99 % of windows."""
        total = self.total
        return None if total is None else total.uncertainty_j

    @property
    def coverage(self) -> float:
        """Share of the window that fresh readings cover, of the board where it is least; a board without any: 0."""
        total = self.total
        return 0.0 if total is None else total.coverage

    @property
    def mean_power_w(self) -> float | None:
        """Gross energy over duration, in watts."""
        total = self.total
        return None if total is None or total.duration_s <= 0 else total.mean_power_w

    @property
    def net_energy_j(self) -> float | None:
        """Gross energy less idle power x duration; None if an idle power is unknown. Never clipped."""
        by_board = self._measure()
        idle_w = {} if self._session is None else self._session.idle_w
        if not by_board or not set(by_board) <= set(idle_w):
            return None
        return sum(energy.energy_j - idle_w[key] * energy.duration_s for key, energy in by_board.items())

    @property
    def settled(self) -> bool:
        """Whether the window has ended and later readings can no longer change its figures."""
        self._measure()
        return self._final is not None

    def settle(self, timeout_s: float = 5.0) -> bool:
        """Wait until the figures are settled; whether they are.

        Gives up early when only boards that are lost keep them open.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self.settled:
            session, wait_s = self._session, deadline_s - time.monotonic()
            if self.ended_s is None or session is None or session.foreign or wait_s <= 0:
                return False
            if all(feed.state.startswith("lost") for feed in self._unsettled()):
                return False
            time.sleep(min(wait_s, session.interval_s / 2))
        return True

    @property
    def edges_s(self) -> list[float]:
        """The moments at which the curves must stay exact for this window's sake."""
        return [self.started_s, *([] if self.ended_s is None else [self.ended_s])]

    def finish(self) -> None:
        """Keep the figures as they are."""
        energies = self._measure()
        with self._lock:
            self._finish(energies)

    def _end_s(self) -> float:
        return time.monotonic() if self.ended_s is None else self.ended_s

    def _unsettled(self) -> list[Feed]:
        end_s = self._end_s()
        energies = [(feed, feed.energy(self.started_s, end_s)) for feed in self._feeds]
        return [feed for feed, energy in energies if energy is None or not energy.settled]

    def _measure(self) -> dict[str, BoardEnergy]:
        session = self._session
        if self._final is not None or session is None or session.foreign:
            return dict(self._final or {})  # in a forked child the curves and their locks are the parent's
        closed = session.closed  # asked before the curves are: what comes in between is in them
        session.drain()
        with self._lock:
            if self._final is not None:
                return dict(self._final)
            end_s, settled = self._end_s(), True
            energies: dict[str, BoardEnergy] = {}
            missing: dict[str, str] = {}
            for feed in self._feeds:
                energy = feed.energy(self.started_s, end_s)
                if energy is None:
                    missing[feed.board.key] = feed.problem or "no reading falls into this window"
                    settled = settled and feed.newest_s is None
                else:
                    energies[feed.board.key] = feed.calibration.energy(energy)
                    settled = settled and energy.settled
            self._missing = missing
            if self.ended_s is not None and (settled or closed):
                self._finish(energies)
            return energies

    def _finish(self, energies: dict[str, BoardEnergy]) -> None:
        if self._final is None:
            self._final = {key: replace(energy, settled=True) for key, energy in energies.items()}
            self._feeds = ()
            if self._session is not None:
                self._session.remove(self)
