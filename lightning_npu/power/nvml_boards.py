"""What boards there are, and what each can be asked for, found by asking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_npu.power.driver import Failure
from lightning_npu.power.nvml_library import ABSENT, NOT_SUPPORTED, UNKNOWN, failure, library
from lightning_npu.power.visible import Gpu, pci_address

_AVERAGE, _INSTANT, _SCOPE_GPU = 185, 186, 0
_AMPERE, _GA100 = 7, (8, 0)
_MEAN_S = 1.0  # what NVML documents of mean power
_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
_UNKNOWN_MW, _UNKNOWN_MJ = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF  # -1, in the types of the two calls


class Sensors(NamedTuple):
    """What a board can be asked for.

    Attributes:
        counter: whether there is an energy counter; see :func:`counter_j`.
        power_w: reads power in watts from a handle; None: there is no power reading.
        averaging_s: what it is a mean over; 0: momentary, or unknown.
        limit_w: the highest power limit that the board can be set to; None: unknown.
    """

    counter: bool
    power_w: Callable[[Any], float] | None
    averaging_s: float
    limit_w: float | None


def sensors(handle: Any) -> Sensors:
    """Ask a board for everything once.

    Raises:
        Failure: it has neither a counter nor a power reading.
    """
    counter = _has(counter_j, handle)
    for power_w in (_instant_w, _average_w, _usage_w):
        if _has(power_w, handle):
            averaging_s = {_instant_w: 0.0, _average_w: _MEAN_S}.get(power_w)
            if averaging_s is None:
                averaging_s = _usage_averaging_s(handle)
            return Sensors(counter, power_w, averaging_s, _limit_w(handle))
    if not counter:
        raise failure(NOT_SUPPORTED, "it has neither a power reading nor an energy counter")
    return Sensors(counter, None, 0.0, _limit_w(handle))


def counter_j(handle: Any) -> float:
    """The energy counter, in joules since the driver was loaded."""
    value = library.call("nvmlDeviceGetTotalEnergyConsumption", handle)
    if value >= _UNKNOWN_MJ:
        raise failure(UNKNOWN, "the counter reads -1")
    return float(value) * 1e-3


def all_gpus() -> tuple[list[Gpu], list[str]]:
    """The boards of this machine, and what is wrong with those of which not even the UUID can be read."""
    gpus, failures = [], []
    try:
        count = library.call("nvmlDeviceGetCount")
    except Failure as error:
        return [], [str(error)]
    for index in range(count):
        try:
            handle = library.call("nvmlDeviceGetHandleByIndex", index)
            uuid = library.call("nvmlDeviceGetUUID", handle)
        except Failure as error:
            failures.append(f"board {index}: {error}")
            continue
        name = _or_none("nvmlDeviceGetName", handle) or "NVIDIA GPU"
        pci = _or_none("nvmlDeviceGetPciInfo", handle)
        bus_id = getattr(pci, "busId", b"")
        address = pci_address(bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id))
        gpus.append(Gpu(index, uuid, name, address, _mig_devices(handle)))
    return gpus, failures


def _mig_devices(handle: Any) -> tuple[str, ...]:
    mode = _or_none("nvmlDeviceGetMigMode", handle)
    if mode is None or not mode[0]:
        return ()
    found = []
    for index in range(_or_none("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = _or_none("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        uuid = None if part is None else _or_none("nvmlDeviceGetUUID", part)
        if uuid is not None:
            found.append(uuid)
    return tuple(found)


def _has(ask: Callable[[Any], float], handle: Any) -> bool:
    """Whether a board has something; what fails for a passing reason is there, but cannot be read now."""
    try:
        ask(handle)
    except Failure as error:
        return error.code not in ABSENT
    return True


def _instant_w(handle: Any) -> float:
    return _field_w(handle, _INSTANT)


def _average_w(handle: Any) -> float:
    return _field_w(handle, _AVERAGE)


def _usage_w(handle: Any) -> float:
    return _watts(library.call("nvmlDeviceGetPowerUsage", handle))


def _field_w(handle: Any, number: int) -> float:
    """A power field of the whole GPU, not of its memory or of the module with its CPU."""
    (answer,) = library.call("nvmlDeviceGetFieldValues", handle, [(number, _SCOPE_GPU)])
    if answer.nvmlReturn != 0:
        raise library.failure_of(answer.nvmlReturn)
    return _watts(getattr(answer.value, _MEMBERS.get(answer.valueType, "uiVal")))


def _watts(milliwatts: float) -> float:
    if not 0 <= milliwatts < _UNKNOWN_MW:
        raise failure(UNKNOWN, "power reads -1")
    return float(milliwatts) * 1e-3


def _usage_averaging_s(handle: Any) -> float:
    """What ``nvmlDeviceGetPowerUsage`` is a mean over: a second on Ampere, except GA100, and later."""
    architecture = _or_none("nvmlDeviceGetArchitecture", handle)
    if architecture is None or not _AMPERE <= architecture < 0xFFFF:
        return 0.0
    capability = _or_none("nvmlDeviceGetCudaComputeCapability", handle)
    ga100 = architecture == _AMPERE and (capability is None or tuple(capability) == _GA100)
    return 0.0 if ga100 else _MEAN_S


def _limit_w(handle: Any) -> float | None:
    """The highest limit that can be set, as the present one may be raised during a run."""
    limits = _or_none("nvmlDeviceGetPowerManagementLimitConstraints", handle)
    present = _or_none("nvmlDeviceGetEnforcedPowerLimit", handle)
    known = [value for value in (limits[1] if limits else 0, present or 0) if 0 < value < _UNKNOWN_MW]
    return max(known) * 1e-3 if known else None


def _or_none(name: str, *args: Any) -> Any:
    try:
        return library.call(name, *args)
    except Failure:
        return None
