"""NVML through ``pynvml``."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from types import ModuleType
from typing import Any

from lightning_npu.errors import PowerUnavailableError
from lightning_npu.power.driver import DriverLibrary, Failure

NOT_SUPPORTED, FUNCTION_NOT_FOUND, UNKNOWN = 3, 13, 999
# what a board does not have, as opposed to what it cannot say now
ABSENT = frozenset({2, NOT_SUPPORTED, 4, FUNCTION_NOT_FOUND})
# not found, GPU is lost, GPU requires restart, GPU not found
LOST = frozenset({6, 15, 16, 28})

_REMEDIES = {
    4: "give this user access to /dev/nvidia*; in a container, start it with the NVIDIA container toolkit (--gpus all)",
    9: "load the driver: sudo modprobe nvidia; nvidia-smi says whether it works",
    12: "install the NVIDIA driver; in a container, start it with the NVIDIA container toolkit (--gpus all)",
    18: "restart the machine: the driver was updated, and the old one is still loaded",
}


class NvmlLibrary(DriverLibrary):
    """NVML in this process."""

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of pynvml; bytes, which old versions give, become text.

        Raises:
            Failure: it failed, or this pynvml has no such function.
        """
        pynvml = self._module
        if pynvml is None:
            raise failure(1, "closed")
        function = getattr(pynvml, name, None)
        if function is None:
            raise failure(FUNCTION_NOT_FOUND, f"this pynvml has no {name}")
        try:
            value = function(*args)
            return value.decode() if isinstance(value, bytes) else value
        except pynvml.NVMLError as error:
            raise _of(error) from error
        except Exception as error:  # text that is no UTF-8, and whatever else the binding lets pass
            raise failure(UNKNOWN, repr(error)) from error

    def failure_of(self, code: int) -> Failure:
        """A status code that came otherwise than by a failing call."""
        return failure(code, str(self._module.NVMLError(code)) if self._module is not None else "closed")

    def _load(self) -> ModuleType:
        try:
            return importlib.import_module("pynvml")
        except ImportError as error:
            raise PowerUnavailableError(
                "NVIDIA boards are read through pynvml, which cannot be imported.",
                expected="the package nvidia-ml-py",
                got=str(error),
                remedy="pip install 'lightning-npu[nvml]'",
            ) from error

    def _start(self, module: ModuleType) -> None:
        try:
            module.nvmlInit()
        except module.NVMLError as error:
            raise _of(error) from error

    def _stop(self, module: ModuleType) -> None:
        with contextlib.suppress(module.NVMLError):
            module.nvmlShutdown()

    def _unavailable(self, failure: Failure) -> PowerUnavailableError:
        return PowerUnavailableError(
            f"NVML cannot be opened: {failure}.",
            remedy=_REMEDIES.get(failure.code, "see what nvidia-smi says; it uses the same library"),
        )


def failure(code: int, text: str) -> Failure:
    """A failure of NVML."""
    return Failure(code, text, "NVML")


def _of(error: Any) -> Failure:
    return failure(int(error.value), str(error))


library = NvmlLibrary()


def _free_lock_of_pynvml() -> None:
    pynvml: Any = sys.modules.get("pynvml")
    if hasattr(pynvml, "libLoadLock"):
        pynvml.libLoadLock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_free_lock_of_pynvml)
