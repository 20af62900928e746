"""Who encodes which batch: fixed and repeatable for a share, never slower than torch alone for "auto"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import make_encoder
from hypothesis import given
from hypothesis import strategies as st
from test_prefetch import Policy, loader, make_trainer

import lightning_npu as npu
from lightning_npu.balance import Balancer
from lightning_npu.lookahead import Ahead, Depth, View
from lightning_npu.lookahead.tags import Fetched
from lightning_npu.runtimes import SimulatedRuntime


@given(share=st.floats(0, 1), seed=st.integers(0, 99), batches=st.integers(1, 200))
def test_a_share_is_kept_evenly_and_repeats(share: float, seed: int, batches: int) -> None:
    def pick() -> list[bool]:
        balancer = Balancer(share, seed=seed)
        return [balancer.picks(number) for number in range(batches)]

    chosen = pick()
    assert chosen == pick()
    for end in range(batches + 1):  # in every beginning, not only on the whole
        assert abs(sum(chosen[:end]) - share * end) < 1 + 1e-9


def test_seeds_pick_different_batches() -> None:
    picks = {tuple(Balancer(0.5, seed=s).picks(n) for n in range(4)) for s in range(20)}
    assert len(picks) == 2


@pytest.mark.parametrize("balance", [-0.1, 1.5, "fast", True, None])
def test_other_values_are_refused(balance: Any) -> None:
    with pytest.raises(npu.InputError, match=r"balance is wrong(.|\n)*'off', 'auto', or a share"):
        npu.Prefetch(balance=balance)


def train(folder: Path, balance: Any, latency_s: float = 0.0, **options: Any) -> tuple[Policy, npu.Prefetch]:
    pl.seed_everything(5, verbose=False)
    runtime = SimulatedRuntime(make_encoder(), latency_s=latency_s, replay=True)
    frozen = npu.NPUFrozenModule.from_runtime(runtime, reference=make_encoder())
    policy = Policy(frozen)
    prefetch = npu.Prefetch(balance=balance, **options)
    make_trainer(folder, prefetch).fit(policy, loader())
    frozen.close()
    return policy, prefetch


def test_the_reference_is_frozen_and_not_saved(tmp_path: Path) -> None:
    policy, _ = train(tmp_path, 0.5)
    names = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert names == ["head.weight", "head.bias"]
    assert set(policy.state_dict()) == {"head.weight", "head.bias", "encoder._extra_state"}
    policy.load_state_dict(policy.state_dict(), strict=True)


@pytest.mark.parametrize("balance", [0.0, 0.25, 1.0, "auto"])
def test_with_equal_heads_the_training_is_the_same(tmp_path: Path, balance: Any) -> None:
    plain, _ = train(tmp_path, "off")
    balanced, prefetch = train(tmp_path, balance)
    assert balanced.seen == plain.seen
    assert torch.allclose(balanced.head.weight, plain.head.weight, atol=1e-6)
    statistics = prefetch.statistics
    assert statistics.hits + statistics.balanced + sum(statistics.misses.values()) == 20
    if balance == 0.25:
        assert 4 <= statistics.hits <= 5
    if balance == 0.0:
        assert statistics.hits == 0


class Clock:
    """A device that takes ``batch_s`` per batch, one after another, on a clock that the test moves."""

    def __init__(self, batch_s: float, slots: int) -> None:
        self.batch_s, self.slots, self.now = batch_s, slots, 0.0
        self.free_at = [0.0] * slots
        self.reference, self.knows_inputs, self.failure = make_encoder(), True, None

    def attach(self, ahead: Any) -> None: ...

    def request(self, tensors: Any, label: str) -> Any:
        slot = min(range(self.slots), key=lambda index: self.free_at[index])
        self.free_at[slot] = max(self.free_at[slot], self.now) + self.batch_s
        return Due(self, self.free_at[slot])

    def remaining_s(self, pending: Any) -> float:
        return max(0.0, pending.ends - self.now)


class Due:
    def __init__(self, clock: Clock, ends: float) -> None:
        self.clock, self.ends = clock, ends

    def done(self) -> bool:
        return self.clock.now >= self.ends


def shares(batch_s: float, slots: int, depth: int = 8, steps: int = 300) -> tuple[float, int]:
    """The share that "auto" gives to the device at steps of one second, and how many batches were late."""
    clock = Clock(batch_s, slots)
    ahead = Ahead({"encoder": clock}, Depth(depth), None, Balancer("auto"))  # type: ignore[dict-item]
    view = View([], ahead)
    view.routes[id(clock)] = [(0,)]
    queue: list[Fetched] = []
    late = 0
    for step in range(steps):
        while len(queue) < 1 + depth:
            batch = Fetched(view, None, [torch.zeros(1)], step)
            ahead.fetched(batch)
            queue.append(batch)
        clock.now = float(step)
        ahead.plan(queue, 1.0)
        batch = queue.pop(0)
        ahead.deliver(batch)
        late += any(not request.pending.done() for request in batch.requests)
        ahead.host.clear()
    return ahead.balancer.share, late


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("batch_s", [0.1, 0.5, 1.2, 2.0, 4.0])
def test_auto_gives_a_device_what_it_can_finish_in_time(batch_s: float, slots: int) -> None:
    share, late = shares(batch_s, slots)
    possible = min(1.0, slots / batch_s)
    assert late <= 1  # the very first one
    assert 0.6 * possible <= share <= possible + 0.02
    if batch_s <= 0.5:
        assert share >= 0.99


def test_a_device_that_is_never_in_time_gets_nothing() -> None:
    share, late = shares(batch_s=50.0, slots=1)
    assert (share, late) == (0.0, 0)


def test_balance_without_a_reference_says_how_to_keep_one(tmp_path: Path) -> None:
    frozen = npu.NPUFrozenModule.from_runtime(SimulatedRuntime(make_encoder(), latency_s=0.0))
    with pytest.raises(npu.InputError, match=r"needs the FP32 head(.|\n)*'encoder'(.|\n)*keep_reference=True"):
        make_trainer(tmp_path, npu.Prefetch(balance="auto")).fit(Policy(frozen), loader())
    frozen.close()
