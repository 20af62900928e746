"""Who reads the boards of a source: a thread of this process, or (:mod:`~lightning_npu.power.remote`) another one."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from lightning_npu.power.base import Board, BoardEnergy, PowerSource, Reading
from lightning_npu.power.calibration import Calibration
from lightning_npu.power.curve import BoardCurve
from lightning_npu.power.polling import Poller, read

log = logging.getLogger("lightning_npu.power")
THREAD_NAME = "lightning_npu.power"
EDGE_CALL_S = 0.005  # a source that takes longer per call is not read at window edges: training would wait for it
EDGE_WAIT_S = 0.002
UPKEEP_S = 5.0
DIGEST_S = 1.0  # readings wait so long before they go into the curves, if nobody asks: code is costly when it is cold
STOP_S = 3.0


class Feed:
    """One board's way from readings to its curve; safe to use from several threads.

    Args:
        board: the board.
        curve: what its readings go into.
        calibration: how they become true power; applied by who asks, the curve is in the sensor's own units.
    """

    def __init__(self, board: Board, curve: BoardCurve, calibration: Calibration) -> None:
        self.board, self._curve, self.calibration = board, curve, calibration
        self._lock = threading.Lock()
        self._said = "ok"
        self.reader = ""
        self.problem = ""
        self.readings = self.failed = self.late = 0
        self.newest_s: float | None = None
        """Time of the newest reading that said anything."""
        self._last_s = float("-inf")

    def add(self, readings: Iterable[Reading]) -> None:
        """Take readings; those that come out of order are left out, since what follows them is already counted."""
        with self._lock:
            for reading in readings:
                if reading.time_s < self._last_s:
                    self.late += 1
                    continue
                self._last_s, self.problem = reading.time_s, reading.problem
                if reading.power_w is None and reading.energy_j is None:
                    self.failed += 1
                else:
                    self.readings, self.newest_s = self.readings + 1, reading.time_s
                self._curve.add(reading)
            state = self._curve.state
        self._say(state)

    def energy(self, t0_s: float, t1_s: float) -> BoardEnergy | None:
        """See :meth:`BoardCurve.energy`."""
        with self._lock:
            return self._curve.energy(t0_s, t1_s)

    def look(self, stale_s: float) -> str:
        """The board's state: the curve's, or "lost: ..." where nothing has come for ``stale_s`` seconds."""
        with self._lock:
            state, newest_s = self._curve.state, self.newest_s
        if newest_s is None:
            state = f"lost: never read{f' ({self.problem})' if self.problem else ''}"
        elif not state.startswith("lost") and time.monotonic() - newest_s > stale_s:
            state = f"lost: nothing has come for more than {stale_s:.3g} s"
        self._say(state)
        return state

    def forget(self, before_s: float, keep: Sequence[float]) -> None:
        """See :meth:`BoardCurve.forget`."""
        with self._lock:
            self._curve.forget(before_s, keep)

    @property
    def settled_s(self) -> float | None:
        """See :meth:`BoardCurve.settled_s`; None too while the board is lost: nothing comes that could change it."""
        with self._lock:
            return None if self._curve.state.startswith("lost") else self._curve.settled_s

    @property
    def slowest_update_s(self) -> float | None:
        """Update period of the sensor that lays the curve, in seconds; None: not known, or too short to be seen."""
        with self._lock:
            counter_s, power_s = self._curve.update_period_s
        return counter_s if self.board.counter else power_s

    @property
    def state(self) -> str:
        """The curve's state, as of the last reading."""
        with self._lock:
            return self._curve.state

    def power_w(self) -> float | None:
        """Newest trusted power in watts, corrected."""
        with self._lock:
            power_w = self._curve.power_w
        return None if power_w is None else self.calibration.power_w(power_w)

    def trace(self, limit: int) -> list[tuple[float, float]]:
        """See :meth:`BoardCurve.trace`; corrected."""
        with self._lock:
            points = self._curve.trace(limit)
        return [(time_s, self.calibration.power_w(watts)) for time_s, watts in points]

    def health(self, state: str, since_start: BoardEnergy | None, started_s: float) -> dict[str, Any]:
        """How well the board is measured; primitives only."""
        with self._lock:
            events = self._curve.events
            counter_s, power_s = self._curve.update_period_s
            ratio = self._curve.counter_ratio
        return {
            "name": self.board.name,
            "kind": self.board.kind,
            "simulated": self.board.simulated,
            "reader": self.reader,
            "state": state,
            "problem": self.problem,
            "coverage": 0.0 if since_start is None else since_start.coverage,
            "method": None if since_start is None else since_start.method,
            "counter_update_s": counter_s,
            "power_update_s": power_s,
            "counter_ratio": ratio,
            "readings": self.readings,
            "failed": self.failed,
            "events": [[time_s - started_s, text] for time_s, text in events],
        }

    def _say(self, state: str) -> None:
        if state == self._said:
            return
        self._said = state
        level = logging.INFO if state == "ok" else logging.WARNING
        log.log(level, "Power of %s (%s): %s", self.board.key, self.board.name, state)


