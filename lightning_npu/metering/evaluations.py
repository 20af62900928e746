"""The hooks of validations, tests and predictions, which are alike."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any


class Evaluations:
    """Turns them into phases: of a training that goes on, or of a run of their own."""

    @abstractmethod
    def _begin_phase(self, trainer: Any, pl_module: Any, phase: str) -> None: ...

    @abstractmethod
    def _end_phase(self, trainer: Any) -> None: ...

    @abstractmethod
    def _count_evaluated(self, batch: Any) -> None: ...

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a phase, or a run of its own."""
        self._begin_phase(trainer, pl_module, "validation")

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run of its own."""
        self._begin_phase(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run of its own."""
        self._begin_phase(trainer, pl_module, "predict")

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *index: int) -> None:
        """Count what is evaluated, where nothing is trained."""
        self._count_evaluated(batch)

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *index: int) -> None:
        """Count what is evaluated."""
        self._count_evaluated(batch)

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *index: int) -> None:
        """Count what is predicted."""
        self._count_evaluated(batch)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the phase, or the run."""
        self._end_phase(trainer)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run."""
        self._end_phase(trainer)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run."""
        self._end_phase(trainer)
