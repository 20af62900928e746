"""One life of an energy monitor, from start to stop: boards, who reads them, and the windows that are open."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence

from lightning_npu.errors import one_line
from lightning_npu.power.base import BoardEnergy, PowerSource
from lightning_npu.power.calibration import Calibration, lookup
from lightning_npu.power.curve import BoardCurve
from lightning_npu.power.polling import find_boards
from lightning_npu.power.remote import ProcessReader, why_not
from lightning_npu.power.sampling import STOP_S, Feed, Reader, ThreadReader
from lightning_npu.power.windows import Window

log = logging.getLogger("lightning_npu.power")
FIRST_S = 2.0  # start waits so long for the first readings, so that the first window is covered from its beginning
KEEP_S = 120.0  # detail is kept for so long
KEEP_MOST_S = 1800.0  # and for so long at most where the owner still needs it
FORCE_S = 600.0  # after so long what is known counts as settled: a board that is lost may never settle
STALE_S = 5.0


class Session:
    """The boards of some sources, read until :meth:`close`.

    Args:
        owner: the monitor; once it is gone, reading ends by itself.
        interval_s: mean time between two readings of a board.
        process: whether a helper process reads: True, False, or "auto" for boards without a counter.
        calibration: by key, physical id or kind.
    """

    def __init__(
        self, owner: object, *, interval_s: float, process: bool | str, calibration: Mapping[str, Calibration]
    ) -> None:
        self._owner = weakref.ref(owner)
        self._process, self._calibration = process, calibration
        self.interval_s = interval_s
        self.feeds: tuple[Feed, ...] = ()
        self.problems: dict[str, str] = {}
        self.idle_w: dict[str, float] = {}
        self.needed_s = math.inf  # detail from that moment on is needed still
        self.started_s, self.started_at = time.monotonic(), time.time()
        self.stopped_s: float | None = None
        self._stopped = False
        self._pid = os.getpid()
        self._sources: list[PowerSource] = []
        self._readers: list[Reader] = []
        self._windows: weakref.WeakSet[Window] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.whole = Window(lambda: self, "whole")

    def open(self, sources: Sequence[tuple[str, PowerSource]]) -> None:
        """Find the boards, begin to read them, and wait a moment for the first readings.

        What is missing is told by :attr:`problems`; nothing raises.
        """
        for name, source in sources:
            feeds = self._find(name, source)
            if feeds:
                self._sources.append(source)
                self.feeds += tuple(feeds)
                self._readers += self._staff(source, feeds)
        self.started_s, self.started_at = time.monotonic(), time.time()
        deadline_s = self.started_s + FIRST_S
        for reader in self._readers:
            try:
                reader.start()
            except RuntimeError as error:  # the system has no thread to give
                log.warning("Power of %s is not read: %s.", ", ".join(f.board.key for f in reader.feeds), error)
                reader.first.set()
        for reader in self._readers:
            reader.first.wait(max(deadline_s - time.monotonic(), 0.0))
        self.drain()
        self.whole.begin()

    def close(self) -> None:
        """End the windows that are open and all reading, with a last reading after those ends; idempotent."""
        with self._lock:
            if self.stopped_s is not None or self.foreign:
                return
            self.stopped_s = time.monotonic()
        for window in self._list():
            window.end_at(self.stopped_s)
        for reader in self._readers:
            reader.stop()
        deadline_s = time.monotonic() + STOP_S
        hanging = [reader for reader in self._readers if not reader.join(deadline_s)]
        self._stopped = True
        for source in self._sources:
            if any(reader.source is source for reader in hanging):
                log.warning("A call to the power source %s hangs; its thread is left to itself.", source.name)
                continue
            try:
                source.close()
            except Exception:
                log.debug("The power source %s could not be closed.", source.name, exc_info=True)

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child: threads, locks and pipes are the parent's."""
        return os.getpid() != self._pid

    @property
    def closed(self) -> bool:
        """Whether no reading can come any more."""
        return self._stopped or all(reader.ended for reader in self._readers)

    def edge(self) -> None:
        """Read the counters now."""
        if self.stopped_s is None and not self.foreign:
            for reader in self._readers:
                reader.edge()

    def between(self, start_s: float, end_s: float) -> dict[str, BoardEnergy]:
        """Energy of each board between two moments that are not long past, where anything is known."""
        if self.foreign:
            return {}
        energies = {feed: feed.energy(start_s, end_s) for feed in self.feeds}
        return {
            feed.board.key: feed.calibration.energy(energy) for feed, energy in energies.items() if energy is not None
        }

    @property
    def settled_s(self) -> float:
        """The moment before which later readings of no board change anything."""
        now_s = time.monotonic()
        known = [feed.settled_s for feed in self.feeds]
        return min((moment_s for moment_s in known if moment_s is not None), default=now_s)

    def drain(self) -> None:
        """Take what was read so far into the curves."""
        for reader in self._readers:
            reader.drain()

    def add(self, window: Window) -> None:
        """Keep what ``window`` needs."""
        with self._lock:
            self._windows.add(window)

    def remove(self, window: Window) -> None:
        """``window`` is final."""
        with self._lock:
            self._windows.discard(window)

    def reader(self, kind: type[Reader]) -> list[Reader]:
        """The readers of a kind."""
        return [reader for reader in self._readers if isinstance(reader, kind)]

    def keep_up(self, feeds: Sequence[Feed]) -> bool:
        """Drop what no window needs of these boards' curves; whether anybody still wants readings."""
        now_s = time.monotonic()
        windows = self._list()
        for window in windows:
            if window.ended_s is not None and now_s - window.ended_s > FORCE_S:
                window.finish()
        keep = sorted({moment_s for window in windows for moment_s in window.edges_s})
        for feed in feeds:
            feed.forget(max(min(now_s - KEEP_S, self.needed_s), now_s - KEEP_MOST_S), keep)
        return self._owner() is not None

    def look(self) -> dict[str, str]:
        """The boards' states by key, boards that have fallen silent included."""
        self.drain()
        if self.stopped_s is not None:
            return {feed.board.key: feed.state for feed in self.feeds}
        return {feed.board.key: feed.look(max(STALE_S, 20 * self.interval_s)) for feed in self.feeds}

    def _list(self) -> list[Window]:
        with self._lock:
            return list(self._windows)

    def _find(self, name: str, source: PowerSource) -> list[Feed]:
        try:
            boards = find_boards(source)
        except Exception as error:
            self.problems[name] = one_line(error)
            return []
        if not boards:
            self.problems[name] = "it has no boards"
        known = {feed.board.key for feed in self.feeds}
        twice = [board.key for board in boards if board.key in known]
        if twice:
            self.problems[name] = f"{', '.join(twice)} is read through another source already"
        feeds = []
        for board in boards:
            if board.key not in known:
                calibration = lookup(self._calibration, board) or Calibration()
                curve = BoardCurve(board, poll_s=self.interval_s, gain=calibration.gain_uncertainty)
                feeds.append(Feed(board, curve, calibration))
        return feeds

    def _staff(self, source: PowerSource, feeds: list[Feed]) -> list[Reader]:
        """Who reads what: counters do not suffer from a thread that is held up, other sensors do."""
        apart = [
            feed for feed in feeds if self._process is True or (self._process == "auto" and not feed.board.counter)
        ]
        reason = why_not(source) if apart else ""
        if reason:
            log.info("A thread reads %s: %s.", ", ".join(feed.board.key for feed in apart), reason)
            apart = []
        here = [feed for feed in feeds if feed not in apart]
        readers: list[Reader] = []
        if apart:
            readers.append(ProcessReader(source, apart, self.interval_s, self.keep_up))
        if here:
            readers.append(ThreadReader(source, here, self.interval_s, self.keep_up))
        return readers
