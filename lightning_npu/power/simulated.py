"""Boards whose power is stated instead of measured: for planning, and for tests that know the truth."""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from lightning_npu.errors import InputError
from lightning_npu.power.base import Board, PowerSource, Reading, SourceRecipe
from lightning_npu.power.host import host_id


@runtime_checkable
class SimulatedDevice(Protocol):
    """What knows its own power and energy now, such as ``runtimes.simulated.SimulatedRuntime``."""

    def power_w(self) -> float:
        """Watts now."""

    def energy_j(self) -> float:
        """Joules since some moment."""


@dataclass(frozen=True)
class SquareWave:
    """Power that alternates between two values, and its exact energy, over ``time.monotonic()``.

    Attributes:
        low_w: watts in the second part of each period.
        high_w: watts in the first part of each period.
        period_s: seconds.
        duty: share of the first part, 0 to 1.
        phase_s: a moment at which a period begins.
    """

    low_w: float
    high_w: float
    period_s: float = 1.0
    duty: float = 0.5
    phase_s: float = 0.0

    def power_w(self, time_s: float) -> float:
        """Watts at a moment."""
        within_s = (time_s - self.phase_s) % self.period_s
        return self.high_w if within_s < self.duty * self.period_s else self.low_w

    def energy_j(self, from_s: float, to_s: float) -> float:
        """Joules between two moments."""
        return (
            self._high_s(to_s) * (self.high_w - self.low_w)
            + self.low_w * (to_s - from_s)
            - (self._high_s(from_s) * (self.high_w - self.low_w))
        )

    def _high_s(self, time_s: float) -> float:
        periods, within_s = divmod(time_s - self.phase_s, self.period_s)
        return periods * self.duty * self.period_s + min(within_s, self.duty * self.period_s)


@dataclass(frozen=True)
class SimulatedBoard:
    """A board of a :class:`SimulatedSource`.

    Attributes:
        power: a constant in watts, a :class:`SquareWave`, a function from ``time.monotonic()`` to watts, or a device
            with ``power_w()`` and ``energy_j()``.
        name: the last part of its key; unique within a source.
        kind: "gpu", "npu" or "cpu".
        counter: whether it has an energy counter; not for a function, whose energy is not known.
        power_sensor: whether it has a power reading.
        update_s: both are renewed this often and stay the same in between; 0: continuously. A device is looked at when
            it is read, at most this often.
        noise_w: standard deviation of power readings, in watts.
        limit_w: as in :class:`~lightning_npu.power.base.Board`.
        seed: of the noise.

    Raises:
        InputError: a counter for a function, a board without any sensor, a negative or infinite number.
    """

    power: float | SquareWave | Callable[[float], float] | SimulatedDevice
    name: str = "0"
    kind: str = "npu"
    counter: bool = False
    power_sensor: bool = True
    update_s: float = 0.0
    noise_w: float = 0.0
    limit_w: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for option in ("update_s", "noise_w"):
            value = getattr(self, option)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{option} is wrong.", expected="a finite number from 0 on", got=value)
        if self.counter and not isinstance(self.power, (int, float, SquareWave, SimulatedDevice)):
            raise InputError(
                f"Simulated board '{self.name}' cannot have an energy counter.",
                expected="a power whose energy is known: a number, a SquareWave, or a device with energy_j()",
                got=self.power,
            )
        if not (self.counter or self.power_sensor):
            raise InputError(
                f"Simulated board '{self.name}' has no sensor.", expected="counter or power_sensor", got="neither"
            )


_naming = threading.Lock()
_serial = itertools.count()
_numbers: WeakKeyDictionary[SimulatedDevice, int] = WeakKeyDictionary()


