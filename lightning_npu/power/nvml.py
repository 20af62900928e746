"""NVIDIA GPUs: board power and the energy counter through NVML."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_npu.errors import InputError, PowerUnavailableError
from lightning_npu.power.base import Board, PowerSource, Reading, SourceRecipe
from lightning_npu.power.driver import Access, Failure
from lightning_npu.power.host import host_id
from lightning_npu.power.nvml_boards import all_gpus, counter_j, sensors
from lightning_npu.power.nvml_library import LOST, library
from lightning_npu.power.visible import VARIABLE, Gpu, find_by_uuid, visible_gpus

if TYPE_CHECKING:
    import torch

_user = itertools.count()


@dataclass(frozen=True)
class _Entry:
    """A board of a source, and how it is read."""

    uuid: str
    board: Board
    power_w: Callable[[Any], float] | None
    access: Access


class NvmlSource(PowerSource):
    """The NVIDIA boards that this process uses.

    Where a board has an energy counter is found by calling it. Power is the momentary one (field 186) where the driver
    has it, else the mean (field 185), else ``nvmlDeviceGetPowerUsage``, which is a mean over the last second on Ampere
    (except GA100) and later; ``Board.averaging_s`` says which. A MIG device is read through its board. A board that was
    lost, or whose driver was reloaded, is looked for again by its UUID, at once and then after 1, 2, 4 ... 30 s.

    Args:
        devices: CUDA ordinals of this process (``0``, ``torch.device("cuda:1")``), or UUIDs or their beginnings
            (``"GPU-8f2c"``, ``"MIG-..."``), which need not be visible to CUDA here. None: all that this process sees;
            ``power/visible.py`` says how that is found.

    Raises:
        InputError: a device that is neither.
    """

    name: ClassVar[str] = "nvml"

    def __init__(self, devices: Sequence[int | str | torch.device] | None = None) -> None:
        self._devices = None if devices is None else tuple(_checked(device) for device in devices)
        self._user = next(_user)
        self._entries: dict[str, _Entry] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Only the choice of devices goes to another process."""
        return type(self), (self._devices,)

    @classmethod
    def available(cls) -> str:
        """``"ok: ..."`` with the boards' models, or why there is none and the remedy."""
        source = cls()
        try:
            return "ok: " + ", ".join(
                f"{board.name} ({'counter and power' if board.counter else 'power only'})" for board in source.boards()
            )
        except PowerUnavailableError as error:
            return error.one_line
        finally:
            source.close()

    def boards(self) -> tuple[Board, ...]:
        """The physical boards, each once.

        Raises:
            PowerUnavailableError: no pynvml, library, driver or permission; no such device; none with a sensor.
        """
        with library.lock:
            library.open(self._user)
            if self._entries is None:
                try:
                    self._entries = {entry.board.key: entry for entry in self._find()}
                except BaseException:
                    library.close(self._user)
                    raise
            return tuple(entry.board for entry in self._entries.values())

    def read(self, board: Board, *, power: bool = True) -> Reading:
        """Counter and power as they are now; the time is that of the counter's call, where there is one."""
        try:
            entry = self._entry(board)
            handle = entry.access.handle()
        except Failure as failure:
            return Reading(time.monotonic(), problem=f"board: {failure}", lost=failure.code in LOST)
        except PowerUnavailableError as error:  # the library cannot be opened in this process, or not again
            return Reading(time.monotonic(), problem=error.what)
        asked: list[tuple[str, Callable[[Any], float]]] = []
        if board.counter:
            asked.append(("energy counter", counter_j))
        if power and entry.power_w is not None:
            asked.append(("power", entry.power_w))
        values: dict[str, float] = {}
        failures: dict[str, Failure] = {}
        times: list[float] = []
        for what, ask in asked:
            before = time.monotonic()
            try:
                values[what] = ask(handle)
            except Failure as failure:
                failures[what] = failure
            times.append((before + time.monotonic()) / 2)
        if asked:
            entry.access.note(failed=not values)
        return Reading(
            times[0] if times else time.monotonic(),
            values.get("power"),
            values.get("energy counter"),
            "; ".join(f"{what}: {failure}" for what, failure in failures.items()),
            any(failure.code in LOST for failure in failures.values()),
        )

    def close(self) -> None:
        """Shut NVML down, unless another source of this process reads through it."""
        library.close(self._user)

    def recipe(self) -> SourceRecipe:
        """The same physical boards by their UUIDs."""
        self.boards()
        assert self._entries is not None
        uuids = [entry.uuid for entry in self._entries.values()]
        return SourceRecipe(f"{__name__}:NvmlSource", {"devices": uuids})

    def _entry(self, board: Board) -> _Entry:
        if self._entries is None:
            self.boards()
        assert self._entries is not None
        return self._entries[board.key]

    def _find(self) -> list[_Entry]:
        gpus, failures = all_gpus()
        chosen = self._choose(gpus)
        entries = []
        for gpu in chosen:
            try:
                entries.append(_entry(gpu, self._user))
            except Failure as failure:
                failures.append(f"{gpu.name} {gpu.uuid}: {failure}")
        if not entries:
            shown = f"{VARIABLE}={os.environ[VARIABLE]!r}" if VARIABLE in os.environ else f"{VARIABLE} is not set"
            raise PowerUnavailableError(
                "No NVIDIA board can be read.",
                expected="a board that this process sees and that has a power sensor",
                got=f"{len(gpus)} boards in this machine, {shown}" + "".join(f"; {text}" for text in failures),
                remedy=f"correct {VARIABLE}" if gpus and not chosen else "see what nvidia-smi says about power",
            )
        return entries

    def _choose(self, gpus: Sequence[Gpu]) -> list[Gpu]:
        torch = sys.modules.get("torch")
        if self._devices is None:
            return list(dict.fromkeys(visible_gpus(gpus, os.environ, torch, ordered=False)))
        ordinals = [device for device in self._devices if isinstance(device, int)]
        visible = visible_gpus(gpus, os.environ, torch) if ordinals else []
        chosen: dict[Gpu, None] = {}
        for device in self._devices:
            gpu: Gpu | None
            if isinstance(device, int):
                gpu = visible[device] if 0 <= device < len(visible) else None
                expected = f"a CUDA ordinal below {len(visible)}"
            else:
                gpu = find_by_uuid(gpus, device)
                expected = f"the beginning of one of {[gpu.uuid for gpu in gpus]}, or of one of their MIG devices"
            if gpu is None:
                raise PowerUnavailableError(
                    f"There is no GPU {device!r}.",
                    expected=expected,
                    got=repr(device),
                    remedy="nvidia-smi -L lists the boards of this machine",
                )
            chosen[gpu] = None
        return list(chosen)


def _entry(gpu: Gpu, user: int) -> _Entry:
    access = Access(library, user, lambda: library.call("nvmlDeviceGetHandleByUUID", gpu.uuid))
    found = sensors(access.handle())
    board = Board(
        f"{host_id()}/{gpu.uuid}",
        "gpu",
        gpu.name,
        index=gpu.index,
        counter=found.counter,
        limit_w=found.limit_w,
        averaging_s=found.averaging_s,
    )
    return _Entry(gpu.uuid, board, found.power_w, access)


def _checked(device: Any) -> int | str:
    """A device as a CUDA ordinal or a UUID."""
    if isinstance(device, str) and not device.startswith(("GPU-", "MIG-")):
        kind, _, number = device.partition(":")
        if kind == "cuda" and (number.isdigit() or not number):
            return int(number) if number else _current()
    elif isinstance(device, (int, str)):
        return device
    elif getattr(device, "type", None) == "cuda":
        return _current() if device.index is None else int(device.index)
    raise InputError(
        "A device is wrong.",
        expected="a CUDA ordinal, torch.device('cuda', ordinal), or a UUID that begins with GPU- or MIG-",
        got=repr(device),
    )


def _current() -> int:
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0
