"""What measuring energy costs: CPU time, memory, threads and processes of an EnergyMonitor at rest.

    python benchmarks/energy_sampler_cost.py [--seconds 20]

The boards are SIMULATED and answer in microseconds, so that what is measured is this package's own cost; a driver's
calls come on top of it. CPU is that of all threads of this process, which does nothing else, and of the helper.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

from lightning_npu.power import EnergyMonitor
from lightning_npu.power.simulated import SimulatedBoard, SimulatedSource, SquareWave


def source(counters: int, gauges: int) -> SimulatedSource:
    """Boards with a 100 ms counter and boards with a 100 ms power reading."""
    gpu, npu = SquareWave(50.0, 180.0, 0.7), SquareWave(8.0, 25.0, 0.7)
    boards = [SimulatedBoard(gpu, name=f"gpu{n}", kind="gpu", counter=True, update_s=0.1) for n in range(counters)]
    return SimulatedSource([*boards, *(SimulatedBoard(npu, name=f"npu{n}", update_s=0.1) for n in range(gauges))])


def children() -> list[int]:
    """Process ids of this process's children."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def cpu_s(pid: int) -> float:
    """CPU seconds of another process so far, of all its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def resident_mib(pid: int | str) -> float:
    """Resident memory in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    print("| SIMULATED boards | start s | CPU % here | CPU % helper | MiB here | MiB helper | threads | us/window |")
    print("|---|---|---|---|---|---|---|---|")
    for counters, gauges, interval_s, process in (
        (1, 1, 0.05, "auto"),
        (2, 0, 0.05, "auto"),
        (0, 2, 0.05, "auto"),
        (1, 1, 0.05, False),
        (8, 8, 0.05, "auto"),
        (1, 1, 0.02, "auto"),
    ):
        boards = source(counters, gauges)
        began_s = time.perf_counter()
        with EnergyMonitor([boards], interval_s, process=process) as monitor:
            start_s = time.perf_counter() - began_s
            time.sleep(1.0)  # past the start
            helpers = children()
            cpu_here_s, cpu_helpers_s = time.process_time(), sum(map(cpu_s, helpers))
            began_s = time.perf_counter()
            time.sleep(args.seconds)
            seconds = time.perf_counter() - began_s
            here, apart = time.process_time() - cpu_here_s, sum(map(cpu_s, helpers)) - cpu_helpers_s
            threads = threading.active_count() - 1
            window_s = time.thread_time()
            for _ in range(200):
                monitor.begin().end()
            window_s = (time.thread_time() - window_s) / 200
            memory = f"{resident_mib('self'):.0f} | {sum(map(resident_mib, helpers)):.0f}"
        what = f"{counters} with a counter, {gauges} without, {interval_s * 1e3:.0f} ms"
        what += "" if process == "auto" else ", no helper"
        cost = f"{100 * here / seconds:.2f} | {100 * apart / seconds:.2f}"
        print(f"| {what} | {start_s:.2f} | {cost} | {memory} | {threads} | {window_s * 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
