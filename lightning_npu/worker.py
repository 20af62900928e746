"""Asynchronous execution on a runtime: every call to a device goes through a worker."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError

from torch import Tensor

from lightning_npu.engine import LOOK_S, Counters, Engine, Inputs, Job
from lightning_npu.engine import THREAD_NAME as THREAD_NAME
from lightning_npu.errors import DeviceError
from lightning_npu.runtimes.base import Runtime

TIMEOUT_S = 60.0


class Worker:
    """Runs batches on one runtime, one thread per slot of the device.

    The runtime is opened on first use and once per process: a copy that a fork left in a child process opens its
    own. Batches start in the order of submission. A batch of another size than the runtime's fixed one is run in
    parts, which spread over the slots and are written where they belong.

    A call that takes longer than ``timeout_s`` ends every wait with a ``DeviceError``: the device is given up, what
    was queued fails, and the thread that hangs in the driver is left to itself (nothing can end it); it releases the
    device if the call ever returns. The next use opens the device again.

    Args:
        open_runtime: opens the runtime; called in the first thread that needs it.
        pending: batches that may wait beyond those that run; :meth:`submit` blocks while there are more.
        timeout_s: the longest that one call to the device may take.
    """

    def __init__(self, open_runtime: Callable[[], Runtime], *, pending: int = 16, timeout_s: float = TIMEOUT_S) -> None:
        self._open_runtime, self._pending, self.timeout_s = open_runtime, pending, timeout_s
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._finalizer: weakref.finalize[..., Worker] | None = None
        self._pid = os.getpid()
        self._numbers = 0
        self.counters = Counters()

    @property
    def runtime(self) -> Runtime:
        """The open runtime."""
        return self._ready().runtime

    @property
    def current(self) -> Runtime | None:
        """The runtime as it was opened last in this process, whether it works or not; opens nothing."""
        engine = self._engine
        return None if engine is None or self._pid != os.getpid() else engine.runtime

    @property
    def is_open(self) -> bool:
        """Whether the runtime is open in this process."""
        return self._engine is not None and self._pid == os.getpid()

    def submit(self, inputs: Inputs, *, name: str = "", pin: bool = False) -> Pending:
        """Queue one batch.

        Args:
            inputs: contiguous CPU tensors as the runtime takes them, of any number of samples; or a function that
                gives them, called in a thread of the worker, without gradients. They must not be changed before the
                result is there.
            name: what errors call this batch; default: its number.
            pin: write the outputs into page-locked memory, for copies to a GPU that do not block.

        Raises:
            DeviceError: the device hangs while earlier batches hold all places.
        """
        engine = self._ready()
        self._numbers += 1
        return Pending(engine, engine.submit(inputs, name or f"batch {self._numbers}", pin))

    def close(self) -> None:
        """Drop what waits, wait for what runs, and release the device; the next use opens it again."""
        with self._lock:
            self._engine, finalizer, self._finalizer = None, self._finalizer, None
            if finalizer is not None and self._pid == os.getpid():
                finalizer()

    def _ready(self) -> Engine:
        if self._pid != os.getpid():  # forked: the parent's lock, threads and session are not ours
            self._lock, self._engine, self._finalizer, self._pid = threading.Lock(), None, None, os.getpid()
        engine = self._engine
        if engine is not None and engine.lost is None:
            return engine
        with self._lock:
            if self._engine is None or self._engine.lost is not None:
                runtime = self._open_runtime()
                places = runtime.slots + self._pending
                engine = Engine(runtime, self.counters, places=places, timeout_s=self.timeout_s)
                self._engine, self._finalizer = engine, weakref.finalize(self, _close, engine, os.getpid())
            return self._engine


class Pending:
    """A batch that was submitted."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job

    def done(self) -> bool:
        """Whether :meth:`result` would not wait."""
        return self._job.future.done()

    def cancel(self) -> bool:
        """Drop the batch if it did not start; whether it was dropped."""
        return self._job.future.cancel()

    def remaining_s(self, batch_s: float) -> float:
        """About how long until the result is there, if a batch takes the device ``batch_s`` seconds."""
        return self._engine.remaining_s(self._job, batch_s)

    def inputs(self) -> Sequence[Tensor]:
        """What it is computed from; waits for a function that makes it.

        Raises:
            Exception: whatever that function raised.
        """
        if self._job.inputs is None:
            self.result()
        assert self._job.inputs is not None
        return self._job.inputs

    def result(self) -> list[Tensor]:
        """The flat outputs, CPU tensors; waits for them.

        Raises:
            DeviceError: the device failed or hangs; names batch and device.
        """
        while True:
            try:
                return self._job.future.result(timeout=LOOK_S)
            except (FutureTimeoutError, TimeoutError):
                if self._job.future.done():  # the timeout is the device's own error, not ours
                    raise
                self._engine.look()
            except CancelledError:
                raise DeviceError(f"{self._job.name} was cancelled.", remedy="submit it again") from None


def _close(engine: Engine, pid: int) -> None:
    if pid == os.getpid():  # in a forked child it belongs to the parent
        engine.close()
