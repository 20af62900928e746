# ruff: noqa: F811  # pytest fixtures are imported by name
"""What a board can do wrong, done on purpose: each ends as designed, no batch lost or repeated, no thread left."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_encoder, make_images
from mobilint_parts import FAKES, artifact, board, fake_module  # noqa: F401

import lightning_npu as npu
from lightning_npu.runtimes.mobilint.cores import CorePlan
from lightning_npu.runtimes.mobilint.runtime import MobilintRuntime
from lightning_npu.worker import THREAD_NAME, Worker


@pytest.fixture
def no_probe(artifact: npu.Artifact) -> Callable[..., MobilintRuntime]:
    """Opens the runtime without measuring fidelity, so that calls count from 0."""
    return lambda **options: MobilintRuntime.open(artifact, **options)


def fails_at(board: Any, first: int, status: str, last: int | None = None) -> None:
    def fault(number: int) -> None:
        if first <= number and (last is None or number <= last):
            raise fake_module()._core.fail(status, "injected")

    board.fault = fault


def features(images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return make_encoder()(images)[0]


@pytest.mark.parametrize(
    ("status", "meaning", "remedy"),
    [
        ("Acc_NPUTimeout", "the NPU did not answer in time", "raise timeout_s"),
        ("Driver_WaitDoneTimeout", "the NPU did not finish in time", "mobilint-cli status"),
        ("Driver_FailedToPostInfer", "the driver reports a failure", "dmesg"),
        ("Model_TaskQueueClosed", "the queue of the device was closed", "the next use opens"),
    ],
)
def test_a_device_that_is_lost_at_a_batch_names_batch_and_device(
    no_probe: Callable[..., MobilintRuntime], board: Any, status: str, meaning: str, remedy: str
) -> None:
    runtime = no_probe(threads=1)
    worker = Worker(lambda: runtime)
    batches = [make_images(2, seed=seed) for seed in range(6)]
    fails_at(board, 4, status)  # two images a batch: the third batch
    pending = [worker.submit([batch], name=f"batch {index}") for index, batch in enumerate(batches)]
    for index in (0, 1):  # what came before is right, in order
        torch.testing.assert_close(pending[index].result()[0], features(batches[index]))
    with pytest.raises(
        npu.DeviceError, match=rf"batch 2: Mobilint .* failed while computing an image: {meaning}"
    ) as info:
        pending[2].result()
    assert status in str(info.value)
    assert remedy in str(info.value)
    assert status in str(info.value.__cause__)  # the vendor's own
    for index in (3, 4, 5):
        with pytest.raises(npu.DeviceError, match=rf"batch {index}: Mobilint .* was lost(.|\n)*close\(\)"):
            pending[index].result()
    assert board.calls == 5  # nobody waits for a device that is gone
    worker.close()
    assert board.events[-2:] == ["dispose", "close 0"]
    gc.collect()  # though the errors are kept, the vendor's objects are not
    assert not [thing for thing in gc.get_objects() if type(thing) is fake_module()._core.Model]


def test_a_failure_that_is_not_the_devices_end_costs_one_batch(
    no_probe: Callable[..., MobilintRuntime], board: Any
) -> None:
    runtime = no_probe(threads=1)
    worker = Worker(lambda: runtime)
    fails_at(board, 1, "BadAlloc", last=1)
    results = [worker.submit([make_images(1, seed=seed)]) for seed in range(3)]
    torch.testing.assert_close(results[0].result()[0], features(make_images(1, seed=0)))
    with pytest.raises(npu.DeviceError, match=r"batch 2(.|\n)*memory ran out(.|\n)*BadAlloc"):
        results[1].result()
    torch.testing.assert_close(results[2].result()[0], features(make_images(1, seed=2)))
    worker.close()


@pytest.mark.parametrize("status", ["BadAlloc", "Driver_FailedToAllocateModelMemory"])
def test_out_of_memory_at_launch(artifact: npu.Artifact, board: Any, status: str) -> None:
    board.launch_status = status
    with pytest.raises(npu.DeviceError, match=r"launching the model(.|\n)*ran out(.|\n)*close other models"):
        MobilintRuntime.open(artifact)
    assert board.events[-1] == "close 0"
    board.launch_status = ""
    MobilintRuntime.open(artifact).close()  # nothing was left on the device
    assert board.busy_cores == {0: set()}


def test_a_device_in_use(artifact: npu.Artifact, board: Any) -> None:
    board.relocatable = False
    first = MobilintRuntime.open(artifact)
    with pytest.raises(
        npu.RuntimeUnavailableError, match=r"core(.|\n)*in use(.|\n)*Acc_CoreAlreadyInUse(.|\n)*lists them"
    ):
        MobilintRuntime.open(artifact)
    first.close()
    MobilintRuntime.open(artifact).close()


def test_nan_is_found(no_probe: Callable[..., MobilintRuntime], board: Any) -> None:
    runtime = no_probe()
    worker = Worker(lambda: runtime)
    nan = [np.full((1, 16, 8), np.nan, np.float32), np.zeros((1, 1, 8), np.float32)]
    board.fault = lambda number: nan if number == 2 else None
    with pytest.raises(npu.DeviceError, match=r"batch 1(.|\n)*answered NaN in output 'output_0'"):
        worker.submit([make_images(4)]).result()
    board.fault = None
    torch.testing.assert_close(worker.submit([make_images(4)]).result()[0], features(make_images(4)))
    worker.close()


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([np.zeros((1, 16, 8), np.float32)], r"another number of outputs(.|\n)*1 outputs"),
        ([np.zeros((1, 16, 8), np.float32)] * 3, r"another number of outputs(.|\n)*3 outputs"),
        ([np.zeros((1, 1, 8), np.float32), np.zeros((1, 16, 8), np.float32)], r"another shape or dtype in output"),
        ([np.zeros((1, 16, 8), np.int8), np.zeros((1, 1, 8), np.int8)], r"another shape or dtype(.|\n)*int8"),
    ],
)
def test_wrong_outputs(
    no_probe: Callable[..., MobilintRuntime], board: Any, outputs: list[np.ndarray], message: str
) -> None:
    runtime = no_probe()
    worker = Worker(lambda: runtime)
    board.fault = lambda number: outputs
    with pytest.raises(npu.DeviceError, match=rf"batch 1(.|\n)*{message}"):
        worker.submit([make_images(2)]).result()
    worker.close()


def test_garbage_and_failures_of_asynchronous_calls(artifact: npu.Artifact, board: Any) -> None:
    runtime = MobilintRuntime.open(artifact, asynchronous=True)
    worker = Worker(lambda: runtime)
    fails_at(board, board.calls + 3, "Model_AsyncPipelineTimeout")
    with pytest.raises(npu.DeviceError, match=r"asynchronous pipeline is stuck"):
        worker.submit([make_images(12)]).result()
    worker.close()
    board.fault = None
    fails_at(board, board.calls + 20, "Model_AsyncPipelineNotAlive")
    with pytest.raises(npu.DeviceError, match=r"trying asynchronous calls(.|\n)*pipeline has ended"):
        MobilintRuntime.open(artifact, asynchronous=True)
    assert board.events[-2:] == ["dispose", "close 0"]


# ---- hanging


def test_a_hang_ends_by_the_watchdog_and_nothing_is_disposed_under_it(artifact: npu.Artifact, board: Any) -> None:
    runtime = MobilintRuntime.open(artifact)
    worker = Worker(lambda: runtime, timeout_s=0.8)
    board.fault = lambda number: board.hang() if number == 3 else None
    pending = [worker.submit([make_images(4, seed=seed)], name=f"batch {seed}") for seed in range(3)]
    errors = []
    for job in pending:
        try:
            job.result()
        except npu.DeviceError as error:
            errors.append(str(error))
    assert errors
    assert all(re.search(r"on Mobilint .* hangs: batch \d has been running for", error) for error in errors)
    worker.close()  # returns at once, though a thread is in the driver
    assert "dispose" not in board.events
    ours = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]
    for thread in ours:
        thread.join(1)  # those that are not in the driver end
    hung = [thread for thread in ours if thread.is_alive()]
    assert len(hung) == 1
    board.released.set()  # the driver answers after all
    hung[0].join(10)
    assert board.events.count("dispose") == 1
    assert not board.disposed_under_a_call


def test_an_artifact_can_be_opened_again_after_a_hang(artifact: npu.Artifact, board: Any) -> None:
    module = npu.NPUFrozenModule(artifact, runtime="mobilint", timeout_s=1.0)
    images = make_images(2)
    module(images)
    board.fault = lambda number: board.hang()
    with pytest.raises(npu.DeviceError, match="hangs"):
        module(images)
    board.fault = None
    torch.testing.assert_close(module(images)[0], features(images))
    module.close()
    board.released.set()
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_NAME):
            thread.join(10)


def test_how_long_a_divided_batch_still_takes(artifact: npu.Artifact, board: Any) -> None:
    runtime = MobilintRuntime.open(artifact)
    worker = Worker(lambda: runtime)
    worker.submit([make_images(16)]).result()
    counters = worker.counters
    assert counters.alone_s == pytest.approx(counters.busy_s / 8)  # its images are spread over eight cores
    full = threading.Event()

    def fault(number: int) -> None:
        if board.running == 8:
            full.set()
        board.hang()

    board.fault = fault
    first = worker.submit([make_images(16, seed=0)])
    assert full.wait(10)  # all slots are on its parts before another batch can be divided
    second, third = (worker.submit([make_images(16, seed=seed)]) for seed in (1, 2))
    assert first.remaining_s(1.0) == 1.0
    assert second.remaining_s(1.0) == 1.5  # after the half that waits
    assert third.remaining_s(1.0) == 2.5
    board.released.set()
    for index, pending in enumerate((first, second, third)):
        torch.testing.assert_close(pending.result()[0], features(make_images(16, seed=index)))
    assert first.remaining_s(1.0) == 0.0
    worker.close()


def test_disposal_waits_for_what_runs(artifact: npu.Artifact, board: Any) -> None:
    runtime = MobilintRuntime.open(artifact)
    inside = threading.Event()

    def fault(number: int) -> None:
        inside.set()
        board.hang()

    board.fault = fault
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(runtime.run([make_images(1)])))
    thread.start()
    assert inside.wait(10)
    runtime.close()
    runtime.close()
    assert "dispose" not in board.events
    with pytest.raises(npu.DeviceError, match="was closed"):
        runtime.run([make_images(1)])
    board.released.set()
    thread.join(10)
    torch.testing.assert_close(results[0][0], features(make_images(1)))
    assert board.events[-2:] == ["dispose", "close 0"]
    runtime.close()
    assert board.events.count("dispose") == 1


# ---- coming and going


def test_a_board_that_is_plugged_in_again(artifact: npu.Artifact, board: Any) -> None:
    module = npu.NPUFrozenModule(artifact, runtime="mobilint")
    images = make_images(3)
    torch.testing.assert_close(module(images)[0], features(images))
    board.lose()
    with pytest.raises(npu.DeviceError, match=r"the driver reports a failure|was lost"):
        module(images)
    module.close()
    with pytest.raises(npu.RuntimeUnavailableError, match="finds no ARIES device"):
        module(images)
    board.numbers = [0]
    torch.testing.assert_close(module(images)[0], features(images))
    module.close()


def test_the_reference_takes_over_when_the_board_is_lost(artifact: npu.Artifact, board: Any) -> None:
    head = make_encoder()
    module = npu.NPUFrozenModule(artifact, runtime="mobilint", reference=head, on_failure="reference")
    batches = [make_images(2, seed=seed) for seed in range(4)]
    assert module.failure is None
    results = []
    for index, batch in enumerate(batches):
        if index == 2:
            board.lose()
        results.append(module(batch)[0])
    for batch, result in zip(batches, results, strict=True):
        torch.testing.assert_close(result, features(batch))
    assert module.failure is not None
    assert "Mobilint" in module.failure.reason
    module.close()


def test_a_model_that_cannot_be_taken_down_is_a_line_in_the_log(
    artifact: npu.Artifact, board: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = npu.NPUFrozenModule(artifact, runtime="mobilint")
    module(make_images(1))
    board.dispose_status = "Driver_FailedToUnclaimCores"
    with caplog.at_level("WARNING"):
        module.close()
    assert any("taking the model down" in record.getMessage() for record in caplog.records)
    assert board.events[-1] == "close 0"
    board.dispose_status = ""
    module(make_images(1))
    module.close()


def test_objects_go_in_the_vendors_order(artifact: npu.Artifact, board: Any) -> None:
    runtime = MobilintRuntime.open(artifact)
    runtime.run([make_images(1)])
    runtime.close()
    del runtime
    gc.collect()
    assert board.events == ["open 0", "model", "launch", "dispose", "close 0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_the_parents_model_alone_and_opens_its_own(artifact: npu.Artifact, board: Any) -> None:
    module = npu.NPUFrozenModule(artifact, runtime="mobilint")
    images = make_images(2)
    right = module(images)[0]
    inherited = module._worker.runtime
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
            with pytest.raises(npu.DeviceError, match="opened by the process from which this one was forked"):
                inherited._infer([images.numpy()])
            inherited.close()
            mine = torch.equal(module(images)[0], right)
            del inherited
            gc.collect()
            untouched = "dispose" not in board.events and "destroyed while launched" not in board.events
            module.close()
            status = 0 if mine and untouched and board.events.count("dispose") == 1 else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "dispose" not in board.events
    torch.testing.assert_close(module(images)[0], right)
    module.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_destroy_what_it_inherited(artifact: npu.Artifact, board: Any) -> None:
    runtime = MobilintRuntime.open(artifact)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del runtime
            gc.collect()
            status = 0 if board.events == ["open 0", "model", "launch"] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    runtime.close()


def test_what_a_spawned_process_gets_is_plain(artifact: npu.Artifact, board: Any) -> None:
    import pickle

    module = npu.NPUFrozenModule(artifact, runtime="mobilint", runtime_options={"threads": 2})
    module(make_images(1))
    twin = pickle.loads(pickle.dumps(module))
    assert board.events.count("open 0") == 1  # the copy opens on first use
    torch.testing.assert_close(twin(make_images(1))[0], module(make_images(1))[0])
    assert board.events.count("open 0") == 2
    twin.close()
    module.close()


def test_two_ranks_of_a_host_share_a_board_as_a_launcher_starts_them(artifact: npu.Artifact, board: Any) -> None:
    """Real processes, each with the fake."""
    if board.native.__name__ != "fake_qbruntime":
        pytest.skip("the processes have the fake in either case")
    code = f"""
