"""Where a run's figures are kept: ``energy.json`` and ``power_trace.csv`` beside the run, whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_npu.power.monitor import EnergyMonitor
from lightning_npu.power.trace_file import TraceRow, write_trace

log = logging.getLogger(__name__)

TRACE_POINTS = 20_000
"""Points per board that a trace holds; beyond that, neighbours are joined without losing energy."""


class RunFiles:
    """The files of one run. A file of another run is never written over: it keeps its name, this one gets a number.

    Args:
        folder: beside what else the run writes; made when something is written.
        stage: "fit" has plain names, others have theirs in the names.
        rank: other ranks than the first have theirs in the names, and write only what no merge took over.
        trace: whether to write the power trace.
    """

    def __init__(self, folder: Path, stage: str, rank: int, *, trace: bool) -> None:
        self._rank, self._trace, self._complained = rank, trace, False
        suffix = ("" if stage == "fit" else f"-{stage}") + ("" if rank == 0 else f"-rank{rank}")
        number = 1
        while True:
            ending = suffix + ("" if number == 1 else f"-{number}")
            self.path = folder / f"energy{ending}.json"
            self.trace_path = folder / f"power_trace{ending}.csv"
            if not (self.path.exists() or self.trace_path.exists()):
                break
            number += 1

    def write(self, report: Mapping[str, Any], monitor: EnergyMonitor) -> None:
        """Write both; a full or read-only disk is logged once and does not end the training."""
        if self._rank != 0 and report["ranks_merged"]:
            return  # the first rank has it
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, report)
            rows = trace_rows(monitor) if self._trace else []
            if rows:
                write_trace(self.trace_path, rows)
        except OSError as error:
            if not self._complained:
                log.warning("The energy of this run cannot be written to %s: %s", self.path, error)
            self._complained = True


def trace_rows(monitor: EnergyMonitor) -> list[TraceRow]:
    """The boards' power since the start, in the order of time."""
    kinds = {board.key: board.kind for board in monitor.boards}
    rows = [
        TraceRow(time_s, key, kinds[key], watts)
        for key, points in monitor.trace(TRACE_POINTS).items()
        for time_s, watts in points
    ]
    return sorted(rows, key=lambda row: row.t_s)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    half = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with half.open("x", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
