"""Board power and energy: sources, curves, windows."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_npu.power.base import Board, BoardEnergy, PowerSource, Reading

if TYPE_CHECKING:
    from lightning_npu.power.mobilint import MobilintSource as MobilintSource
    from lightning_npu.power.monitor import EnergyMonitor as EnergyMonitor
    from lightning_npu.power.nvml import NvmlSource as NvmlSource
    from lightning_npu.power.rapl import RaplSource as RaplSource
    from lightning_npu.power.replay import ReplaySource as ReplaySource
    from lightning_npu.power.simulated import SimulatedSource as SimulatedSource

# resolved on first use: the process that samples counter-less boards imports one vendor's module and nothing else
_PUBLIC = {
    "EnergyMonitor": "monitor",
    "MobilintSource": "mobilint",
    "NvmlSource": "nvml",
    "RaplSource": "rapl",
    "ReplaySource": "replay",
    "SimulatedSource": "simulated",
}

__all__ = ["Board", "BoardEnergy", "PowerSource", "Reading", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
