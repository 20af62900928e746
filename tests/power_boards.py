"""A real power source whose truth is known and whose faults are files in a folder, in whatever process it is read."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from lightning_npu.errors import PowerUnavailableError
from lightning_npu.power.base import Board, PowerSource, Reading, SourceRecipe
from lightning_npu.power.simulated import SquareWave

WAVE = SquareWave(8.0, 25.0, period_s=0.5)
DEADLINE_S = 30.0


class FolderSource(PowerSource):
    """Boards ``<folder's name>/<n>`` that all draw ``wave``.

    Files in the folder: ``raise``, ``lost``, ``slow`` and ``hang`` concern every board, ``lost-1`` board 1 alone;
    ``crash`` and ``stuck`` concern helper processes alone; ``absent`` is looked at when boards are listed. ``opened``
    and ``closed`` are written by the source.
    """

    name: ClassVar[str] = "folder"

    def __init__(
        self, folder: str, *, boards: int = 1, counter: bool = False, remote: bool = False, parent: int | None = None
    ) -> None:
        self.folder, self.counter, self.remote = Path(folder), counter, remote
        self.parent = os.getpid() if parent is None else parent
        self._boards = tuple(
            Board(f"{self.folder.name}/{n}", "npu", "a board of a test", n, counter) for n in range(boards)
        )
        self.key = self._boards[0].key

    @classmethod
    def available(cls) -> str:
        return "ok"

    def boards(self) -> tuple[Board, ...]:
        if self.has("absent"):
            raise PowerUnavailableError("The folder has no boards.", remedy="remove the file 'absent'")
        with (self.folder / "opened").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return self._boards

    def has(self, fault: str) -> bool:
        return (self.folder / fault).exists()

    def set(self, fault: str, on: bool = True) -> None:
        (self.folder / fault).touch() if on else (self.folder / fault).unlink()

    def read(self, board: Board, *, power: bool = True) -> Reading:
        while self.has("hang") or (self.has("stuck") and os.getpid() != self.parent):
            time.sleep(0.005)
        if self.has("crash") and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.has("slow"):
            time.sleep(0.06)
        if self.has("raise"):
            raise RuntimeError("the driver has had enough")
        now_s = time.monotonic()
        if self.has("lost") or self.has(f"lost-{board.index}"):
            return Reading(now_s, problem="the board fell off the bus", lost=True)
        energy_j = WAVE.energy_j(0.0, now_s) if self.counter else None
        return Reading(now_s, WAVE.power_w(now_s) if power else None, energy_j)

    def close(self) -> None:
        (self.folder / "closed").touch()

    def recipe(self) -> SourceRecipe | None:
        if not self.remote:
            return None
        options = {"folder": str(self.folder), "boards": len(self._boards), "counter": self.counter, "remote": True}
        return SourceRecipe(f"{__name__}:FolderSource", {**options, "parent": self.parent})


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Look again and again until it is so; fail after a long time."""
    for _ in _tries():
        if condition():
            return
    raise AssertionError(f"not within {DEADLINE_S:.0f} s: {what}")


def _tries() -> Iterator[None]:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        yield
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
