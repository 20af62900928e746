"""Tells the user, once, why features cannot be asked for ahead and what to do about it."""

from __future__ import annotations

import logging
import sys
import warnings

log = logging.getLogger(__name__)

_OURS = ("lightning_npu", "torch")
_ADVICE = {
    "not_a_batch_leaf": (
        "An NPUFrozenModule is fed a tensor that is no tensor of the batch, so its features cannot be asked for ahead "
        "of time. Compute it in the dataset or collate function, or say how it is made from the batch: "
        "Prefetch(inputs=...) or a method npu_inputs(batch) of the LightningModule."
    ),
    "edited": (
        "A batch tensor was edited in place between loading and the call of an NPUFrozenModule, so what was asked for "
        "ahead of time is not used. Edit it in the dataset, or out of place."
    ),
    "inputs_failed": (
        "The function that says what an NPUFrozenModule is fed (Prefetch(inputs=...)) failed; see the log."
    ),
    "differs": (
        "What inputs(batch) gave differs from what the training step passed to the NPUFrozenModule. Make both the same "
        "computation, without randomness."
    ),
}


class Advice:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def give(self, cause: str) -> None:
        """Warn, at the user's line, about the cause of a miss that the user can do something about."""
        advice = _ADVICE.get(cause)
        if advice is None or cause in self._said:
            return
        self._said.add(cause)
        warnings.warn(
            f"{advice} Until then these batches are encoded on the spot: slower, never wrong.",
            stacklevel=_users_level(),
        )

    def inputs_failed(self, error: Exception) -> None:
        """Log what the user's ``inputs`` raised."""
        known = repr(error) in self._said
        self._said.add(repr(error))
        level = logging.DEBUG if known else logging.WARNING
        log.log(level, "inputs(batch) failed, so nothing was asked for ahead: %r", error)


def _users_level() -> int:
    """Which caller of the function that calls this one is the user's code: neither ours nor torch's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    return level
