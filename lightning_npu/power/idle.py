"""What boards draw before work begins."""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lightning_npu.power.windows import Window

log = logging.getLogger("lightning_npu.power")
SLICES = 10
SETTLE_S = 2.0
LEAST_COVERAGE = 0.5


@dataclass(frozen=True)
class Idle:
    """A board's idle power.

    Attributes:
        power_w: watts.
        spread_w: standard deviation of the mean power over tenths of the time; None if given.
        seconds: how long it was measured; None if given.
        source: "given" or "measured".
        cuda_context: whether this process had one, which holds a GPU in a higher state; None if given.
    """

    power_w: float
    spread_w: float | None = None
    seconds: float | None = None
    source: str = "given"
    cuda_context: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """Primitives only."""
        return asdict(self)


def measure(make_window: Callable[[str], Window], seconds: float, shortest_s: float) -> dict[str, Idle]:
    """Idle power of each board that was read for half of the time or more, by key; blocks for ``seconds``.

    Args:
        make_window: makes windows of a running monitor.
        seconds: how long to measure.
        shortest_s: the shortest slice of that time whose mean power says something.
    """
    slices: list[Window] = []
    with make_window("idle") as whole:
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            with make_window("idle") as part:
                time.sleep(min(max(seconds / SLICES, shortest_s), left_s))
            slices.append(part)
    for window in (*slices, whole):
        window.settle(SETTLE_S)
    parts, idle = [part.by_board for part in slices], {}
    for key, energy in whole.by_board.items():
        if energy.coverage < LEAST_COVERAGE or energy.duration_s <= 0:
            log.warning(
                "Idle power of %s is not known: it was read for %.0f %% of the time.", key, 100 * energy.coverage
            )
            continue
        powers = [part[key].mean_power_w for part in parts if key in part and part[key].duration_s > 0]
        spread_w = statistics.pstdev(powers) if powers else None
        idle[key] = Idle(energy.mean_power_w, spread_w, energy.duration_s, "measured", _cuda_context())
    return idle


def _cuda_context() -> bool:
    torch = sys.modules.get("torch")  # who has not imported it has no context of torch's
    return torch is not None and bool(torch.cuda.is_initialized())
