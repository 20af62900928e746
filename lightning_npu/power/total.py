"""The energy of several boards together."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_npu.errors import InputError
from lightning_npu.power.base import BoardEnergy


def combine(boards: Mapping[str, BoardEnergy]) -> BoardEnergy:
    """Add the energies of different boards over one window.

    Gain errors add up linearly, because boards of one model tend to err in the same direction; what the sensors could
    not resolve, and what gaps hid, is independent from board to board and adds up as the root of the sum of squares.
    Coverage, state and settledness are the worst of all. The highest powers need not have come at one moment, so that
    their sum is an upper bound; it is None if one board has none.

    Args:
        boards: energy by board key, one entry a board.

    Raises:
        InputError: there is none; a sum of nothing would be 0 J.
    """
    if not boards:
        raise InputError(
            "There is no board whose energy could be added up.",
            expected="at least one board",
            got="none",
            remedy="Report that nothing was measured, not 0 J.",
        )
    parts = list(boards.values())
    peaks = [part.max_power_w for part in parts if part.max_power_w is not None]
    methods = {part.method for part in parts}
    gain_j = sum(part.gain_j for part in parts)
    resolution_j = math.hypot(*(part.resolution_j for part in parts))
    gap_j = math.hypot(*(part.gap_j for part in parts))
    return BoardEnergy(
        energy_j=sum(part.energy_j for part in parts),
        uncertainty_j=gain_j + resolution_j + gap_j,
        gain_j=gain_j,
        resolution_j=resolution_j,
        gap_j=gap_j,
        coverage=min(part.coverage for part in parts),
        duration_s=max(part.duration_s for part in parts),
        max_power_w=sum(peaks) if len(peaks) == len(parts) else None,
        method=methods.pop() if len(methods) == 1 else "mixed",
        state=_worst(boards),
        settled=all(part.settled for part in parts),
    )


def _worst(boards: Mapping[str, BoardEnergy]) -> str:
    """The worst state, with the key of its board put in where there are several boards."""
    for level in ("lost", "degraded"):
        for key, part in boards.items():
            if part.state.startswith(level):
                return part.state if len(boards) == 1 else f"{level}: {key}{part.state[len(level) :]}"
    return "ok"
