"""What users pass to an energy monitor, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lightning_npu.errors import InputError
from lightning_npu.power import registry
from lightning_npu.power.base import PowerSource
from lightning_npu.power.calibration import Calibration, number


def check_sources(sources: object) -> Literal["auto"] | list[PowerSource | str]:
    """What is to be measured.

    Raises:
        InputError: it is neither "auto" nor a list of sources and registered names.
    """
    if sources == "auto":
        return "auto"
    if not isinstance(sources, (list, tuple)):
        raise InputError(
            "Power sources cannot be told from that.",
            expected='"auto", or a list of sources and names',
            got=repr(sources),
            remedy=f"write sources=[{sources!r}]" if isinstance(sources, str) else "put them into a list",
        )
    names = registry.SOURCES.names
    for source in sources:
        if isinstance(source, str) and source not in names:
            raise InputError(
                f"There is no power source named {source!r}.",
                expected=f"one of {', '.join(names)}",
                got=source,
                remedy="check the spelling, or install the package that brings this source",
            )
        if not isinstance(source, (str, PowerSource)):
            raise InputError(
                "That is no power source.",
                expected="a PowerSource, or the name of a registered one",
                got=repr(source),
                remedy="make one, such as NvmlSource()"
                + (": the class alone is not enough" * isinstance(source, type)),
            )
    return list(sources)


def check_calibration(calibration: object) -> dict[str, Calibration]:
    """The calibration map, read.

    Raises:
        InputError: it cannot be.
    """
    if calibration is None:
        return {}
    if not isinstance(calibration, Mapping):
        raise InputError("calibration is no mapping.", expected="board: values", got=repr(calibration))
    return {name: Calibration.of(name, entry) for name, entry in calibration.items()}


def check_idle(idle: object) -> Literal["measure"] | dict[str, float] | None:
    """What is wanted or known of idle power.

    Raises:
        InputError: it cannot be.
    """
    if idle is None:
        return None
    if idle == "measure":
        return "measure"
    if not isinstance(idle, Mapping):
        raise InputError(
            "idle_power_w says nothing.",
            expected='None, "measure", or watts by board or kind',
            got=repr(idle),
            remedy='write idle_power_w={"gpu": 55.0}',
        )
    watts = {name: number(f"The idle power of {name!r}", value) for name, value in idle.items()}
    if any(value < 0 for value in watts.values()):
        raise InputError("Idle power is below zero.", expected="watts from 0 on", got=watts)
    return watts
