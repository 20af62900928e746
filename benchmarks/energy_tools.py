"""One meter in a process of its own, for energy_accuracy.py: makes it, says so, runs windows at given times, reports.

    python benchmarks/energy_tools.py < orders

Orders are two lines of JSON: ``{"tool": name, "gpus": [...], "npus": [...]}`` and, after this process has answered
"ready", ``{"windows": [[t0, t1], ...], "hold": [t, seconds] or null}`` in seconds of ``time.monotonic()``. ``hold``
keeps the interpreter lock from ``t`` on, as C code does that does not release it. The answer is one line of JSON.
"""
# ruff: noqa: D102  what begin, end and finish do is said once, in Tool

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

Figures = dict[str, dict[str, Any]]  # "gpu/0" -> {"j": joules or None, ...}


class Tool(ABC):
    """A meter as its documentation says to use it.

    Args:
        gpus: numbers of the GPUs to measure; None: leave the choice to the tool.
        npus: the same of NPUs.
        power_only: GPUs among them that have no counter.
    """

    def __init__(self, gpus: list[int] | None, npus: list[int] | None, power_only: list[int]) -> None:
        self.gpus, self.npus, self.power_only = gpus, npus, power_only

    @abstractmethod
    def begin(self) -> None:
        """Begin a window."""

    @abstractmethod
    def end(self) -> Figures | None:
        """End it; None: the figures come from :meth:`finish`."""

    def finish(self) -> list[Figures]:
        """Figures of all windows whose ``end`` gave none, in order."""
        return []


class Ours(Tool):
    """lightning_npu.power.EnergyMonitor at its defaults."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from lightning_npu.power import EnergyMonitor, MobilintSource, NvmlSource

        sources: list[Any] = []
        if self.gpus is None or self.gpus:
            sources.append(NvmlSource())
        if self.npus is None or self.npus:
            sources.append(MobilintSource())
        self.monitor = EnergyMonitor(sources=sources)
        self.monitor.start()
        self.windows: list[Any] = []

    def begin(self) -> None:
        self.windows.append(self.monitor.begin(f"{len(self.windows)}"))

    def end(self) -> None:
        self.windows[-1].end()

    def finish(self) -> list[Figures]:
        self.windows[-1].settle(3.0)
        boards = {board.key: board for board in self.monitor.boards}
        figures: list[Figures] = [{} for _ in self.windows]
        for window, here in zip(self.windows, figures, strict=True):
            for key, energy in window.by_board.items():
                here[f"{boards[key].kind}/{boards[key].index}"] = {
                    "j": energy.energy_j,
                    "key": key,
                    "u_j": energy.uncertainty_j,
                    "gain_j": energy.gain_j,
                    "gap_j": energy.gap_j,
                    "coverage": energy.coverage,
                    "state": energy.state,
                    "method": energy.method,
                    "settled": energy.settled,
                }
            if not here:
                problems = "; ".join(f"{name}: {why}" for name, why in self.monitor.problems.items())
                here["none"] = {"j": window.energy_j, "state": problems}
        self.health = self.monitor.health()
        self.monitor.stop()
        return figures


class Zeus(Tool):
    """ZeusMonitor, told not to synchronise with a GPU that is not there."""

    approximate = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from zeus.monitor import ZeusMonitor

        counted = None if self.gpus is None else [i for i in self.gpus if i not in self.power_only]
        self.monitor = ZeusMonitor(gpu_indices=counted, cpu_indices=[], approx_instant_energy=self.approximate)

    def begin(self) -> None:
        self.monitor.begin_window("w", sync_execution=False)

    def end(self) -> Figures:
        energy = self.monitor.end_window("w", sync_execution=False).gpu_energy
        return {f"gpu/{index}": {"j": joules} for index, joules in energy.items()}


class ZeusApproximate(Zeus):
    """The same, with power x time in place of a counter that has not moved."""

    approximate = True


class ZeusPower(Tool):
    """Zeus's PowerMonitor, for boards without a counter; left to itself it polls without a pause (0.16.0)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from zeus.monitor.power import PowerMonitor

        self.monitor = PowerMonitor(gpu_indices=self.gpus, update_period=0.05, power_domains=["device_instant"])
        self.spans: list[tuple[float, float]] = []

    def begin(self) -> None:
        self.begun = time.time()

    def end(self) -> None:
        self.spans.append((self.begun, time.time()))
        self.monitor.get_power()  # takes samples out of its pipe, which would fill up and stop it

    def finish(self) -> list[Figures]:
        for _ in range(20):  # asked at once it misses what is still on its way
            self.monitor.get_power()
            time.sleep(0.02)
        energies = [self.monitor.get_energy(t0, t1) or {} for t0, t1 in self.spans]
        self.monitor.stop()
        return [{f"gpu/{index}": {"j": joules} for index, joules in energy.items()} for energy in energies]


