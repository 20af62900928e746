"""What the meter asks of a Lightning trainer, in one place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from lightning_npu import keys, wandb_logging
from lightning_npu.lookahead.tags import leaves

Row = Mapping[str, float]


def folder_of(trainer: Any) -> Path | None:
    """The folder of the run, where its checkpoints are put too; all ranks ask, and get that of the first.

    None in a ``fast_dev_run``, which leaves no files.
    """
    if trainer.fast_dev_run:
        return None
    folder = trainer.default_root_dir
    if trainer.loggers:
        logger = trainer.loggers[0]
        folder = getattr(logger, "log_dir", None)
        if folder is None:
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            folder = Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version)
    folder = str(trainer.strategy.broadcast(str(folder)))
    return Path.cwd() if "://" in folder else Path(folder)  # a trace is too much to be written to a bucket every minute


def logging_step(trainer: Any) -> int:
    """The step under which Lightning logs now: it counts batches that stepped, whatever the number of optimizers."""
    return int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))


def logs_now(trainer: Any, *, stepped: bool) -> bool:
    """Whether Lightning logs at the end of this batch.

    Args:
        trainer: the trainer.
        stepped: whether an optimizer did.
    """
    every = trainer.log_every_n_steps
    if not every or not (stepped or not trainer.lightning_module.automatic_optimization):
        return False
    return bool((logging_step(trainer) + 1) % every == 0 or trainer.should_stop)


def samples_of(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor that has one; a batch without tensors counts as 1."""
    if batch is None:
        return 0
    return next((int(tensor.shape[0]) for tensor in leaves(batch) if tensor.ndim), 1)


def synchronise(trainer: Any) -> None:
    """Wait for what was queued on the GPU: energy over a span of time needs it only where work is told apart."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_checkpoints(trainer: Any, during: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Enter ``during()`` around ``trainer.save_checkpoint``; what undoes it."""
    save = trainer.save_checkpoint

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        with during():
            return save(*args, **kwargs)

    trainer.save_checkpoint = save_checkpoint
    return functools.partial(_remove_patch, trainer, save_checkpoint)


def _remove_patch(trainer: Any, patch: Any) -> None:
    if vars(trainer).get("save_checkpoint") is patch:  # somebody may have patched on top
        del trainer.save_checkpoint


class Logs:
    """Where a trainer's figures go: to its loggers, and to the callbacks that monitor them.

    Args:
        trainer: the trainer.
        prefix: of the keys of energy.
    """

    def __init__(self, trainer: Any, prefix: str) -> None:
        self._trainer, self._prefix = trainer, prefix

    def define(self, over_energy: tuple[str, ...]) -> None:
        """Tell W&B what to draw over what."""
        for logger in self._loggers:
            wandb_logging.define_metrics(logger, prefix=self._prefix, metrics=over_energy)

    def log(self, row: Row, step: int) -> None:
        """Send a row to every logger, in full precision: energy that is rounded to float32 may seem to go down."""
        for logger in self._loggers if row else ():
            logger.log_metrics(self._named(row), step=step)

    def monitored(self, row: Row, *, step: bool, ranks: int) -> None:
        """Let EarlyStopping, ModelCheckpoint and the like see a row; all ranks pass the same.

        Args:
            row: figures by key.
            step: whether they are of a step, or of an epoch or a validation. Of a step only what something monitors is
                passed on: Lightning takes a third of a millisecond for each key.
            ranks: of the run.
        """
        trainer, named = self._trainer, self._named(row)
        if step:
            wanted = {getattr(callback, "monitor", None) for callback in trainer.callbacks}
            wanted |= {config.monitor for config in trainer.lr_scheduler_configs}
            named = {key: value for key, value in named.items() if key in wanted}
        if named and not getattr(trainer, "barebones", False):
            trainer.lightning_module.log_dict(
                named, logger=False, on_step=step, on_epoch=not step, batch_size=1, sync_dist=ranks > 1
            )

    def end(self, row: Row, final: Row, trace: Mapping[str, list[tuple[float, float]]], step: int) -> None:
        """Log the last row, and for W&B the power trace as a table and the figures that hold as the run's summary."""
        self.log(row, step)
        for logger in self._loggers if row else ():
            wandb_logging.log_power_trace(logger, trace, step=step, prefix=self._prefix)
            wandb_logging.write_summary(logger, self._named(final))

    @property
    def _loggers(self) -> list[Any]:
        return list(self._trainer.loggers) if self._trainer.is_global_zero else []

    def _named(self, row: Row) -> dict[str, float]:
        return {keys.with_prefix(key, self._prefix): value for key, value in row.items() if math.isfinite(value)}
