"""The threads that drive one open runtime: a bounded queue in order, one thread per slot, and a watchdog."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_npu.errors import DeviceError, NPUError
from lightning_npu.runtimes.base import Runtime
from lightning_npu.tensor_spec import TensorSpec, common_batch

THREAD_NAME = "lightning-npu"
LOOK_S = 0.5  # how often a waiting thread looks whether the device still answers

Inputs = Sequence[Tensor] | Callable[[], Sequence[Tensor]]


@dataclass
class Counters:
    """What was done so far. Times are in seconds, each slot counted by itself; idle is waiting for a batch.

    A batch that is divided keeps several slots busy at once: ``alone_s`` is what batches take with those to themselves.
    """

    batches: int = 0
    samples: int = 0
    busy_s: float = 0.0
    alone_s: float = 0.0
    idle_s: float = 0.0


class Job:
    """One batch on its way: inputs, outputs, future. Its state changes under the engine's lock alone."""

    def __init__(self, inputs: Inputs, name: str, pin: bool) -> None:
        self.make = inputs if callable(inputs) else None
        self.inputs: Sequence[Tensor] | None = None if callable(inputs) else inputs
        self.name, self.pin = name, pin
        self.batch: int | None = None
        self.outputs: list[Tensor] | None = None
        self.future: Future[list[Tensor]] = Future()
        self.parts = self.parts_left = 1
        self.error: BaseException | None = None


