"""A launched MXQ with images to feed it: what every check works with."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from lightning_npu.errors import ArtifactError, NPUError
from lightning_npu.runtimes.mobilint.cores import MODES, UNITS, CorePlan, configure
from lightning_npu.runtimes.mobilint.model import LaunchedModel

Outputs = list[Any]


@dataclass(frozen=True)
class Result:
    """What one check found.

    Attributes:
        verdict: "pass", "FAIL", "info" (a figure, neither right nor wrong) or "skipped".
        text: what was seen.
    """

    verdict: str
    text: str


@dataclass
class Bench:
    """What is verified.

    Attributes:
        module: ``qbruntime``.
        path: the MXQ file.
        number: the device.
        seconds: how long what is timed takes.
        mode: the core mode; None: as the MXQ says.
        auto: whether the vendor's library finds it, and the cores, out.
    """

    module: ModuleType
    path: Path
    number: int
    seconds: float
    mode: str | None = None
    auto: bool = False

    def plan(self, units: Sequence[int] | None = None) -> CorePlan:
        """All cores, or some of them."""
        mode = self.mode or "single"
        if units is None:
            return CorePlan(mode, tuple(range(UNITS[mode])), auto=self.auto)
        return CorePlan(mode, tuple(units), shared=True)

    @contextmanager
    def launched(self, units: Sequence[int] | None = None, *, asynchronous: bool = False) -> Iterator[Any]:
        """The vendor's model on the device."""
        config = configure(self.module, self.plan(units), asynchronous=asynchronous)
        model = LaunchedModel(self.module, self.path, config, self.number)
        try:
            model.launch()
            with model.use() as vendor:
                yield vendor
        finally:
            model.close()

    def find_mode(self) -> str:
        """Settle the core mode: the MXQ's own, or the first that it holds."""
        with_mode: NPUError | None = None
        for mode in (self.mode, *MODES):
            self.mode, self.auto = mode, mode is None
            try:
                with self.launched() as model:
                    found = str(model.get_core_mode().name).lower()
            except NPUError as error:
                with_mode = with_mode or error
                continue
            if found not in MODES:
                raise ArtifactError(
                    f"The MXQ is for core mode '{found}'.", expected=f"one of {list(MODES)}", got=found,
                    remedy="compile it for core mode 'single', 'global4', 'global8' or 'all'",
                )  # fmt: skip
            self.mode = found
            return found
        assert with_mode is not None
        raise with_mode


def images(model: Any, count: int) -> list[list[Any]]:
    """Random inputs of the model's shapes and dtype, the same every time."""
    random = np.random.default_rng(7)
    kind = {"Uint8": np.uint8, "Int8": np.int8}.get(model.get_model_input_data_type().name)
    made: list[list[Any]] = []
    for _ in range(count):
        if kind is None:
            made.append([random.standard_normal(s).astype(np.float32) for s in _shapes(model)])
        else:
            low, high = np.iinfo(kind).min, np.iinfo(kind).max
            made.append([random.integers(low, high, s, dtype=kind, endpoint=True) for s in _shapes(model)])
    return made


def _shapes(model: Any) -> list[tuple[int, ...]]:
    return [tuple(abs(int(size)) for size in shape[-3:]) for shape in model.get_model_input_shape()]


def equal(found: Outputs, expected: Outputs) -> bool:
    """Bit for bit, whatever the leading axes of length 1."""
    return len(found) == len(expected) and all(
        a.size == b.size and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(found, expected, strict=True)
    )


def digest(outputs: Sequence[Outputs]) -> str:
    """A hash of outputs, to be compared between processes."""
    total = hashlib.sha256()
    for arrays in outputs:
        for array in arrays:
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


def rate(model: Any, samples: Sequence[list[Any]], threads: int, seconds: float) -> tuple[float, int]:
    """Images per second with so many threads, and how many answers differed from the first of the same image."""
    right = [list(model.infer_hwc(sample)) for sample in samples]
    counts, wrong = [0] * threads, [0] * threads
    failures: list[BaseException] = []
    started = time.perf_counter()
    ends = started + seconds

    def work(index: int) -> None:
        turn = index
        try:
            while time.perf_counter() < ends or counts[index] == 0:
                place = turn % len(samples)
                found = list(model.infer_hwc(samples[place]))
                wrong[index] += not equal(found, right[place])
                counts[index] += 1
                turn += 1
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(index,), name=f"verify-{index}") for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return sum(counts) / (time.perf_counter() - started), sum(wrong)


def in_a_process(request: Mapping[str, Any], timeout_s: float, **environment: str) -> dict[str, Any]:
    """Answer a request in a process of its own; "error" in the answer says why there is none."""
    command = [sys.executable, "-m", "lightning_npu.verify_mobilint.child", json.dumps(request)]
    environ = {**os.environ, **environment}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environ, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_s:g} s"}
    lines = done.stdout.strip().splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"error": f"exit status {done.returncode}: {' '.join(done.stderr.split())[-300:]}"}
    return answer
