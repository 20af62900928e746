"""Mobilint NPUs: board power through the vendor's mbltml."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_npu.errors import InputError, PowerUnavailableError
from lightning_npu.power.base import Board, PowerSource, Reading, SourceRecipe
from lightning_npu.power.driver import Access, Failure
from lightning_npu.power.host import host_id
from lightning_npu.power.mobilint_library import LOST, NOT_SUPPORTED, TARGETS, failure, library

VISIBLE = "QBRUNTIME_VISIBLE_DEVICES"
_UNAVAILABLE = -2  # no code of mbltml
_user = itertools.count()


@dataclass(frozen=True)
class _Device:
    """A device as mbltml shows it now.

    Attributes:
        key: its identity on this host.
        target: such as "aries-rb".
        number: among those of its target.
        args: what its functions are called with.
    """

    key: str
    target: str
    number: int
    args: tuple[int, ...]


class MobilintSource(PowerSource):
    """The Mobilint boards of this machine, which have a power reading and no energy counter.

    mbltml knows no serial number. A board is identified by host, target type and PCIe slot (mobilint-ml), or by its
    device node and, where the firmware tells it, its chip (mbltml 0.0.0, which knows no slot): what is moved to another
    slot is another board. What the vendor does not document: how often the power reading is renewed (about once a
    second has been seen on an MLA100), and whether on an MLA400, one card with four devices, it is that of the device
    or of the card. Here each device is a board; if they repeat the card's power, choose one of them by ``devices``.

    The power rails of the board's regulator are left alone: choosing one is seen by every process.

    Args:
        devices: numbers of ARIES devices, as the vendor's runtime counts them. None: all that
            ``QBRUNTIME_VISIBLE_DEVICES`` leaves, if it is a list of numbers, else all.

    Raises:
        InputError: a device that is no number from 0 on.
    """

    name: ClassVar[str] = "mobilint"

    def __init__(self, devices: Sequence[int] | None = None) -> None:
        for device in devices or ():
            if not isinstance(device, int) or device < 0:
                raise InputError("A Mobilint device is wrong.", expected="a number from 0 on", got=repr(device))
        self._numbers = None if devices is None else tuple(devices)
        self._user = next(_user)
        self._boards: dict[str, tuple[Board, Access]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Only the choice of devices goes to another process."""
        return type(self), (self._numbers,)

    @classmethod
    def available(cls) -> str:
        """``"ok: ..."`` with the boards, or why there is none and the remedy."""
        source = cls()
        try:
            return "ok: " + ", ".join(f"{board.name} {board.index} (power only)" for board in source.boards())
        except PowerUnavailableError as error:
            return error.one_line
        finally:
            source.close()

    def boards(self) -> tuple[Board, ...]:
        """The boards with a power reading.

        Raises:
            PowerUnavailableError: no mbltml, two of them mixed up, no driver, no such device, or none with a power
                reading.
        """
        with library.lock:
            library.open(self._user)
            if self._boards is None:
                try:
                    self._boards = {board.key: (board, self._access(board)) for board in self._find()}
                except BaseException:
                    library.close(self._user)
                    raise
            return tuple(board for board, _ in self._boards.values())

    def read(self, board: Board, *, power: bool = True) -> Reading:
        """Power as it is now; nothing where it is not wanted, as there is no counter."""
        before = time.monotonic()
        if not power:
            return Reading(before)
        try:
            access = self._way(board)
            args = access.handle()
        except Failure as error:
            return Reading(time.monotonic(), problem=f"board: {error}", lost=error.code in LOST)
        except PowerUnavailableError as error:  # the library cannot be opened in this process, or not again
            return Reading(time.monotonic(), problem=error.what)
        before = time.monotonic()
        power_w, problem, code = None, "", _UNAVAILABLE
        try:
            power_w = _power_w(args)
        except Failure as error:
            problem, code = f"power: {error}", error.code
        access.note(failed=code != _UNAVAILABLE)  # "unavailable" is an answer: to start the library again helps nobody
        return Reading((before + time.monotonic()) / 2, power_w, problem=problem, lost=code in LOST)

    def close(self) -> None:
        """Shut mbltml down, unless another source of this process reads through it."""
        library.close(self._user)

    def recipe(self) -> SourceRecipe:
        """The same device numbers."""
        numbers = sorted({board.index for board in self.boards() if board.index is not None})
        return SourceRecipe(f"{__name__}:MobilintSource", {"devices": numbers})

    def _way(self, board: Board) -> Access:
        if self._boards is None:
            self.boards()
        assert self._boards is not None
        return self._boards[board.key][1]

    def _access(self, board: Board) -> Access:
        def look_up() -> tuple[int, ...]:
            for device in _devices():
                if device.key == board.key:
                    return device.args
            raise failure(6, "device not found")

        access = Access(library, self._user, look_up)
        with contextlib.suppress(Failure):  # it is looked up again when it is read
            access.handle()
        return access

    def _find(self) -> list[Board]:
        try:
            devices = _devices()
        except Failure as error:
            raise PowerUnavailableError(
                f"mbltml does not list its devices: {error}.", remedy="see what mobilint-cli status says"
            ) from error
        chosen = _chosen(devices, self._numbers)
        boards, failures = [], []
        for device in chosen:
            try:
                _power_w(device.args)
            except Failure as error:
                if error.code == NOT_SUPPORTED:  # anything else may pass
                    failures.append(f"{device.target} {device.number} has no power reading")
                    continue
            boards.append(Board(device.key, "npu", f"Mobilint {device.target}", index=device.number))
        if not boards:
            names = [f"{device.target} {device.number}" for device in devices]
            wanted = f"device {list(self._numbers)}" if self._numbers is not None else f"a device that {VISIBLE} leaves"
            raise PowerUnavailableError(
                "No Mobilint board can be read.",
                expected=f"{wanted}, with a power reading (ARIES only)",
                got="; ".join([f"devices {names}", *failures]),
                remedy="mobilint-cli status lists the boards of this machine",
            )
        return boards


