"""A device that fails in mid-run does not cost the run: the FP32 head takes over from the very batch that failed."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_encoder, make_images
from test_prefetch import (
    Policy,
    loader,
    make_trainer,
    not_a_number,
    one_output_too_few,
    raises,
    wrong_shape,
)
from torch import Tensor, nn

import lightning_npu as npu
from lightning_npu.power.simulated import SimulatedBoard, SimulatedSource
from lightning_npu.runtimes import SimulatedRuntime
from lightning_npu.worker import THREAD_NAME

IMAGES = make_images(4, seed=5)
MADE: list[npu.NPUFrozenModule] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


def wrap(runtime: SimulatedRuntime, **options: Any) -> npu.NPUFrozenModule:
    MADE.append(npu.NPUFrozenModule.from_runtime(runtime, **options))
    return MADE[-1]


def faulty(
    fault: Callable[[Any], Any] = raises, at: int = 0, module: nn.Module | None = None, **options: Any
) -> tuple[npu.NPUFrozenModule, SimulatedRuntime]:
    head = make_encoder() if module is None else module
    runtime = SimulatedRuntime(head, latency_s=0.0)
    settings: dict[str, Any] = {"reference": head, "on_failure": "reference", **options}
    original, calls = runtime._compute, itertools.count()
    runtime._compute = lambda inputs: (  # type: ignore[method-assign]
        fault(original(inputs)) if next(calls) >= at else original(inputs)
    )
    return wrap(runtime, **settings), runtime


def trained(folder: Path, frozen: npu.NPUFrozenModule, prefetch: npu.Prefetch) -> Policy:
    torch.manual_seed(7)
    policy = Policy(frozen)
    make_trainer(folder, prefetch).fit(policy, loader(shuffle=False))
    return policy


@pytest.mark.parametrize("fault", [raises, wrong_shape, one_output_too_few, not_a_number])
@pytest.mark.parametrize(("depth", "at"), [(0, 5), (2, 0), (2, 5), (4, 19)])
def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path, fault: Any, depth: int, at: int) -> None:
    healthy = trained(tmp_path, wrap(SimulatedRuntime(make_encoder(), latency_s=0.0)),
                      npu.Prefetch(depth))  # fmt: skip
    frozen, _ = faulty(fault, at)
    policy = trained(tmp_path, frozen, npu.Prefetch(depth))
    assert [seen[0] for seen in policy.seen] == [seen[0] for seen in healthy.seen]  # no batch lost, none repeated
    for name, value in policy.head.state_dict().items():
        assert torch.equal(value, healthy.head.state_dict()[name]), name
    assert frozen.stats["reference_calls"] == 20 - at


def test_a_hanging_device_is_replaced_too(tmp_path: Path) -> None:
    driver = threading.Event()

    def hangs(results: Any) -> Any:
        driver.wait(60)
        return results

    frozen, runtime = faulty(hangs, 5, timeout_s=0.3)
    policy = trained(tmp_path, frozen, npu.Prefetch(2))
    assert len(policy.seen) == 20
    assert frozen.stats["reference_calls"] == 15
    assert frozen.failure is not None
    assert "hangs: batch 5 of the loader" in frozen.failure.reason
    driver.set()
    frozen.close()
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_NAME):
            thread.join(60)
    assert runtime._closed.is_set()


def test_balance_goes_on_without_the_device(tmp_path: Path) -> None:
    frozen, _ = faulty(raises, 5)
    policy = trained(tmp_path, frozen, npu.Prefetch(balance="auto"))
    assert len(policy.seen) == 20
    assert frozen.failure is not None


def test_the_failure_is_logged_once_and_described(caplog: pytest.LogCaptureFixture) -> None:
    frozen, runtime = faulty(at=1)
    frozen(IMAGES)
    assert frozen.failure is None
    assert "failure" not in frozen.describe()
    with caplog.at_level(logging.ERROR, "lightning_npu"):
        for _ in range(3):
            frozen(IMAGES)
    assert [record.message.split(" failed")[0] for record in caplog.records] == [runtime.device]
    failure = frozen.describe()["failure"]
    assert failure["reference_calls"] == 3
    assert "link down" in failure["reason"]
    assert failure["device"] == runtime.device
    assert frozen.describe()["runtime"] == "simulated"


class Structured(nn.Module):
    """Several inputs, keywords, nested outputs, one of which is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 2.0) -> dict[str, Any]:
        y = self.linear(x) * scale
        return {"b": (y.sum(-1), [mask]), "a": y, "same": x}


