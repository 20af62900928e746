"""NVML through ``pynvml``: opened once per process, again in a forked one, and again after the driver was reloaded."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from types import ModuleType
from typing import Any

from lightning_npu.errors import PowerUnavailableError

NOT_SUPPORTED, FUNCTION_NOT_FOUND = 3, 13
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


class NvmlFailure(Exception):
    """A call failed.

    Attributes:
        code: NVML's status code.
        text: what it says.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __str__(self) -> str:
        return f"{self.text.rstrip('.').lower()} (NVML {self.code})"


class NvmlLibrary:
    """The library of this process, shared by all sources in it.

    Attributes:
        generation: changes whenever handles to boards become invalid.
        last_success_s: when a reading of any board last succeeded, which its reader notes here.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything, as in a process that was just forked: handles and locks of the parent mean nothing."""
        self.lock = threading.RLock()
        self.generation += 1
        self.last_success_s = 0.0
        self._pynvml: ModuleType | None = None
        self._users: set[int] = set()

    def open(self, user: int) -> None:
        """Initialise NVML unless it is.

        Args:
            user: whoever must :meth:`close` it, by a number of its own.

        Raises:
            PowerUnavailableError: no pynvml, library or driver, or no permission.
        """
        with self.lock:
            if self._pynvml is None:
                pynvml = _import()
                try:
                    pynvml.nvmlInit()
                except pynvml.NVMLError as error:
                    raise _unavailable(_failure(error)) from error
                self._pynvml = pynvml
                self.generation += 1
            self._users.add(user)

    def close(self, user: int) -> None:
        """Shut NVML down unless others use it."""
        with self.lock:
            self._users.discard(user)
            if self._pynvml is not None and not self._users:
                self._shut_down()
                self._pynvml = None

    def reopen(self, seen: int) -> None:
        """Shut down and initialise again, unless somebody did since ``seen``.

        Raises:
            NvmlFailure: it cannot be initialised now.
        """
        with self.lock:
            if self._pynvml is None or self.generation != seen:
                return
            self.generation += 1
            self._shut_down()
            try:
                self._pynvml.nvmlInit()
            except self._pynvml.NVMLError as error:
                raise _failure(error) from error

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of pynvml; bytes, which old versions give, become text.

        Raises:
            NvmlFailure: it failed, or this pynvml has no such function.
        """
        pynvml = self._pynvml
        if pynvml is None:
            raise NvmlFailure(1, "closed")
        function = getattr(pynvml, name, None)
        if function is None:
            raise NvmlFailure(FUNCTION_NOT_FOUND, f"this pynvml has no {name}")
        try:
            value = function(*args)
        except pynvml.NVMLError as error:
            raise _failure(error) from error
        return value.decode() if isinstance(value, bytes) else value

    def error_text(self, code: int) -> str:
        """What a status code says that came otherwise than by a failing call."""
        return str(self._pynvml.NVMLError(code)) if self._pynvml is not None else "closed"

    def _shut_down(self) -> None:
        assert self._pynvml is not None
        with contextlib.suppress(self._pynvml.NVMLError):
            self._pynvml.nvmlShutdown()


def _import() -> ModuleType:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise PowerUnavailableError(
            "NVIDIA boards are read through pynvml, which cannot be imported.",
            expected="the package nvidia-ml-py",
            got=str(error),
            remedy="pip install 'lightning-npu[nvml]'",
        ) from error


def _failure(error: Any) -> NvmlFailure:
    return NvmlFailure(int(error.value), str(error))


def _unavailable(failure: NvmlFailure) -> PowerUnavailableError:
    return PowerUnavailableError(
        f"NVML cannot be opened: {failure}.",
        remedy=_REMEDIES.get(failure.code, "see what nvidia-smi says; it uses the same library"),
    )


library = NvmlLibrary()


def _after_fork_in_child() -> None:
    library.reset()
    pynvml: Any = sys.modules.get("pynvml")
    if hasattr(pynvml, "libLoadLock"):
        pynvml.libLoadLock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork_in_child)
