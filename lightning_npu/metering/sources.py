"""Which boards a run keeps busy, and so which sensors are its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_npu.power import registry
from lightning_npu.power.base import PowerSource

if TYPE_CHECKING:
    import torch

    from lightning_npu.module import NPUFrozenModule

log = logging.getLogger(__name__)


def sources_of_run(
    asked: str | Sequence[PowerSource | str], device: torch.device, modules: Mapping[str, NPUFrozenModule]
) -> tuple[list[PowerSource], dict[str, str]]:
    """The power sources of a run on this rank, and by name the reasons why others could not be made.

    Under "auto": of the GPU that trains, of the devices of all frozen modules, and of the processor's package where
    training or an artifact runs on the processor.

    Args:
        asked: "auto", or sources and names of sources.
        device: that training runs on.
        modules: the model's frozen modules by name. Their devices are opened.
    """
    if not isinstance(asked, str):
        return _named(asked)
    from lightning_npu.power.nvml import NvmlSource
    from lightning_npu.power.rapl import RaplSource

    sources: list[PowerSource] = []
    problems: dict[str, str] = {}
    if device.type == "cuda":
        sources.append(NvmlSource([device]))
    elif device.type != "cpu":
        problems[device.type] = f"no power source is known for {device}; give EnergyMeter(sources=[...]) one"
    on_processor = device.type == "cpu"
    for name, module in modules.items():
        on_processor |= module.host_threads > 0
        found = module.power_sources
        if not found and module.host_threads == 0:
            problems[name] = "the runtime of this module knows no power sensor of its device"
        sources += [source for source in found if not any(source is other for other in sources)]
    if on_processor:
        sources.append(RaplSource())
    return sources, problems


def _named(asked: Sequence[PowerSource | str]) -> tuple[list[PowerSource], dict[str, str]]:
    sources: list[PowerSource] = []
    problems: dict[str, str] = {}
    for source in asked:
        try:
            sources.append(registry.find(source)() if isinstance(source, str) else source)
        except Exception as error:  # a third party's source may fail in any way
            problems[str(source)] = " ".join(str(error).split())
    return sources, problems