class SimulatedSource(PowerSource):
    """Boards whose power is stated. Nothing of them is measured: keys and names say "simulated".

    Args:
        boards: the boards, or mappings with the fields of :class:`SimulatedBoard`, in which a mapping as ``power``
            holds those of :class:`SquareWave`.
        start_s: the moment of ``time.monotonic()`` from which counters count; None: now.

    Raises:
        InputError: two boards of one name, or none at all.
    """

    name: ClassVar[str] = "simulated"

    def __init__(
        self,
        boards: Sequence[SimulatedBoard | Mapping[str, Any]],
        *,
        start_s: float | None = None,
    ) -> None:
        specs = [_spec(board) for board in boards]
        if not specs or len({spec.name for spec in specs}) < len(specs):
            raise InputError(
                "Simulated boards are wrong.",
                expected="one or more, each with a name of its own",
                got=[spec.name for spec in specs],
            )
        self._start_s = time.monotonic() if start_s is None else start_s
        self._sensors = {_key(spec): _Sensor(spec, self._start_s) for spec in specs}
        self._boards = tuple(
            Board(
                _key(spec),
                spec.kind,
                f"simulated {spec.kind} {spec.name}",
                index=index,
                counter=spec.counter,
                limit_w=spec.limit_w,
                simulated=True,
            )
            for index, spec in enumerate(specs)
        )
        self._specs = specs

    @classmethod
    def of_runtime(cls, runtime: SimulatedDevice) -> SimulatedSource:
        """The board that ``runtime`` stands for: the same in every call, another one for every runtime and process."""
        with _naming:
            if runtime not in _numbers:
                _numbers[runtime] = next(_serial)
            number = _numbers[runtime]
        return cls([SimulatedBoard(runtime, name=f"{os.getpid()}-{number}", counter=True)])

    @classmethod
    def available(cls) -> str:
        """Always; it needs nothing."""
        return "ok: simulated, for planning and tests; made in code by SimulatedSource([SimulatedBoard(...)])"

    def boards(self) -> tuple[Board, ...]:
        """The boards that it was made with."""
        return self._boards

    def read(self, board: Board, *, power: bool = True) -> Reading:
        """What the board's sensors say now."""
        return self._sensors[board.key].read(power)

    def recipe(self) -> SourceRecipe | None:
        """The same boards, counting from the same moment; None where a power is a function or a device."""
        if not all(isinstance(spec.power, (int, float, SquareWave)) for spec in self._specs):
            return None
        options = {"boards": [asdict(spec) for spec in self._specs], "start_s": self._start_s}
        return SourceRecipe(f"{__name__}:SimulatedSource", options)


class _Sensor:
    """Looks at a board's power as its sensors do."""

    def __init__(self, spec: SimulatedBoard, start_s: float) -> None:
        self._spec, self._start_s = spec, start_s
        self._lock = threading.Lock()
        self._seen: tuple[int, float | None, float | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self._spec, "start_s": self._start_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read(self, power: bool) -> Reading:
        spec = self._spec
        with self._lock:
            now = time.monotonic()
            tick = math.floor((now - self._start_s) / spec.update_s) if spec.update_s else 0
            if self._seen is None or not spec.update_s or self._seen[0] != tick:
                self._seen = (tick, *self._look(self._start_s + tick * spec.update_s if spec.update_s else now, tick))
            _, power_w, energy_j = self._seen
        return Reading(now, power_w if power else None, energy_j)

    def _look(self, time_s: float, tick: int) -> tuple[float | None, float | None]:
        spec, source = self._spec, self._spec.power
        energy_j: float | None = None
        if isinstance(source, (int, float)):
            power_w, energy_j = float(source), source * (time_s - self._start_s)
        elif isinstance(source, SquareWave):
            power_w, energy_j = source.power_w(time_s), source.energy_j(self._start_s, time_s)
        elif isinstance(source, SimulatedDevice):
            power_w, energy_j = source.power_w(), source.energy_j()
        else:
            power_w = source(time_s)
        if spec.noise_w:
            moment = tick if spec.update_s else time_s
            power_w = max(0.0, power_w + spec.noise_w * random.Random(f"{spec.seed}/{moment}").gauss(0.0, 1.0))
        return power_w if spec.power_sensor else None, energy_j if spec.counter else None


def _spec(board: SimulatedBoard | Mapping[str, Any]) -> SimulatedBoard:
    if isinstance(board, SimulatedBoard):
        return board
    power = board.get("power")
    return SimulatedBoard(**{**board, "power": SquareWave(**power) if isinstance(power, Mapping) else power})


def _key(spec: SimulatedBoard) -> str:
    return f"{host_id()}/simulated-{spec.kind}-{spec.name}"