class Engine:
    """An open runtime with its threads.

    Args:
        runtime: the open runtime; released by :meth:`close`.
        counters: where to count.
        places: batches that may be queued or running; :meth:`submit` waits while there are more.
        timeout_s: the longest that one call to the device may take.
    """

    def __init__(self, runtime: Runtime, counters: Counters, *, places: int, timeout_s: float) -> None:
        self.runtime, self.counters, self.timeout_s = runtime, counters, timeout_s
        self.lost: DeviceError | None = None
        self._places, self._held, self._closing = places, 0, False
        self._tasks: deque[tuple[Job, int | None]] = deque()  # (batch, first sample of a part; None: not divided yet)
        self._running: dict[int, tuple[Job, float]] = {}
        self._parts = 1  # of the last batch that was divided
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # there is a task, or the end
        self._room = threading.Condition(self._lock)  # there is a place, or the end
        self._fixed = next((spec.static_batch for spec in runtime.inputs if spec.static_batch is not None), None)
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), name=f"{THREAD_NAME}-{slot}", daemon=True)
            for slot in range(runtime.slots)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, inputs: Inputs, name: str, pin: bool) -> Job:
        """Queue one batch.

        Raises:
            DeviceError: the device hangs while earlier batches hold all places, or was closed.
        """
        job = Job(inputs, name, pin)
        with self._lock:
            while self._held >= self._places and self.lost is None and not self._closing:
                self._room.wait(LOOK_S)
                self._look()
            if self.lost is not None:
                raise self.lost
            if self._closing:
                raise self.runtime.closed_error()
            self._held += 1
            self._tasks.append((job, None))
            self._work.notify()
        return job

    def look(self) -> None:
        """Give the device up if a call has run for too long; whoever waits for a result calls this now and then."""
        with self._lock:
            self._look()

    def remaining_s(self, job: Job, batch_s: float) -> float:
        """About how long until ``job`` is done, if a batch takes ``batch_s`` seconds with its slots to itself."""
        with self._lock:
            if job.future.done():
                return 0.0
            if job.parts > 1:  # its parts come before what was submitted later
                return batch_s * job.parts_left / job.parts
            now, slots = time.monotonic(), self.runtime.slots
            for running, since in self._running.values():
                if running is job:
                    return max(0.0, batch_s - (now - since))
            before = 0.0  # batches, each by the share of the slots that it takes
            for other, start in self._tasks:
                if other is job:
                    break
                parts = other.parts if start is not None else self._parts
                before += min(slots, parts) / slots / (parts if start is not None else 1)
            first_s = min(
                (max(0.0, batch_s - (now - since)) for other, since in self._running.values() if other.parts == 1),
                default=0.0,
            )
            return first_s + batch_s * (1 + before)

    def close(self) -> None:
        """Drop what waits, wait for what runs, release the runtime. A thread that hangs is left to itself."""
        with self._lock:
            self._closing = True
            waiting, self._tasks = self._tasks, deque()
            self._wake_all()
        for job, _ in waiting:
            if not job.future.cancel():  # some of its parts ran already
                job.error = job.error or self.runtime.closed_error()
                _settle(job)
        for thread in self._threads:
            while thread.is_alive() and self.lost is None:
                thread.join(LOOK_S)
                self.look()
        if not any(thread.is_alive() for thread in self._threads):
            self.runtime.close()

    # ---- one slot's thread

    def _serve(self, slot: int) -> None:
        while (task := self._next(slot)) is not None:
            job, start, since = task
            try:
                if start is None:
                    start = self._divide(job)
                if start is not None and job.error is None:
                    self._run(job, start)
            except BaseException as error:
                job.error = job.error or _named(error, job, self.runtime)
            self._finish(slot, job, since)
            del task, job  # the batch must not stay in memory until the next one comes
        if self.lost is not None:  # the call that hung has returned after all
            self.runtime.close()

    def _next(self, slot: int) -> tuple[Job, int | None, float] | None:
        before = time.monotonic()
        with self._lock:
            while not self._tasks and not self._closing and self.lost is None:
                self._work.wait()
            if self._closing or self.lost is not None:
                return None
            now = time.monotonic()
            self.counters.idle_s += now - before
            job, start = self._tasks.popleft()
            self._running[slot] = (job, now)
            return job, start, now

    def _divide(self, job: Job) -> int | None:
        """Start a batch: make its inputs, and divide it where the runtime has a fixed batch of another size."""
        if not job.future.set_running_or_notify_cancel():
            return None
        if job.make is not None:
            # gradients and inference mode belong to the calling thread: here both are off unless the user's code asks
            try:
                with torch.no_grad():
                    job.inputs = job.make()
            except Exception as error:
                job.error = error  # the user's own, not the device's
                return None
        assert job.inputs is not None
        job.batch = common_batch(self.runtime.inputs, job.inputs)
        if job.batch == 0:
            job.outputs = [_empty(spec, 0, job.pin) for spec in self.runtime.outputs]
            return None
        fixed = self._fixed
        divided = fixed is not None and job.batch is not None and job.batch != fixed
        if divided or job.pin:
            job.outputs = [_empty(spec, job.batch, job.pin) for spec in self.runtime.outputs]
        if divided:
            starts = range(0, job.batch or 0, fixed or 1)
            with self._lock:
                job.parts = job.parts_left = self._parts = len(starts)
                self._tasks.extendleft((job, start) for start in reversed(starts[1:]))  # before later batches
                self._work.notify(len(starts) - 1)
        return 0

    def _run(self, job: Job, start: int) -> None:
        runtime, fixed = self.runtime, self._fixed
        assert job.inputs is not None
        if fixed is None or job.batch is None or job.batch == fixed:
            job.outputs = _call(runtime, job.inputs, job.batch, job.name, job.outputs)
            return
        assert job.outputs is not None
        count = min(fixed, job.batch - start)
        part = [_cut(spec, x, start, count, fixed) for spec, x in zip(runtime.inputs, job.inputs, strict=True)]
        places = [
            output if spec.batch_axis is None else output.narrow(spec.batch_axis, start, count)
            for spec, output in zip(runtime.outputs, job.outputs, strict=True)
        ]
        direct = count == fixed and all(place.is_contiguous() for place in places)
        results = _call(runtime, part, fixed, job.name, places if direct else None)
        for spec, place, result in zip(runtime.outputs, places, results, strict=True):
            if result.data_ptr() != place.data_ptr():
                place.copy_(result if spec.batch_axis is None else result.narrow(spec.batch_axis, 0, count))

    def _finish(self, slot: int, job: Job, since: float) -> None:
        with self._lock:
            self._running.pop(slot, None)
            busy_s = time.monotonic() - since
            self.counters.busy_s += busy_s
            self.counters.alone_s += busy_s / min(self.runtime.slots, job.parts)
            job.parts_left -= 1
            if job.parts_left > 0:
                return
            self._held -= 1
            self._room.notify()
            if job.error is None and not job.future.cancelled():
                self.counters.batches += 1
                self.counters.samples += 1 if job.batch is None else job.batch
        _settle(job)

    def _look(self) -> None:
        now = time.monotonic()
        hung = [(now - since, job) for job, since in self._running.values() if now - since > self.timeout_s]
        if not hung or self.lost is not None:
            return
        seconds, job = max(hung, key=lambda pair: pair[0])
        self.lost = DeviceError(
            f"Runtime '{self.runtime.name}' on {self.runtime.device} hangs: {job.name} has been running "
            f"for {seconds:.1f} s.",
            expected=f"an answer within {self.timeout_s:g} s",
            remedy="check the device and its driver; raise timeout_s if it is only slow",
        )
        for stuck in {
            id(j): j for j in (*(j for j, _ in self._running.values()), *(j for j, _ in self._tasks))
        }.values():
            stuck.error = stuck.error or self.lost
            _settle(stuck)
        self._tasks.clear()
        self._wake_all()

    def _wake_all(self) -> None:
        self._work.notify_all()
        self._room.notify_all()