class Reader(ABC):
    """Reads some boards of one source until it is stopped.

    Args:
        source: an open source.
        feeds: its boards that are read here.
        interval_s: mean time between two readings of a board.
        upkeep: called now and then, so that memory stays bounded; says whether the readings are still wanted.
    """

    kind: ClassVar[str]

    def __init__(
        self, source: PowerSource, feeds: Sequence[Feed], interval_s: float, upkeep: Callable[[Sequence[Feed]], bool]
    ) -> None:
        self.source, self.feeds, self.interval_s, self._upkeep = source, tuple(feeds), interval_s, upkeep
        self.stopping = threading.Event()
        self.first = threading.Event()
        """Set once every board was tried."""
        self._thread = threading.Thread(target=self._guarded, name=f"{THREAD_NAME} {source.name}", daemon=True)
        self._kept_s = time.monotonic()
        for feed in self.feeds:
            feed.reader = self.kind

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Ask for a last reading and the end; returns at once."""
        self.stopping.set()

    @property
    def ended(self) -> bool:
        """Whether no reading comes from here any more; also before the start."""
        return not self._thread.is_alive()

    def join(self, until_s: float) -> bool:
        """Wait until ``until_s`` (``time.monotonic()``) for the end; whether it came."""
        if not self.ended:
            self._thread.join(max(until_s - time.monotonic(), 0.0))
        return self.ended

    @abstractmethod
    def edge(self) -> None:
        """Read the counters now, in the caller's thread, where that is cheap."""

    @abstractmethod
    def drain(self) -> None:
        """Take what was read so far into the curves; does not wait for more."""

    @abstractmethod
    def run(self) -> None:
        """What the reader's thread does."""

    def keep_up(self) -> None:
        """Let the session drop what nobody needs any more, now and then; stop if nobody needs anything."""
        if time.monotonic() - self._kept_s > UPKEEP_S:
            self._kept_s = time.monotonic()
            if not self._upkeep(self.feeds):
                self.stopping.set()

    def _guarded(self) -> None:
        try:
            self.run()
        except Exception:  # a fault of ours must not end training; the boards' coverage tells of it from here on
            log.exception("Power of %s is not read any more.", ", ".join(feed.board.key for feed in self.feeds))
        finally:
            self.first.set()


class ThreadReader(Reader):
    """Reads in a thread of this process, and counters at the edges of windows in the thread that asks."""

    kind = "thread"

    def __init__(
        self, source: PowerSource, feeds: Sequence[Feed], interval_s: float, upkeep: Callable[[Sequence[Feed]], bool]
    ) -> None:
        super().__init__(source, feeds, interval_s, upkeep)
        self._lock, self._digesting = threading.Lock(), threading.Lock()
        self._taken: deque[tuple[int, Reading]] = deque()
        boards = [feed.board for feed in self.feeds]
        self._poller = Poller(source, boards, interval_s, self._take, lock=self._lock)
        self._bell = threading.Lock()  # waiting for a lock costs half of what waiting for an event does
        self._bell.acquire()

    def _take(self, index: int, reading: Reading) -> None:
        self._taken.append((index, reading))

    def run(self) -> None:
        """Poll until stopped, then once more."""
        self.poll(float("inf"))
        self.last_round()

    def last_round(self) -> None:
        """Read every board once more."""
        self._poller.round(everything=True)
        self.drain()

    def poll(self, until_s: float) -> None:
        """Poll until that moment, or until stopped."""
        digested_s = float("-inf")
        while not self.stopping.is_set() and (now_s := time.monotonic()) < until_s:
            next_s = min(self._poller.round(), until_s)
            if now_s - digested_s > DIGEST_S:
                digested_s = now_s
                self.drain()
                self.first.set()
                self.keep_up()
            self._bell.acquire(timeout=max(next_s - time.monotonic(), 0.0))

    def stop(self) -> None:
        """See :meth:`Reader.stop`."""
        super().stop()
        with contextlib.suppress(RuntimeError):  # it has rung before
            self._bell.release()

    def edge(self) -> None:
        """Read the counters now, unless a call to the source takes long or hangs."""
        if self._poller.call_s > EDGE_CALL_S or not self._lock.acquire(timeout=EDGE_WAIT_S):
            return
        try:
            for index, feed in enumerate(self.feeds):
                if feed.board.counter and not self._poller.failures[index]:
                    self._take(index, read(self.source, feed.board, power=False))
        finally:
            self._lock.release()

    def drain(self) -> None:
        """Take what was read into the curves."""
        with self._digesting:
            readings: list[list[Reading]] = [[] for _ in self.feeds]
            for _ in range(len(self._taken)):
                index, reading = self._taken.popleft()
                readings[index].append(reading)
            for feed, part in zip(self.feeds, readings, strict=True):
                if part:
                    feed.add(part)
