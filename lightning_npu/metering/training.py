"""The hooks of a training that goes on: its epochs and steps, and what is logged of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_npu.metering import trainer as lightning
from lightning_npu.metering.arguments import whole
from lightning_npu.metering.files import RunFiles
from lightning_npu.metering.ranks import gather
from lightning_npu.metering.run import MeteredRun

if TYPE_CHECKING:
    from lightning_npu.prefetch import Prefetch

FLUSH_S = 60.0
"""How often ``energy.json`` is written while a run goes on, in seconds, beside the ends of epochs."""

CALIBRATION_STEPS, FIRST_CALIBRATION, CALIBRATE_EVERY = 5, 20, 1000
"""Steps in which training and accelerator are timed each by itself: how many, from which step on, and how often."""


class Training:
    """Windows over epochs and steps of the present run."""

    sync: str
    _samples: Callable[[Any], int]
    _run: MeteredRun | None
    _files: RunFiles | None
    _ahead: Prefetch | None

    @abstractmethod
    def _write(self, run: MeteredRun, ended: str, *, merged: bool) -> None: ...

    @abstractmethod
    def _logs(self, trainer: Any) -> lightning.Logs: ...

    @abstractmethod
    def _sync(self, trainer: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a window."""
        if self._run is not None:
            self._run.begin_epoch()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The batch is there; the step begins."""
        if self._run is None:
            return
        if self._ahead is not None and self._run.recorder.batches % CALIBRATE_EVERY == FIRST_CALIBRATION:
            self._ahead.calibrate(CALIBRATION_STEPS)
        alone = self._ahead is not None and self._ahead.calibrating
        if self.sync == "step" or alone:
            lightning.synchronise(trainer)
        self._run.begin_step(alone=alone)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The step ends; log where Lightning logs."""
        run = self._run
        if run is None:
            return
        if self.sync == "step":
            lightning.synchronise(trainer)
        stepped = trainer.global_step != run.recorder.steps
        run.recorder.step_done(whole(self._samples(batch)), trainer.global_step)
        if lightning.logs_now(trainer, stepped=stepped):
            self._log_step(trainer, run)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Let EarlyStopping and ModelCheckpoint see energy when a validation ends; all ranks come here."""
        run = self._run
        if run is not None and run.stage == "fit" and not trainer.sanity_checking:
            self._log_merged(trainer, run, lightning.logging_step(trainer))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Merge all ranks, log the epoch, write the file."""
        run = self._run
        if run is None:
            return
        self._sync(trainer)
        run.end_epoch()
        self._log_merged(trainer, run, lightning.logging_step(trainer) - 1)  # as Lightning does
        run.note_epoch(trainer.current_epoch)
        if self._files is not None and self._files.due:
            self._write(run, "", merged=True)

    def _log_step(self, trainer: Any, run: MeteredRun) -> None:
        if not trainer.is_global_zero:
            run.recorder.fold()
            return
        logs = self._logs(trainer)
        row = run.live_values(self._ahead, trainer.strategy.root_device)
        logs.log(row, lightning.logging_step(trainer))
        if run.ranks == 1:
            logs.monitored(row, step=True, ranks=1)
        if self._files is not None and self._files.due and run.recorder.elapsed_s - run.written_s > FLUSH_S:
            self._write(run, "", merged=False)

    def _log_merged(self, trainer: Any, run: MeteredRun, step: int) -> None:
        """The first rank's figures on every rank: decisions that rest on them must agree."""
        run.ledger.merge()
        row = gather(run.merged_values() if trainer.is_global_zero else None)[0] or {}
        self._logs(trainer).log(row, step)
        self._logs(trainer).monitored(row, step=False, ranks=run.ranks)
