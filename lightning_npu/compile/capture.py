"""Records what a submodule is fed while its model runs, so that nobody has to know its shapes."""

from __future__ import annotations

import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_npu.compile.eligible import require_eligible
from lightning_npu.compile.run_model import Reached, candidates, find, move, reason, runner
from lightning_npu.compile.samples import unusable
from lightning_npu.compile.trees import put_together, take_apart
from lightning_npu.compile.undisturbed import undisturbed
from lightning_npu.errors import InputError

log = logging.getLogger(__name__)


class NotFiniteError(InputError):
    """A submodule is fed NaN or infinities."""


@dataclass(frozen=True)
class Call:
    """One call of the submodule: its arguments, tensors as detached copies on the CPU."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class CapturedCalls:
    """What was recorded: the calls in order, and from how many items of the loader."""

    calls: list[Call]
    batches: int


def capture_inputs(
    model: nn.Module,
    submodule: str,
    loader: Iterable[Any],
    *,
    limit_batches: int,
    limit_samples: int | None = None,
    run: Callable[[nn.Module, Any], Any] | None = None,
) -> CapturedCalls:
    """Runs a model on a few batches and records every call of one of its submodules.

    The model is left as it was: it runs in eval mode without gradients, and train/eval flags, parameters, buffers,
    attributes, hooks and random state are restored, also after an error (see :func:`undisturbed`). A LightningModule is
    run by its ``training_step``, after its own batch transfer hooks, and logs nothing. With manual optimization the
    step is ended as soon as the submodule is called, before an optimizer can move weights: a warning says that further
    calls in the step are not seen. Other steps run to their end, so that several calls per batch are seen, and whatever
    they raise after a call of the submodule is let pass (they may need a Trainer).

    Args:
        model: the model: a plain module, or a LightningModule with or without a Trainer.
        submodule: dotted name of the submodule, such as "policy.encoder".
        loader: iterable of batches of the model, or of ready inputs of the submodule (a tensor, a tuple of positional
            or a mapping of keyword arguments); the first item shows which. May be endless.
        limit_batches: how many items to take at most.
        limit_samples: how many samples to record at most, counted along the first axis of each call's first tensor;
            the batch that reaches it is the last. Keeps memory bounded where batches are large.
        run: ``run(model, batch)``, for models that are run in another way. The batch is on the model's device.

    Returns:
        The calls, several per batch if the model makes several.

    Raises:
        InputError: there is no such submodule, it is not built yet, or the model never calls it; the loader is empty;
            neither the model nor the submodule runs on its first item; or the inputs hold NaN or infinities.
        CompileError: the submodule is in half precision or was built under inference mode.
    """
    target = find(model, submodule)
    require_eligible(target, submodule)
    if limit_batches < 1:
        raise InputError("limit_batches is too small.", expected="1 or more", got=limit_batches)
    if isinstance(loader, Tensor | Mapping | str):
        raise InputError(
            "The calibration loader is a single item.",
            expected="an iterable of batches",
            got=type(loader).__name__,
            remedy="put it into a list: [batch]",
        )
    steps = run is None and getattr(model, "automatic_optimization", True) is False
    recorder = _Recorder(target, submodule, first_only=steps)
    hook = target.register_forward_pre_hook(recorder, with_kwargs=True, prepend=True)  # before hooks that edit inputs
    try:
        with undisturbed(model):
            return _capture(
                model, target, submodule, _until(loader, recorder, limit_samples), limit_batches, run, recorder
            )
    finally:
        hook.remove()


def _until(loader: Iterable[Any], recorder: _Recorder, samples: int | None) -> Iterator[Any]:
    """The loader's items, until that many samples were recorded."""
    for item in loader:
        yield item
        if samples is not None and recorder.samples >= samples:
            return


