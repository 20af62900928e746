"""``EnergyMeter``: what a training costs in joules, per sample, per step, per phase, on every board that it uses."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_npu import keys
from lightning_npu._lightning import pl
from lightning_npu.errors import InputError
from lightning_npu.lookahead.tags import leaves
from lightning_npu.metering import values as figures
from lightning_npu.metering.files import RunFiles
from lightning_npu.metering.ledger import Account
from lightning_npu.metering.ranks import divide, gather
from lightning_npu.metering.run import MeteredRun
from lightning_npu.metering.sources import sources_of_run
from lightning_npu.module import NPUFrozenModule
from lightning_npu.power.base import PowerSource
from lightning_npu.power.monitor import EnergyMonitor
from lightning_npu.prefetch import Prefetch

log = logging.getLogger(__name__)

FLUSH_S = 60.0
"""How often ``energy.json`` is written while a run goes on, in seconds, beside the ends of epochs."""

CALIBRATION_STEPS, FIRST_CALIBRATION, CALIBRATE_EVERY = 5, 20, 1000
"""Steps in which training and accelerator are timed each by itself: how many, from which step on, and how often."""


class EnergyMeter(pl.Callback):
    """Measures the energy of a training: the combined board power of all boards that it uses.

    ::

        trainer = L.Trainer(callbacks=[npu.EnergyMeter()])

    Which boards: the GPU that the strategy trains on, the accelerators of the model's frozen modules, and the
    processor's package where training or an artifact runs on the processor. A board counts once, whichever ranks use
    it. Figures are logged at ``log_every_n_steps`` to every logger, and by ``log``, so that EarlyStopping and
    ModelCheckpoint can monitor them; without a sensor no energy is logged, and one warning says why. At the end of each
    epoch, and after errors and Ctrl-C, ``energy.json`` and ``power_trace.csv`` are written beside the run.

    With several ranks, live figures are those of the first rank's host; at the ends of epochs and of validations all
    ranks and hosts are merged, board by board, and every rank logs the same figures, so that their decisions agree.

    Args:
        sources: "auto", or power sources and names of sources.
        prefetch: "auto" or a depth: own a :class:`Prefetch` unless the trainer has one; a :class:`Prefetch`: own that
            one; False: own none.
        interval_s: mean time between two readings of a board, in seconds.
        rolling_s: the shortest window over steps, in seconds; it is longer by itself where a sensor is slow.
        idle_power_w: "measure": twelve seconds before the training starts, with everything loaded; or watts by board
            key or kind; None: no net figures.
        calibration: by board key or kind, what is known of a sensor; see :class:`EnergyMonitor`.
        samples: how many samples a batch has; default: the first dimension of its first tensor.
        sync: "epoch": wait for the GPU at the ends of epochs and phases; "step": at every step, for profiling;
            "never".
        prefix: of the keys.
        trace: write the power trace.
        over_energy: keys of metrics that W&B draws over joules; a "*" at the end stands for anything.

    Attributes:
        report: the content of ``energy.json``; None before a run.
        path: where it is written; None before a run.

    Raises:
        InputError: a value of the wrong kind.
    """

    def __init__(
        self,
        sources: str | Sequence[PowerSource | str] = "auto",
        prefetch: Prefetch | int | str | bool = "auto",
        interval_s: float = 0.05,
        *,
        rolling_s: float = 1.0,
        idle_power_w: Any = None,
        calibration: Mapping[str, Mapping[str, float]] | None = None,
        samples: Callable[[Any], int] | None = None,
        sync: str = "epoch",
        prefix: str = keys.PREFIX,
        trace: bool = True,
        over_energy: Sequence[str] = ("val*",),
    ) -> None:
        if sync not in ("epoch", "step", "never"):
            raise InputError("sync is wrong.", expected="'epoch', 'step' or 'never'", got=repr(sync))
        if not (math.isfinite(rolling_s) and rolling_s > 0):
            raise InputError("rolling_s is wrong.", expected="seconds above 0", got=rolling_s)
        self.sources = sources if isinstance(sources, str) else list(sources)
        self.rolling_s, self.sync, self.prefix = rolling_s, sync, prefix
        self.trace, self.over_energy = trace, tuple(over_energy)
        self._make_monitor = functools.partial(
            EnergyMonitor, interval_s=interval_s, idle_power_w=idle_power_w, calibration=calibration
        )
        self._make_monitor(self.sources)  # refuse a wrong value where it was written
        self._samples = samples
        self.prefetch = _prefetch(prefetch)
        self.report: dict[str, Any] | None = None
        self.path: Path | None = None
        self._run: MeteredRun | None = None
        self._files: RunFiles | None = None
        self._ahead: Prefetch | None = None
        self._prior: Account | None = None
        self._unpatch: Callable[[], None] = _nothing

    @property
    def monitor(self) -> EnergyMonitor | None:
        """What measures on this rank; None outside of a run."""
        return None if self._run is None else self._run.recorder.monitor

    # ---- begin and end

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the look-ahead in place."""
        self._ahead = next((c for c in trainer.callbacks if isinstance(c, Prefetch)), None)
        if self._ahead is None and self.prefetch is not None:
            self._ahead = self.prefetch
            self._ahead.setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure."""
        if trainer.global_step == 0 and not trainer.ckpt_path:
            self._prior = None
        self._begin(trainer, pl_module, "fit")
        save = trainer.save_checkpoint

        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            if self._run is None:
                return save(*args, **kwargs)
            with self._run.phase("checkpoint"):
                return save(*args, **kwargs)

        trainer.save_checkpoint = save_checkpoint
        self._unpatch = functools.partial(_remove_patch, trainer, "save_checkpoint", save_checkpoint)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End, and merge what all ranks saw; all ranks come here."""
        self._finish(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a phase, or a run of its own."""
        self._begin_phase(trainer, pl_module, "validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End it."""
        self._end_phase(trainer)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run of its own."""
        self._begin_phase(trainer, pl_module, "test")

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """End it."""
        self._end_phase(trainer)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run of its own."""
        self._begin_phase(trainer, pl_module, "predict")

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """End it."""
        self._end_phase(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave everything as it was."""
        self._leave("ended early")
        if self.prefetch is not None:
            self.prefetch.teardown(trainer, pl_module, stage)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write what was measured: Lightning calls nothing else after errors and Ctrl-C.

        Other ranks may not come here, so each rank writes what it saw into a file of its own.
        """
        self._leave(f"{type(exception).__name__}: {exception}".rstrip(": "))
        if self.prefetch is not None:
            self.prefetch.on_exception(trainer, pl_module, exception)

    def _begin(self, trainer: Any, pl_module: Any, stage: str) -> None:
        modules = {name: m for name, m in pl_module.named_modules() if isinstance(m, NPUFrozenModule)}
        sources, problems = sources_of_run(self.sources, trainer.strategy.root_device, modules)
        monitor = self._make_monitor(divide(sources))
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # asks all ranks
        self._files = RunFiles(folder, stage, trainer.global_rank, trace=self.trace)
        self.path = self._files.path
        self._sync(trainer)
        self._run = MeteredRun(
            monitor,
            modules,
            stage=stage,
            rolling_s=self.rolling_s,
            prior=self._prior if stage == "fit" else None,
            steps=trainer.global_step,
            ranks=trainer.world_size,
            ranks_here=max(1, trainer.world_size // max(1, trainer.num_nodes)),
            problems=problems,
        )
        for logger in trainer.loggers if trainer.is_global_zero else ():
            from lightning_npu import wandb_logging

            wandb_logging.define_metrics(logger, prefix=self.prefix, metrics=self.over_energy)

    def _begin_phase(self, trainer: Any, pl_module: Any, phase: str) -> None:
        if self._run is None:
            self._begin(trainer, pl_module, phase)
        assert self._run is not None
        self._sync(trainer)
        self._run.enter(phase)

    def _end_phase(self, trainer: Any) -> None:
        if self._run is None:
            return
        self._sync(trainer)
        self._run.leave()
        if self._run.stage != "fit":
            self._finish(trainer)

    def _finish(self, trainer: Any) -> None:
        run = self._run
        if run is None:
            return
        self._sync(trainer)
        run.stop()
        run.ledger.merge()
        self._write(run, "finished", merged=True)
        if trainer.is_global_zero:
            self._log_end(trainer, run)
        self._close(run)

    def _leave(self, ended: str) -> None:
        """Without the other ranks."""
        self._unpatch()
        self._unpatch = _nothing
        if self._run is not None:
            self._run.stop()
            self._write(self._run, ended, merged=self._run.ranks == 1)
            self._close(self._run)

    def _close(self, run: MeteredRun) -> None:
        if run.stage == "fit":
            self._prior = run.ledger.account  # a later fit of the same trainer goes on counting
        self._run = None

    def _write(self, run: MeteredRun, ended: str, *, merged: bool) -> None:
        self.report = run.document(ended, merged=merged)
        if self._files is not None:
            self._files.write(self.report, run.recorder.monitor)

    # ---- steps

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
            _synchronise(trainer)
        self._run.begin_step(alone=alone)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The step ends; log where Lightning logs."""
        run = self._run
        if run is None:
            return
        if self.sync == "step":
            _synchronise(trainer)
        run.end_step(self._count(batch), trainer.global_step)
        step = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
        every = trainer.log_every_n_steps
        if (every and (step + 1) % every == 0) or trainer.should_stop:
            run.recorder.fold()
            if trainer.is_global_zero:
                self._log_step(trainer, run, step)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Let EarlyStopping and ModelCheckpoint see energy when a validation ends; all ranks come here."""
        run = self._run
        if run is not None and run.stage == "fit" and not trainer.sanity_checking:
            run.ledger.merge()
            self._log_merged(trainer, pl_module, run)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Merge all ranks, log the epoch, write the file."""
        run = self._run
        if run is None:
            return
        self._sync(trainer)
        run.end_epoch()
        run.ledger.merge()
        run.note_epoch(trainer.current_epoch)
        self._log_merged(trainer, pl_module, run)
        self._write(run, "", merged=True)

    # ---- logging

    def _log_step(self, trainer: Any, run: MeteredRun, step: int) -> None:
        row = run.live_values(self._ahead, trainer.strategy.root_device)
        for logger in trainer.loggers if row else ():
            logger.log_metrics(self._named(row), step=step)
        if row and run.ranks == 1:
            trainer.lightning_module.log_dict(self._named(row), logger=False, batch_size=1)
        if run.recorder.elapsed_s - run.written_s > FLUSH_S:
            self._write(run, "", merged=run.ranks == 1)

    def _log_merged(self, trainer: Any, pl_module: Any, run: MeteredRun) -> None:
        """The first rank's figures on every rank: decisions that rest on them must agree."""
        row = gather(run.merged_values() if trainer.is_global_zero else None)[0]
        if row:
            pl_module.log_dict(self._named(row), on_step=False, on_epoch=True, batch_size=1)

    def _log_end(self, trainer: Any, run: MeteredRun) -> None:
        from lightning_npu import wandb_logging

        row = run.merged_values() | figures.of_overlap(run.timer.overlap)
        for logger in trainer.loggers:
            if row:
                logger.log_metrics(self._named(row), step=trainer.global_step)
                wandb_logging.log_power_trace(logger, run.named_trace(), step=trainer.global_step, prefix=self.prefix)
            wandb_logging.write_summary(logger, self._named(row))

    def _named(self, row: Mapping[str, float]) -> dict[str, float]:
        return {keys.with_prefix(key, self.prefix): value for key, value in row.items()}

    def _count(self, batch: Any) -> int:
        if self._samples is not None:
            return int(self._samples(batch))
        found = leaves(batch)
        return int(found[0].shape[0]) if found and found[0].ndim else 1

    def _sync(self, trainer: Any) -> None:
        if self.sync != "never":
            _synchronise(trainer)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Energy and work so far, so that a resumed run goes on counting."""
        account = self._prior if self._run is None else self._run.ledger.account
        return {} if account is None else {"account": account.to_json()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._prior = Account.from_json(state_dict["account"]) if "account" in state_dict else None


def _prefetch(wanted: Prefetch | int | str | bool) -> Prefetch | None:
    if isinstance(wanted, Prefetch):
        return wanted
    if wanted is True:
        raise InputError("prefetch is wrong.", expected="'auto', a depth, a Prefetch, or False", got=True)
    return None if wanted is False else Prefetch(wanted)


def _synchronise(trainer: Any) -> None:
    """Wait for what was queued on the GPU: energy over a span of time needs it only where work is told apart."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _remove_patch(owner: Any, name: str, patch: Any) -> None:
    if vars(owner).get(name) is patch:
        delattr(owner, name)


def _nothing() -> None:
    """There is nothing to undo."""
