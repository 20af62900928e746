"""Energy of one run on one process: in all, by phase, by epoch, and over the last steps."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_npu.metering.phases import Phases, Span, bundle
from lightning_npu.metering.stretches import Epoch, Mark, Rolling, Snapshot
from lightning_npu.metering.totals import BoardTotal, Totals, then, without
from lightning_npu.power.base import BoardEnergy
from lightning_npu.power.monitor import EnergyMonitor, Window
from lightning_npu.power.session import KEEP_MOST_S

TRAINING = ("train", "data_wait")
"""Phases whose energy is the cost of training samples."""

RESOLVED_PERIODS = 10
"""Updates of the slowest sensor within a window over steps: a window over fewer is mostly error."""

LONGEST_S = 60.0
"""How far back steps are remembered."""

FOLD_S = 5.0
"""How long spans of phases wait at most until what is settled of them is added up, while steps are trained."""

SETTLE_S, SETTLE_PERIODS = 10.0, 4
"""How long spans wait for the readings that settle them: a sensor that hangs must not hold up the others' figures."""


class Recorder:
    """Follows a run from :meth:`start` to :meth:`stop`.

    Args:
        monitor: started by :meth:`start`, unless nothing is there to be read.
        rolling_s: the shortest window over steps, in seconds; longer where a sensor is slow.

    Attributes:
        phases: what goes on now.
        samples: trained by this process.
        steps: optimizer steps, those before the run included.
        batches: training steps.
        by_phase: what every board used in each phase, up to the last reading that settles it.
        phase_s: seconds of each phase, likewise.
    """

    def __init__(self, monitor: EnergyMonitor, rolling_s: float = 1.0) -> None:
        self.monitor, self.rolling_s = monitor, rolling_s
        self.phases = Phases()
        self.by_phase: dict[str, Totals] = {}
        self.phase_s: dict[str, float] = {}
        self.samples, self.steps, self.batches = 0, 0, 0
        self._marks: deque[Mark] = deque()
        self._elsewhere: deque[Span] = deque()
        self._folded_s = -math.inf
        self._tried_s = time.monotonic()
        self._whole: Window | None = None
        self._final: Totals | None = None
        self._epoch: Window | None = None
        self._epoch_from = (0, 0, 0)  # samples, steps and batches at its begin
        self._epoch_ended: Epoch | None = None
        self._trained: Totals = {}  # in the present epoch, as far as it is settled

    def start(self, *, quietly: bool = False) -> None:
        """Begin to measure.

        Args:
            quietly: there is nothing to read, and the user knows.
        """
        if not quietly:
            self.monitor.start()
        self._whole = self.monitor.begin("run")
        self.phases = Phases(start_s=self._whole.started_s)
        self.monitor.keep_since(self.phases.waiting_since_s)

    def stop(self, timeout_s: float = 0.5) -> None:
        """End, and wait a moment for the readings that settle the last figures."""
        if self._whole is None or self._final is not None:
            return
        ended_s = self._whole.end().ended_s
        self.phases.stop(time.monotonic() if ended_s is None else ended_s)
        self._whole.settle(timeout_s)
        self.end_epoch()
        self.monitor.stop()  # reads once more
        self._fold(math.inf)
        self._final = self.of_window(self._whole)

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
        trained_s = sum(self.phases.seconds.get(phase, 0.0) for phase in TRAINING)
        self._marks.append(Mark(now_s, trained_s, self.samples, steps, self.batches))
        while len(self._marks) > 3 and self._marks[0].time_s < now_s - LONGEST_S:
            self._marks.popleft()
        while self._marks[0].time_s < now_s - KEEP_MOST_S:  # of which no detail is left
            self._marks.popleft()
        if now_s - self._tried_s > FOLD_S:  # also where nothing is logged: detail of long ago is gone
            self.fold()

    def evaluated(self, samples: int) -> None:
        """A batch of a validation, test or prediction ended, with so many samples to be counted."""
        self.samples += samples
        if time.monotonic() - self._tried_s > FOLD_S:
            self.phases.switch(self.phases.current)  # what is over of it can be added up
            self.fold()

    def interrupt(self, phase: str) -> None:
        """Something else begins, such as a validation."""
        self._read()
        self.phases.enter(phase)

    def resume(self) -> None:
        """It ends, and what it interrupted goes on."""
        self._read()
        self.phases.leave()

    # ---- figures

    @property
    def totals(self) -> Totals:
        """What every board used since the start; those that could not be read are absent."""
        if self._final is not None:
            return self._final
        return {} if self._whole is None else self.of_window(self._whole)

    @property
    def missing(self) -> dict[str, str]:
        """Why the energy of other boards is not known, by key."""
        return {} if self._whole is None else self._whole.missing

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return 0.0 if self._whole is None else self._whole.duration_s

    def fold(self) -> None:
        """Add to the phases what is settled."""
        self._fold(self.monitor.settled_until_s)

    def snapshot(self) -> Snapshot:
        """Energy in all and by phase up to this moment, as far as is known by now."""
        self.fold()
        by_phase, phase_s = dict(self.by_phase), dict(self.phase_s)
        for span in self.phases.waiting() if self._final is None else ():
            by_phase[span.phase] = then(by_phase.get(span.phase, {}), self._between(span))
            phase_s[span.phase] = phase_s.get(span.phase, 0.0) + span.end_s - span.start_s
        totals, elapsed_s = self.totals, self.elapsed_s
        if self._final is None:  # readings may have come in between, and time has passed
            present = self.phases.current
            by_phase[present] = {
                key: replace(total, energy_j=total.energy_j + totals[key].energy_j - _sum_j(by_phase, key))
                for key, total in by_phase[present].items()
                if key in totals
            }
            phase_s[present] += elapsed_s - math.fsum(phase_s.values())
        return Snapshot(totals, by_phase, phase_s, elapsed_s)

    def begin_epoch(self) -> None:
        """Begin the window of an epoch; no effect where one has begun and nothing was trained in it yet."""
        if self._epoch is not None and self._epoch_ended is None and self._epoch_from[2] == self.batches:
            return
        self.fold()
        self._epoch, self._epoch_ended = self.monitor.begin("epoch"), None
        self._epoch_from = (self.samples, self.steps, self.batches)
        self._trained = {}

    def end_epoch(self) -> None:
        """End the window of an epoch; no effect where none is open."""
        if self._epoch is not None and self._epoch_ended is None:
            self._epoch.end()
            self._epoch_ended = self._measure_epoch(self._epoch)

    def epoch(self) -> Epoch | None:
        """The present epoch so far, or the one that ended; None before the first."""
        if self._epoch_ended is not None or self._epoch is None:
            return self._epoch_ended
        return self._measure_epoch(self._epoch)

    def rolling(self) -> Rolling | None:
        """Energy over the last steps that are settled; None while they are too short to be resolved."""
        self.fold()
        begin = end = None
        shortest_s = self.shortest_s
        for mark in reversed(self._marks):
            if mark.time_s > self._folded_s:
                continue
            end = end or mark
            if end.trained_s - mark.trained_s >= shortest_s:
                begin = mark
                break
        if begin is None or end is None:
            return None
        by_board = self._between(Span("", begin.time_s, end.time_s))
        for span in self._elsewhere:
            start_s, end_s = max(span.start_s, begin.time_s), min(span.end_s, end.time_s)
            if start_s < end_s:
                by_board = without(by_board, self._between(Span("", start_s, end_s)))
        if not by_board:
            return None
        samples, steps, batches = (b - a for a, b in zip(begin[2:], end[2:], strict=True))
        return Rolling(by_board, samples, steps, batches, end.trained_s - begin.trained_s)

    @property
    def shortest_s(self) -> float:
        """The shortest window over steps that the sensors resolve, in seconds."""
        return min(max(self.rolling_s, RESOLVED_PERIODS * self._slowest_s), LONGEST_S / 2)

    # ---- within

    @property
    def _slowest_s(self) -> float:
        return max(self.monitor.update_periods_s.values(), default=0.0)

    def _read(self) -> None:
        """Read counters now: between two polls power may change, and does so where phases do."""
        self.monitor.begin("phase")

    def _fold(self, until_s: float) -> None:
        self._tried_s = time.monotonic()
        forced_s = self._tried_s - max(SETTLE_S, SETTLE_PERIODS * self._slowest_s)
        spans = self.phases.take(max(until_s, forced_s))
        # between two polls a curve is a straight line: to lay an edge there for every short step would tell no more
        for bundled in bundle(spans, TRAINING, self.monitor.interval_s / 2):
            start_s, end_s = bundled[0].start_s, bundled[-1].end_s
            energies = self.monitor.between(start_s, end_s)
            if until_s < math.inf and start_s > forced_s and not _settled(energies.values()):
                self.phases.put_back([span for span in spans if span.start_s >= start_s])
                break
            self._account(bundled, self._as_totals(energies))
            self._folded_s = end_s
        while self._elsewhere and self._marks and self._elsewhere[0].end_s < self._marks[0].time_s:
            self._elsewhere.popleft()
        # a validation may take longer than the monitor keeps detail by itself, and its edges are needed at its end
        needed_s = self.phases.waiting_since_s
        self.monitor.keep_since(min(needed_s, self._marks[0].time_s) if self._marks else needed_s)

    def _account(self, bundled: Sequence[Span], totals: Totals) -> None:
        """Add spans that follow one another to their phases, whose energies together are ``totals``."""
        epoch = self._epoch if self._epoch_ended is None else None
        if epoch is not None and bundled[0].phase in TRAINING and bundled[0].start_s >= epoch.started_s:
            self._trained = then(self._trained, totals)
        seconds: dict[str, float] = {}
        for span in bundled:
            seconds[span.phase] = seconds.get(span.phase, 0.0) + span.end_s - span.start_s
            if span.phase not in TRAINING and self._marks:  # before the first step nothing asks for it
                self._elsewhere.append(span)
        whole_s = math.fsum(seconds.values())
        for phase, phase_s in seconds.items():
            part = totals if len(seconds) == 1 else {key: t.part(phase_s / whole_s) for key, t in totals.items()}
            self.by_phase[phase] = then(self.by_phase.get(phase, {}), part)
            self.phase_s[phase] = self.phase_s.get(phase, 0.0) + phase_s

    def _measure_epoch(self, window: Window) -> Epoch:
        self.fold()
        training = self._trained
        waiting = (span for span in self.phases.waiting() if span.start_s >= window.started_s)
        for spans in bundle(waiting, TRAINING, math.inf):
            if spans[0].phase in TRAINING:
                training = then(training, self._between(Span("", spans[0].start_s, spans[-1].end_s)))
        samples, steps, _ = self._epoch_from
        return Epoch(self.of_window(window), training, self.samples - samples, self.steps - steps, window.duration_s)

    def _between(self, span: Span) -> Totals:
        return self._as_totals(self.monitor.between(span.start_s, span.end_s))

    def of_window(self, window: Window) -> Totals:
        """What every board used in a window of the monitor; those that could not be read are absent."""
        return self._as_totals(window.by_board)

    def _as_totals(self, energies: dict[str, BoardEnergy]) -> Totals:
        idle = self.monitor.idle_power_w or {}
        boards = {board.key: board for board in self.monitor.boards}
        return {
            key: BoardTotal.of(boards[key], energy, idle[key]["power_w"] if key in idle else None)
            for key, energy in energies.items()
        }


def _sum_j(by_phase: dict[str, Totals], key: str) -> float:
    return math.fsum(totals[key].energy_j for totals in by_phase.values() if key in totals)


def _settled(energies: Iterable[BoardEnergy]) -> bool:
    """Whether later readings change nothing; those of a board that is lost may never come."""
    return all(energy.settled or energy.state.startswith("lost") for energy in energies)
