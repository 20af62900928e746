"""What a power source is: boards with a stable identity, and readings of them that say why something is missing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

ENTRY_POINT_GROUP = "lightning_npu.power_sources"


@dataclass(frozen=True)
class Board:
    """A physical board with a power sensor of its own.

    Attributes:
        key: identity over processes, ranks and nodes: ``"<host>/<vendor's physical id>"``, such as
            ``"node7/GPU-8f2c..."``. Two ranks that see one board give it the same key.
        kind: "gpu", "npu" or "cpu".
        name: the model, in words for logs.
        index: the number by which the vendor's library counts it; None where there is none.
        counter: whether it has an energy counter, found out by calling it.
        limit_w: the power in watts beyond which a reading cannot be true; None: unknown.
        wrap_j: where its energy counter starts again from zero, in joules; None: it does not.
        averaging_s: its power readings are means over this many past seconds; 0: instantaneous, or unknown.
        simulated: whether nothing of it is measured.
    """

    key: str
    kind: str
    name: str
    index: int | None = None
    counter: bool = False
    limit_w: float | None = None
    wrap_j: float | None = None
    averaging_s: float = 0.0
    simulated: bool = False


@dataclass(frozen=True)
class Reading:
    """What a board's sensor said at one moment.

    Attributes:
        time_s: ``time.monotonic()`` in the middle of the call.
        power_w: board power in watts; None: not available, never 0 in its place.
        energy_j: energy counter in joules from a zero of the vendor's choice; None: no counter, or not available.
        problem: why something that the board has is missing, one phrase; empty when nothing is.
        lost: whether the library says that the board is gone.
    """

    time_s: float
    power_w: float | None = None
    energy_j: float | None = None
    problem: str = ""
    lost: bool = False


@dataclass(frozen=True)
class BoardEnergy:
    """Energy of one board over a window.

    Attributes:
        energy_j: gross energy in joules.
        uncertainty_j: half-width of the interval that holds the true value in 99 % of windows, in joules:
            the sum of ``gain_j``, ``resolution_j`` and ``gap_j``.
        gain_j: its share from the sensor's gain error, which no averaging removes.
        resolution_j: its share from the sensor's update period, noise and the window's edges.
        gap_j: its share from spans that were bridged because no reading came.
        coverage: share of the window that fresh readings cover, 0 to 1.
        duration_s: seconds.
        max_power_w: highest power reading within; None: none fell into it.
        method: "counter" or "power" (integrated readings), or "mixed" where one took over from the other.
        state: "ok", "degraded: <why>" or "lost: <why>", the worst within the window.
        settled: whether later readings can no longer change the figures.
    """

    energy_j: float
    uncertainty_j: float
    gain_j: float
    resolution_j: float
    gap_j: float
    coverage: float
    duration_s: float
    max_power_w: float | None
    method: str
    state: str
    settled: bool

    @property
    def mean_power_w(self) -> float:
        """Energy over duration, in watts; NaN for an empty window."""
        return self.energy_j / self.duration_s if self.duration_s > 0 else float("nan")


class PowerSource(ABC):
    """One vendor's sensors. Registered by an entry point in the group ``lightning_npu.power_sources``.

    Making one touches no driver. The library is opened by the first :meth:`boards` in each process, so that a source
    survives fork, spawn and pickling.

    Attributes:
        name: the name under which users choose it, such as "nvml".
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def available(cls) -> str:
        """``"ok ..."`` when this machine has such boards, else the reason why not and the remedy, in one sentence."""

    @abstractmethod
    def boards(self) -> tuple[Board, ...]:
        """The boards that this source reads; the same in every call of a process.

        Raises:
            PowerUnavailableError: no library, driver, permission or board; the message says which, and the remedy.
        """

    @abstractmethod
    def read(self, board: Board, *, power: bool = True) -> Reading:
        """Read ``board`` now. Each quantity is asked for by itself, so that one that fails does not cost the other.

        Args:
            board: one of :meth:`boards`.
            power: whether power is wanted too, or the counter alone.

        Never raises because of a library, driver or board: the reading says what is missing and why.
        """

    def close(self) -> None:  # noqa: B027  a source that holds nothing has nothing to release
        """Release the library. May be called more than once; a later :meth:`boards` opens it again."""

    def recipe(self) -> SourceRecipe | None:
        """How another process makes the same source; None: it can be read in this process only."""
        return None


@dataclass(frozen=True)
class SourceRecipe:
    """How to make a source in another process.

    Attributes:
        factory: ``"package.module:Class"``.
        options: keyword arguments, JSON values only.
    """

    factory: str
    options: dict[str, Any] = field(default_factory=dict)
