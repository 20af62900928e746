"""Mobilint's monitoring library through ``mbltml``, in both of the forms that exist.

Two distributions bring a package of the name ``mbltml``, and their functions differ: ``mbltml`` 0.0.0 has
``fn(dev_no)``, ``mobilint-ml`` 1.4 and later ``fn(target_device_type, dev_no)``. Which one is here is seen in the
functions' signatures. When both are installed, the files of the one lie over those of the other, and what then runs
is a Python file of one with a C library of the other, whose calls have undefined effects: that is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import subprocess
import sys
import threading
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_npu.errors import PowerUnavailableError
from lightning_npu.power.driver import DriverLibrary, Failure

UNINITIALIZED, NOT_SUPPORTED = 1, 4
# driver not found, invalid argument (no device of this number any more), device not found
LOST = frozenset({2, 3, 6})
# what both forms call these devices, by the number that both give them
TARGETS = {
    1: "aries-ra", 2: "regulus-ra", 3: "aries-rb", 4: "regulus-rb", 5: "regulus-ra-usb", 6: "regulus-rb-usb"
}  # fmt: skip
DEVICE_FOLDER, DEVICE_NODES = "/dev", ("aries*", "regulus*")
_DISTRIBUTIONS = ("mbltml", "mobilint-ml")
_REINSTALL = "pip uninstall -y mbltml mobilint-ml && pip install mobilint-ml"
_TEXTS = {
    1: "not initialized", 2: "driver not found", 3: "invalid argument", 4: "not supported", 6: "device not found"
}  # fmt: skip


class MbltmlLibrary(DriverLibrary):
    """mbltml in this process. Calls are made one at a time: the vendor does not say whether they may overlap.

    Attributes:
        typed: whether functions take the target device type before the device's number; known once it is open.
    """

    typed = False

    def reset(self) -> None:
        """Forget the parent's state, its lock for calls included."""
        super().reset()
        self._calls = threading.Lock()

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of mbltml.

        Raises:
            Failure: it failed, or this form has no such function.
        """
        with self._calls:
            module = self._module
            if module is None:
                raise failure(UNINITIALIZED, "closed")
            function = getattr(module, name, None)
            if function is None:
                raise failure(NOT_SUPPORTED, f"this mbltml has no {name}")
            try:
                return function(*args)
            except module.MBLTMLError as error:
                raise _of(error) from error
            except Exception as error:  # text that is no UTF-8, and whatever else the binding lets pass
                raise failure(-1, repr(error)) from error

    def _load(self) -> ModuleType:
        spec = find_spec("mbltml")
        if spec is None:
            raise PowerUnavailableError(
                "Mobilint boards are read through mbltml, which is not installed.",
                remedy="pip install mobilint-ml",
            )
        folders = [Path(folder).resolve() for folder in spec.submodule_search_locations or ()]
        owners = sorted(_owners(folders))
        if len(owners) > 1:
            raise _mixed(f"{' and '.join(owners)} lie over each other in {folders[0]}")
        try:
            module = importlib.import_module("mbltml.mbltml")
        except ModuleNotFoundError as error:
            if error.name != "mbltml.mbltml":
                raise _broken(error) from error
            raise _mixed(
                f"{folders[0] if folders else spec.origin} has no mbltml.py, as one of the two left it"
            ) from error
        except Exception as error:  # a vendor's package may fail in any way
            raise _broken(error) from error
        self.typed = typed = _typed(module)
        path = _c_library(module)
        try:
            exports_typed = hasattr(ctypes.CDLL(str(path)), "mbltmlGetTargetDeviceCount")
        except OSError as error:
            raise _broken(error) from error
        if exports_typed != typed:
            raise _mixed(
                f"mbltml.py is that of {_DISTRIBUTIONS[typed]}, {path.name} that of {_DISTRIBUTIONS[not typed]}"
            )
        return module

    def _start(self, module: ModuleType) -> None:
        if not any(any(Path(DEVICE_FOLDER).glob(pattern)) for pattern in DEVICE_NODES):
            _try_elsewhere(_c_library(module))
        try:
            with self._calls:
                module.mbltmlInit()
        except module.MBLTMLError as error:
            raise _of(error) from error
        except (AttributeError, OSError) as error:  # a function that this C library does not have
            vars(module)["_clib"] = None  # the binding would go on with what it has declared by now
            raise _mixed(str(error)) from error

    def _stop(self, module: ModuleType) -> None:
        with self._calls, contextlib.suppress(module.MBLTMLError):
            module.mbltmlShutdown()

    def _unavailable(self, failure: Failure) -> PowerUnavailableError:
        if failure.code == UNINITIALIZED:
            return PowerUnavailableError(
                "There is no driver for Mobilint boards on this machine.",
                expected=f"{DEVICE_FOLDER}/{' or '.join(DEVICE_NODES)}, which this user may open",
                got=str(failure),
                remedy="install the driver (https://docs.mobilint.com); a container needs --device /dev/aries0",
            )
        return PowerUnavailableError(
            f"mbltml cannot be opened: {failure}.",
            remedy="see what mobilint-cli status says; it uses the same driver",
        )


def failure(code: int, text: str) -> Failure:
    """A failure of mbltml."""
    return Failure(code, text, "mbltml")


def _of(error: Any) -> Failure:
    """A vendor's error, whose own text fails for codes that it does not know."""
    code = int(error.code)
    return failure(code, _TEXTS.get(code, "unknown error"))


