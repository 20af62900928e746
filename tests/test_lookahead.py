"""The look-ahead without Lightning: tags, depth, plain and Fabric loops, transfer."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import make_encoder, make_images
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_npu as npu
from lightning_npu.lookahead import Depth, leaves, replace_leaves
from lightning_npu.runtimes import SimulatedRuntime
from lightning_npu.transfer import to_device

Pair = namedtuple("Pair", ["image", "state"])


@dataclass
class Sample:
    image: Tensor
    note: str


batches = st.recursive(
    st.one_of(st.builds(lambda: torch.zeros(1)), st.integers(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.builds(lambda: Sample(torch.zeros(1), "n")),
    ),
    max_leaves=8,
)


@given(batches)
def test_leaves_are_found_and_replaced_in_one_order(batch: Any) -> None:
    found = leaves(batch)
    new = [torch.ones(1) for _ in found]
    replaced = replace_leaves(batch, dict(enumerate(new)))
    assert [id(tensor) for tensor in leaves(replaced)] == [id(tensor) for tensor in new]
    assert [id(tensor) for tensor in leaves(batch)] == [id(tensor) for tensor in found]  # the original is untouched
    assert type(replaced) is type(batch) or not found


def test_leaves_follow_lightnings_own_order() -> None:
    from lightning_utilities.core.apply_func import apply_to_collection

    batch = {"b": Pair(torch.zeros(1), [torch.ones(1)]), "a": (torch.ones(2), Sample(torch.zeros(3), "x"))}
    theirs: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: theirs.append(id(tensor)))
    assert [id(tensor) for tensor in leaves(batch)] == theirs


# ---- depth


def test_depth_grows_when_both_sides_wait_and_never_beyond_its_bounds() -> None:
    depth = Depth("auto", most=5)
    for step in range(400):
        depth.step(wait_s=step * 0.001, idle_s=step * 0.001, now=step * 0.02)
    assert depth.value == 5
    for wait_s, idle_s in ((0.001, 0.0), (0.0, 0.001)):  # the slower side alone: depth would not help
        still = Depth("auto")
        for step in range(400):
            still.step(wait_s=step * wait_s, idle_s=step * idle_s, now=step * 0.02)
        assert still.value == 2


@given(batch_bytes=st.integers(1, 1 << 34), steps=st.integers(0, 100))
def test_auto_stays_within_its_memory(batch_bytes: int, steps: int) -> None:
    depth = Depth("auto", memory_bytes=1 << 30)
    for step in range(steps):
        depth.bound(batch_bytes)
        depth.step(step, step, step)
        assert depth.value == 1 or depth.value * batch_bytes <= 1 << 30


def test_a_number_stays() -> None:
    depth = Depth(3)
    depth.bound(1 << 40)
    for step in range(100):
        depth.step(step, step, step)
    assert depth.value == 3


# ---- loops of one's own


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = npu.NPUFrozenModule.from_runtime(SimulatedRuntime(make_encoder(), latency_s=0.0))
        self.head = nn.Linear(8, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(images)[1])


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(make_images(24), torch.arange(24)), batch_size=4)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_plain_loop(device: Any) -> None:
    model, plain = Model(), make_encoder()
    with npu.Lookahead(loader(), model, device=device, depth=2) as ahead:
        for _ in range(2):
            for images, numbers in ahead:
                assert torch.equal(model.encoder(images)[1], plain(images)[1])
                assert numbers[0] % 4 == 0
        assert len(ahead) == 6
        assert ahead.statistics.hits == 11
        assert ahead.statistics.misses == {"learning": 1}
        with pytest.raises(npu.InputError, match="Two look-aheads"):
            npu.Lookahead(loader(), model)
    assert model.encoder._ahead is None
    model.encoder.close()


def test_a_fabric_loop() -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(Model())
    batches = fabric.setup_dataloaders(loader())
    with npu.Lookahead(batches, model, depth=2) as ahead:
        total = sum(float(model(images).sum()) for images, _ in ahead)
    assert ahead.statistics.hits == 5
    assert abs(total) > 0
    model.module.encoder.close()


def test_a_model_without_frozen_modules_is_refused() -> None:
    with pytest.raises(npu.InputError, match="has no NPUFrozenModule to look ahead for"):
        npu.Lookahead(loader(), nn.Linear(2, 2))


def test_batches_are_not_kept_alive() -> None:
    model = Model()
    seen: list[weakref.ref[Tensor]] = []
    with npu.Lookahead(loader(), model, depth=2) as ahead:
        for images, _ in ahead:
            model(images)
            seen.append(weakref.ref(images))
            del images, _
            gc.collect()
            assert sum(reference() is not None for reference in seen) <= 2
    model.encoder.close()


def test_transfer_to_a_device_without_streams_is_plain() -> None:
    tensors = [torch.ones(2), torch.zeros(3)]
    assert all(torch.equal(a, b) for a, b in zip(to_device(tensors, torch.device("cpu")), tensors, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_features_arrive_on_a_gpu_whole() -> None:
    model = Model().cuda()
    plain = make_encoder()
    with npu.Lookahead(loader(), model, device="cuda", depth=2) as ahead:
        for images, _ in ahead:
            features = model.encoder(images)[1]
            assert features.device.type == "cuda"
            assert torch.allclose(features.cpu(), plain(images.cpu())[1], atol=1e-6)
    assert ahead.statistics.hits == 5
    model.encoder.close()
