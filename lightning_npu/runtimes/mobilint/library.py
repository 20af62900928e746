"""The vendor's ``qbruntime``: found, imported on use, kept quiet, and asked for its devices in each of its forms."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_npu.errors import RuntimeUnavailableError
from lightning_npu.runtimes.mobilint.errors import translate

DISTRIBUTION = "mobilint-qb-runtime"
INSTALL = "pip install 'lightning-npu[mobilint]'"
DEVICE_FOLDER, DEVICE_NODES = "/dev", "aries[0-9]*"
LOG_LEVEL, TIMEOUT, VISIBLE = "QBRUNTIME_LOG_LEVEL", "QBRUNTIME_NPU_TIMEOUT_MS", "QBRUNTIME_VISIBLE_DEVICES"
# the vendor's limit comes before the worker's, so that it is the vendor who says what happened
_BEFORE_OURS = 0.9
_lock = threading.Lock()
_our_timeout: str | None = None


def installed_version() -> str | None:
    """The version of the installed distribution; None: not installed, or a build of another name."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def missing() -> str | None:
    """Why ``qbruntime`` cannot be used, with the remedy; None if it can. Imports nothing."""
    if find_spec("qbruntime") is None:
        here = (sys.platform, os.uname().machine if hasattr(os, "uname") else "AMD64")
        if here not in {("linux", "x86_64"), ("linux", "aarch64"), ("win32", "AMD64")}:
            return f"the vendor builds {DISTRIBUTION} for Linux and Windows, not for {here[0]} on {here[1]}"
        return f"the package {DISTRIBUTION} is not installed: {INSTALL}"
    found = installed_version()
    if found is not None and not _supported(found):
        return f"{DISTRIBUTION} {found} is not supported: pip install '{DISTRIBUTION}>=1.1,<2'"
    return None


def _supported(found: str) -> bool:
    try:
        major, minor = (int(part) for part in found.split(".")[:2])
    except ValueError:
        return True  # a development build
    return major == 1 and minor >= 1


def device_nodes() -> list[str]:
    """Device nodes of ARIES devices; empty on Windows, which has none."""
    return sorted(str(path) for path in Path(DEVICE_FOLDER).glob(DEVICE_NODES)) if os.name == "posix" else []


def no_nodes() -> str | None:
    """Why no device can be there, with the remedy; None if one may be. Calls no driver."""
    if os.name == "posix" and not device_nodes():
        return (
            f"there is no device node {DEVICE_FOLDER}/aries0: install the driver (https://docs.mobilint.com) and look "
            "for the board with `lspci -d 209f:`; in a container, start it with --device /dev/aries0"
        )
    return None


def load(timeout_s: float | None = None) -> ModuleType:
    """Import ``qbruntime``, quietly, with its own time limit set below ``timeout_s``.

    Its log lines go to stdout. They are switched off, unless ``QBRUNTIME_LOG_LEVEL`` is set or somebody else
    imported it before: then they have been chosen.

    Raises:
        RuntimeUnavailableError: it is not installed, too old or too new, or cannot be imported.
    """
    reason = missing()
    if reason is not None:
        raise RuntimeUnavailableError(f"Runtime 'mobilint' cannot be used: {reason.partition(':')[0]}.", remedy=reason)
    with _lock:
        if timeout_s is not None:
            _limit(timeout_s)
        first = "qbruntime" not in sys.modules
        try:
            module = importlib.import_module("qbruntime")
        except Exception as error:  # a vendor's package may fail in any way
            raise RuntimeUnavailableError(
                f"{DISTRIBUTION} is installed but cannot be imported: {type(error).__name__}: {error}.",
                remedy=f"pip install --force-reinstall '{DISTRIBUTION}>=1.1,<2'",
            ) from error
        if first and LOG_LEVEL not in os.environ:
            levels = module.LogLevel
            module.set_log_level(getattr(levels, "Off", None) or levels.OFF)  # 1.1 writes it in capitals
    return module


def _limit(timeout_s: float) -> None:
    """Set the vendor's time limit, unless the user did. 1.3 and later know it; when they read it is not documented."""
    global _our_timeout
    if os.environ.get(TIMEOUT) not in (None, _our_timeout):
        return
    _our_timeout = os.environ[TIMEOUT] = str(max(1, int(timeout_s * 1000 * _BEFORE_OURS)))


def has_names(module: ModuleType) -> bool:
    """Whether devices are opened by name and number (1.4 and later), not by number alone."""
    return "device_name" in inspect.signature(module.Accelerator.__init__).parameters


def device_numbers(module: ModuleType) -> list[int]:
    """Numbers of the ARIES devices that this process may open, as in ``/dev/aries0``."""
    numbers = module.get_available_device_numbers(*(["aries"] if has_names(module) else []))
    return sorted(int(number) for number in numbers)


def open_accelerator(module: ModuleType, number: int) -> Any:
    """Open one ARIES device.

    Raises:
        RuntimeUnavailableError: there is none of this number, or the driver does not open it.
    """
    try:
        return module.Accelerator("aries", number) if has_names(module) else module.Accelerator(number)
    except Exception as error:
        raise translate(error, "opening it", f"Mobilint device {number}") from error
