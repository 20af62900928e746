"""Which cores of a device a process takes, in which of the vendor's core modes; plain data until a model is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lightning_npu.errors import ArtifactError, DeviceError, RuntimeUnavailableError
from lightning_npu.runtimes.mobilint.placement import Place

# an ARIES device has two clusters of four cores; "multi" is left out: with it one model reached a third of the speed
CLUSTERS, CORES_PER_CLUSTER = 2, 4
UNITS = {"single": CLUSTERS * CORES_PER_CLUSTER, "global4": CLUSTERS, "global8": 1}
MODES = tuple(UNITS)


@dataclass(frozen=True)
class CorePlan:
    """A share of a device.

    Attributes:
        mode: "single" (a core computes an image), "global4" (a cluster does), "global8" (all cores do).
        units: numbers of the cores or clusters; (0,) for "global8".
        shared: whether other processes have the rest of the device.
        auto: whether the vendor's library chooses mode and cores, as the MXQ says.
    """

    mode: str
    units: tuple[int, ...]
    shared: bool = False
    auto: bool = False

    @property
    def slots(self) -> int:
        """Images that are computed at once."""
        return len(self.units)

    def describe(self) -> str:
        """For logs: ``"single, cores 0-3"``."""
        if self.mode == "global8":
            return "global8, all cores"
        name = "core" if self.mode == "single" else "cluster"
        text = str(self.units[0]) if self.slots == 1 else f"{self.units[0]}-{self.units[-1]}"
        return f"{self.mode}, {name}{'s' * (self.slots > 1)} {text}"


def plan_cores(compiled: str, wanted: str | None, place: Place) -> CorePlan:
    """The cores of one process.

    Args:
        compiled: the core mode that the MXQ was compiled for: one of :data:`MODES`, or "all".
        wanted: the core mode that the user chose; None: that of the MXQ, and "single" where it holds all.
        place: the device and this process' share of it.

    Raises:
        ArtifactError: the MXQ was not compiled for that mode.
        RuntimeUnavailableError: more processes share the device than it has cores or clusters.
    """
    if wanted is not None and compiled not in ("all", wanted):
        raise ArtifactError(
            f"The MXQ was not compiled for core mode '{wanted}'.",
            expected=f"core_mode='{compiled}', or an MXQ of inference_scheme='all'",
            got=f"core_mode='{wanted}'",
            remedy="leave core_mode out, or compile the module again",
        )
    mode = wanted or ("single" if compiled == "all" else compiled)
    count = UNITS[mode]
    if place.sharers > count:
        raise RuntimeUnavailableError(
            f"{place.sharers} ranks share Mobilint device {place.number}, which has room for {count} in core mode "
            f"'{mode}'.",
            expected=f"at most {count} rank{'s' * (count > 1)} per device",
            got=f"{place.sharers} ranks",
            remedy="start fewer ranks, add boards, use core_mode='single' (8 ranks), or say ranks_per_device if "
            "fewer share it",
        )
    first = place.position * count // place.sharers
    end = (place.position + 1) * count // place.sharers
    shared = place.sharers > 1
    auto = not shared and wanted is None and compiled != "all"
    return CorePlan(mode, tuple(range(first, end)), shared=shared, auto=auto)


def configure(module: ModuleType, plan: CorePlan, *, asynchronous: bool) -> Any:
    """The vendor's ``ModelConfig`` for a plan.

    Raises:
        DeviceError: a setter refused; the vendor says so by returning False and going on.
    """
    config = module.ModelConfig()
    if plan.auto:
        _set(config.set_auto_core_mode, "set_auto_core_mode()")
    elif plan.mode == "single":
        ids = [module.CoreId(*_core(module, unit)) for unit in plan.units]
        _set(lambda: config.set_single_core_mode(core_ids=ids), f"set_single_core_mode(core_ids={list(plan.units)})")
    elif plan.mode == "global4":
        clusters = [_cluster(module, unit) for unit in plan.units]
        _set(lambda: config.set_global4_core_mode(clusters), f"set_global4_core_mode({list(plan.units)})")
    else:
        _set(config.set_global8_core_mode, "set_global8_core_mode()")
    if asynchronous:
        config.set_async_pipeline_enabled(True)  # returns None, so it is read back
        if not config.get_async_pipeline_enabled():
            raise _refused("set_async_pipeline_enabled(True)", "still disabled")
    return config


def taken(module: ModuleType, model: Any, plan: CorePlan) -> CorePlan:
    """The plan as the model carries it out, which for an automatic one is only known now.

    Raises:
        ArtifactError: the MXQ is for another core mode than the artifact says.
        RuntimeUnavailableError: a process that shares the device would not get its own cores.
    """
    found = str(model.get_core_mode().name).lower()
    if found not in (plan.mode, "auto"):
        raise ArtifactError(
            "The MXQ is for another core mode than the artifact says.", expected=plan.mode, got=found,
            remedy="compile the module again",
        )  # fmt: skip
    if plan.mode == "global8":
        return plan
    units = _units(module, model.get_target_cores(), plan.mode)
    if plan.auto:
        return CorePlan(plan.mode, units or plan.units, auto=True)
    if plan.shared and units != plan.units:
        raise RuntimeUnavailableError(
            "qbruntime does not keep to the cores that it was given, so ranks would compute on each other's.",
            expected=f"{plan.mode} {list(plan.units)}",
            got=f"{plan.mode} {list(units)}",
            remedy="use one rank per device (ranks_per_device=1 and as many devices as ranks)",
        )
    return plan


def _units(module: ModuleType, ids: Iterable[Any], mode: str) -> tuple[int, ...]:
    found = set()
    for core_id in ids:
        cluster, core = _index(core_id.cluster.name), _index(core_id.core.name)
        if cluster is None or (mode == "single" and core is None):
            continue
        found.add(cluster if mode == "global4" else cluster * CORES_PER_CLUSTER + (core or 0))
    return tuple(sorted(found))


def _index(name: str) -> int | None:
    digits = name.removeprefix("Cluster").removeprefix("Core")
    return int(digits) if digits.isdecimal() else None


def _core(module: ModuleType, unit: int) -> tuple[Any, Any]:
    cluster, core = divmod(unit, CORES_PER_CLUSTER)
    return _cluster(module, cluster), getattr(module.Core, f"Core{core}")


def _cluster(module: ModuleType, index: int) -> Any:
    return getattr(module.Cluster, f"Cluster{index}")


def _set(setter: Callable[[], bool], call: str) -> None:
    answer = setter()
    if answer is not True:
        raise _refused(call, repr(answer))


def _refused(call: str, answer: str) -> DeviceError:
    return DeviceError(
        f"qbruntime refused ModelConfig.{call}.",
        expected="True",
        got=answer,
        remedy="report it with `make verify-mobilint`; QBRUNTIME_LOG_LEVEL=info lets the vendor say why",
    )
