"""Processors through Intel's RAPL counters, which Linux shows under ``/sys/class/powercap`` (AMD's too)."""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightning_npu.errors import PowerUnavailableError
from lightning_npu.power.base import Board, PowerSource, Reading, SourceRecipe
from lightning_npu.power.host import host_id

ROOT = "/sys/class/powercap"
_PACKAGE = re.compile(r"package-(\d+)(-die-\d+)?")


@dataclass(frozen=True)
class _Zone:
    """A RAPL zone: a folder with a name and a counter."""

    folder: Path
    name: str
    label: str  # unique on this host, the same after every start
    group: str  # zones of one group may be the same counter

    def counter_uj(self) -> int:
        return int((self.folder / "energy_uj").read_text())


class RaplSource(PowerSource):
    """Energy of processor packages and of the memory attached to them, one board each.

    The zones of one machine overlap, so that adding all of them up counts twice. Taken are: every package; the
    memory ("dram") zones, which packages do not include. Not taken are: cores and integrated graphics ("core",
    "uncore"), which are parts of a package; the platform ("psys"), which includes the packages, unless there is
    nothing else; the packages of ``intel-rapl-mmio``, which are those of ``intel-rapl`` by another way; dies that
    repeat the counter of their package, as AMD's Zen 1 and 2 do, found by reading them. AMD gives no memory zone.

    The counters start again from zero at ``max_energy_range_uj``, some minutes to an hour under full load, so they
    must be read at least once a minute. There is no power reading.

    Args:
        root: the powercap folder.
    """

    name: ClassVar[str] = "rapl"

    def __init__(self, root: str | Path = ROOT) -> None:
        self._root = Path(root)
        self._lock = threading.Lock()
        self._boards: tuple[Board, ...] | None = None
        self._zones: dict[str, _Zone] = {}

    @classmethod
    def available(cls) -> str:
        """``"ok: ..."``, or why the counters cannot be read and the remedy."""
        try:
            boards = cls().boards()
        except PowerUnavailableError as error:
            return error.one_line
        return f"ok: {', '.join(board.name for board in boards)}"

    def boards(self) -> tuple[Board, ...]:
        """One board for every package and for the memory of every package.

        Raises:
            PowerUnavailableError: no RAPL zone, or no permission to read the counters.
        """
        with self._lock:
            if self._boards is None:
                zones = self._find()
                self._boards = tuple(_board(zone) for zone in zones)
                self._zones = {board.key: zone for board, zone in zip(self._boards, zones, strict=True)}
            return self._boards

    def read(self, board: Board, *, power: bool = True) -> Reading:
        """The counter; ``power`` changes nothing, as there is no power reading."""
        self.boards()
        zone = self._zones[board.key]
        before = time.monotonic()
        energy_j, problem, lost = None, "", False
        try:
            energy_j = zone.counter_uj() * 1e-6
        except (OSError, ValueError) as error:
            code = error.errno if isinstance(error, OSError) else None
            lost = code in (errno.ENOENT, errno.ENODEV)
            problem = f"energy counter: {_why(error)}"
        return Reading((before + time.monotonic()) / 2, energy_j=energy_j, problem=problem, lost=lost)

    def recipe(self) -> SourceRecipe:
        """The same folder."""
        return SourceRecipe(f"{__name__}:RaplSource", {"root": str(self._root)})

    def _find(self) -> list[_Zone]:
        candidates = list(_candidates(self._root))
        if not candidates:
            raise PowerUnavailableError(
                f"This machine shows no RAPL counters under {self._root}.",
                expected="folders intel-rapl:*, as Linux makes them on Intel and AMD processors",
                got="none",
                remedy="load the kernel module (sudo modprobe intel_rapl_msr); virtual machines and most containers "
                "have no such counters",
            )
        zones: list[_Zone] = []
        failure: Exception | None = None
        for zone in candidates:
            try:
                zone.counter_uj()
                if not any(_same_counter(zone, taken) for taken in zones):
                    zones.append(zone)
            except PermissionError as error:
                raise PowerUnavailableError(
                    f"The RAPL counters under {self._root} may be read by root only, as Linux has it since 5.10.",
                    remedy=f"sudo chmod a+r {self._root}/intel-rapl*/energy_uj   (holds until the next start)",
                ) from error
            except (OSError, ValueError) as error:
                failure = error
        if not zones:
            assert failure is not None
            raise PowerUnavailableError(
                f"The RAPL counters under {self._root} cannot be read: {_why(failure)}.",
                remedy="look at dmesg for messages of intel_rapl; the meter goes on without the processor",
            ) from failure
        return zones


def _candidates(root: Path) -> Iterable[_Zone]:
    """The zones that do not include one another, but for those that may be the same counter."""
    top = {folder: _name(folder) for folder in sorted(root.glob("intel-rapl:*"), key=_number) if _level(folder) == 1}
    packages = {folder: name for folder, name in top.items() if _PACKAGE.fullmatch(name)}
    if not packages:
        mmio = sorted(root.glob("intel-rapl-mmio:*"), key=_number)
        packages = {
            folder: name for folder in mmio if _level(folder) == 1 and _PACKAGE.fullmatch(name := _name(folder))
        }
    if not packages:
        for folder, name in top.items():
            if name == "psys":
                yield _Zone(folder, "platform", "psys", "psys")
        return
    for folder, name in packages.items():
        match = _PACKAGE.fullmatch(name)
        assert match is not None
        words = f"CPU package {match[1]}" + (match[2] or "").replace("-", " ")
        yield _Zone(folder, words, name, f"package-{match[1]}")
        # a zone's parts are inside it, and the class folder shows them beside it as well
        parts = list(root.glob(f"{folder.name}:*")) or list(folder.glob(f"{folder.name}:*"))
        for part in sorted(parts, key=_number):
            if _name(part) == "dram":
                yield _Zone(part, f"memory of {words}", f"{name}-dram", f"package-{match[1]}-dram")


def _same_counter(zone: _Zone, taken: _Zone) -> bool:
    """Whether two zones are one counter: what the one says lies between two readings of the other."""
    if zone.group != taken.group:
        return False
    before = taken.counter_uj()
    value = zone.counter_uj()
    return before <= value <= taken.counter_uj()


def _board(zone: _Zone) -> Board:
    try:
        wrap_j = int((zone.folder / "max_energy_range_uj").read_text()) * 1e-6
    except (OSError, ValueError):
        wrap_j = 0.0
    # limit_w stays open: power limits of packages are averages over many milliseconds, and firmware sets them at will
    return Board(f"{host_id()}/rapl-{zone.label}", "cpu", zone.name, counter=True, wrap_j=wrap_j or None)


def _name(folder: Path) -> str:
    try:
        return (folder / "name").read_text().strip()
    except OSError:
        return ""


def _level(folder: Path) -> int:
    return folder.name.count(":")


def _number(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in folder.name.split(":")[1:] if part.isdigit())


def _why(error: Exception) -> str:
    return (error.strerror or repr(error)).lower() if isinstance(error, OSError) else str(error)
