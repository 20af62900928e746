"""Run the frozen part of a PyTorch Lightning model on a low-power inference accelerator while the rest trains."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_npu import forward_gradient as forward_gradient
    from lightning_npu import metrics as metrics
    from lightning_npu import power as power
    from lightning_npu import runtimes as runtimes
    from lightning_npu.artifact import Artifact as Artifact
    from lightning_npu.compile import compile_module as compile_module
    from lightning_npu.compile.split import split_module as split_module
    from lightning_npu.energy import EnergyMeter as EnergyMeter
    from lightning_npu.errors import ArtifactError as ArtifactError
    from lightning_npu.errors import CompileError as CompileError
    from lightning_npu.errors import CompilerMissingError as CompilerMissingError
    from lightning_npu.errors import DeviceError as DeviceError
    from lightning_npu.errors import FidelityError as FidelityError
    from lightning_npu.errors import InputError as InputError
    from lightning_npu.errors import NPUError as NPUError
    from lightning_npu.errors import PowerUnavailableError as PowerUnavailableError
    from lightning_npu.errors import RuntimeUnavailableError as RuntimeUnavailableError
    from lightning_npu.lookahead import Lookahead as Lookahead
    from lightning_npu.module import NPUFrozenModule as NPUFrozenModule
    from lightning_npu.offloading import offload as offload
    from lightning_npu.power.monitor import EnergyMonitor as EnergyMonitor
    from lightning_npu.prefetch import Prefetch as Prefetch
    from lightning_npu.report import wandb_workspace as wandb_workspace

# public name -> module that defines it; resolved on first use, so that importing the package stays light
_PUBLIC = {
    "Artifact": "artifact",
    "ArtifactError": "errors",
    "CompileError": "errors",
    "CompilerMissingError": "errors",
    "DeviceError": "errors",
    "EnergyMeter": "energy",
    "EnergyMonitor": "power.monitor",
    "FidelityError": "errors",
    "InputError": "errors",
    "NPUError": "errors",
    "Lookahead": "lookahead",
    "NPUFrozenModule": "module",
    "PowerUnavailableError": "errors",
    "Prefetch": "prefetch",
    "RuntimeUnavailableError": "errors",
    "compile_module": "compile",
    "offload": "offloading",
    "split_module": "compile.split",
    "wandb_workspace": "report",
}
_MODULES = ("forward_gradient", "metrics", "power", "runtimes")

__all__ = [*sorted(_PUBLIC), *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("lightning-npu")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
