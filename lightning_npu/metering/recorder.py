"""Energy of one run on one process: in all, by phase, and over the last steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from lightning_npu.metering.phases import Phases, Span
from lightning_npu.metering.totals import BoardTotal, Sum, Totals, add_up, then, without
from lightning_npu.power.base import BoardEnergy
from lightning_npu.power.monitor import EnergyMonitor, Window

TRAINING = ("train", "data_wait")
"""Phases whose energy is the cost of training samples."""

RESOLVED_PERIODS = 10
"""Updates of the slowest sensor within a window over steps: a window over fewer is mostly error."""

LONGEST_S = 60.0
"""How far back steps are remembered."""


class Mark(NamedTuple):
    """The end of a step: when, and what had been done by then."""

    time_s: float
    samples: int
    steps: int
    batches: int


@dataclass(frozen=True)
class Rolling:
    """Energy over the last steps, validation and checkpoints between them taken off.

    Attributes:
        total: of all boards.
        by_board: of each.
        samples: trained within.
        steps: optimizer steps within.
        batches: training steps within.
        duration_s: seconds, of training alone.
    """

    total: Sum
    by_board: Totals
    samples: int
    steps: int
    batches: int
    duration_s: float


@dataclass(frozen=True)
class Epoch:
    """Energy of an epoch.

    Attributes:
        whole: of each board.
        training: the same without validation, checkpoints and what else came between.
        samples: trained within.
        steps: optimizer steps within.
        duration_s: seconds.
    """

    whole: Totals
    training: Totals
    samples: int
    steps: int
    duration_s: float


class Recorder:
    """Follows a run from :meth:`start` to :meth:`stop`.

    Args:
        monitor: started by :meth:`start`.
        rolling_s: the shortest window over steps, in seconds; longer where a sensor is slow.
    """

    def __init__(self, monitor: EnergyMonitor, rolling_s: float = 1.0) -> None:
        self.monitor, self.rolling_s = monitor, rolling_s
        self.phases = Phases()
        self.by_phase: dict[str, Totals] = {}
        self.phase_s: dict[str, float] = {}
        self.samples, self.steps, self.batches = 0, 0, 0
        self._marks: deque[Mark] = deque()
        self._elsewhere: deque[Span] = deque()
        self._whole: Window | None = None
        self._final: Totals | None = None
        self._epoch: Window | None = None
        self._epoch_counts = Mark(0.0, 0, 0, 0)
        self._elsewhere_before: Totals = {}

    def start(self) -> None:
        """Begin to measure."""
        self.monitor.start()
        self._whole = self.monitor.begin("run")
        self.phases = Phases()

    def stop(self, timeout_s: float = 0.5) -> None:
        """End, and wait a moment for the readings that settle the last figures."""
        if self._whole is None or self._final is not None:
            return
        self.phases.stop()
        self._whole.end()
        self._whole.settle(timeout_s)
        self._fold(math.inf)
        self._final = self._total(self._whole)
        self.monitor.stop()

    def step_done(self, samples: int, steps: int) -> None:
        """A training step ended.

        Args:
            samples: in it.
            steps: optimizer steps so far.
        """
        self.samples += samples
        self.batches += 1
        self.steps = steps
        now_s = self.phases.switch("data_wait")
        self._marks.append(Mark(now_s, self.samples, steps, self.batches))
        while self._marks[0].time_s < now_s - LONGEST_S and len(self._marks) > 2:
            self._marks.popleft()

    @property
    def totals(self) -> Totals:
        """What every board used since the start; those that could not be read are absent."""
        if self._final is not None:
            return self._final
        return {} if self._whole is None else self._total(self._whole)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return 0.0 if self._whole is None else self._whole.duration_s

    def fold(self) -> None:
        """Add to the phases what is settled."""
        self._fold(self.monitor.settled_until_s)

    def begin_epoch(self) -> None:
        """Begin the window of an epoch."""
        self._epoch = self.monitor.begin("epoch")
        self._epoch_counts = Mark(self._epoch.started_s, self.samples, self.steps, self.batches)
        self.fold()
        self._elsewhere_before = self._elsewhere_total()

    def end_epoch(self) -> None:
        """End the window of an epoch."""
        if self._epoch is not None:
            self._epoch.end()

    def epoch(self) -> Epoch | None:
        """The present epoch so far, or the one that ended; None before the first."""
        if self._epoch is None:
            return None
        whole = self._total(self._epoch)
        training = without(whole, without(self._elsewhere_total(), self._elsewhere_before))
        began = self._epoch_counts
        return Epoch(whole, training, self.samples - began.samples, self.steps - began.steps, self._epoch.duration_s)

    def _elsewhere_total(self) -> Totals:
        """What all phases but training used so far, also what is not settled."""
        total: Totals = {}
        for phase, totals in self.by_phase.items():
            if phase not in TRAINING:
                total = then(total, totals)
        for span in self.phases.waiting():
            if span.phase not in TRAINING:
                total = then(total, self._between(span.start_s, span.end_s))
        return total

    def rolling(self) -> Rolling | None:
        """Energy over the last steps that are settled; None while they are too short to be resolved."""
        self.fold()
        settled_s = self.monitor.settled_until_s
        ends = [mark for mark in self._marks if mark.time_s <= settled_s]
        if not ends:
            return None
        end = ends[-1]
        shortest_s = self.shortest_s
        begin = next((mark for mark in reversed(ends) if end.time_s - mark.time_s >= shortest_s), None)
        if begin is None:
            return None
        by_board = self._between(begin.time_s, end.time_s)
        away_s = 0.0
        for span in self._elsewhere:
            start_s, end_s = max(span.start_s, begin.time_s), min(span.end_s, end.time_s)
            if start_s < end_s:
                away_s += end_s - start_s
                by_board = without(by_board, self._between(start_s, end_s))
        total = add_up(by_board)
        if total is None:
            return None
        duration_s = end.time_s - begin.time_s - away_s
        return Rolling(
            total,
            by_board,
            end.samples - begin.samples,
            end.steps - begin.steps,
            end.batches - begin.batches,
            duration_s,
        )

    @property
    def shortest_s(self) -> float:
        """The shortest window over steps that the sensors resolve, in seconds."""
        slowest_s = max(self.monitor.update_periods_s.values(), default=0.0)
        return min(max(self.rolling_s, RESOLVED_PERIODS * slowest_s), LONGEST_S / 2)

    def _fold(self, until_s: float) -> None:
        for span in self.phases.take(until_s):
            energies = self._between(span.start_s, span.end_s)
            self.by_phase[span.phase] = then(self.by_phase.get(span.phase, {}), energies)
            self.phase_s[span.phase] = self.phase_s.get(span.phase, 0.0) + span.end_s - span.start_s
            if span.phase not in TRAINING:
                self._elsewhere.append(span)
        while self._elsewhere and self._marks and self._elsewhere[0].end_s < self._marks[0].time_s:
            self._elsewhere.popleft()

    def _between(self, start_s: float, end_s: float) -> Totals:
        return self._as_totals(self.monitor.between(start_s, end_s))

    def _total(self, window: Window) -> Totals:
        return self._as_totals(window.by_board)

    def _as_totals(self, energies: dict[str, BoardEnergy]) -> Totals:
        idle = self.monitor.idle_power_w or {}
        boards = {board.key: board for board in self.monitor.boards}
        return {
            key: BoardTotal.of(boards[key], energy, idle[key]["power_w"] if key in idle else None)
            for key, energy in energies.items()
        }