def _capture(
    model: nn.Module,
    target: nn.Module,
    submodule: str,
    loader: Iterable[Any],
    limit: int,
    run: Callable[[nn.Module, Any], Any] | None,
    recorder: _Recorder,
) -> CapturedCalls:
    parameter = next(itertools.chain(model.parameters(), model.buffers()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    ready: Callable[[Any], Any] | None = None
    batches = 0
    with runner(model, run, device, recorder.forget) as run_model:
        for number, item in enumerate(itertools.islice(loader, limit)):
            recorder.begin(number)
            if ready is not None:
                ready(item)
            else:
                try:
                    run_model(item)
                except Reached:
                    pass
                except NotFiniteError:
                    raise
                except Exception as error:
                    if recorder.seen:
                        log.debug("batch %d: after the call of '%s': %s", number, submodule, reason(error))
                    elif number == 0 and run is None:
                        ready = _ready(model, target, submodule, item, device, recorder, error)
                    else:
                        raise _failed(model, submodule, number, error, run) from error
            batches += 1
    if not batches:
        raise InputError(
            "The calibration loader is empty.",
            expected="at least one batch",
            remedy="check the dataset's length and the loader's drop_last; an iterator that was read before is empty",
        )
    if not recorder.calls:
        raise InputError(
            f"'{submodule}' was never called while {type(model).__name__} ran on {batches} batches.",
            expected="a submodule that is used whenever the model runs, called as a module (not through .forward)",
            remedy="name the submodule that is called, or pass run=lambda model, batch: ... that uses it",
        )
    if recorder.cut_short:
        warnings.warn(
            f"{type(model).__name__} optimizes manually, so only the first call of '{submodule}' in each training_step "
            "was recorded: if it is called more often (a second camera), pass run=lambda model, batch: ... that makes "
            "all calls.",
            stacklevel=3,
        )
    return CapturedCalls(recorder.calls, batches)


def _ready(
    model: nn.Module,
    target: nn.Module,
    submodule: str,
    item: Any,
    device: torch.device,
    recorder: _Recorder,
    error: Exception,
) -> Callable[[Any], Any]:
    """How the submodule is called with items of the loader, found by trying it on the first."""
    reasons = []
    for name, call in candidates(target, item):
        recorder.forget()
        try:
            call(target, move(item, device))
        except Reached:
            pass
        except NotFiniteError:
            raise
        except Exception as problem:
            reasons.append(f"{name}: {reason(problem)}")
            continue
        return lambda item: _quietly(call, target, move(item, device))
    recorder.forget()
    raise InputError(
        f"Neither {type(model).__name__} nor its submodule '{submodule}' runs on the first item of the loader.",
        expected="batches of the model, or ready inputs of the submodule",
        got=f"{_describe(item)}; the model: {reason(error)}; the submodule: {'; '.join(reasons)}",
        remedy="pass run=lambda model, batch: ..., which runs the model on a batch",
    ) from error


def _quietly(call: Callable[[nn.Module, Any], Any], target: nn.Module, item: Any) -> None:
    with suppress(Reached):
        call(target, item)


def _failed(model: nn.Module, submodule: str, number: int, error: Exception, run: Any) -> InputError:
    return InputError(
        f"{type(model).__name__} failed on batch {number} (counted from 0) before it called '{submodule}'.",
        got=reason(error),
        remedy="mend what run= does" if run is not None else "pass run=lambda model, batch: ..., or mend the batch",
    )


class _Recorder:
    """A forward pre-hook that keeps copies of the arguments."""

    def __init__(self, target: nn.Module, name: str, *, first_only: bool) -> None:
        self.calls: list[Call] = []
        self._name, self._first_only = name, first_only
        self._signature = inspect.signature(target.forward)
        self._number, self._start = 0, 0
        self.cut_short = False

    def begin(self, number: int) -> None:
        """A new batch."""
        self._number, self._start = number, len(self.calls)

    def forget(self) -> None:
        """Drops what was recorded of this batch."""
        del self.calls[self._start :]

    @property
    def samples(self) -> int:
        """Samples in all calls, by the first axis of each one's first tensor."""
        firsts = (take_apart((call.args, call.kwargs), is_slot=_is_tensor)[1][:1] for call in self.calls)
        return sum(leaf.shape[0] if leaf.ndim else 1 for leaves in firsts for leaf in leaves)

    @property
    def seen(self) -> bool:
        """Whether there was a call in this batch."""
        return len(self.calls) > self._start

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        template, leaves, _ = take_apart((args, kwargs), is_slot=_is_tensor)
        with torch.inference_mode(False):  # the copies outlive any inference mode that the model runs in
            copies = [leaf.detach().to("cpu", copy=True) for leaf in leaves]
        self._require_finite(args, kwargs)
        self.calls.append(Call(*put_together(template, copies)))
        if self._first_only:
            self.cut_short = True
            raise Reached

    def _require_finite(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            named: Any = self._signature.bind(*args, **kwargs).arguments
        except TypeError:  # the module will say so itself
            named = {"args": args, "kwargs": kwargs}
        for name, value in named.items():
            _, leaves, paths = take_apart(value, name, is_slot=_is_tensor)
            for leaf, path in zip(leaves, paths, strict=True):
                bad = unusable(leaf) if leaf.is_floating_point() else 0
                if bad:
                    raise NotFiniteError(
                        f"Input '{path}' of '{self._name}' holds {bad} NaN or infinite values of {leaf.numel()} in "
                        f"batch {self._number} (counted from 0).",
                        expected="finite values (a mask of 0 and -inf is fine): one NaN would spoil a whole range",
                        remedy="mend the data, or leave such samples out of the calibration loader",
                    )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _describe(item: Any) -> str:
    template, leaves, _ = take_apart(item, is_slot=_is_tensor)
    shapes = [f"{leaf.dtype} {list(leaf.shape)}" for leaf in leaves]
    return f"a {type(template).__name__ if not leaves or leaves[0] is not item else 'tensor'} with {', '.join(shapes)}"
