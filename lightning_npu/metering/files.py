"""Where a run's figures are kept: ``energy.json`` and ``power_trace.csv`` beside the run, whole or not at all."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_npu.power.monitor import EnergyMonitor
from lightning_npu.power.trace_file import TraceRow, write_trace

log = logging.getLogger(__name__)

TRACE_POINTS = 20_000
"""Points per board that a trace holds; beyond that, neighbours are joined without losing energy."""

SHARE = 0.01
"""Share of the time that writing may take while a run goes on."""


class RunFiles:
    """The files of one run. A file of another run is never written over: it keeps its name, this one gets a number.

    Args:
        folder: beside what else the run writes; made when something is written. None: nothing is written.
        stage: "fit" has plain names, others have theirs in the names.
        rank: other ranks than the first have theirs in the names, and write only what no merge took over.
        trace: whether to write the power trace.

    Attributes:
        path: of ``energy.json``, once it is there.
    """

    def __init__(self, folder: Path | None, stage: str, rank: int, *, trace: bool) -> None:
        self._folder, self._rank, self._trace = folder, rank, trace
        self._suffix = ("" if stage == "fit" else f"-{stage}") + ("" if rank == 0 else f"-rank{rank}")
        self._trace_path: Path | None = None
        self._complained = False
        self._next_s = 0.0
        self.path: Path | None = None

    @property
    def due(self) -> bool:
        """Whether a file that is not the last one may be written now: writing must not slow the run."""
        return time.monotonic() >= self._next_s

    def write(self, report: Mapping[str, Any], monitor: EnergyMonitor) -> None:
        """Write both; a full or read-only disk is logged once and does not end the training."""
        if self._folder is None or (self._rank != 0 and report["ranks_merged"]):
            return  # the first rank has it
        began_s = time.monotonic()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self.path is None:
                self.path, self._trace_path = self._claim(self._folder, report)
            else:
                write_json(self.path, report)
            rows = trace_rows(monitor) if self._trace else []
            if rows and self._trace_path is not None:
                write_trace(self._trace_path, rows)
        except OSError as error:
            if not self._complained:
                log.warning("The energy of this run cannot be written to %s: %s", self._folder, error)
            self._complained = True
        ended_s = time.monotonic()
        self._next_s = ended_s + (ended_s - began_s) / SHARE

    def _claim(self, folder: Path, report: Mapping[str, Any]) -> tuple[Path, Path]:
        """Write under the first number that no run has, also where several runs begin at one moment."""
        for number in itertools.count(1):
            ending = self._suffix + ("" if number == 1 else f"-{number}")
            path, trace_path = folder / f"energy{ending}.json", folder / f"power_trace{ending}.csv"
            if path.exists() or trace_path.exists():
                continue
            try:
                write_json(path, report, replace=False)
            except FileExistsError:
                continue
            return path, trace_path
        raise AssertionError("unreachable")


def trace_rows(monitor: EnergyMonitor) -> list[TraceRow]:
    """The boards' power since the start, in the order of time."""
    kinds = {board.key: board.kind for board in monitor.boards}
    rows = [
        TraceRow(time_s, key, kinds[key], watts)
        for key, points in monitor.trace(TRACE_POINTS).items()
        for time_s, watts in points
    ]
    return sorted(rows, key=lambda row: row.t_s)


def write_json(path: Path, content: Mapping[str, Any], *, replace: bool = True) -> None:
    """Write a file whole or not at all.

    Args:
        path: where to.
        content: what is not JSON in it is written as text.
        replace: whether a file of that name may be replaced.

    Raises:
        FileExistsError: there is one, and it may not.
        OSError: the disk is full, or the folder cannot be written.
    """
    half = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with half.open("x", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False, default=str)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        if replace:
            half.replace(path)
        else:
            _move(half, path)
    finally:
        half.unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    """Rename unless the target is there, which a rename alone would replace."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if target.exists():
            raise FileExistsError(target) from None
        source.replace(target)
