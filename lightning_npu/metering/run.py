"""One metered run on one rank: what is recorded, what all ranks know, and what is said about it."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning_npu import keys
from lightning_npu.errors import one_line
from lightning_npu.metering import values
from lightning_npu.metering.document import document
from lightning_npu.metering.failures import FailureWatch
from lightning_npu.metering.ledger import Account, Ledger
from lightning_npu.metering.overlap import OverlapTimer
from lightning_npu.metering.ranks import divide, gather, rank
from lightning_npu.metering.recorder import Recorder
from lightning_npu.metering.sources import Sensors
from lightning_npu.metering.totals import add_up
from lightning_npu.power.base import PowerSource
from lightning_npu.power.monitor import EnergyMonitor

if TYPE_CHECKING:
    from lightning_npu.module import NPUFrozenModule
    from lightning_npu.prefetch import Prefetch

log = logging.getLogger(__name__)


class MeteredRun:
    """From its making to :meth:`stop`. All ranks make theirs at the same point.

    Args:
        make_monitor: makes the monitor of the sources that this rank is to read.
        sensors: of the run on this rank.
        modules: the model's frozen modules, by name.
        stage: "fit", "validation", "test" or "predict".
        rolling_s: the shortest window over steps, in seconds.
        prior: energy and work of an earlier part of the run.
        ranks: that train together.
        ranks_here: those on this host.

    Attributes:
        name: of this run alone.
    """

    def __init__(
        self,
        make_monitor: Callable[[list[PowerSource]], EnergyMonitor],
        sensors: Sensors,
        modules: Mapping[str, NPUFrozenModule],
        *,
        stage: str,
        rolling_s: float,
        prior: Account | None,
        ranks: int,
        ranks_here: int,
    ) -> None:
        self.name = uuid.uuid4().hex
        self.stage, self.ranks, self._ranks_here = stage, ranks, ranks_here
        self._sensors, self._modules = sensors, dict(modules)
        self._facts = {name: _describe(module) for name, module in modules.items()}
        self.timer = OverlapTimer()
        self._epochs: list[dict[str, Any]] = []
        self._started_at = time.time()
        self.written_s = 0.0
        self._shown: values.Values = {}
        sources, missing = divide(sensors.sources)
        problems = {**sensors.problems, **missing}
        self.recorder = Recorder(make_monitor(sources), rolling_s)
        self.recorder.start(quietly=not sources)  # what is missing is told below, once for all ranks
        self.ledger = Ledger(self.recorder, prior or Account(), ranks_here, problems)
        self._failures = FailureWatch(self.recorder, modules)
        self.ledger.failures = self._failures.to_json
        everyone = gather([problems, sorted({board.kind for board in self.recorder.monitor.boards})])
        if rank() == 0:
            _warn(
                sensors,
                {name: reason for found, _ in everyone for name, reason in found.items()},
                {kind for _, kinds in everyone for kind in kinds},
            )

    # ---- what happens

    def count_steps_from(self, steps: int) -> None:
        """Training begins; so many optimizer steps were taken before."""
        self.recorder.steps = self.ledger.steps_before = steps

    def enter(self, phase: str) -> None:
        """Interrupt what goes on by another phase."""
        self.recorder.interrupt(phase)
        self.timer.interrupt()

    def leave(self) -> None:
        """Go back to what was interrupted."""
        self.recorder.resume()
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
        self.recorder.begin_epoch()
        self.recorder.phases.switch("data_wait")
        self.timer.interrupt()

    def end_epoch(self) -> None:
        """It ends."""
        self.recorder.phases.switch("other")
        self.recorder.end_epoch()
        self.timer.interrupt()

    def begin_step(self, *, alone: bool) -> None:
        """A training step begins; ``alone``: its features are computed on the spot."""
        self._failures.look()
        self.timer.step(sum(module.stats["wait_s"] for module in self._modules.values()), alone=alone)
        self.recorder.phases.switch("train")

    def evaluated(self, samples: int) -> None:
        """A batch of a validation, test or prediction ended, with so many samples to be counted."""
        self.recorder.evaluated(samples)
        self._failures.look()

    def stop(self) -> None:
        """End the run."""
        self._failures.end()
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
        rolling = self.recorder.rolling()
        account, monitor = self.ledger.account_settled, self.recorder.monitor
        row = values.of_account(account)
        if row:
            row |= values.of_power(monitor.power_w(), account.totals) | values.of_health(
                monitor.health(), account.totals
            )
            if rolling is not None:
                row |= values.of_steps(rolling, self._ranks_here)
        if prefetch is not None and prefetch.modules:
            row |= values.of_lookahead(prefetch.statistics) | values.of_overlap(self.timer.overlap)
        if row:  # the look-ahead's figures are drawn over it too, where no board can be read
            row.setdefault(keys.ELAPSED_S, account.elapsed_s)
        if device.type == "cuda":
            row[keys.GPU_MEMORY_PEAK_BYTES] = float(torch.cuda.max_memory_allocated(device))
        return self._monotonic(row)

    def merged_values(self) -> values.Values:
        """Of all ranks, as of the last merge; of an evaluation by itself, its phase alone.

        A test after a training would else seem to be a training that used hardly any energy.
        """
        row = values.of_account(self.ledger.account)
        if self.stage != "fit":
            return {key: value for key, value in row.items() if key == keys.phase_j(self.stage)}
        if row and self.ledger.epoch is not None:
            row |= values.of_epoch(self.ledger.epoch)
        return self._monotonic(row)

    def final_values(self) -> values.Values:
        """The figures that hold, after the end: those of :meth:`document`, per sample and step over the whole run."""
        row, account = self.merged_values(), self.ledger.account
        exact = values.of_account(account)
        if self.stage == "fit":
            return row | exact | values.of_work(account.work(self.stage), account.samples, account.steps)
        return {key: exact.get(key, value) for key, value in row.items()}

    def _monotonic(self, row: values.Values) -> values.Values:
        """Energy so far as it was shown does not go down when a late reading turns out lower than was expected."""
        self._shown = {
            key: max(value, self._shown.get(key, value)) for key, value in row.items() if key in values.CUMULATIVE
        }
        return row | self._shown

    def named_trace(self) -> dict[str, list[tuple[float, float]]]:
        """Power of this rank's boards since the start, by their short names."""
        names = keys.board_names(self.recorder.monitor.boards)
        return {names[key]: points for key, points in self.recorder.monitor.trace().items()}

    def document(self, ended: str, *, merged: bool) -> dict[str, Any]:
        """The content of ``energy.json``.

        Args:
            ended: "" while it runs, "finished", or why it ended.
            merged: whether all ranks were heard of just now.
        """
        monitor, account = self.recorder.monitor, self.ledger.account
        self.written_s = self.recorder.elapsed_s
        mine = self._failures.to_json()
        elsewhere = self.ledger.all_failures if merged else []
        kinds = {total.kind for total in account.totals.values()}
        return document(
            account,
            stage=self.stage,
            started_at=self._started_at,
            ended=ended,
            epochs=self._epochs,
            health=monitor.health(),
            idle_power_w=monitor.idle_power_w,
            unmetered=self._sensors.unmetered(kinds, {**self.ledger.problems, **self.recorder.missing}),
            overlap=self.timer.overlap,
            modules=self._facts,
            failures=mine + [failure for failure in elsewhere if failure not in mine],
            ranks=self.ranks,
            ranks_merged=self.ranks == 1 or (merged and self.ledger.ranks_merged == self.ranks),
            earlier=self.ledger.prior,
        )


def _warn(sensors: Sensors, problems: Mapping[str, str], kinds: set[str]) -> None:
    """Say once what is not measured."""
    unmetered = sensors.unmetered(kinds, problems)
    told = "; ".join(f"{what}: {reason}" for what, reason in unmetered.items())
    if not kinds:
        log.warning("No board's power can be read, so no energy is measured. %s", told or "There are no power sources.")
    elif unmetered and (problems or not sensors.chosen):
        log.warning(
            "Energy of this run leaves something out, so joules per sample do not compare with those of runs in which "
            "it is measured. %s",
            told,
        )


def _describe(module: NPUFrozenModule) -> dict[str, Any]:
    """What a module runs on; asked at the start, since a device that has failed may not answer at the end."""
    try:
        return module.describe()
    except Exception as error:
        return {"problem": one_line(error)}
