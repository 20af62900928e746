"""``ForwardGradientMixin``: forward gradients in Lightning's automatic optimisation."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lightning_npu._lightning import pl
from lightning_npu.errors import InputError
from lightning_npu.forward_gradient.evaluation import ranks
from lightning_npu.forward_gradient.optimizer import ForwardGradient

LOSS_KEY = "train_loss_ff"
_MARK = "_probes_without_graph"


class ForwardGradientMixin:
    """For a ``LightningModule`` whose ``configure_optimizers`` gives a :class:`ForwardGradient`.

    ``class Model(ForwardGradientMixin, LightningModule)``; everything else is ordinary Lightning: ``training_step``
    returns a loss, schedulers, checkpoints, loggers and DDP (``ddp_spawn`` too) work. ``training_step`` runs ``2 * m``
    times per batch, without building a graph. What it logs is logged once per batch: by the call with gradients where
    there is a ``first_order`` optimizer, else by the first probe, whose weights are ``eps`` away from the trained ones;
    the mean loss over all probes is logged as ``train_loss_ff``. Metrics that it updates are updated in every call.

    DDP wants at least one parameter of the module to require grad; all the same, forward gradients need none. With
    ``first_order`` and several processes, the parameters that ForwardGradient trains must not require grad when
    DDP wraps the model: call ``requires_grad_(False)`` on them in ``__init__``.

    When training starts, what cannot be right is refused with an ``InputError``: more than one optimizer or another
    one, manual optimisation, gradient clipping or accumulation by the Trainer, 16-mixed precision, sharded weights.
    """

    _quiet: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        step = getattr(cls, "training_step", None)
        if step is not None and not hasattr(step, _MARK):
            # on the class: a wrapper on the instance would tie copies and pickles to the original
            cls.training_step = _without_graph(step)  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Refuse Trainer options that cannot be right, before any data is read."""
        if stage == "fit":
            _check_trainer(self)
            _check_ddp(self)
            _name_watchers(self)
        super().setup(stage)  # type: ignore[misc]

    def on_fit_start(self) -> None:
        """Refuse optimizers that cannot be right, before the first batch."""
        _check_optimizer(self)
        super().on_fit_start()  # type: ignore[misc]

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Take the step, and log the mean loss of its probes once."""
        _check_trainer(self)  # again: a setup() or on_fit_start() that does not call super() goes around the first time
        _check_optimizer(self)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)  # type: ignore[misc]
        chosen = _trained_by(self)
        if chosen is not None and chosen.last_loss is not None:
            several = ranks()[1] > 1  # the same on all ranks already; Lightning warns unless told to average
            self.log(LOSS_KEY, chosen.last_loss, on_step=True, on_epoch=True, sync_dist=several)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log, unless this is one of the calls of ``training_step`` that log nothing."""
        if not self._quiet:
            super().log(*args, **kwargs)  # type: ignore[misc]

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backpropagate where there is a graph: in the one call for ``first_order``."""
        if loss.requires_grad:
            super().backward(loss, *args, **kwargs)  # type: ignore[misc]


def _without_graph(step: Callable[..., Any]) -> Callable[..., Any]:
    """``training_step`` that builds no graph while the optimizer probes; Lightning turns gradients on around it."""

    @functools.wraps(step)
    def probed(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = _trained_by(self)
        if chosen is None or not chosen.probing:
            return step(self, *args, **kwargs)
        before = self._quiet
        self._quiet = before or chosen.first_order is not None or chosen.calls_in_step > 0
        try:
            with torch.no_grad():
                return step(self, *args, **kwargs)
        finally:
            self._quiet = before

    setattr(probed, _MARK, True)
    return probed


def _trained_by(module: Any) -> ForwardGradient | None:
    """The optimizer of a module in training; None outside of it, or where it is another one."""
    trainer = getattr(module, "_trainer", None)
    optimizers = trainer.strategy.optimizers if trainer is not None else []
    if len(optimizers) != 1:
        return None
    only = getattr(optimizers[0], "optimizer", optimizers[0])  # Lightning's wrapper, or the optimizer itself
    return only if isinstance(only, ForwardGradient) else None


def _check_trainer(module: Any) -> None:
    trainer = module.trainer
    if not module.automatic_optimization:
        raise InputError(
            "ForwardGradientMixin is for automatic optimisation.",
            expected="automatic_optimization=True",
            got="automatic_optimization=False",
            remedy="leave the mixin out and call self.optimizers().step(closure=lambda: loss) in training_step",
        )
    if trainer.gradient_clip_val:
        raise InputError(
            "The Trainer cannot clip forward gradients.",
            expected="gradient_clip_val=None",
            got=f"gradient_clip_val={trainer.gradient_clip_val}",
            remedy="leave it out: estimator='sign' and 'normalized' bound every step by lr",
        )
    if trainer.accumulate_grad_batches != 1:
        raise InputError(
            "Forward gradients are not accumulated: no gradient is kept from batch to batch.",
            expected="accumulate_grad_batches=1",
            got=f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            remedy="take larger batches, which need no more memory than inference does, or raise m",
        )
    if str(trainer.precision).startswith("16-"):
        raise InputError(
            "Half precision rounds away the small differences of losses, and its loss scaling expects gradients.",
            expected="precision '32-true', 'bf16-mixed' or '64-true'",
            got=repr(trainer.precision),
            remedy="choose Trainer(precision='bf16-mixed') or leave precision out",
        )
    if not isinstance(trainer.strategy, (pl.strategies.SingleDeviceStrategy, pl.strategies.DDPStrategy)):
        raise InputError(
            "Forward gradients need whole weights in each process.",
            expected="one device, or a DDP strategy",
            got=type(trainer.strategy).__name__,
            remedy="choose Trainer(strategy='ddp')",
        )


def _check_ddp(module: Any) -> None:
    several = isinstance(module.trainer.strategy, pl.strategies.DDPStrategy)
    if several and not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError(
            "DDP takes no module without a parameter that requires grad, although forward gradients need none.",
            expected="at least one parameter that requires grad",
            got=f"{sum(1 for _ in module.parameters())} parameters, none of which does",
            remedy="leave requires_grad=True on the float parameters that ForwardGradient trains; where all are "
            "integers, as with GraphWeights, add one that nobody uses in __init__, self.unused = "
            "torch.nn.Parameter(torch.zeros(())), and give ForwardGradient the others only",
        )


def _name_watchers(module: Any) -> None:
    hook = "on_before_optimizer_step"
    watching = [
        type(c).__name__ for c in module.trainer.callbacks if getattr(type(c), hook) is not getattr(pl.Callback, hook)
    ]
    if watching:
        warnings.warn(
            f"{hook} of {watching} runs in every call of training_step, several times per batch, without gradients.",
            stacklevel=4,
        )


def _check_optimizer(module: Any) -> None:
    chosen = _trained_by(module)
    if chosen is None:
        raise InputError(
            "ForwardGradientMixin needs one optimizer, a ForwardGradient.",
            expected="configure_optimizers returning a ForwardGradient, with a scheduler or without",
            got=[type(optimizer).__name__ for optimizer in module.trainer.strategy.optimizers],
            remedy="pass optimizers of other parameters as ForwardGradient(first_order=...)",
        )
    several = isinstance(module.trainer.strategy, pl.strategies.DDPStrategy)
    if several and chosen.first_order is not None:
        waiting = sum(p.requires_grad for group in chosen.param_groups for p in group["params"])
        if waiting:
            raise InputError(
                "DDP would wait for gradients of parameters that forward gradients train.",
                expected="requires_grad=False on them when DDP wraps the model",
                got=f"{waiting} parameters that require grad",
                remedy="call requires_grad_(False) on them in __init__; ForwardGradient trains them all the same",
            )
