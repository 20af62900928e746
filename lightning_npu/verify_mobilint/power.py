"""What the board's sensors do: how often power is renewed, what utilisation counts, idle against load."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from lightning_npu.errors import PowerUnavailableError
from lightning_npu.power.driver import Failure
from lightning_npu.power.mobilint import MobilintSource
from lightning_npu.power.mobilint_library import TARGETS, library
from lightning_npu.verify_mobilint.bench import Bench, Result, images, rate

_POLL_S = 0.02
_IDLE_SHARE = 0.5
_LEAST_S = 10.0  # about ten renewals, if there is one a second
_SETTLE_S = 2.0  # past the sensor's own window


def sensors(bench: Bench) -> Result:
    """Poll power and utilisation while the board idles and while it computes."""
    source = MobilintSource([bench.number])
    try:
        (board,) = source.boards()
        code = next((code for code, name in TARGETS.items() if board.name.endswith(name)), 0)
        arguments = (code, bench.number) if library.typed else (bench.number,)
        seconds = max(_LEAST_S, 2 * bench.seconds)
        idle = _poll(source, board, seconds * _IDLE_SHARE)
        idle_use = _utilization(arguments)
        with bench.launched() as model, _load(model, seconds):
            time.sleep(_SETTLE_S)
            busy = _poll(source, board, seconds)
            busy_use = _utilization(arguments)
    except (PowerUnavailableError, ValueError) as error:
        return Result("skipped", " ".join(str(error).split()))
    finally:
        source.close()
    changes = [time_s for (_, a), (time_s, b) in pairwise(busy) if a != b]
    gaps = [b - a for a, b in pairwise(changes)]
    period = f"renewed about every {statistics.median(gaps):.2f} s" if gaps else "its renewals cannot be told"
    watts = [statistics.fmean(value for _, value in part) if part else float("nan") for part in (idle, busy)]
    text = f"idle {watts[0]:.2f} W, computing {watts[1]:.2f} W, {period} ({len(busy)} readings, {len(changes)} changes)"
    return Result("info", f"{text}; utilisation idle {idle_use}, computing {busy_use}")


def _poll(source: MobilintSource, board: Any, seconds: float) -> list[tuple[float, float]]:
    found, ends = [], time.monotonic() + seconds
    while time.monotonic() < ends:
        reading = source.read(board)
        if reading.power_w is not None:
            found.append((reading.time_s, reading.power_w))
        time.sleep(_POLL_S)
    return found


def _utilization(arguments: tuple[int, ...]) -> str:
    try:
        return str(library.call("mbltmlGetTotalUtilization", *arguments))
    except Failure as error:
        return f"not readable ({error})"


@contextmanager
def _load(model: Any, seconds: float) -> Iterator[None]:
    samples = images(model, 8)
    worker = threading.Thread(target=rate, args=(model, samples, 8, seconds + _SETTLE_S))
    worker.start()
    try:
        yield
    finally:
        worker.join()
