"""``EnergyMeter``: what a training costs in joules, per sample, per step, per phase, on every board that it uses."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_npu import keys
from lightning_npu._lightning import pl
from lightning_npu.metering import trainer as lightning
from lightning_npu.metering import values
from lightning_npu.metering.arguments import check, own_prefetch, whole
from lightning_npu.metering.evaluations import Evaluations
from lightning_npu.metering.files import RunFiles
from lightning_npu.metering.ledger import Account
from lightning_npu.metering.run import MeteredRun
from lightning_npu.metering.sources import sensors_of_run
from lightning_npu.metering.training import Training
from lightning_npu.module import NPUFrozenModule
from lightning_npu.power.base import PowerSource
from lightning_npu.power.monitor import EnergyMonitor
from lightning_npu.prefetch import Prefetch

log = logging.getLogger(__name__)


class EnergyMeter(Training, Evaluations, pl.Callback):
    """Measures the energy of a training: the combined board power of all boards that it uses.

    ::

        trainer = L.Trainer(callbacks=[npu.EnergyMeter()])

    Which boards: the GPU that the strategy trains on, the accelerators of the model's frozen modules, and the
    processor's package where training or an artifact runs on the processor. A board counts once, whichever ranks use
    it. Figures are logged at ``log_every_n_steps`` to every logger, and by ``log``, so that EarlyStopping and
    ModelCheckpoint can monitor them; without a sensor no energy is logged, and one warning says why. ``energy.json``
    and ``power_trace.csv`` are written beside the run: at the ends of epochs (less often where epochs are so short that
    it would take more than 1 % of the time), at the end, and after errors and Ctrl-C. An evaluation by itself has files
    of its own (``energy-test.json``), and logs the energy of its phase alone, so that a test after a training does not
    replace the training's figures.

    With several ranks, live figures are those of the first rank's host; at the ends of epochs and of validations all
    ranks and hosts are merged, board by board, and every rank logs the same figures, so that their decisions agree.
    Between those ends, and so at the ends of steps, there is nothing to monitor under several ranks.

    An optimizer step is what ``trainer.global_step`` counts: every step of every optimizer.

    Args:
        sources: "auto", or power sources and names of sources.
        prefetch: "auto" or a depth: own a :class:`Prefetch` unless the trainer has one; a :class:`Prefetch`: own that
            one; False: own none.
        interval_s: mean time between two readings of a board, in seconds.
        rolling_s: the shortest window over steps, in seconds, up to 30; it is longer by itself where a sensor is slow.
        idle_power_w: "measure": twelve seconds before the training starts, with everything loaded; or watts by board
            key or kind; None: no net figures.
        calibration: by board key or kind, what is known of a sensor; see :class:`EnergyMonitor`.
        samples: how many samples a batch has; default: the first dimension of its first tensor. Packed sequences and
            graphs need it.
        sync: "epoch": wait for the GPU at the ends of epochs and phases; "step": at every step, for profiling;
            "never".
        prefix: of the keys.
        trace: write the power trace.
        over_energy: keys of metrics that W&B draws over joules; a "*" at the end stands for anything.

    Attributes:
        report: the content of ``energy.json``; None before a run.

    Raises:
        InputError: a value of the wrong kind.
    """

    def __init__(
        self,
        sources: str | Sequence[PowerSource | str] = "auto",
        prefetch: bool | int | str | Prefetch = "auto",
        interval_s: float = 0.05,
        *,
        rolling_s: float = 1.0,
        idle_power_w: Any = None,
        calibration: Mapping[str, Mapping[str, float]] | None = None,
        samples: Callable[[Any], int] = lightning.samples_of,
        sync: str = "epoch",
        prefix: str = keys.PREFIX,
        trace: bool = True,
        over_energy: Sequence[str] = ("val*",),
    ) -> None:
        check(rolling_s=rolling_s, sync=sync, prefix=prefix, samples=samples, over_energy=over_energy)
        self._make_monitor = functools.partial(
            EnergyMonitor, interval_s=interval_s, idle_power_w=idle_power_w, calibration=calibration
        )
        self._make_monitor(sources)  # refuse a wrong value where it was written
        self.sources = sources if isinstance(sources, str) else list(sources)
        self.rolling_s, self.sync, self.prefix, self.trace = rolling_s, sync, prefix, trace
        self.over_energy = (over_energy,) if isinstance(over_energy, str) else tuple(over_energy)
        self.prefetch = own_prefetch(prefetch)
        self.report: dict[str, Any] | None = None
        self._samples = samples
        self._run: MeteredRun | None = None
        self._files: RunFiles | None = None
        self._ahead: Prefetch | None = None
        self._own: Prefetch | None = None
        self._prior: Account | None = None
        self._undo: Callable[[], None] | None = None

    @property
    def monitor(self) -> EnergyMonitor | None:
        """What measures on this rank; None outside of a run."""
        return None if self._run is None else self._run.recorder.monitor

    @property
    def path(self) -> Path | None:
        """Where ``energy.json`` of the last run is; None before it was written."""
        return None if self._files is None else self._files.path

    # ---- begin and end

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the look-ahead in place."""
        if stage == "fit" and (trainer.global_step == 0 or trainer.ckpt_path):
            self._prior = None  # that of another training; a checkpoint is loaded after this
        self._ahead = next((c for c in trainer.callbacks if isinstance(c, Prefetch)), None)
        self._own = self.prefetch if self._ahead is None else None
        if self._own is not None:
            self._ahead = self._own
            self._own.setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure."""
        self._begin(trainer, pl_module, "fit")
        self._undo = lightning.time_checkpoints(trainer, self._during_checkpoint)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Steps are counted from here: what a checkpoint says of them is known by now.

        An epoch that goes on from a checkpoint begins here; Lightning calls no :meth:`on_train_epoch_start` for it.
        """
        if self._run is not None:
            self._run.count_steps_from(trainer.global_step)
            self._run.begin_epoch()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End, and merge what all ranks saw; all ranks come here."""
        self._finish(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave everything as it was."""
        self._leave("ended early")
        if self._own is not None:
            self._own.teardown(trainer, pl_module, stage)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write what was measured: Lightning calls nothing else after errors and Ctrl-C.

        Other ranks may not come here, so each rank writes what it saw into a file of its own.
        """
        try:
            self._leave(f"{type(exception).__name__}: {exception}".rstrip(": "))
        except Exception:  # what stopped the training is what the user must see
            log.exception("The energy of this run is not written.")
        finally:
            if self._own is not None:
                self._own.on_exception(trainer, pl_module, exception)

    def _begin(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave("ended early")
        modules = {name: m for name, m in pl_module.named_modules() if isinstance(m, NPUFrozenModule)}
        sensors = sensors_of_run(self.sources, trainer.strategy.root_device, modules)
        self._files = RunFiles(lightning.folder_of(trainer), stage, trainer.global_rank, trace=self.trace)
        self._sync(trainer)
        self._run = MeteredRun(
            self._make_monitor,
            sensors,
            modules,
            stage=stage,
            rolling_s=self.rolling_s,
            prior=self._prior if stage == "fit" else None,
            ranks=trainer.world_size,
            ranks_here=max(1, trainer.world_size // max(1, trainer.num_nodes)),
        )
        self._logs(trainer).define(self.over_energy)

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
        row, overlap = run.merged_values(), values.of_overlap(run.timer.overlap)
        final = run.final_values() | overlap
        trace = run.named_trace() if run.stage == "fit" else {}  # that of a test would replace it
        self._logs(trainer).end(row | overlap, final, trace, trainer.global_step)
        self._close(run)

    def _leave(self, ended: str) -> None:
        """End without the other ranks."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        run = self._run
        if run is not None:
            run.stop()
            self._write(run, ended, merged=False)
            self._close(run)

    def _close(self, run: MeteredRun) -> None:
        if run.stage == "fit":
            self._prior = run.ledger.account  # a later fit of the same trainer goes on counting
        self._run = None

    def _write(self, run: MeteredRun, ended: str, *, merged: bool) -> None:
        self.report = run.document(ended, merged=merged)
        if self._files is not None:
            self._files.write(self.report, run.recorder.monitor)

    @contextlib.contextmanager
    def _during_checkpoint(self) -> Iterator[None]:
        with contextlib.nullcontext() if self._run is None else self._run.phase("checkpoint"):
            yield

    def _count_evaluated(self, batch: Any) -> None:
        run = self._run
        if run is not None:
            run.evaluated(0 if run.stage == "fit" else whole(self._samples(batch)))

    def _logs(self, trainer: Any) -> lightning.Logs:
        return lightning.Logs(trainer, self.prefix)

    def _sync(self, trainer: Any) -> None:
        if self.sync != "never":
            lightning.synchronise(trainer)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Energy and work so far, so that a resumed run goes on counting.

        Under several ranks Lightning keeps that of the first. At the ends of epochs and validations it holds all of
        them; in between, what the first rank reads itself (all boards of its host) up to this moment, and what boards
        of other hosts used up to the last such end: a checkpoint may be written by one rank alone, after an error, and
        must not wait for the others.
        """
        if self._run is not None:
            return {"account": self._run.ledger.account.to_json(), "run": self._run.name}
        return {} if self._prior is None else {"account": self._prior.to_json(), "run": ""}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        if "account" not in state_dict:
            return
        try:
            account = Account.from_json(state_dict["account"])
        except Exception as error:  # whatever another version has written there must not end a training
            log.warning("This checkpoint's energy cannot be read (%r): counting begins anew.", error)
            return
        if self._run is None:
            self._prior = account
        elif state_dict.get("run") != self._run.name:  # else a tuner goes back; the energy of its trials was used
            self._run.ledger.prior = account  # a strategy that restores late
