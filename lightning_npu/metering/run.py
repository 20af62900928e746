"""One metered run on one rank: what is recorded, what all ranks know, and what is said about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning_npu import keys
from lightning_npu.metering import values
from lightning_npu.metering.document import document
from lightning_npu.metering.ledger import Account, Ledger
from lightning_npu.metering.overlap import OverlapTimer
from lightning_npu.metering.recorder import Recorder
from lightning_npu.metering.totals import add_up
from lightning_npu.power.monitor import EnergyMonitor

if TYPE_CHECKING:
    from lightning_npu.module import NPUFrozenModule
    from lightning_npu.prefetch import Prefetch


class MeteredRun:
    """From its making to :meth:`stop`.

    Args:
        monitor: of the boards that this rank reads; started here.
        modules: the model's frozen modules, by name.
        stage: "fit", "validation", "test" or "predict".
        rolling_s: the shortest window over steps, in seconds.
        prior: energy and work of an earlier part of the run.
        steps: optimizer steps before.
        ranks: that train together.
        ranks_here: those on this host.
        problems: why power sources could not be made.
    """

    def __init__(
        self,
        monitor: EnergyMonitor,
        modules: Mapping[str, NPUFrozenModule],
        *,
        stage: str,
        rolling_s: float,
        prior: Account | None,
        steps: int,
        ranks: int,
        ranks_here: int,
        problems: Mapping[str, str],
    ) -> None:
        self.stage, self.ranks, self._ranks_here = stage, ranks, ranks_here
        self._modules, self._problems = dict(modules), dict(problems)
        self.timer = OverlapTimer()
        self.recorder = Recorder(monitor, rolling_s)
        self.recorder.steps = steps
        self.recorder.start()
        self.ledger = Ledger(self.recorder, prior or Account(), ranks_here)
        self.written_s = 0.0
        self._epochs: list[dict[str, Any]] = []

    # ---- what happens

    def enter(self, phase: str) -> None:
        """Interrupt what goes on by another phase."""
        self.recorder.phases.enter(phase)
        self.timer.interrupt()

    def leave(self) -> None:
        """Go back to what was interrupted."""
        self.recorder.phases.leave()
        self.timer.interrupt()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase inside of a block."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def begin_epoch(self) -> None:
        """An epoch begins, by waiting for data."""
        self.recorder.phases.switch("data_wait")
        self.recorder.begin_epoch()
        self.timer.interrupt()

    def end_epoch(self) -> None:
        """It ends."""
        self.recorder.phases.switch("other")
        self.recorder.end_epoch()
        self.timer.interrupt()

    def begin_step(self, *, alone: bool) -> None:
        """A training step begins; ``alone``: its features are computed on the spot."""
        self.timer.step(sum(module.stats["wait_s"] for module in self._modules.values()), alone=alone)
        self.recorder.phases.switch("train")

    def end_step(self, samples: int, steps: int) -> None:
        """It ends."""
        self.recorder.step_done(samples, steps)

    def stop(self) -> None:
        """End the run."""
        self.recorder.stop()

    def note_epoch(self, number: int) -> None:
        """Keep the figures of the epoch that was merged last."""
        epoch = self.ledger.epoch
        if epoch is None:
            return
        total, trained = add_up(epoch.whole), add_up(epoch.training)
        self._epochs.append(
            {
                "epoch": number,
                "seconds": epoch.duration_s,
                "samples": epoch.samples,
                "optimizer_steps": epoch.steps,
                "energy_j": None if total is None else total.energy_j,
                "uncertainty_j": None if total is None else total.uncertainty_j,
                "per_sample_j": None if trained is None or not epoch.samples else trained.energy_j / epoch.samples,
            }
        )

    # ---- what is said

    def live_values(self, prefetch: Prefetch | None, device: torch.device) -> values.Values:
        """Of this rank's host, now; without figures of energy where no board can be read."""
        row = values.of_account(self.ledger.account)
        if row:
            row |= values.of_power(self.recorder.monitor.power_w(), self.recorder.totals)
            rolling = self.recorder.rolling()
            if rolling is not None:
                row |= values.of_steps(rolling, self._ranks_here)
        if prefetch is not None and prefetch.modules:
            row |= values.of_lookahead(prefetch.statistics) | values.of_overlap(self.timer.overlap)
        if device.type == "cuda":
            row[keys.GPU_MEMORY_PEAK_BYTES] = float(torch.cuda.max_memory_allocated(device))
        return row

    def merged_values(self) -> values.Values:
        """Of all ranks, as of the last merge."""
        row = values.of_account(self.ledger.account)
        if row and self.ledger.epoch is not None:
            row |= values.of_epoch(self.ledger.epoch)
        return row

    def named_trace(self) -> dict[str, list[tuple[float, float]]]:
        """Power of this rank's boards since the start, by their short names."""
        names = keys.board_names(self.recorder.monitor.boards)
        return {names[key]: points for key, points in self.recorder.monitor.trace().items()}

    def document(self, ended: str, *, merged: bool) -> dict[str, Any]:
        """The content of ``energy.json``."""
        monitor = self.recorder.monitor
        self.written_s = self.recorder.elapsed_s
        return document(
            self.ledger.account,
            stage=self.stage,
            started_at=monitor.started_at,
            ended=ended,
            epochs=self._epochs,
            health=monitor.health(),
            idle_power_w=monitor.idle_power_w,
            problems={**self._problems, **monitor.problems, **self.ledger.problems},
            overlap=self.timer.overlap,
            modules={name: module.describe() for name, module in self._modules.items()},
            ranks=self.ranks,
            ranks_merged=merged,
        )
