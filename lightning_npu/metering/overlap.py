"""How near a training is to the limit of a two-device pipeline: overlap efficiency, measured while it runs."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

STEPS_KEPT = 64
"""Steps whose times are kept."""


@dataclass(frozen=True)
class Overlap:
    """Times per step, medians, in seconds.

    Attributes:
        train_s: the training by itself, with features that are there at once.
        npu_s: the accelerator by itself: what training waits for it when nothing was asked for ahead.
        step_s: a step as it runs, both overlapped.
    """

    train_s: float
    npu_s: float
    step_s: float

    @property
    def efficiency(self) -> float:
        """``max(train_s, npu_s) / step_s``: 1.0 is the limit of a two-device pipeline."""
        return max(self.train_s, self.npu_s) / self.step_s


class OverlapTimer:
    """Times steps, calibration steps apart from the others.

    In a calibration step the features are computed on the spot, so training waits for the device and the device for
    training. The time waited is the accelerator's, the rest is the training's, each undisturbed by the other. In an
    overlapped step neither could be had so: where both share cores or memory, they slow each other.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._train_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._npu_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._step_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._began: tuple[float, float, bool] | None = None

    def step(self, waited_s: float, *, alone: bool) -> None:
        """A step begins, and the one before it ends.

        Args:
            waited_s: seconds that training has waited for features so far.
            alone: whether the step that begins is a calibration step.
        """
        now_s = self._clock()
        if self._began is not None:
            began_s, waited_before_s, was_alone = self._began
            step_s, npu_s = now_s - began_s, waited_s - waited_before_s
            if was_alone:
                self._train_s.append(step_s - npu_s)
                self._npu_s.append(npu_s)
            else:
                self._step_s.append(step_s)
        self._began = (now_s, waited_s, alone)

    def interrupt(self) -> None:
        """What comes between two steps now, such as a validation, belongs to neither."""
        self._began = None

    @property
    def overlap(self) -> Overlap | None:
        """The medians of the last steps; None before both kinds of steps were seen."""
        if not (self._train_s and self._step_s):
            return None
        return Overlap(*(statistics.median(times) for times in (self._train_s, self._npu_s, self._step_s)))
