"""The process that samples boards without an energy counter: ``python -m lightning_npu.power.helper``.

A thread of the training process does not run while C code holds the GIL, and a board without a counter remembers
nothing of that time. This process imports the standard library and one vendor's module, reads at its own pace and
writes frames (:mod:`~lightning_npu.power.wire`) to standard output. What the pipe does not take waits here. It ends
when standard input says so or ends, or when its parent does.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import select
import signal
import sys
import time
from collections import deque
from typing import Any

from lightning_npu.power.base import Board, PowerSource, Reading
from lightning_npu.power.polling import Poller
from lightning_npu.power.wire import HELPER, Encoder, beat, text

BACKLOG = 1 << 16  # frames; nearly an hour of one board at the default rate, besides what the pipe holds
BEAT_S = 1.0
FLUSH_S = 0.2  # readings wait so long before they are written: code is costly when it is cold
FRAMES = 64  # in one write
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP")
_PR_SET_PDEATHSIG = 1


class Outbox:
    """Frames on their way to the parent, in order; the oldest are lost when there are too many.

    Args:
        descriptor: a pipe; made non-blocking.
        longest: how many frames wait at most.
    """

    def __init__(self, descriptor: int, longest: int = BACKLOG) -> None:
        self._descriptor = descriptor
        self._frames: deque[bytes] = deque(maxlen=longest)
        os.set_blocking(descriptor, False)

    @property
    def blocked(self) -> list[int]:
        """What to wait for until more can be written; nothing where nothing waits."""
        return [self._descriptor] if self._frames else []

    def put(self, frame: bytes) -> None:
        """Queue one frame."""
        self._frames.append(frame)

    def flush(self, patience_s: float = 0.0) -> None:
        """Write what the pipe takes within ``patience_s``.

        Raises:
            BrokenPipeError: nobody reads any more.
        """
        while self._frames:
            together = [*itertools.islice(self._frames, FRAMES)]
            if sum(map(len, together)) > select.PIPE_BUF:  # more than that may be cut
                together = together[:1]
            try:
                os.write(self._descriptor, b"".join(together))
            except BlockingIOError:
                if not select.select([], [self._descriptor], [], patience_s)[1]:
                    return
                continue
            for _ in together:
                self._frames.popleft()


def make(recipe: dict[str, Any]) -> PowerSource:
    """The source that a recipe describes.

    Raises:
        Exception: whatever importing or making it raises.
    """
    module, _, name = recipe["factory"].partition(":")
    source: PowerSource = getattr(importlib.import_module(module), name)(**recipe["options"])
    return source


def main() -> int:
    """Read the order from standard input, then sample until told to stop."""
    for name in _IGNORED:  # they are meant for the training process, which ends this one when it is done
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    order = json.loads(_line())
    _end_with_parent()
    outbox = Outbox(_take(1))
    try:
        source = make(order["recipe"])
        known = {board.key: board for board in source.boards()}
        boards = [known[key] for key in order["boards"]]
        os.close(_take(2))  # opening the library may have left words there that matter; what it prints later does not
        _sample(source, boards, order, outbox)
        source.close()
    except BrokenPipeError:
        return 0
    except Exception as error:
        outbox.put(text(HELPER, f"{type(error).__name__}: {error}"))
        outbox.flush(patience_s=0.5)
        return 3
    return 0


def _sample(source: PowerSource, boards: list[Board], order: dict[str, Any], outbox: Outbox) -> None:
    encoder, taken = Encoder(), list[tuple[int, Reading]]()

    def send(patience_s: float = 0.0) -> None:
        for board, reading in taken:
            for frame in encoder.encode(board, reading):
                outbox.put(frame)
        taken.clear()
        outbox.flush(patience_s)

    poller = Poller(source, boards, order["interval_s"], lambda *reading: taken.append(reading), seed=os.getpid())
    beat_s, sent_s = time.monotonic(), 0.0
    while True:
        next_s = poller.round()
        while True:
            now_s = time.monotonic()
            if now_s - sent_s > FLUSH_S:
                sent_s = now_s
                send()
            if now_s - beat_s > BEAT_S:
                beat_s = now_s
                outbox.put(beat(now_s))
                outbox.flush()
                if os.getppid() != order["parent"]:
                    return
            wait_s = next_s - now_s
            told, free, _ = select.select([0], outbox.blocked, [], min(max(wait_s, 0.0), BEAT_S))
            if told:  # a word from the parent, or its end
                poller.round(everything=True)
                send(patience_s=0.5)
                return
            if free:
                outbox.flush()
            elif wait_s <= BEAT_S:
                break


def _line() -> bytes:
    line = b""
    while b"\n" not in line:
        part = os.read(0, 4096)
        if not part:
            raise SystemExit(0)  # the parent died before it said what to do
        line += part
    return line


def _take(descriptor: int) -> int:
    """A copy of ``descriptor``; what libraries print there from now on goes nowhere."""
    copy = os.dup(descriptor)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return copy


def _end_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, even while a driver call hangs."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