def _owners(folders: list[Path]) -> set[str]:
    """The distributions that brought the package in one of these folders."""
    found = set()
    for name in _DISTRIBUTIONS:
        for distribution in distributions(name=name):
            if Path(str(distribution.locate_file("mbltml"))).resolve() in folders:
                found.add(name)
    return found


def _typed(module: ModuleType) -> bool:
    try:
        count = len(inspect.signature(module.mbltmlGetTotalPower).parameters)
    except (AttributeError, TypeError, ValueError) as error:
        raise _broken(error) from error
    if count not in (1, 2):
        raise PowerUnavailableError(
            "This version of mbltml is not known.",
            expected="mbltmlGetTotalPower(dev_no) or mbltmlGetTotalPower(target_device_type, dev_no)",
            got=f"{count} parameters",
            remedy="pip install 'mobilint-ml<2'",
        )
    return count == 2


def _c_library(module: ModuleType) -> Path:
    """The file that the binding will load, chosen as it does: the longest name beside its own file."""
    assert module.__file__ is not None
    folder = Path(module.__file__).resolve().parent
    found = list(folder.glob("libmbltml.so*"))
    if not found:
        raise _mixed(f"{folder} has no libmbltml.so")
    return max(found, key=lambda path: len(str(path)))


def _try_elsewhere(path: Path) -> None:
    """Start the C library in a process of its own, which takes its complaint on stderr with it.

    Only where there are no device nodes and it will most likely fail: the complaint cannot be caught in this process
    without catching what other threads write. Raises Failure.
    """
    script = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).mbltmlInit())"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", script, str(path)], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return  # no other process can be made here; the library will speak for itself
    if done.returncode:
        raise failure(done.returncode, done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no driver")


def _mixed(what: str) -> PowerUnavailableError:
    return PowerUnavailableError(
        "Two distributions, mbltml and mobilint-ml, are mixed up in this environment.",
        expected="one of them: both bring a package of the name mbltml, and they do not fit each other",
        got=what,
        remedy=f"{_REINSTALL}   (tools that need mbltml 0.0.0, such as mblt-tracker, belong in another environment)",
    )


def _broken(error: Exception) -> PowerUnavailableError:
    return PowerUnavailableError(
        f"mbltml is installed but cannot be used: {type(error).__name__}: {error}.", remedy=_REINSTALL
    )


library = MbltmlLibrary()
