"""Boards that are read by a helper process, which goes on while C code in this one holds the GIL."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import lightning_npu
from lightning_npu.power.base import PowerSource, Reading, SourceRecipe
from lightning_npu.power.polling import LONGEST_BACK_OFF_S, read
from lightning_npu.power.sampling import EDGE_CALL_S, Feed, ThreadReader
from lightning_npu.power.wire import Decoder

log = logging.getLogger("lightning_npu.power")
MODULE = "lightning_npu.power.helper"
PIPE_BYTES = 1 << 20  # 32768 readings, if the system allows it
CHUNK_BYTES = 1 << 16
DRAIN_S = 1.0
SILENCE_S = 10.0  # a helper says something every second; after this long without a word it hangs in a driver call
LONG_LIFE_S = 60.0
END_S = 1.0


def why_not(source: PowerSource) -> str:
    """Why no helper process can read ``source``; empty when one can."""
    try:
        recipe = source.recipe()
    except Exception as error:  # a third party's source may fail in any way
        return f"its recipe cannot be made: {error!r}"
    if os.name != "posix":
        return "helper processes need POSIX pipes"
    if not sys.executable or getattr(sys, "frozen", False):
        return "there is no Python interpreter that a helper process could run"
    if recipe is None:
        return f"a {source.name} source can be read in this process only"
    if recipe.factory.partition(":")[0] == "__main__":
        return "its class is defined in the main script, which a helper process must not run again"
    try:
        json.dumps(recipe.options)
    except (TypeError, ValueError) as error:
        return f"its options are not JSON: {error}"
    return ""


class Helper:
    """A running helper process. Its parent is the thread that makes it, which must outlive it.

    Args:
        recipe: the source to read.
        boards: keys of the boards to read.
        interval_s: mean time between two readings of a board.

    Raises:
        OSError: no process could be started.
    """

    def __init__(self, recipe: SourceRecipe, boards: Sequence[str], interval_s: float) -> None:
        self.started_s = time.monotonic()
        self.readings = 0
        self._decoder = Decoder()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,  # Ctrl-C goes to the whole foreground group
                env=_environment(),
            )
        except BaseException:
            self._errors.close()
            raise
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._ended, self._spoke = select.poll(), select.poll()
        self._ended.register(self._stdout, 0)  # hang-up only
        self._spoke.register(self._stdout, select.POLLIN)
        os.set_blocking(self._stdout.fileno(), False)
        _widen(self._stdout.fileno())
        order = {"recipe": asdict(recipe), "boards": list(boards), "interval_s": interval_s, "parent": os.getpid()}
        self._tell(json.dumps(order).encode() + b"\n")

    def receive(self) -> list[tuple[int, Reading]]:
        """What has come since the last call: positions of boards and their readings."""
        readings: list[tuple[int, Reading]] = []
        while chunk := self._stdout.read(CHUNK_BYTES):
            readings.extend(self._decoder.decode(chunk))
        self.readings += len(readings)
        return readings

    def wait(self, seconds: float) -> bool:
        """Wait until the process has closed its pipe, or so long; whether it has."""
        waiting = self._ended if self.readings else self._spoke  # the first readings are waited for
        hung_up = any(event & (select.POLLHUP | select.POLLERR) for _, event in waiting.poll(seconds * 1000))
        return hung_up or self.process.poll() is not None

    def silent_s(self) -> float:
        """Seconds since the newest sign of life that was received."""
        return time.monotonic() - max(self._decoder.newest_s, self.started_s)

    def finish(self) -> None:
        """Tell the process to read once more and to end."""
        self._tell(b"q")
        self._stdin.close()

    def close(self) -> str:
        """Reap the process, killed if need be, and release the pipes; says how it ended."""
        for patience_s in (0.5, END_S):  # one that has closed its pipe is about to end by itself
            try:
                self.process.wait(patience_s)
                break
            except subprocess.TimeoutExpired:
                self.process.kill()
        else:
            log.warning("Process %d hangs in a driver call and cannot be ended.", self.process.pid)
        self._errors.seek(0)
        words = self._errors.read()[-2000:].decode(errors="replace").strip().splitlines()
        for file in (self._stdin, self._stdout, self._errors):
            file.close()
        code = self.process.returncode
        ending = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return self._decoder.complaint or (f"{ending}: {words[-1]}" if words else ending)

    def _tell(self, words: bytes) -> None:
        with contextlib.suppress(OSError):  # it is dead already: its pipe says so
            self._stdin.write(words)


class ProcessReader(ThreadReader):
    """Reads through a helper process; through a thread while there is none.

    A helper that dies is started anew: at once, then after 1, 2, 4 .. 30 s if it goes on dying. One that never came
    to read is not tried again.
    """

    kind = "process"

    def __init__(
        self, source: PowerSource, feeds: Sequence[Feed], interval_s: float, upkeep: Callable[[Sequence[Feed]], bool]
    ) -> None:
        super().__init__(source, feeds, interval_s, upkeep)
        self._pipe = threading.Lock()
        self._helper: Helper | None = None
        self._edge_s = 0.0  # how long a reading at an edge takes lately
        self._edges: list[deque[Reading]] = [deque() for _ in self.feeds]

    @property
    def pid(self) -> int | None:
        """The helper's process id; None while there is none."""
        helper = self._helper
        return None if helper is None else helper.process.pid

    @property
    def helper_readings(self) -> int:
        """How many readings have come from the present helper."""
        helper = self._helper
        return 0 if helper is None else helper.readings

    def run(self) -> None:
        """Keep a helper alive until stopped."""
        recipe = self.source.recipe()
        assert recipe is not None
        deaths = 0
        while not self.stopping.is_set():
            try:
                helper = Helper(recipe, [feed.board.key for feed in self.feeds], self.interval_s)
            except OSError as error:
                self._go_on_without(f"none could be started ({error})", float("inf"))
                break
            self._follow(helper)
            how = helper.close()
            if self.stopping.is_set():
                return
            if not helper.readings:
                self._go_on_without(how, float("inf"))
                break
            deaths = deaths + 1 if time.monotonic() - helper.started_s < LONG_LIFE_S else 1
            self._go_on_without(how, 0.0 if deaths == 1 else min(2.0 ** min(deaths - 2, 10), LONGEST_BACK_OFF_S))
        self.last_round()

    def stop(self) -> None:
        """See :meth:`Reader.stop`; the helper's end wakes the thread that waits for it."""
        super().stop()
        with self._pipe:
            if self._helper is not None:
                self._helper.finish()

    def edge(self) -> None:
        """Read the counters now; they wait until the helper's readings have caught up with them."""
        if self._helper is None:
            super().edge()
            return
        for index, feed in enumerate(self.feeds):
            if feed.board.counter and self._edge_s <= EDGE_CALL_S:
                started_s = time.monotonic()
                self._edges[index].append(read(self.source, feed.board, power=False))
                self._edge_s = time.monotonic() - started_s

    def drain(self) -> None:
        """Take what was read here, and what has come through the pipe, into the curves."""
        super().drain()
        with self._pipe:
            if self._helper is not None:
                self._take_all(self._helper.receive())

    def _follow(self, helper: Helper) -> None:
        with self._pipe:
            self._helper = helper
            if self.stopping.is_set():
                helper.finish()
        deadline_s = float("inf")
        while time.monotonic() < deadline_s:
            ended = helper.wait(DRAIN_S)
            self.drain()
            if helper.readings:
                self.first.set()
            self.keep_up()
            if ended or helper.silent_s() > SILENCE_S:
                break
            if self.stopping.is_set():
                deadline_s = min(deadline_s, time.monotonic() + END_S)
        self.drain()
        with self._pipe:
            self._helper = None
            self._flush_edges()

    def _go_on_without(self, how: str, seconds: float) -> None:
        then = "for good" if seconds == float("inf") else f"for {seconds:.0f} s"
        what = f"a thread reads {then}" if seconds else "it is started anew"
        names = ", ".join(feed.board.key for feed in self.feeds)
        log.warning("The process that reads the power of %s ended: %s; %s.", names, how, what)
        if seconds:
            self._label("thread")
            self.poll(time.monotonic() + seconds)
            self._label("process")

    def _label(self, kind: str) -> None:
        for feed in self.feeds:
            feed.reader = kind

    def _take_all(self, received: list[tuple[int, Reading]]) -> None:
        by_feed: dict[int, list[Reading]] = {}
        for index, reading in received:
            edges, readings = self._edges[index], by_feed.setdefault(index, [])
            while edges and edges[0].time_s <= reading.time_s:
                readings.append(edges.popleft())
            readings.append(reading)
        for index, readings in by_feed.items():
            self.feeds[index].add(readings)

    def _flush_edges(self) -> None:
        for edges, feed in zip(self._edges, self.feeds, strict=True):
            feed.add(edges)
            edges.clear()


def _environment() -> dict[str, str]:
    """This process's environment, with its own import path: the helper finds what was importable here."""
    root = str(Path(lightning_npu.__file__).resolve().parent.parent)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [root, *filter(None, given), *(entry or str(Path.cwd()) for entry in sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "PYTHONSAFEPATH": "1"}


def _widen(pipe: int) -> None:
    """Let the pipe hold minutes of readings, where the system does."""
    import fcntl

    try:
        fcntl.fcntl(pipe, getattr(fcntl, "F_SETPIPE_SZ", 1031), PIPE_BYTES)
    except OSError:
        log.debug("The pipe from the helper process keeps its size; what it does not take waits in the helper.")
