"""Power traces in files: CSV with one line per reading, in the order of time.

The columns are ``t_s,board,kind,power_w,energy_j``: seconds since the recording began; the board's key; "gpu", "npu"
or "cpu"; board power in watts; energy counter in joules. Of the last two, what was not available is empty.
"""

from __future__ import annotations

import csv
import math
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_npu.errors import InputError

COLUMNS = ("t_s", "board", "kind", "power_w", "energy_j")


class TraceRow(NamedTuple):
    """One reading.

    Attributes:
        t_s: seconds since the recording began.
        board: the board's key.
        kind: "gpu", "npu" or "cpu".
        power_w: watts; None: not available.
        energy_j: energy counter in joules; None: not available, or no counter.
    """

    t_s: float
    board: str
    kind: str
    power_w: float | None = None
    energy_j: float | None = None


@dataclass(frozen=True)
class Trace:
    """Readings of one or more boards, in the order of time.

    Attributes:
        rows: the readings.

    Raises:
        InputError: no row at all, a number that is not finite, time that goes backwards, a board of two kinds.
    """

    rows: tuple[TraceRow, ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise InputError("A power trace is empty.", expected="one reading or more", got="none")
        kinds: dict[str, str] = {}
        last_s = -math.inf
        for number, row in enumerate(self.rows, start=1):
            numbers = [value for value in (row.t_s, row.power_w, row.energy_j) if value is not None]
            if not all(math.isfinite(value) for value in numbers):
                raise InputError(f"Reading {number} of a power trace is wrong.", expected="finite numbers", got=row)
            if row.t_s < last_s:
                raise InputError(
                    f"Reading {number} of a power trace lies before the one above it.",
                    expected=f"{last_s} s or later",
                    got=f"{row.t_s} s",
                    remedy="sort the readings by time",
                )
            if kinds.setdefault(row.board, row.kind) != row.kind:
                raise InputError(
                    f"Reading {number} of a power trace gives board '{row.board}' another kind.",
                    expected=kinds[row.board],
                    got=row.kind,
                )
            last_s = row.t_s

    @property
    def boards(self) -> dict[str, str]:
        """The boards' keys with their kinds, in the order in which they first appear."""
        return {row.board: row.kind for row in self.rows}

    def of(self, board: str) -> tuple[TraceRow, ...]:
        """The readings of one board."""
        return tuple(row for row in self.rows if row.board == board)


def write_trace(path: str | Path, rows: Iterable[TraceRow]) -> None:
    """Write readings to ``path``, which appears, or is replaced, only when all of them are written.

    Args:
        path: where to.
        rows: readings in the order of time; numbers are written so that reading them back gives the same.
    """
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with scratch.open("x", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows((row.t_s, row.board, row.kind, row.power_w, row.energy_j) for row in rows)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(target)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def read_trace(path: str | Path) -> Trace:
    """Read what :func:`write_trace` wrote.

    Raises:
        InputError: no such file, or a file that is no power trace; the message names the line.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            return Trace(tuple(_rows(path, csv.reader(file))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"The power trace {path} cannot be read: {error}.", remedy="check the path, or record it again"
        ) from error


def _rows(path: str | Path, lines: Iterator[list[str]]) -> Iterator[TraceRow]:
    header = next(lines, [])
    if tuple(header) != COLUMNS:
        raise InputError(f"{path} is no power trace.", expected=",".join(COLUMNS), got=",".join(header) or "nothing")
    for number, line in enumerate(lines, start=2):
        try:
            t_s, board, kind, power, energy = line
            row = TraceRow(float(t_s), board, kind, _optional(power), _optional(energy))
        except ValueError as error:
            raise InputError(
                f"Line {number} of the power trace {path} is wrong.",
                expected=",".join(COLUMNS),
                got=",".join(line),
                remedy="mend the line, or leave it out",
            ) from error
        yield row


def _optional(text: str) -> float | None:
    return float(text) if text else None
