"""Energy of the boards that do the work, over any span of time."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning_npu.errors import InputError, one_line
from lightning_npu.power import registry
from lightning_npu.power.arguments import check_calibration, check_idle, check_sources
from lightning_npu.power.base import Board, BoardEnergy, PowerSource
from lightning_npu.power.calibration import lookup, number, unused
from lightning_npu.power.idle import Idle, measure
from lightning_npu.power.session import Session
from lightning_npu.power.windows import Window as Window

log = logging.getLogger("lightning_npu.power")
INTERVALS_S = (0.001, 60.0)
_monitors: weakref.WeakSet[EnergyMonitor] = weakref.WeakSet()
_inherited: list[Session] = []


class EnergyMonitor:
    """Measures the energy of boards: ``with EnergyMonitor() as monitor, monitor.window("epoch") as w: ...``.

    One cumulative curve per board, from its energy counter where it has one, else from integrated power; a window is a
    difference on the curves. Each source is read in a thread of its own. Boards without a counter are read by a small
    helper process, because a thread does not run while C code holds the GIL. After construction nothing raises
    because of a sensor: what is missing is told by ``problems``, and by one warning in the log.

    A fork leaves the child with a monitor that is stopped, and so do copying and pickling. It can be started again
    after ``stop()``, with new curves.

    Args:
        sources: "auto" for every registered source that has boards here; or a list of sources and of their names.
        interval_s: mean time between two readings of a board, in seconds.
        idle_power_w: what is taken off for net energy: "measure" makes :meth:`start` measure it, before the work
            begins (it blocks for 12 s); or watts of each board by its key, physical id or kind.
        calibration: by key, physical id or kind: ``{"gain": 1.02, "gain_uncertainty": 0.005, "offset_w": 0.0}``; true
            power is gain x reading + offset. Without one the gain is taken to be known to 5 %.
        process: True reads through a helper process, False through threads, "auto" through a process what has no
            counter.

    Raises:
        InputError: an argument cannot be.
    """

    def __init__(
        self,
        sources: Literal["auto"] | Sequence[PowerSource | str] = "auto",
        interval_s: float = 0.05,
        *,
        idle_power_w: Literal["measure"] | Mapping[str, float] | None = None,
        calibration: Mapping[str, Mapping[str, float]] | None = None,
        process: bool | Literal["auto"] = "auto",
    ) -> None:
        self._sources = check_sources(sources)
        self.interval_s = number("interval_s", interval_s)
        if not INTERVALS_S[0] <= self.interval_s <= INTERVALS_S[1]:
            raise InputError(
                "Boards cannot be read at that interval.",
                expected=f"interval_s from {INTERVALS_S[0]} to {INTERVALS_S[1]} seconds",
                got=interval_s,
                remedy="leave it at 0.05",
            )
        if process not in ("auto", True, False):
            raise InputError("process says nothing.", expected='"auto", True or False', got=process)
        self._process = process
        self._calibration = check_calibration(calibration)
        self._given_idle = check_idle(idle_power_w)
        self._idle: dict[str, Idle] = {}
        self._session: Session | None = None
        self._lock = threading.RLock()

    def __enter__(self) -> EnergyMonitor:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Find the boards and begin to read; returns when each was read once, or after 2 s. No effect while running."""
        with self._lock:
            if self.running:
                return
            session = Session(self, interval_s=self.interval_s, process=self._process, calibration=self._calibration)
            sources, session.problems = self._find_sources()
            session.open(sources)
            self._session = session
            _monitors.add(self)
            self._tell_what_is_missing(session)
            if isinstance(self._given_idle, Mapping):
                given = ((feed.board.key, lookup(self._given_idle, feed.board)) for feed in session.feeds)
                self._idle = {key: Idle(watts) for key, watts in given if watts is not None}
            session.idle_w.update({key: idle.power_w for key, idle in self._idle.items()})
        if self._given_idle == "measure" and not self._idle:
            self.measure_idle()

    def stop(self) -> None:
        """End open windows and all reading; figures stay. No effect when stopped."""
        with self._lock:
            if self._session is not None:
                self._session.close()

    @property
    def running(self) -> bool:
        """Whether boards are being read."""
        return self._session is not None and self._session.stopped_s is None

    @property
    def boards(self) -> tuple[Board, ...]:
        """The boards that were found at the start; () before."""
        return () if self._session is None else tuple(feed.board for feed in self._session.feeds)

    @property
    def problems(self) -> dict[str, str]:
        """Why sources have no boards here, by the source's name."""
        return {} if self._session is None else dict(self._session.problems)

    @property
    def started_s(self) -> float | None:
        """``time.monotonic()`` at the start; None before."""
        return None if self._session is None else self._session.started_s

    @property
    def started_at(self) -> float | None:
        """``time.time()`` at the start, for display: durations are never taken from it."""
        return None if self._session is None else self._session.started_at

    def window(self, name: str = "") -> Window:
        """A window that begins when it is entered by ``with``."""
        return Window(lambda: self._session if self.running else None, name)

    def begin(self, name: str = "") -> Window:
        """A window that begins now; call its ``end()``."""
        return self.window(name).begin()

    def between(self, start_s: float, end_s: float) -> dict[str, BoardEnergy]:
        """Energy of each board between two moments of ``time.monotonic()``, by key, where anything is known.

        For many short spans, within the last two minutes or after :meth:`keep_since`: no sensor is read for it.

        Args:
            start_s: begin.
            end_s: end.
        """
        return {} if self._session is None else self._session.between(start_s, end_s)

    def keep_since(self, moment_s: float) -> None:
        """Let :meth:`between` stay exact from a moment on, for half an hour at most; the last call counts."""
        if self._session is not None:
            self._session.needed_s = moment_s

    @property
    def settled_until_s(self) -> float:
        """The moment of ``time.monotonic()`` before which figures can no longer change; takes in what was read."""
        if self._session is None:
            return time.monotonic()
        self._session.drain()
        return self._session.settled_s

    @property
    def update_periods_s(self) -> dict[str, float]:
        """How often each board's sensor was seen to be renewed, in seconds, by key; unknown ones are absent."""
        feeds = () if self._session is None else self._session.feeds
        periods = {feed.board.key: feed.slowest_update_s for feed in feeds}
        return {key: period_s for key, period_s in periods.items() if period_s is not None}

    def power_w(self) -> dict[str, float | None]:
        """Newest power of each board in watts, by key; None where it is not known now."""
        session = self._session
        if session is None:
            return {}
        lost = {key for key, state in session.look().items() if state.startswith("lost")}
        return {
            feed.board.key: None if feed.board.key in lost or not self.running else feed.power_w()
            for feed in session.feeds
        }

    def health(self) -> dict[str, dict[str, Any]]:
        """How well each board is measured, by key; primitives only.

        ``state``, ``problem`` (of the last reading), ``reader`` ("thread" or "process"), ``coverage`` since the start,
        ``counter_update_s`` and ``power_update_s`` as seen, ``counter_ratio`` (counter over integrated power),
        ``readings``, ``failed``, ``method``, ``simulated``, and ``events``: the newest 256 changes of state, as seconds
        since the start and text.
        """
        session = self._session
        if session is None:
            return {}
        states, whole = session.look(), session.whole.by_board
        return {
            feed.board.key: feed.health(states[feed.board.key], whole.get(feed.board.key), session.started_s)
            for feed in session.feeds
        }

    def trace(self, limit: int = 4096) -> dict[str, list[tuple[float, float]]]:
        """Power since the start, at most ``limit`` points a board, by key: (seconds since the start, watts)."""
        session = self._session
        if session is None:
            return {}
        session.drain()
        return {
            feed.board.key: [(time_s - session.started_s, watts) for time_s, watts in feed.trace(limit)]
            for feed in session.feeds
        }

    @property
    def idle_power_w(self) -> dict[str, dict[str, Any]] | None:
        """The baseline of each board, by key; None without one.

        ``power_w``, ``spread_w``, ``seconds``, ``source`` ("given" or "measured") and ``cuda_context``: whether one
        existed, which holds a GPU in a higher state.
        """
        return {key: idle.as_dict() for key, idle in self._idle.items()} or None

    def measure_idle(self, seconds: float = 10.0, discard_s: float = 2.0) -> dict[str, dict[str, Any]] | None:
        """Take what the boards draw now as their idle power; blocks for ``discard_s + seconds``.

        Args:
            seconds: how long to measure. A sensor's noise and slow updates need 10 s or more.
            discard_s: how long to wait before, so that what ran until now dies down.

        Returns:
            :attr:`idle_power_w`. Boards that could not be read for half of the time get no baseline.
        """
        session = self._session
        if session is None or not self.running:
            log.warning("Idle power cannot be measured: the monitor is not running. Call start() before.")
            return self.idle_power_w
        time.sleep(max(discard_s, 0.0))
        self._idle.update(measure(self.window, seconds, 10 * self.interval_s))
        session.idle_w.update({key: idle.power_w for key, idle in self._idle.items()})
        return self.idle_power_w

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_lock"]
        return {**state, "_session": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def _find_sources(self) -> tuple[list[tuple[str, PowerSource]], dict[str, str]]:
        if isinstance(self._sources, str):
            found, problems = registry.auto_sources()
            return [(source.name, source) for source in found], problems
        sources: list[tuple[str, PowerSource]] = []
        problems = {}
        for entry in self._sources:
            name = entry if isinstance(entry, str) else entry.name
            count = sum(known.partition(" #")[0] == name for known in (*dict(sources), *problems))
            name = f"{name} #{count + 1}" if count else name
            try:
                sources.append((name, registry.find(entry)() if isinstance(entry, str) else entry))
            except Exception as error:  # a third party's source may fail in any way
                problems[name] = one_line(error)
        return sources, problems

    def _tell_what_is_missing(self, session: Session) -> None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in session.problems.items())
        if not session.feeds:
            log.warning(
                "No board's power can be read, so no energy is measured. %s", reasons or "There are no sources."
            )
        elif session.problems and not isinstance(self._sources, str):
            log.warning("Some power sources have no boards here, their energy is not measured. %s", reasons)
        given = self._given_idle if isinstance(self._given_idle, Mapping) else {}
        for what, mapping in (("calibration", self._calibration), ("idle_power_w", given)):
            names = unused(mapping, self.boards)
            if names and session.feeds:
                known = ", ".join(board.key for board in self.boards)
                log.warning("%s names %s, which is none of the boards: %s.", what, ", ".join(names), known)

    def _forked(self) -> None:
        """In a forked child: threads, locks, pipes and curves are the parent's, and are left alone."""
        if self._session is not None:
            _inherited.append(self._session)  # kept, since collecting it would touch the parent's process
        self._session, self._lock = None, threading.RLock()


def _stop_all() -> None:
    for monitor in list(_monitors):
        monitor.stop()


def _forked() -> None:
    for monitor in list(_monitors):
        monitor._forked()


atexit.register(_stop_all)  # a last reading, and no helper process left behind
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
