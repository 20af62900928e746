"""Stretches of a run, and what was used and done in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_npu.metering.totals import Totals


class Mark(NamedTuple):
    """The end of a step: when, and what had been done by then."""

    time_s: float
    trained_s: float
    samples: int
    steps: int
    batches: int


@dataclass(frozen=True)
class Rolling:
    """Energy over the last steps, validation and checkpoints between them taken off.

    Attributes:
        by_board: of each board.
        samples: trained within.
        steps: optimizer steps within.
        batches: training steps within.
        duration_s: seconds, of training alone.
    """

    by_board: Totals
    samples: int
    steps: int
    batches: int
    duration_s: float


@dataclass(frozen=True)
class Epoch:
    """Energy of an epoch.

    Attributes:
        whole: of each board.
        training: the same without validation, checkpoints and what else came between.
        samples: trained within.
        steps: optimizer steps within.
        duration_s: seconds.
    """

    whole: Totals
    training: Totals
    samples: int
    steps: int
    duration_s: float


class Snapshot(NamedTuple):
    """A run up to one moment.

    Attributes:
        totals: energy of each board.
        by_phase: of each board in each phase; the phases make up the totals.
        phase_s: seconds of each phase.
        elapsed_s: seconds.
    """

    totals: Totals
    by_phase: dict[str, Totals]
    phase_s: dict[str, float]
    elapsed_s: float
