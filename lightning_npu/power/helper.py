"""The process that samples boards without an energy counter: ``python -m lightning_npu.power.helper``.

A thread of the training process does not run while C code holds the GIL, and a board without a counter remembers
nothing of that time. This process imports the standard library and one vendor's module, reads at its own pace and
writes frames (:mod:`~lightning_npu.power.wire`) to standard output. What the pipe does not take waits here. It ends
when standard input says so or ends, or when its parent does.
"""

from __future__ import annotations

import importlib
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

    def put(self, frame: bytes) -> None:
        """Queue one frame."""
        self._frames.append(frame)

    def flush(self, patience_s: float = 0.0) -> None:
        """Write what the pipe takes within ``patience_s``.

        Raises:
            BrokenPipeError: nobody reads any more.
        """
        while self._frames:
            try:
                os.write(self._descriptor, self._frames[0])
            except BlockingIOError:
                if not select.select([], [self._descriptor], [], patience_s)[1]:
                    return
                continue
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
    encoder, last_s = Encoder(), 0.0

    def send(board: int, reading: Reading) -> None:
        nonlocal last_s
        last_s = time.monotonic()
        for frame in encoder.encode(board, reading):
            outbox.put(frame)

    poller = Poller(source, boards, order["interval_s"], send, seed=os.getpid())
    while True:
        next_s = poller.round()
        while True:
            if time.monotonic() - last_s > BEAT_S:
                last_s = time.monotonic()
                outbox.put(beat(last_s))
            outbox.flush()
            wait_s = min(next_s - time.monotonic(), BEAT_S)
            if select.select([0], [], [], max(wait_s, 0.0))[0]:  # a word from the parent, or its end
                poller.round(everything=True)
                outbox.flush(patience_s=0.5)
                return
            if os.getppid() != order["parent"]:
                return
            if time.monotonic() >= next_s:
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
