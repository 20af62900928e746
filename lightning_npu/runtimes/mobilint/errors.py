"""The vendor's one exception class, told apart by the status name in its text, as this package's errors."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_npu.errors import ArtifactError, DeviceError, NPUError, RuntimeUnavailableError

_STATUS = re.compile(r"^\s*(\w+) occurred\b")
SEE_LOG = "QBRUNTIME_LOG_LEVEL=info lets the vendor's own lines through"


@dataclass(frozen=True)
class Status:
    """What a status name of the vendor means.

    Attributes:
        kind: the error that it becomes while a device is opened; during a batch all become ``DeviceError``.
        meaning: one clause.
        remedy: what to do.
        lost: whether the device is given up when it comes in the middle of a run.
    """

    kind: type[NPUError]
    meaning: str
    remedy: str
    lost: bool = False


_DRIVER = "see what `mobilint-cli status` and dmesg say; restart the driver or the machine if it persists"
_BUSY = "end the other process that uses the device (`mobilint-cli status` lists them), or choose another device_index"
_MEMORY = "close other models on this device, or use core_mode='global8', which needs the least device memory"
_BROKEN = "copy the artifact again, or compile the module again"
_MODE = "choose a core_mode that the MXQ was compiled for, or compile it again with inference_scheme='all'"
_UPDATE = "update mobilint-qb-runtime, driver and firmware together, or compile the module again for this device"
_OURS = "report it with `make verify-mobilint`: shapes and dtypes were checked against the MXQ when it was opened"
_CLOSE = "call close(); the next use opens the device again"
_SLOW = "check the device with `mobilint-cli status`; raise timeout_s if it is only slow"


def _absent(meaning: str) -> Status:
    remedy = "`lightning-npu doctor` says what is missing: driver, device node or permission"
    return Status(RuntimeUnavailableError, meaning, remedy, lost=True)


STATUSES: dict[str, Status] = {
    "Acc_DeviceNotFound": _absent("there is no such device"),
    "Driver_NotInitialized": _absent("the driver does not open this device, or QBRUNTIME_VISIBLE_DEVICES hides it"),
    "Acc_UnknownDevice": Status(RuntimeUnavailableError, "this qbruntime does not know the kind of device", _UPDATE),
    "Acc_AmbiguousDevice": Status(
        RuntimeUnavailableError, "several kinds of device fit", "set QBRUNTIME_VISIBLE_DEVICES to one of them"
    ),
    "Acc_CoreAlreadyInUse": Status(RuntimeUnavailableError, "a core that was asked for is in use", _BUSY),
    "Driver_FailedToClaimCores": Status(RuntimeUnavailableError, "the cores cannot be claimed", _BUSY, lost=True),
    "Driver_FailedToLockCore": Status(RuntimeUnavailableError, "a core cannot be locked", _BUSY, lost=True),
    "Model_AlreadyLaunched": Status(DeviceError, "the model is on the device already", _CLOSE),
    "BadAlloc": Status(DeviceError, "memory ran out, on the device or on the host", _MEMORY),
    "Driver_FailedToAllocateModelMemory": Status(DeviceError, "device memory for the model ran out", _MEMORY),
    "Driver_FailedToAllocateHostMemory": Status(DeviceError, "host memory for transfers ran out", _MEMORY),
    "Model_FailedToAllocMemory": Status(DeviceError, "memory for the model ran out", _MEMORY),
    "Model_FailedToLoadMXQ": Status(ArtifactError, "the MXQ cannot be read by this qbruntime", _UPDATE),
    "Model_BrokenMXQ": Status(ArtifactError, "the MXQ is damaged", _BROKEN),
    "Model_IsNotSupportedHardware": Status(ArtifactError, "the MXQ is for another kind of device", _UPDATE),
    "Model_NotSupported": Status(ArtifactError, "this device or qbruntime does not support that", _UPDATE),
    "Model_MXQAndModelConfigNotMatch": Status(ArtifactError, "the MXQ does not hold the core mode or cores", _MODE),
    "Model_NoTargetCores": Status(ArtifactError, "the MXQ is for none of the cores that were asked for", _MODE),
    "Model_NoGlobalCoreWithGlobalMultiMode": Status(ArtifactError, "the MXQ has no global core", _MODE),
    "Model_InvalidNPUDtype": Status(ArtifactError, "the network's outputs are not INT8", "leave int8 out"),
    "Model_DtypeMismatched": Status(ArtifactError, "the MXQ takes inputs of another dtype", _OURS),
    "Model_ShapeMismatched": Status(ArtifactError, "the MXQ takes inputs of another shape", _OURS),
    "Model_UnexpectedMemoryFormat": Status(ArtifactError, "the MXQ takes inputs of another layout", _OURS),
    "Acc_NPUTimeout": Status(DeviceError, "the NPU did not answer in time", _SLOW, lost=True),
    "Driver_WaitDoneTimeout": Status(DeviceError, "the NPU did not finish in time", _SLOW, lost=True),
    "Model_TaskQueueTimeout": Status(DeviceError, "the queue of the device did not move in time", _SLOW, lost=True),
    "Model_AsyncPipelineTimeout": Status(DeviceError, "the asynchronous pipeline is stuck", _SLOW, lost=True),
    "Model_AsyncPipelineNotAlive": Status(DeviceError, "the asynchronous pipeline has ended", _CLOSE, lost=True),
    "Model_AsyncPipelineCheckFailed": Status(
        ArtifactError, "this model does not run in the asynchronous pipeline", "leave asynchronous out"
    ),
    "Model_PredictError": Status(DeviceError, "the inference failed", _DRIVER, lost=True),
    "Model_NotAlive": Status(DeviceError, "the model is not on the device any more", _CLOSE, lost=True),
    "Model_NotLaunched": Status(DeviceError, "the model is not on the device", _CLOSE, lost=True),
    "Model_TaskQueueClosed": Status(DeviceError, "the queue of the device was closed", _CLOSE, lost=True),
    "Future_NotValid": Status(DeviceError, "a result was asked for twice", _OURS),
}

_ANY_DRIVER = Status(DeviceError, "the driver reports a failure", _DRIVER, lost=True)


def status_name(error: BaseException) -> str | None:
    """The vendor's status name in an error of ``qbruntime``, such as "Acc_NPUTimeout"; None where there is none."""
    found = _STATUS.match(str(error))
    return found.group(1) if found else None


def status_of(error: BaseException) -> Status | None:
    """What an error of ``qbruntime`` means; None where that is not known."""
    name = status_name(error)
    if name is None:
        return None
    return STATUSES.get(name) or (_ANY_DRIVER if name.startswith("Driver_") else None)


def translate(error: BaseException, doing: str, device: str, *, running: bool = False) -> NPUError:
    """This package's error for an exception that came out of ``qbruntime``; raise it ``from`` that exception.

    Args:
        error: what came.
        doing: what was being done, such as "launching model.mxq".
        device: the device, in words.
        running: a batch was on the device: whatever it is, it is the device that failed.
    """
    raw = " ".join(str(error).split())
    status = status_of(error)
    if status is None:
        return DeviceError(
            f"qbruntime failed on {device} while {doing}: {type(error).__name__}.",
            got=raw,
            remedy=f"{_DRIVER}; {SEE_LOG}",
        )
    kind = DeviceError if running else status.kind
    what = f"{device} failed while {doing}: {status.meaning} ({status_name(error)})."
    return kind(what, got=raw, remedy=f"{status.remedy}; {SEE_LOG}")
