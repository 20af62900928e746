"""Devices that failed during a run, and what the run used after that: a run of two kinds must not pass as one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from lightning_npu.metering.recorder import Recorder
from lightning_npu.metering.totals import add_up
from lightning_npu.power.monitor import Window

if TYPE_CHECKING:
    from lightning_npu.module import NPUFrozenModule


class FailureWatch:
    """Sees when the reference takes over from the device of a frozen module (``on_failure="reference"``).

    Args:
        recorder: of the run.
        modules: the frozen modules, by name.
    """

    def __init__(self, recorder: Recorder, modules: Mapping[str, NPUFrozenModule]) -> None:
        self._recorder = recorder
        self._healthy = {name: module for name, module in modules.items() if module.failure is None}
        self._failed: dict[str, tuple[NPUFrozenModule, Window, int]] = {}

    def look(self) -> None:
        """Begin a window for each device that has failed since the last look."""
        for name in [name for name, module in self._healthy.items() if module.failure is not None]:
            module = self._healthy.pop(name)
            self._failed[name] = (module, self._recorder.monitor.begin(f"after {name} failed"), self._recorder.samples)

    def end(self) -> None:
        """The run ends."""
        self.look()
        for _, window, _ in self._failed.values():
            window.end()

    def to_json(self) -> list[dict[str, Any]]:
        """One entry a failure: what failed, why, when, and the energy and samples since then, on this rank."""
        entries: list[dict[str, Any]] = []
        for name, (module, window, samples) in self._failed.items():
            failure = module.failure
            total = add_up(self._recorder.of_window(window))
            entries.append(
                {
                    "module": name,
                    "device": "" if failure is None else failure.device,
                    "reason": "" if failure is None else failure.reason,
                    "at": None if failure is None else datetime.fromtimestamp(failure.at, timezone.utc).isoformat(),
                    "seconds_since": window.duration_s,
                    "samples_since": self._recorder.samples - samples,
                    "energy_since_j": None if total is None else total.energy_j,
                    "uncertainty_since_j": None if total is None else total.uncertainty_j,
                }
            )
        return entries
