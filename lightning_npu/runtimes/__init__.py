"""Runtimes: what executes an artifact. Third parties add theirs by the entry-point group ``lightning_npu.runtimes``."""

from lightning_npu.runtimes.base import Runtime as Runtime
from lightning_npu.runtimes.base import available as available
from lightning_npu.runtimes.base import open_runtime as open_runtime


def __getattr__(name: str) -> object:
    if name == "SimulatedRuntime":  # needs the compiler's view of modules, so it is loaded on use
        from lightning_npu.runtimes.simulated import SimulatedRuntime

        return SimulatedRuntime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
