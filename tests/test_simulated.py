"""A simulated device says that it is one, takes its time, and draws the power that was stated."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from conftest import make_encoder, make_images

import lightning_npu as npu
from lightning_npu.runtimes import SimulatedRuntime


def wrap(**options: Any) -> tuple[npu.NPUFrozenModule, SimulatedRuntime]:
    runtime = SimulatedRuntime(make_encoder(), **{"latency_s": 0.0, **options})
    return npu.NPUFrozenModule.from_runtime(runtime), runtime


def test_it_computes_what_the_module_computes_and_keeps_its_structure() -> None:
    frozen, runtime = wrap()
    images = make_images(3)
    for a, b in zip(frozen(images=images), make_encoder()(images), strict=True):
        assert torch.equal(a, b)
    assert runtime.fingerprint == SimulatedRuntime(make_encoder(), latency_s=1.0).fingerprint
    assert runtime.fingerprint != SimulatedRuntime(make_encoder(seed=1), latency_s=1.0).fingerprint
    assert runtime.name == "simulated"
    assert "simulated" in frozen.describe()["device"]
    frozen.close()


def test_a_call_takes_at_least_its_latency_and_slots_serve_side_by_side() -> None:
    frozen, _ = wrap(latency_s=0.05, slots=2)
    frozen(make_images(1))
    started = time.monotonic()
    futures = [frozen.submit(make_images(1, seed=i)) for i in range(4)]
    for future in futures:
        future.result()
    assert time.monotonic() - started >= 0.1
    assert frozen.stats["run_s"] >= 5 * 0.05  # busy time counts each slot
    frozen.close()


def test_replay_computes_each_input_once() -> None:
    frozen, runtime = wrap(replay=True)
    images = make_images(2)
    first = frozen(images)[0].clone()
    calls: list[int] = []
    original = runtime._flat

    class Counts(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            calls.append(1)
            assert original is not None
            return original(*tensors)

    runtime._flat = Counts()  # type: ignore[assignment]
    again = frozen(images)[0]
    again.add_(1.0)
    assert torch.equal(frozen(images)[0], first)  # an edited answer is not replayed
    assert calls == []
    frozen(images + 1)
    assert calls == [1]
    frozen.close()


def test_power_follows_use() -> None:
    frozen, runtime = wrap(latency_s=0.2, active_w=20.0, idle_w=5.0)
    assert runtime.power_w() == 5.0
    seen: list[float] = []
    started, before_j = time.monotonic(), runtime.energy_j()
    future = frozen.submit(make_images(1))
    watcher = threading.Thread(target=lambda: seen.append(runtime.power_w()))
    while runtime._served == 0 and not future.done():
        time.sleep(0.001)
    watcher.start()
    watcher.join()
    future.result()
    assert seen == [20.0]
    spent_j, seconds = runtime.energy_j() - before_j, time.monotonic() - started
    assert 5.0 * seconds < spent_j <= 20.0 * seconds + 1e-6
    frozen.close()


@pytest.mark.parametrize("bad", [{"latency_s": -1.0}, {"jitter": float("nan")}, {"active_w": -5.0}, {"slots": 0}])
def test_impossible_devices_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(npu.InputError, match=r"Expected: (a finite number from 0 on|slots of 1 or more)"):
        wrap(**bad)


def test_it_is_made_from_a_module_never_from_an_artifact(compiled: npu.Artifact) -> None:
    with pytest.raises(npu.CompileError, match="made from a module, not from an artifact"):
        SimulatedRuntime.open(compiled)
    assert "simulated" not in npu.runtimes.available()


def test_jitter_is_lognormal_around_the_latency() -> None:
    _, runtime = wrap(jitter=0.2, latency_s=1.0)
    factors = torch.tensor([runtime._factor() for _ in range(4000)])
    assert abs(float(factors.median()) - 1.0) < 0.02
    assert abs(float(factors.log().std()) - 0.2) < 0.02
