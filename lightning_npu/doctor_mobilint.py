"""What of a Mobilint board's software is here, piece by piece, and what to do for each piece that is not."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_npu.runtimes.mobilint import library

SYS = Path("/sys")
PCI_VENDOR = "0x209f"
_DOCS = "https://docs.mobilint.com"
# the two distributions that bring a package "mbltml", and how their functions are called
_FORMS = {"mobilint-ml": "the newer binding of board power", "mbltml": "the older binding of board power"}

Piece = tuple[str, bool, str]


def examine_mobilint() -> list[Piece]:
    """Name, whether it can be used, and what was found, with the remedy: driver, runtime, cards, firmware, and so on.

    Never raises. Opens no device, and imports the vendor's runtime only where there is a device node.
    """
    looks: dict[str, Callable[[], tuple[bool, str]]] = {
        "driver": _driver,
        "runtime": _runtime,
        "cards": _cards,
        "firmware": _firmware,
        "monitoring": _monitoring,
        "compiler": _compiler,
    }
    pieces = []
    for name, look in looks.items():
        try:
            ok, text = look()
        except Exception as error:  # a broken driver must not hide the rest of the report
            ok, text = False, f"looking failed: {' '.join(repr(error).split())}"
        pieces.append((f"mobilint {name}", ok, text))
    return pieces


def on_the_bus() -> int:
    """Devices with Mobilint's PCI vendor id, driver or not."""
    vendors = SYS.glob("bus/pci/devices/*/vendor")
    return sum(path.read_text(encoding="ascii").strip().lower() == PCI_VENDOR for path in vendors)


def driver_version() -> str | None:
    """Version of the loaded kernel module; None where it is not loaded or does not say."""
    for path in sorted(SYS.glob("module/*aries*/version")):
        with contextlib.suppress(OSError):
            return f"{path.parent.name} {path.read_text(encoding='utf-8', errors='replace').strip()}"
    return None


def _driver() -> tuple[bool, str]:
    nodes, found = library.device_nodes(), driver_version()
    if sys.platform != "linux":
        return False, f"looked for on Linux only; here is {sys.platform}"
    if nodes:
        closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
        if closed:
            return False, f"{', '.join(closed)} may not be opened by this user: see `ls -l {closed[0]}` and its group"
        return True, f"{found or 'of unknown version'}; {', '.join(nodes)}"
    boards = on_the_bus()
    if boards:
        loaded = f"{found} is loaded" if found else "no driver is loaded"
        return False, (
            f"{boards} board(s) on the PCI bus and no device node: {loaded}. Install the driver ({_DOCS}) and load "
            "it; in a container, start it with --device /dev/aries0"
        )
    return False, (
        f"no device node {library.DEVICE_FOLDER}/aries0 and no board on the PCI bus (vendor {PCI_VENDOR}): put the "
        f"board in, then install the driver ({_DOCS})"
    )


def _runtime() -> tuple[bool, str]:
    reason = library.missing()
    if reason is not None:
        return False, reason
    level = os.environ.get(library.LOG_LEVEL)
    lines = f"its log lines as {library.LOG_LEVEL}={level}" if level else "its log lines are kept off stdout"
    return True, f"qbruntime {library.installed_version() or 'of unknown version'}; {lines}"


def _cards() -> tuple[bool, str]:
    if library.missing() is not None:
        return False, "not known without the runtime: see mobilint runtime"
    if library.no_nodes() is not None:
        return False, "none that could be opened: see mobilint driver"
    module = library.load()
    numbers = library.device_numbers(module)
    visible = os.environ.get(library.VISIBLE)
    hidden = "" if visible is None else f" ({library.VISIBLE}={visible})"
    if not numbers:
        return (
            False,
            f"qbruntime may open none{hidden}: check permissions, and that driver and qbruntime fit each other",
        )
    names = f"{', '.join(module.get_available_devices())} " if library.has_names(module) else ""
    modes = "images at once on each: 8 in core mode single, 2 in global4, 1 in global8"
    return True, f"{names}device {', '.join(map(str, numbers))}{hidden}; {modes}"


def _firmware() -> tuple[bool, str]:
    if library.no_nodes() is not None:
        return False, "not readable without a driver: see mobilint driver"
    from lightning_npu.power.mobilint import MobilintSource
    from lightning_npu.power.mobilint_library import library as monitoring

    source = MobilintSource()
    try:
        found = []
        for board in source.boards():
            assert board.index is not None
            code = next((code for code, name in _targets().items() if board.name.endswith(name)), 0)
            arguments = (code, board.index) if monitoring.typed else (board.index,)
            found.append(f"device {board.index}: {monitoring.call('mbltmlGetFirmwareVersion', *arguments)}")
    except Exception as error:  # what cannot be read is said, whatever the reason
        return False, f"not readable: {' '.join(str(error).split())}; `mobilint-cli status` may show it"
    finally:
        source.close()
    return True, ", ".join(found)


def _targets() -> dict[int, str]:
    from lightning_npu.power.mobilint_library import TARGETS

    return TARGETS


def _monitoring() -> tuple[bool, str]:
    installed = {}
    for name in _FORMS:
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    if not installed:
        return False, "mbltml is not installed, so the board's power cannot be read: pip install mobilint-ml"
    forms = "; ".join(f"{name} {number}: {_FORMS[name]}" for name, number in installed.items())
    from lightning_npu.power.mobilint import MobilintSource

    answer = MobilintSource.available()
    if len(installed) > 1 or "mixed up" in answer:
        remedy = "pip uninstall -y mbltml mobilint-ml && pip install mobilint-ml"
        return False, f"{forms}. Files of two distributions lie over each other, which is undefined: {remedy}"
    if "no driver" in answer:
        return True, f"{forms}; usable once there is a driver"
    if not answer.startswith("ok"):
        return False, f"{forms}; {answer}"
    return True, f"{forms}; {answer.removeprefix('ok: ')}"


def _compiler() -> tuple[bool, str]:
    from lightning_npu.compile.mobilint_compiler import installed_compiler

    found = installed_compiler()
    if found is not None:
        return True, f"{found}: target='mobilint' compiles here"
    return False, (
        "not here, and not on PyPI (packages of similar names are others'): target='mobilint' writes a compile kit, "
        f"to be run where the vendor's compiler is ({_DOCS}, or its container mobilint/qbcompiler)"
    )