class CodeCarbon(Tool):
    """A task of CodeCarbon's offline tracker; board by board, from the devices whose sum it reports."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from codecarbon import OfflineEmissionsTracker

        self.tracker = OfflineEmissionsTracker(
            country_iso_code="USA",
            save_to_file=False,
            log_level="error",
            allow_multiple_runs=True,
            force_cpu_power=10,  # else it looks for the CPU's power, which is not what is compared
            force_ram_power=5,
        )
        self.count = 0
        self.tracker.start_task("warm-up")
        self.tracker.stop_task("warm-up")

    def begin(self) -> None:
        self.count += 1
        self.tracker.start_task(f"{self.count}")

    def end(self) -> Figures:
        data = self.tracker.stop_task(f"{self.count}")
        figures: Figures = {"all": {"j": data.gpu_energy * 3.6e6}}
        for hardware in self.tracker._hardware:
            if type(hardware).__name__ == "GPU":
                for device in hardware.devices.devices:
                    figures[f"gpu/{device.gpu_index}"] = {"j": device.energy_delta.kWh * 3.6e6}
        return figures


class MbltGpu(Tool):
    """mblt-tracker's mean power of GPUs, by the time between start and stop."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from mblt_tracker import GPUDeviceTracker

        self.tracker = GPUDeviceTracker()

    def begin(self) -> None:
        self.tracker.start()
        self.begun = time.monotonic()

    def end(self) -> Figures:
        duration = time.monotonic() - self.begun
        self.tracker.stop()
        mean = {index: values["avg_power_w"] for index, values in self.tracker.get_metric()["gpu"].items()}
        return {f"gpu/{i}": {"j": None if w is None else w * duration} for i, w in mean.items()}


class MbltNpu(Tool):
    """The same of NPUs, every 0.5 s as it does by default."""

    interval_s = 0.5

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from mblt_tracker import NPUDeviceTracker

        self.tracker = NPUDeviceTracker(interval=self.interval_s)

    def begin(self) -> None:
        self.tracker.start()
        self.begun = time.monotonic()

    def end(self) -> Figures:
        duration = time.monotonic() - self.begun
        self.tracker.stop()
        devices = self.tracker.get_metric()["devices"].items()
        mean = {index: values.get("avg_total_power_w") for index, values in devices}
        return {f"npu/{i}": {"j": None if w is None else w * duration} for i, w in mean.items()}


class MbltNpuFast(MbltNpu):
    """Every 0.1 s."""

    interval_s = 0.1


TOOLS: dict[str, type[Tool]] = {
    "ours": Ours,
    "zeus": Zeus,
    "zeus approx": ZeusApproximate,
    "zeus power": ZeusPower,
    "codecarbon": CodeCarbon,
    "mblt": MbltGpu,
    "mblt npu": MbltNpu,
    "mblt npu 0.1 s": MbltNpuFast,
}


def sleep_until(moment: float) -> None:
    """Sleep until ``time.monotonic()`` says so."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)


def hold_the_lock(seconds: float) -> None:
    """Keep the interpreter lock, as C code does that does not release it."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))


def run_windows(tool: Tool, order: dict[str, Any]) -> list[dict[str, Any]]:
    """Each window's call times (begin and end, before and after) and figures, or what was raised."""
    results: list[dict[str, Any]] = []
    late, hold = [], order.get("hold")
    for t0, t1 in order["windows"]:
        sleep_until(t0)
        result: dict[str, Any] = {"calls": [time.monotonic()]}
        results.append(result)
        try:
            tool.begin()
            result["calls"].append(time.monotonic())
            if hold and t0 <= hold[0] < t1:
                sleep_until(hold[0])
                hold_the_lock(hold[1])
            # begun late, it ends late: a busy machine must not make windows of no length
            sleep_until(result["calls"][1] + (t1 - t0))
            result["calls"].append(time.monotonic())
            figures = tool.end()
            result["calls"].append(time.monotonic())
            if figures is None:
                late.append(result)
            else:
                result["figures"] = figures
        except Exception as error:
            result["raised"] = f"{type(error).__name__}: {error}"
    time.sleep(order.get("rest_s", 0.5))
    for result, figures in zip(late, tool.finish(), strict=False):
        result["figures"] = figures
    return results


def main() -> None:
    """Follow the orders on standard input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tools print is not an answer
    order, started = json.loads(sys.stdin.readline()), time.monotonic()
    try:
        tool = TOOLS[order["tool"]](order.get("gpus"), order.get("npus"), order.get("power_only", []))
    except BaseException as error:  # tools end the process, too
        print(json.dumps({"raised": f"{type(error).__name__}: {error}"}), file=answers)
        return
    print(json.dumps({"ready_s": time.monotonic() - started}), file=answers)
    results = run_windows(tool, json.loads(sys.stdin.readline()))
    print(json.dumps({"windows": results, "health": getattr(tool, "health", None)}), file=answers)


if __name__ == "__main__":
    main()
