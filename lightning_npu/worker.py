"""Asynchronous, bounded, ordered execution on a runtime: every call to a device goes through here."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from lightning_npu.errors import DeviceError, NPUError
from lightning_npu.runtimes.base import Runtime
from lightning_npu.tensor_spec import TensorSpec, common_batch

THREAD_NAME = "lightning-npu"


class Worker:
    """Runs batches on one runtime, one thread per slot of the device.

    The runtime is opened on first use and once per process: a copy that a fork left in a child process opens its
    own. Results come in the order of submission from a device with one slot; each future belongs to its batch.

    Args:
        open_runtime: opens the runtime; called in the first thread that needs it.
        pending: batches that may wait beyond those that run; :meth:`submit` blocks while there are more.
    """

    def __init__(self, open_runtime: Callable[[], Runtime], *, pending: int = 8) -> None:
        self._open_runtime, self._pending = open_runtime, pending
        self._lock = threading.Lock()
        self._state: _State | None = None
        self._pid = os.getpid()
        self.calls, self.samples, self.run_s = 0, 0, 0.0

    @property
    def runtime(self) -> Runtime:
        """The open runtime."""
        return self._ready().runtime

    @property
    def is_open(self) -> bool:
        """Whether the runtime is open in this process."""
        return self._state is not None and self._pid == os.getpid()

    def submit(self, inputs: Sequence[Tensor]) -> Future[list[Tensor]]:
        """Queue one batch.

        Args:
            inputs: contiguous CPU tensors as the runtime takes them, of any number of samples: a batch that is larger
                or smaller than the runtime's fixed batch is divided or filled up. They must not be changed before
                the future is done.

        Returns:
            A future of the flat outputs.
        """
        state = self._ready()
        state.places.acquire()
        try:
            future = state.threads.submit(self._run, state.runtime, inputs)
        except BaseException:
            state.places.release()
            raise
        future.add_done_callback(lambda _: state.places.release())
        return future

    def close(self) -> None:
        """Wait for what runs, drop what waits, and release the device; the next use opens it again."""
        with self._lock:
            state, self._state = self._state, None
            if state is not None and self._pid == os.getpid():
                state.finalizer()

    def _ready(self) -> _State:
        state = self._state
        if state is not None and self._pid == os.getpid():
            return state
        if self._pid != os.getpid():  # forked: the parent's lock, threads and session are not ours
            self._lock, self._state, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._state is None:
                self._state = _State(self, self._open_runtime(), self._pending)
            return self._state

    def _run(self, runtime: Runtime, inputs: Sequence[Tensor]) -> list[Tensor]:
        started = time.perf_counter()
        batch = common_batch(runtime.inputs, inputs)
        fixed = next((spec.static_batch for spec in runtime.inputs if spec.static_batch is not None), None)
        if fixed is None or batch is None or batch == fixed:
            results = _checked(runtime, inputs, batch)
        else:
            results = _in_parts(runtime, inputs, batch, fixed)
        self.calls += 1
        self.samples += batch or 1
        self.run_s += time.perf_counter() - started
        return results


class _State:
    """The open runtime with its threads; released when the worker is closed, collected, or at exit."""

    def __init__(self, owner: Worker, runtime: Runtime, pending: int) -> None:
        self.runtime = runtime
        self.threads = ThreadPoolExecutor(runtime.slots, thread_name_prefix=THREAD_NAME)
        self.places = threading.BoundedSemaphore(runtime.slots + pending)
        self.finalizer = weakref.finalize(owner, _release, self.threads, runtime, os.getpid())


def _release(threads: ThreadPoolExecutor, runtime: Runtime, pid: int) -> None:
    if pid != os.getpid():  # in a forked child: they belong to the parent
        return
    threads.shutdown(wait=True, cancel_futures=True)
    runtime.close()


def _checked(runtime: Runtime, inputs: Sequence[Tensor], batch: int | None) -> list[Tensor]:
    """One call, its results held to the runtime's own specification."""
    try:
        results = runtime.run(inputs)
    except NPUError:
        raise
    except Exception as error:
        raise DeviceError(f"Runtime '{runtime.name}' failed on {runtime.device}: {error!r}") from error
    expected = [spec.with_batch(batch or 1) for spec in runtime.outputs]
    got = [tuple(result.shape) for result in results]
    if got != expected:
        raise DeviceError(
            f"Runtime '{runtime.name}' on {runtime.device} answered with other shapes than it declared.",
            expected=expected,
            got=got,
            remedy="check the device and its driver; compile the artifact again if it was made for another version",
        )
    return results


def _in_parts(runtime: Runtime, inputs: Sequence[Tensor], batch: int, fixed: int) -> list[Tensor]:
    """A batch of another size than the runtime's, in calls of its size; the last is filled with its last sample."""
    outputs = [_empty(spec, batch) for spec in runtime.outputs]
    for start in range(0, batch, fixed):
        count = min(fixed, batch - start)
        part = [_cut(spec, tensor, start, count, fixed) for spec, tensor in zip(runtime.inputs, inputs, strict=True)]
        for spec, output, result in zip(runtime.outputs, outputs, _checked(runtime, part, fixed), strict=True):
            if spec.batch_axis is None:
                output.copy_(result)
            else:
                output.narrow(spec.batch_axis, start, count).copy_(result.narrow(spec.batch_axis, 0, count))
    return outputs


def _empty(spec: TensorSpec, batch: int) -> Tensor:
    shape = list(spec.shape)
    if spec.batch_axis is not None:
        shape[spec.batch_axis] = batch
    # an explicit dtype and device: defaults are process-wide or set by the caller's thread
    return torch.empty([int(size or 0) for size in shape], dtype=spec.torch_dtype, device="cpu")


def _cut(spec: TensorSpec, tensor: Tensor, start: int, count: int, fixed: int) -> Tensor:
    if spec.batch_axis is None:
        return tensor
    part = tensor.narrow(spec.batch_axis, start, count)
    if count < fixed:
        index = torch.arange(fixed, dtype=torch.int64, device="cpu").clamp_max(count - 1)
        part = part.index_select(spec.batch_axis, index)
    return part.contiguous()
