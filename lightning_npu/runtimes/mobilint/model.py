"""One model on one device: made, launched, asked by many threads at once, and taken down in the right order."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_npu.errors import DeviceError
from lightning_npu.runtimes.mobilint.errors import translate
from lightning_npu.runtimes.mobilint.library import open_accelerator

log = logging.getLogger(__name__)

_launched: weakref.WeakSet[LaunchedModel] = weakref.WeakSet()


class LaunchedModel:
    """A vendor's model on a device. Opening and closing it hold the GIL, inference does not.

    It is disposed by whoever leaves it last: :meth:`close` itself when nothing runs, else the last call that returns.
    A call that never returns is never disposed under, since that would stop every thread of this process.

    Args:
        module: ``qbruntime``.
        path: the MXQ file; it must exist until this returns.
        config: the vendor's ``ModelConfig``.
        number: the device.

    Raises:
        RuntimeUnavailableError: there is no such device, or it is in use.
        ArtifactError: the file is not for this device, this qbruntime or this configuration.
        DeviceError: out of memory, or the driver fails.
    """

    def __init__(self, module: ModuleType, path: Path, config: Any, number: int) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._running, self._closed, self._held = 0, False, False
        self.device = f"Mobilint device {number}"
        self._accelerator: Any = open_accelerator(module, number)
        self._model: Any = None
        try:
            self._model = module.Model(str(path), config)
        except Exception as error:
            self._drop()
            raise translate(error, f"reading {path.name}", self.device) from error
        with suppress(Exception):  # 1.4 and later; only a name
            self.device = f"Mobilint {self._accelerator.get_device_name()} {number}"

    def launch(self) -> None:
        """Bring the model onto the device."""
        try:
            self._model.launch(self._accelerator)
        except Exception as error:
            self._drop()
            raise translate(error, "launching the model", self.device) from error
        self._held = True
        _launched.add(self)

    @contextmanager
    def use(self) -> Iterator[Any]:
        """The vendor's model, for one call; it is not disposed until the call has returned.

        Raises:
            DeviceError: it was closed, or belongs to the process from which this one was forked.
        """
        if self._pid != os.getpid():  # before the lock, which a thread of the parent may have held
            raise DeviceError(
                f"{self.device} was opened by the process from which this one was forked.",
                remedy="open the artifact in this process",
            )
        with self._lock:
            if self._closed:
                raise DeviceError(f"The model on {self.device} was closed.", remedy="open the artifact again")
            self._running += 1
            model = self._model
        try:
            yield model
        finally:
            del model
            with self._lock:
                self._running -= 1
                last = self._closed and self._running == 0
            if last:
                self._dispose()

    @property
    def vendor(self) -> Any:
        """The vendor's model, to be asked what it is; not for inference."""
        return self._model

    def close(self) -> None:
        """Take no more calls, and dispose the model when none runs any more. May be called more than once."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._running == 0
        if idle:
            self._dispose()

    def _dispose(self) -> None:
        try:
            if self._held:
                self._model.dispose()
        except Exception as error:  # whoever closes has no use for it: the device is gone, or the process ends
            log.warning("%s", " ".join(str(translate(error, "taking the model down", self.device)).split()))
        finally:
            self._drop()

    def _drop(self) -> None:
        """Models go before their accelerators: the vendor warns otherwise."""
        self._held = False
        _launched.discard(self)
        self._model = None
        self._accelerator = None

    def _keep_for_ever(self) -> None:
        """In a forked child: destroying these objects would take down the parent's model on the device."""
        for thing in (self._model, self._accelerator):
            if thing is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _after_fork() -> None:
    for model in list(_launched):
        model._keep_for_ever()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