import json, qbruntime, torch
import lightning_npu as npu
from qbruntime._core import board
board.inputs, board.outputs = [(16, 16, 3)], [(1, 16, 8), (1, 1, 8)]
board.compute = lambda arrays: [arrays[0].reshape(6, 16, 8)[:1], arrays[0].reshape(-1)[:8].reshape(1, 1, 8)]
module = npu.NPUFrozenModule({str(artifact.path)!r}, runtime="mobilint")
module(torch.ones(3, 3, 16, 16))
facts = module.describe()
module.close()
print(json.dumps([facts["cores"], facts["slots"], facts["device_index"], board.events[-2:]]))
"""
    started = []
    for rank in range(2):
        environ = {
            **os.environ, "PYTHONPATH": f"{FAKES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "QBRUNTIME_LOG_LEVEL": "off",
        }  # fmt: skip
        started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ))
    answers = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    ends = ["dispose", "close 0"]
    assert answers == [[[0, 1, 2, 3], 4, 0, ends], [[4, 5, 6, 7], 4, 0, ends]]


def test_sharing_is_refused_where_cores_are_not_kept_to(
    artifact: npu.Artifact, board: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    runtime = MobilintRuntime.open(artifact)
    assert runtime.plan == CorePlan("single", (4, 5, 6, 7), shared=True)
    assert runtime.slots == 4
    runtime.close()
    board.ignores_core_ids = True
    with pytest.raises(npu.RuntimeUnavailableError, match=r"does not keep to the cores(.|\n)*\[4, 5, 6, 7\]"):
        MobilintRuntime.open(artifact)


@pytest.mark.parametrize("lost_at", [None, 40])
def test_a_training_run_on_a_board_that_may_be_lost(artifact: npu.Artifact, board: Any, lost_at: int | None) -> None:
    """The same batches in the same order as in torch, by whichever of the two computes them."""
    import lightning as L

    class Policy(L.LightningModule):
        def __init__(self, encoder: torch.nn.Module) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.encoder, self.head, self.losses = encoder, torch.nn.Linear(8, 1), []

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = (self.head(self.encoder(batch[0])[1]) - 1).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    def losses(encoder: torch.nn.Module, *callbacks: L.Callback) -> list[float]:
        data = torch.utils.data.TensorDataset(make_images(48, seed=4))
        policy = Policy(encoder)
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=list(callbacks),
        )  # fmt: skip
        trainer.fit(policy, torch.utils.data.DataLoader(data, batch_size=8))
        return policy.losses

    right = losses(make_encoder().requires_grad_(False))
    board.latency_s = 0.001
    module = npu.NPUFrozenModule(artifact, runtime="mobilint", reference=make_encoder(), on_failure="reference")
    module.describe()
    if lost_at is not None:
        fails_at(board, board.calls + lost_at, "Acc_NPUTimeout")
    found = losses(module, npu.Prefetch())
    assert len(found) == 12
    assert found == pytest.approx(right, rel=1e-4)
    assert (module.failure is not None) == (lost_at is not None)
    module.close()
