"""Which boards a run keeps busy, and so which sensors are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_npu.errors import one_line
from lightning_npu.power import registry
from lightning_npu.power.base import PowerSource

if TYPE_CHECKING:
    import torch

    from lightning_npu.module import NPUFrozenModule

KINDS = {"cuda": "gpu", "cpu": "cpu"}
"""Kind of board that a type of torch device is."""


@dataclass
class Sensors:
    """What measures a run on this rank.

    Attributes:
        sources: the power sources.
        problems: why others could not be made, by name.
        parts: the kind of board that each part of the run works on: the training, and each frozen module by its name.
        sources_of: names of the sources that would measure each part.
        chosen: whether the user named the sources, and so knows what they leave out.
    """

    sources: list[PowerSource] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    sources_of: dict[str, list[str]] = field(default_factory=dict)
    chosen: bool = False

    def unmetered(self, kinds: set[str], problems: Mapping[str, str]) -> dict[str, str]:
        """The parts of the run whose energy is in no figure, as ``"cpu (training, encoder)"``, and why.

        Args:
            kinds: of boards that are measured.
            problems: why sources have no boards, by name.
        """
        by_reason: dict[tuple[str, str], list[str]] = {}
        told: set[str] = set()
        for part, kind in self.parts.items():
            asked = problems if self.chosen else (part, *self.sources_of.get(part, ()))
            names = [name for name in asked if name in problems]
            told.update(names)
            if kind not in kinds or part in problems:
                reason = "; ".join(problems[name] for name in names) or f"no board of kind '{kind}' could be read"
                by_reason.setdefault((kind, reason), []).append(part)
        parts = {f"{kind} ({', '.join(parts)})": reason for (kind, reason), parts in by_reason.items()}
        return parts | {name: reason for name, reason in problems.items() if name not in told}


def sensors_of_run(
    asked: str | Sequence[PowerSource | str], device: torch.device, modules: Mapping[str, NPUFrozenModule]
) -> Sensors:
    """What measures a run on this rank.

    Under "auto": the GPU that trains, the devices of all frozen modules, and the processor's package where training
    or an artifact runs on the processor.

    Args:
        asked: "auto", or sources and names of sources.
        device: that training runs on.
        modules: the model's frozen modules by name. Their devices are opened.
    """
    parts = {"training": KINDS.get(device.type, device.type)}
    parts |= {name: "cpu" if module.host_threads > 0 else "npu" for name, module in modules.items()}
    if not isinstance(asked, str):
        sources, problems = _named(asked)
        return Sensors(sources, problems, parts, chosen=True)
    from lightning_npu.power.nvml import NvmlSource
    from lightning_npu.power.rapl import RaplSource

    found = Sensors(parts=parts)
    if device.type == "cuda":
        found.sources.append(NvmlSource([device]))
        found.sources_of["training"] = [NvmlSource.name]
    elif device.type != "cpu":
        found.problems["training"] = f"no power source is known for {device}; give EnergyMeter(sources=[...]) one"
    for name, module in modules.items():
        _add_module(found, name, module)
    if "cpu" in parts.values():
        found.sources.append(RaplSource())
        for part in (part for part, kind in parts.items() if kind == "cpu"):
            found.sources_of[part] = [RaplSource.name]
    return found


def _add_module(found: Sensors, name: str, module: NPUFrozenModule) -> None:
    try:
        sources = module.power_sources
    except Exception as error:  # a third party's runtime may fail in any way, and must not end a training
        found.problems[name] = one_line(error)
        return
    if not sources and module.host_threads == 0:
        found.problems[name] = "the runtime of this module knows no power sensor of its device"
    found.sources_of[name] = [source.name for source in sources]
    found.sources += [source for source in sources if not any(source is other for other in found.sources)]


def _named(asked: Sequence[PowerSource | str]) -> tuple[list[PowerSource], dict[str, str]]:
    sources: list[PowerSource] = []
    problems: dict[str, str] = {}
    for source in asked:
        try:
            sources.append(registry.find(source)() if isinstance(source, str) else source)
        except Exception as error:  # a third party's source may fail in any way
            problems[str(source)] = one_line(error)
    return sources, problems
