"""Batches go through the device in order, bounded, in parts of its size, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_npu.errors import DeviceError, InputError
from lightning_npu.runtimes.base import Runtime
from lightning_npu.tensor_spec import TensorSpec
from lightning_npu.worker import THREAD_NAME, Worker


class Doubler(Runtime):
    """Doubles its input; holds every call until ``gate`` is open, and can be told to fail."""

    name: ClassVar[str] = "doubler"
    targets: ClassVar[tuple[str, ...]] = ()
    fingerprint, device = "doubler", "test device"

    def __init__(self, batch: int | None = None, slots: int = 1) -> None:
        self.inputs = (TensorSpec("x", (batch, 3)),)
        self.outputs = (TensorSpec("y", (batch, 3)),)
        self.slots = slots
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.seen: list[int] = []
        self.closed = 0
        self.failure: Exception | None = None
        self.wrong_shape = False

    @classmethod
    def available(cls) -> str:
        return "ok"

    @classmethod
    def open(cls, artifact: Any, *, device_index: int | None = None, **options: Any) -> Runtime:
        raise NotImplementedError

    def run(self, inputs: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        self.entered.release()
        assert self.gate.wait(60)
        if self.failure is not None:
            raise self.failure
        self.seen.append(inputs[0].shape[0])
        doubled = inputs[0] * 2
        return [doubled[:, :2] if self.wrong_shape else doubled]

    def close(self) -> None:
        self.closed += 1


@given(batch=st.integers(1, 13), fixed=st.integers(1, 5))
def test_any_batch_runs_on_a_fixed_one(batch: int, fixed: int) -> None:
    runtime = Doubler(fixed)
    worker = Worker(lambda: runtime)
    x = torch.arange(batch * 3, dtype=torch.float32).reshape(batch, 3)
    try:
        assert torch.equal(worker.submit([x]).result()[0], x * 2)
    finally:
        worker.close()
    assert runtime.seen == [fixed] * -(-batch // fixed)


def test_results_belong_to_their_batches_in_order() -> None:
    worker = Worker(lambda: Doubler())
    futures = [worker.submit([torch.full((2, 3), float(i))]) for i in range(20)]
    assert [future.result()[0][0, 0].item() for future in futures] == [2.0 * i for i in range(20)]
    worker.close()


def test_submit_blocks_when_enough_is_pending() -> None:
    runtime = Doubler()
    runtime.gate.clear()
    worker = Worker(lambda: runtime, pending=2)
    futures = [worker.submit([torch.zeros(1, 3)]) for _ in range(3)]
    blocked = threading.Thread(target=lambda: futures.append(worker.submit([torch.zeros(1, 3)])))
    blocked.start()
    assert runtime.entered.acquire(timeout=60)
    assert blocked.is_alive()
    assert len(futures) == 3
    runtime.gate.set()
    blocked.join(60)
    assert len(futures) == 4
    worker.close()


def test_slots_run_at_the_same_time() -> None:
    runtime = Doubler(slots=3)
    runtime.gate.clear()
    worker = Worker(lambda: runtime)
    futures = [worker.submit([torch.zeros(1, 3)]) for _ in range(3)]
    assert all(runtime.entered.acquire(timeout=60) for _ in range(3))
    runtime.gate.set()
    assert all(future.result() for future in futures)
    worker.close()


def test_any_failure_is_a_device_error_that_names_the_device() -> None:
    runtime = Doubler()
    worker = Worker(lambda: runtime)
    runtime.failure = ValueError("wire loose")
    with pytest.raises(DeviceError, match="'doubler' failed on test device: ValueError"):
        worker.submit([torch.zeros(1, 3)]).result()
    runtime.failure, runtime.wrong_shape = None, True
    with pytest.raises(DeviceError, match=r"other shapes than it declared(.|\n)*\[\(1, 3\)\](.|\n)*\[\(1, 2\)\]"):
        worker.submit([torch.zeros(1, 3)]).result()
    runtime.wrong_shape = False
    assert worker.submit([torch.ones(1, 3)]).result()[0].sum() == 6
    worker.close()


def test_failures_free_their_places() -> None:
    runtime = Doubler()
    runtime.failure = ValueError("always")
    worker = Worker(lambda: runtime, pending=1)
    for _ in range(10):
        with pytest.raises(DeviceError):
            worker.submit([torch.zeros(1, 3)]).result()
    worker.close()


def test_closing_twice_and_using_again() -> None:
    runtime = Doubler()
    worker = Worker(lambda: runtime)
    worker.submit([torch.zeros(1, 3)]).result()
    worker.close()
    worker.close()
    assert runtime.closed == 1
    assert not worker.is_open
    worker.submit([torch.zeros(1, 3)]).result()
    assert worker.is_open
    worker.close()


def test_a_forgotten_worker_releases_its_device() -> None:
    runtime = Doubler()
    worker = Worker(lambda: runtime)
    worker.submit([torch.zeros(1, 3)]).result()
    del worker
    gc.collect()
    assert runtime.closed == 1
    assert not [t for t in threading.enumerate() if t.name.startswith(THREAD_NAME)]


def test_an_opening_that_fails_is_tried_again() -> None:
    attempts: list[int] = []

    def opener() -> Runtime:
        attempts.append(1)
        if len(attempts) == 1:
            raise DeviceError("not yet")
        return Doubler()

    worker = Worker(opener)
    with pytest.raises(DeviceError, match="not yet"):
        worker.submit([torch.zeros(1, 3)])
    assert worker.submit([torch.zeros(1, 3)]).result()
    worker.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_opens_its_own_device() -> None:
    opened: list[int] = []

    def opener() -> Runtime:
        opened.append(os.getpid())
        return Doubler()

    worker = Worker(opener)
    worker.submit([torch.zeros(1, 3)]).result()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            total = worker.submit([torch.ones(1, 3)]).result()[0].sum().item()
            status = 0 if total == 6 and opened[-1] == os.getpid() else 2
            worker.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker.submit([torch.ones(1, 3)]).result()[0].sum() == 6
    assert len(opened) == 1
    worker.close()


def test_inputs_that_disagree_are_refused() -> None:
    runtime = Doubler()
    runtime.inputs = (TensorSpec("x", (None, 3)), TensorSpec("y", (None, 3)))
    worker = Worker(lambda: runtime)
    with pytest.raises(InputError, match=r"disagree about the number of samples(.|\n)*x: 1, y: 2"):
        worker.submit([torch.zeros(1, 3), torch.zeros(2, 3)]).result()
    worker.close()