@pytest.mark.parametrize("how", ["call", "submit", "compile"])
def test_structures_are_those_of_the_module(how: str) -> None:
    torch._dynamo.reset()
    head = Structured().eval()
    x, mask = torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    frozen, _ = faulty(module=head)
    healthy = wrap(SimulatedRuntime(head, latency_s=0.0))
    expected = healthy(x, mask=mask, scale=3.0)
    if how == "compile":
        with pytest.raises(npu.DeviceError):  # a simulated device learns its shapes from a first call
            faulty(module=head, on_failure="raise")[0](x, mask=mask, scale=3.0)
        frozen(x, mask=mask, scale=3.0)
        frozen._failover.failure = None  # the next one fails inside of the compiled graph
        got = torch.compile(lambda a, b: frozen(a, mask=b, scale=3.0), fullgraph=True, backend="eager")(x, mask)
    elif how == "submit":
        got = frozen.submit(x, mask=mask, scale=3.0).result()
        again = frozen.submit(x, mask=mask, scale=3.0)
        assert again.done()
        assert torch.equal(again.result()["a"], got["a"])
    else:
        got = frozen(x, mask=mask, scale=3.0)
    assert frozen.failure is not None
    assert list(got) == list(expected)
    assert torch.equal(got["a"], expected["a"])
    assert torch.equal(got["b"][0], expected["b"][0])
    assert torch.equal(got["b"][1][0], mask)
    assert torch.equal(got["same"], x)


def test_the_reference_computes_in_fp32_under_autocast_and_gives_the_autocast_dtype() -> None:
    head = nn.Linear(64, 8).eval()
    x = torch.randn(4, 64)
    frozen, _ = faulty(module=head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = frozen(x)
    assert got.dtype == torch.bfloat16
    assert not got.requires_grad
    assert torch.equal(got, head(x).to(torch.bfloat16))


def test_a_tail_follows_the_reference() -> None:
    head, tail = nn.Linear(3, 3).eval(), nn.Linear(3, 2).eval()
    frozen, _ = faulty(module=head, tail=tail)
    x = torch.randn(2, 3)
    assert torch.equal(frozen(x), tail(head(x)))


def test_closing_gives_the_device_another_chance() -> None:
    fails = [True]

    def once(results: Any) -> Any:
        if fails.pop() if fails else False:
            raise OSError("link down")
        return results

    head = make_encoder()
    artifactless = SimulatedRuntime(head, latency_s=0.0)
    original = artifactless._compute
    artifactless._compute = lambda inputs: once(original(inputs))  # type: ignore[method-assign]
    frozen = wrap(artifactless, reference=head, on_failure="reference")
    frozen(IMAGES)
    assert frozen.failure is not None
    frozen.close()
    assert frozen.failure is None


def test_offload_keeps_what_can_take_over(tmp_path: Path, compiled: npu.Artifact) -> None:
    with pytest.raises(npu.InputError, match=r"needs the FP32 head(.|\n)*on_failure='reference'"):
        npu.NPUFrozenModule(compiled, on_failure="reference")
    with pytest.raises(npu.InputError, match="on_failure is wrong"):
        npu.NPUFrozenModule(compiled, on_failure="ignore")
    policy = Policy(make_encoder())
    with pytest.raises(npu.InputError, match="on_failure is wrong"):
        npu.offload(policy, "encoder", calibration=loader(), output=tmp_path / "e.npu", on_failure="ignore")
    frozen = npu.NPUFrozenModule(compiled, reference=make_encoder(), on_failure="reference")
    twin = pickle.loads(pickle.dumps(frozen))
    assert twin._failover.policy == "reference"
    assert twin.failure is None


@pytest.mark.parametrize("at", [12, 99])
def test_a_run_on_two_devices_is_marked_and_its_energy_kept_apart(tmp_path: Path, at: int) -> None:
    frozen, _ = faulty(raises, at)
    gpu = SimulatedSource([SimulatedBoard(100.0, name="g", kind="gpu", counter=True)])
    meter = npu.EnergyMeter(sources=[gpu])
    make_trainer(tmp_path, meter).fit(Policy(frozen), loader(shuffle=False))
    assert meter.path is not None
    report = json.loads(meter.path.read_text())
    if at == 99:
        assert report["failures"] == []
        return
    (failure,) = report["failures"]
    assert failure["module"] == "encoder"
    assert "link down" in failure["reason"]
    assert failure["samples_since"] == 4 * (20 - at) - 4  # beginning with the step after the one in which it failed
    assert 0 < failure["energy_since_j"] < report["total"]["energy_j"]
    assert failure["energy_since_j"] == pytest.approx(100.0 * failure["seconds_since"], rel=0.02)


def test_an_evaluation_by_itself_is_marked_too(tmp_path: Path) -> None:
    class Tested(Policy):
        def test_step(self, batch: Any, index: int) -> None:
            self.training_step(batch, index)
            time.sleep(0.005)  # the work

    frozen, _ = faulty(raises, 5)
    gpu = SimulatedSource([SimulatedBoard(100.0, name="g", kind="gpu", counter=True)])
    meter = npu.EnergyMeter(sources=[gpu])
    make_trainer(tmp_path, meter).test(Tested(frozen), loader(shuffle=False), verbose=False)
    assert meter.report is not None
    (failure,) = meter.report["failures"]
    batches = len(loader())
    assert failure["samples_since"] == meter.report["samples"] * (batches - 6) / batches  # after the one that failed
    assert 100.0 * 0.005 * (batches - 6) <= failure["energy_since_j"] < meter.report["total"]["energy_j"]