def _settle(job: Job) -> None:
    """Give a future its result or error, once."""
    future = job.future
    if future.done():
        return
    if job.error is not None:
        if future.running() or future.set_running_or_notify_cancel():
            future.set_exception(job.error)
    elif job.outputs is not None:
        future.set_result(job.outputs)


def _named(error: BaseException, job: Job, runtime: Runtime) -> BaseException:
    """The error with the batch and the device in it."""
    if isinstance(error, DeviceError):
        named = DeviceError(f"{job.name}: {error.what}", expected=error.expected, got=error.got, remedy=error.remedy)
        named.__cause__ = error.__cause__
        return named.with_traceback(error.__traceback__)
    if isinstance(error, NPUError) or not isinstance(error, Exception):
        return error
    named = DeviceError(f"{job.name}: runtime '{runtime.name}' failed on {runtime.device}: {error!r}")
    named.__cause__ = error
    return named


def _call(
    runtime: Runtime, inputs: Sequence[Tensor], batch: int | None, name: str, out: Sequence[Tensor] | None
) -> list[Tensor]:
    """One call, its results held to what the runtime declares, and to being numbers."""
    results = runtime.run(inputs, out)
    expected = [spec.with_batch(1 if batch is None else batch) for spec in runtime.outputs]
    got = [tuple(result.shape) for result in results]
    if got != expected:
        raise DeviceError(
            f"runtime '{runtime.name}' on {runtime.device} answered with other shapes than it declared.",
            expected=expected,
            got=got,
            remedy="check the device and its driver; compile the artifact again if it was made for another version",
        )
    for spec, result in zip(runtime.outputs, results, strict=True):
        # no NaN escapes a sum, and a sum reads memory once
        if result.is_floating_point() and math.isnan(result.sum().item()) and bool(result.isnan().any()):
            raise DeviceError(
                f"runtime '{runtime.name}' on {runtime.device} answered NaN in output '{spec.name}'.",
                expected="numbers",
                got=f"{int(result.isnan().sum())} NaN of {result.numel()} values",
                remedy="check the input for NaN and the device for errors; training on this would be lost",
            )
    return results


def _empty(spec: TensorSpec, batch: int | None, pin: bool) -> Tensor:
    shape = [int(size or 0) for size in spec.shape]
    if spec.batch_axis is not None:
        shape[spec.batch_axis] = 1 if batch is None else batch
    # an explicit dtype and device: defaults are process-wide or set by the caller's thread
    return torch.empty(shape, dtype=spec.torch_dtype, device="cpu", pin_memory=pin)


def _cut(spec: TensorSpec, tensor: Tensor, start: int, count: int, fixed: int) -> Tensor:
    """A part of a batch; the last one is filled up with its own last sample."""
    if spec.batch_axis is None:
        return tensor
    part = tensor.narrow(spec.batch_axis, start, count)
    if count < fixed:
        index = torch.arange(fixed, dtype=torch.int64, device="cpu").clamp_max(count - 1)
        part = part.index_select(spec.batch_axis, index)
    return part.contiguous()
