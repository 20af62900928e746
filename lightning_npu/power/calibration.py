"""What users know about their boards: gains of sensors, idle power, each by key, physical id or kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypeVar

from lightning_npu.errors import InputError
from lightning_npu.power.base import Board, BoardEnergy

GAIN_UNCERTAINTY = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class Calibration:
    """How a sensor's readings become true power: ``gain * reading + offset_w``.

    Attributes:
        gain: what readings are multiplied by.
        gain_uncertainty: relative half-width within which the gain is known.
        offset_w: what is added, in watts.
    """

    gain: float = 1.0
    gain_uncertainty: float = GAIN_UNCERTAINTY
    offset_w: float = 0.0

    @classmethod
    def of(cls, name: str, entry: object) -> Calibration:
        """Check one entry of a calibration map.

        Raises:
            InputError: an unknown field, or a value that cannot be.
        """
        known = tuple(cls.__dataclass_fields__)
        if not isinstance(entry, Mapping) or not set(entry) <= set(known):
            raise InputError(
                f"The calibration of {name!r} cannot be read.",
                expected=f"a mapping with some of {', '.join(known)}",
                got=entry,
                remedy='write calibration={"GPU-...": {"gain": 1.02, "gain_uncertainty": 0.005}}',
            )
        values = {field: number(f"{field} of {name!r}", value) for field, value in entry.items()}
        calibration = cls(**values)
        if calibration.gain <= 0 or not 0 <= calibration.gain_uncertainty < 1:
            raise InputError(
                f"The calibration of {name!r} cannot be.",
                expected="gain above 0, gain_uncertainty from 0 to below 1 (0.05 means 5 %)",
                got=dict(entry),
                remedy="gain is the factor that the sensor's readings must be multiplied by, close to 1",
            )
        return calibration

    def power_w(self, reading_w: float) -> float:
        """True power for what the sensor says."""
        return self.gain * reading_w + self.offset_w

    def energy(self, measured: BoardEnergy) -> BoardEnergy:
        """The same window's energy, corrected."""
        if self.gain == 1.0 and self.offset_w == 0.0:
            return measured
        gain_j, resolution_j, gap_j = (
            self.gain * part for part in (measured.gain_j, measured.resolution_j, measured.gap_j)
        )
        return replace(
            measured,
            energy_j=self.gain * measured.energy_j + self.offset_w * measured.duration_s,
            uncertainty_j=gain_j + resolution_j + gap_j,
            gain_j=gain_j,
            resolution_j=resolution_j,
            gap_j=gap_j,
            max_power_w=None if measured.max_power_w is None else self.power_w(measured.max_power_w),
        )


def number(name: str, value: Any) -> float:
    """A finite number.

    Raises:
        InputError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InputError(f"{name} is not a number.", expected="a finite number", got=value, remedy="give a number")
    return float(value)


def names_of(board: Board) -> tuple[str, str, str]:
    """What a board goes by in users' mappings, the most precise first: key, physical id, kind."""
    return board.key, board.key.partition("/")[2] or board.key, board.kind


def lookup(mapping: Mapping[str, T], board: Board) -> T | None:
    """The entry for a board."""
    return next((mapping[name] for name in names_of(board) if name in mapping), None)


def unused(mapping: Mapping[str, Any], boards: tuple[Board, ...]) -> list[str]:
    """Names in a mapping that no board goes by."""
    known = {name for board in boards for name in names_of(board)}
    return sorted(name for name in mapping if name not in known)
