"""Processes with one meter each (energy_tools.py), given orders by energy_accuracy.py and energy_faults.py."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent


class Worker:
    """A process with one meter.

    Args:
        tool: its name in ``energy_tools.TOOLS``.
        boards: ``gpus``, ``npus``, ``power_only``: see ``energy_tools.Tool``.
        environment: what is different from this process's.
    """

    def __init__(self, tool: str, environment: dict[str, str | None] | None = None, **boards: Any) -> None:
        self.tool, self.raised, self.ready_s = tool, "", float("nan")
        env = {**os.environ, **_ENVIRONMENT}
        for name, value in (environment or {}).items():
            env.pop(name, None) if value is None else env.__setitem__(name, value)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(REPOSITORY)]))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "energy_tools.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=env,
        )
        self._tell({"tool": tool, **boards})

    def wait_ready(self, timeout_s: float = 60.0) -> bool:
        """Wait until the meter is made; False: it could not be, and ``raised`` says why."""
        answer = self._answer(timeout_s)
        self.raised = answer.get("raised", "")
        self.ready_s = answer.get("ready_s", float("nan"))
        return not self.raised

    def run(self, windows: list[tuple[float, float]], **order: Any) -> None:
        """Give the times of all windows; returns at once."""
        self.ends_s = max(end for _, end in windows)
        self._tell({"windows": windows, **order})

    def cpu(self) -> tuple[float, int, int]:
        """CPU seconds so far, memory in bytes and number of processes, children included."""
        process = psutil.Process(self._process.pid)
        family = [process, *process.children(recursive=True)]
        times = [member.cpu_times() for member in family]
        return sum(t.user + t.system for t in times), sum(m.memory_info().rss for m in family), len(family)

    def results(self) -> list[dict[str, Any]]:
        """The windows' results, once they are over; the process ends."""
        answer = self._answer(max(0.0, self.ends_s - time.monotonic()) + 60.0)
        self.health = answer.get("health")
        self.raised = answer.get("raised", "")
        self.close()
        windows: list[dict[str, Any]] = answer.get("windows", [])
        return windows

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None and self._process.stdin:
            self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def words(self) -> str:
        """What it wrote to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _tell(self, order: dict[str, Any]) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its answer, or the lack of one, says why

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self._process.kill()
            return {"raised": f"no answer in {timeout_s:.0f} s"}
        line = self._process.stdout.readline()
        if not line:
            return {"raised": f"process ended with code {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


_SCRATCH = tempfile.TemporaryDirectory(prefix="energy-")


def _with_nvidia_smi() -> str:
    """PATH with an ``nvidia-smi`` that does nothing: CodeCarbon takes one for the sign that there are NVIDIA GPUs."""
    script = Path(_SCRATCH.name) / "nvidia-smi"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    return f"{_SCRATCH.name}{os.pathsep}{os.environ.get('PATH', '')}"


_ENVIRONMENT = {"PATH": _with_nvidia_smi(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