def _devices() -> list[_Device]:
    """All devices that can be told. Raises Failure where not even their number can be read."""
    found: list[tuple[str, str, str, int, tuple[int, ...]]] = []
    if library.typed:
        for code, target in TARGETS.items():
            for number in range(library.call("mbltmlGetTargetDeviceCount", code)):
                found.append((*_place(target, (code, number)), target, number, (code, number)))
    else:
        for number in range(library.call("mbltmlGetDeviceCount")):
            target = TARGETS.get(_or("mbltmlGetHardwareVersion", (number,), 0), "npu")
            found.append((*_place(target, (number,)), target, number, (number,)))
    shared = Counter(place for place, *_ in found)
    devices = []
    for place, node, target, number, args in found:
        # one slot may hold a card with several devices
        whole = f"{place}/{node}" if shared[place] > 1 and node not in place else place
        if node or "@" in place:
            devices.append(_Device(f"{host_id()}/{whole}", target, number, args))
    return devices


def _place(target: str, args: tuple[int, ...]) -> tuple[str, str]:
    """Where a device is, and its node; the node is empty for a device that does not answer."""
    node = str(_or("mbltmlGetNodeName", args, "")).rsplit("/", 1)[-1]
    slot = str(_or("mbltmlGetPcieSlot", args, ""))
    if slot:
        return f"{target}@{slot}", node
    chip = _or("mbltmlGetChipId", args, 0)
    return f"{target}:{node}" + (f"#{chip}" if chip else ""), node


def _chosen(devices: Sequence[_Device], numbers: tuple[int, ...] | None) -> list[_Device]:
    if numbers is None:
        entries = [entry.strip() for entry in os.environ.get(VISIBLE, "").split(",")]
        if not all(entry.isdecimal() for entry in entries):
            return list(devices)
        numbers = tuple(int(entry) for entry in entries)
    return [device for device in devices if device.number in numbers]


def _power_w(args: tuple[int, ...]) -> float:
    value = float(library.call("mbltmlGetTotalPower", *args))
    if not (math.isfinite(value) and value >= 0):
        raise failure(_UNAVAILABLE, f"it reads {value:g}, which stands for unavailable")
    return value


def _or(name: str, args: tuple[int, ...], default: Any) -> Any:
    try:
        return library.call(name, *args)
    except Failure:
        return default
