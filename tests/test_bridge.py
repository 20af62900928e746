"""The bridge: autograd goes back through a device that has no backward pass."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import compile_encoder, make_images
from hypothesis import given, settings
from hypothesis import strategies as st
from test_failover import not_a_number, raises
from torch import Tensor, nn

import lightning_npu as npu
from lightning_npu.forward_gradient import Blocks, Bridge, Colour, LowFrequency
from lightning_npu.forward_gradient.structured import Structure
from lightning_npu.runtimes import SimulatedRuntime
from lightning_npu.runtimes.base import Runtime
from lightning_npu.tensor_spec import TensorSpec

MADE: list[npu.NPUFrozenModule] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


def wrap(module: nn.Module, gradient: Any = "forward", **options: Any) -> npu.NPUFrozenModule:
    MADE.append(npu.NPUFrozenModule.from_runtime(SimulatedRuntime(module, latency_s=0.0), gradient=gradient, **options))
    return MADE[-1]


def linear(inputs: int, outputs: int, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def back(module: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """The gradient at ``x`` of the product of v with the module's one output."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(module(x), x, v)
    return gradient


@pytest.mark.parametrize(
    ("size", "gradient", "told"),
    [(32, "forward", True), (32, Bridge(m=2), False), (64, Bridge(m=2), True), (64, Bridge(structure=Colour()), False)],
)
def test_plain_directions_on_images_are_told_to_be_noise_once(size: int, gradient: Any, told: bool) -> None:
    module, x = wrap(nn.Flatten(), gradient), torch.rand(2, 3, size, size)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            back(module, x, torch.rand(2, 3 * size * size))
    noise = [str(warning.message) for warning in seen if "which is noise" in str(warning.message)]
    assert len(noise) == told
    assert all(f"{3 * size**2} values per sample" in text and "structure=Colour()" in text for text in noise)


class Recorded(Runtime):
    """A runtime of a fixed batch or none that keeps what it is fed: f(x, k, c) = (sin(x) + c, k), c without batch."""

    name, targets, fingerprint, device = "recorded", (), "recorded", "test device"

    def __init__(self, batch: int | None = None, width: int = 4) -> None:
        self.inputs = (
            TensorSpec("x", (batch, width)),
            TensorSpec("kind", (batch,), "int64"),
            TensorSpec("shared", (width,), batch_axis=None),
        )
        self.outputs = (TensorSpec("y", (batch, width)), TensorSpec("k", (batch,), "int64"))
        self.seen: list[list[Tensor]] = []

    @classmethod
    def available(cls) -> str:
        return "ok"

    @classmethod
    def open(cls, artifact: Any, *, device_index: int | None = None, **options: Any) -> Runtime:
        raise NotImplementedError

    def run(self, inputs: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> list[Tensor]:
        self.seen.append([tensor.clone() for tensor in inputs])
        x, kind, shared = inputs
        return [x.sin() + shared, kind.clone()]

    def close(self) -> None:
        pass


def recorded(batch: int | None = None, **options: Any) -> tuple[npu.NPUFrozenModule, Recorded]:
    runtime = Recorded(batch)
    MADE.append(npu.NPUFrozenModule.from_runtime(runtime, gradient=Bridge(eps=1e-2, **options)))
    return MADE[-1], runtime


# ---- the estimate


@pytest.mark.parametrize("m", [1, 4, 16])
@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_its_cosine_to_the_gradient_is_that_of_m_directions_in_d_dimensions(m: int, distribution: str) -> None:
    torch.manual_seed(1)
    d = 48
    toy = nn.Sequential(nn.Linear(d, 40), nn.Tanh(), nn.Linear(40, 12))
    x, v = torch.randn(256, d), torch.randn(256, 12)
    bridged = wrap(toy, Bridge(m=m, eps=1e-2, distribution=distribution))
    estimate, exact = back(bridged, x, v), back(toy, x, v)
    # over the batch: the mean of single samples' cosines is lower by sqrt(2 / pi) = 0.798 for one direction
    assert torch.cosine_similarity(estimate.flatten(), exact.flatten(), dim=0) > 0.8 * math.sqrt(m / d)


@given(
    inputs=st.integers(1, 6),
    outputs=st.integers(1, 5),
    seed=st.integers(-(2**63), 2**63 - 1),
    distribution=st.sampled_from(["rademacher", "gaussian"]),
)
@settings(max_examples=30, deadline=None)
def test_it_is_unbiased_on_linear_maps(inputs: int, outputs: int, seed: int, distribution: str) -> None:
    m = 4096
    module = linear(inputs, outputs)
    x, v = torch.randn(2, inputs), torch.randn(2, outputs)
    frozen = wrap(module, Bridge(m=m, eps=0.25, seed=seed, distribution=distribution))
    error = back(frozen, x, v) - back(module, x, v)
    size = back(module, x, v).norm(dim=1, keepdim=True)
    assert bool((error.abs() <= 6 * math.sqrt(2 / m) * size + 1e-4).all())  # 6 standard deviations
    frozen.close()


@pytest.mark.parametrize("eps", [1e-2, 0.5])
def test_with_one_value_per_sample_signs_leave_nothing_to_chance(eps: float) -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x * x, -3 * x], dim=1)

    x, v = torch.randn(5, 1), torch.randn(5, 2)
    torch.testing.assert_close(back(wrap(Square(), Bridge(eps=eps)), x, v), back(Square(), x, v), rtol=1e-3, atol=1e-4)


def test_samples_do_not_feel_each_other() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    x, v = torch.randn(4, 6), torch.randn(4, 8)
    x2, v2 = x.clone(), v.clone()
    x2[1], v2[3] = 5.0, -7.0
    first, second = back(wrap(module, Bridge(eps=0.1)), x, v), back(wrap(module, Bridge(eps=0.1)), x2, v2)
    assert torch.equal(first[[0, 2]], second[[0, 2]])
    assert not torch.equal(first[1], second[1])
    assert not torch.equal(first[3], second[3])
    alike = back(wrap(module, Bridge(eps=0.1)), x[:1].expand(4, 6), v[:1].expand(4, 8))
    assert not torch.allclose(alike[0], alike[1]), "each sample has directions of its own"


def test_each_backward_pass_draws_anew_and_the_seed_decides() -> None:
    module, x, v = linear(8, 3), torch.randn(2, 8), torch.randn(2, 3)
    first, twin, other = (wrap(module, Bridge(eps=0.1, seed=seed)) for seed in (5, 5, 6))
    a, b = back(first, x, v), back(first, x, v)
    assert not torch.equal(a, b)
    assert torch.equal(back(twin, x, v), a)
    assert torch.equal(back(twin, x, v), b)
    assert not torch.equal(back(other, x, v), a)


# ---- what is called


def test_only_floating_inputs_that_require_grad_are_moved() -> None:
    module, runtime = recorded(m=2)
    x, kind, shared = torch.randn(3, 4, requires_grad=True), torch.arange(3), torch.randn(4)
    y, k = module(x, kind, shared)
    assert y.requires_grad
    assert not k.requires_grad
    y.sum().backward()
    forward, probes = runtime.seen
    assert torch.equal(forward[0], x)
    assert torch.equal(probes[1], kind.repeat(4))
    assert torch.equal(probes[2], shared)
    moves = (probes[0] - x.detach().repeat(4, 1)).view(2, 2, 3, 4)  # sides, directions, samples, values
    torch.testing.assert_close(moves.abs(), torch.full_like(moves, 1e-2), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(moves[0], -moves[1], rtol=1e-4, atol=1e-6)


def test_an_input_that_all_samples_share_collects_from_all() -> None:
    module, runtime = recorded(m=400)
    x, shared = torch.randn(3, 4), torch.randn(4, requires_grad=True)
    v = torch.randn(3, 4)
    module(x, torch.arange(3), shared)[0].backward(v)
    assert shared.grad is not None
    assert torch.cosine_similarity(shared.grad, v.sum(0), dim=0) > 0.98
    assert len(runtime.seen) == 1 + 800, "what has no batch axis cannot be stacked"
    x = x.requires_grad_()
    module(x, torch.arange(3), shared)[0].backward(v)
    assert x.grad is not None
    assert torch.cosine_similarity(x.grad, v * x.detach().cos()).min() > 0.98
    assert module.stats["gradient"]["calls"] == 800 + (800 + 1), "each input has its own; x can be stacked"


class Sum(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small, self.large, self.size = nn.Linear(16, 3), nn.Linear(4, 3), size

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.small(x) + self.size * self.large(state)


def test_an_input_of_small_gradient_is_not_drowned_by_another() -> None:
    original = Sum(1e3)
    frozen = wrap(original, Bridge(m=256, eps=0.1))
    v = torch.randn(8, 3)
    gradients = {}
    for moved in (False, True):
        for name, module in (("exact", original), ("estimate", frozen)):
            torch.manual_seed(1)
            x, state = torch.randn(8, 16, requires_grad=True), torch.randn(8, 4, requires_grad=moved)
            module(x, state).backward(v)
            gradients[name] = x.grad
        cosine = torch.cosine_similarity(gradients["exact"], gradients["estimate"]).mean()
        assert cosine > 0.9, f"moved={moved}"


@pytest.mark.parametrize(
    ("batch", "max_batch", "expected"),
    [
        (None, None, [3, 30]),  # 2 sides x 5 directions x 3 samples in one call
        (None, 12, [3, 12, 12, 6]),
        (None, 100, [3, 30]),
        (None, 2, [3, *[3] * 10]),  # never less than the batch
        (4, None, [4, *[4] * 8]),  # the last parts are filled up
        (4, 12, [4, *[4] * 8]),
        (3, None, [3, *[3] * 10]),
    ],
)
def test_directions_are_stacked_into_batches(batch: int | None, max_batch: int | None, expected: list[int]) -> None:
    module, runtime = recorded(batch, m=5, max_batch=max_batch)
    x = torch.randn(3, 4, requires_grad=True)
    module(x, torch.arange(3), torch.zeros(4))[0].sum().backward()
    assert [inputs[0].shape[0] for inputs in runtime.seen] == expected
    assert module.stats["gradient"]["samples"] == 30
    whole, _ = recorded(None, m=5)
    y = x.detach().clone().requires_grad_()
    whole(y, torch.arange(3), torch.zeros(4))[0].sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


def test_nothing_is_asked_where_nothing_is_wanted() -> None:
    module, runtime = recorded()
    x, kind, shared = torch.randn(3, 4, requires_grad=True), torch.arange(3), torch.randn(4)
    with torch.no_grad():
        assert not module(x, kind, shared)[0].requires_grad
    with torch.inference_mode():
        module(x, kind, shared)
    assert not module(x.detach(), kind, shared)[0].requires_grad
    assert len(runtime.seen) == 3
    assert module.stats["gradient"]["backwards"] == 0
    empty = torch.zeros(0, 4, requires_grad=True)
    module(empty, torch.zeros(0, dtype=torch.int64), shared)[0].sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == (0, 4)


class Nested(nn.Module):
    """A dict in, a dict of a tuple, and an input handed through, out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 5)

    def forward(self, batch: dict[str, Tensor], *, state: Tensor) -> dict[str, Any]:
        return {"pair": (self.left(batch["x"]), self.right(state)), "state": state}


def test_dicts_tuples_several_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    original = Nested().eval()
    frozen = wrap(original, Bridge(m=10_000, eps={"batch_x": 0.1, "state": 0.2}))
    results = []
    for module in (original, frozen):
        torch.manual_seed(1)
        x, state = torch.randn(2, 3, requires_grad=True), torch.randn(2, 2, requires_grad=True)
        out = module({"x": x}, state=state)
        (out["pair"][0].square().sum() + 2 * out["pair"][1].sum() + out["state"].sum()).backward()
        results.append((x.grad, state.grad))
    for exact, estimate in zip(*results, strict=True):
        assert exact is not None
        assert estimate is not None
        assert torch.cosine_similarity(exact, estimate).min() > 0.97
        assert (estimate.norm() / exact.norm() - 1).abs() < 0.1
    eps = frozen.stats["gradient"]["eps"]
    assert {name: entry["value"] for name, entry in eps.items()} == {"batch_x": 0.1, "state": 0.2}


def test_an_output_that_the_loss_does_not_use_is_left_out() -> None:
    original = Nested().eval()
    frozen = wrap(original, Bridge(m=3000, eps=0.1))
    x, state = torch.randn(2, 3, requires_grad=True), torch.randn(2, 2)
    frozen({"x": x}, state=state)["pair"][0].sum().backward()
    assert x.grad is not None
    assert torch.cosine_similarity(x.grad, original.left.weight.sum(0).expand(2, 3)).min() > 0.97


def test_a_tail_is_differentiated_by_autograd(compiled_fp32: npu.Artifact) -> None:
    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 1)

        def forward(self, tokens: Tensor, mean: Tensor) -> Tensor:
            return self.mix(mean)

    frozen = npu.NPUFrozenModule(compiled_fp32, tail=Tail(), gradient=Bridge(m=8))
    MADE.append(frozen)
    x = make_images(3).requires_grad_()
    frozen(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert all(parameter.grad is None for parameter in frozen.parameters())


# ---- the user's own loop


def adapt(frozen: nn.Module, steps: int, optimizer: Callable[..., Any] = torch.optim.Adam) -> nn.Module:
    torch.manual_seed(3)
    adapter = nn.Linear(4, 4)
    chosen = optimizer(adapter.parameters(), lr=0.05)
    x = torch.randn(32, 4)
    for _ in range(steps):
        chosen.zero_grad()
        frozen(adapter(x)).square().mean().backward()
        chosen.step()
    return adapter


def test_what_lies_before_the_device_is_trained() -> None:
    frozen = wrap(linear(4, 3), Bridge(m=2, eps=0.1))
    x = torch.randn(256, 4)
    before = frozen(adapt(frozen, 0)(x)).square().mean()
    after = frozen(adapt(frozen, 150)(x)).square().mean()
    assert after < 0.1 * before


def test_accumulation_adds_and_clipping_clips() -> None:
    frozen = wrap(linear(4, 3), Bridge(eps=0.1))
    adapter, x = nn.Linear(4, 4), torch.randn(8, 4)
    parts = []
    for half in (x[:4], x[4:]):
        adapter.zero_grad()
        frozen(adapter(half)).sum().backward()
        parts.append(adapter.weight.grad.clone())
    twin = wrap(linear(4, 3), Bridge(eps=0.1))
    adapter.zero_grad()
    for half in (x[:4], x[4:]):
        twin(adapter(half)).sum().backward()
    torch.testing.assert_close(adapter.weight.grad, parts[0] + parts[1])
    norm = nn.utils.clip_grad_norm_(adapter.parameters(), 0.1)
    assert norm > 0.1
    assert math.isclose(float(nn.utils.get_total_norm([p.grad for p in adapter.parameters()])), 0.1, rel_tol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision(dtype: torch.dtype) -> None:
    module, x = linear(4, 3), torch.randn(64, 4)
    results = []
    for net in (wrap(module, Bridge(m=512, eps=0.1)), module):
        torch.manual_seed(1)
        adapter = nn.Linear(4, 4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        optimizer = torch.optim.SGD(adapter.parameters(), lr=1.0)
        with torch.autocast("cpu", dtype):
            y = net(adapter(x))
            assert y.dtype == dtype
            loss = y.float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        results.append(adapter.weight.grad)
    assert torch.cosine_similarity(results[0].flatten(), results[1].flatten(), dim=0) > 0.98


def test_a_model_in_bfloat16_or_float64() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        frozen = wrap(linear(4, 3), Bridge(eps=0.1)).to(dtype)
        x = torch.randn(2, 4, dtype=dtype, requires_grad=True)
        frozen(x).sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype


def test_torch_compile_sees_a_differentiable_operator() -> None:
    module, x, v = linear(4, 3), torch.randn(2, 4), torch.randn(2, 3)
    eager = back(wrap(module, Bridge(eps=0.1)), x, v)
    for backend in ("eager", "aot_eager"):
        frozen = wrap(module, Bridge(eps=0.1))
        frozen(x)  # a runtime without an artifact learns its inputs from the first call
        whole = torch.compile(frozen, backend=backend, fullgraph=True)
        torch.testing.assert_close(back(whole, x, v), eager, rtol=1e-4, atol=1e-5)
        assert frozen.stats["gradient"]["backwards"] == 1


def test_torch_compile_keeps_the_promises_of_an_eager_call() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    for bridge, words in (
        (Bridge(eps={"image": 0.1}), r"Bridge names inputs that the module does not have"),
        (Bridge(structure=Colour()), r"Colour\(\) is for images, and input 'input' is none"),
    ):
        frozen = wrap(linear(4, 3), bridge)
        frozen(x.detach())
        with pytest.raises(Exception, match=words):  # told while torch traces, which wraps it
            torch.compile(frozen, backend="eager", fullgraph=True)(x)
    frozen = wrap(linear(4, 3), Bridge(eps=0.1))
    frozen(x.detach())
    y = torch.compile(frozen, backend="eager", fullgraph=True)(x)
    with pytest.raises(npu.InputError, match=r"second derivatives cannot be had(.|\n)*create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_activation_checkpointing_draws_once() -> None:
    from torch.utils.checkpoint import checkpoint

    module, x = linear(4, 3), torch.randn(2, 4, requires_grad=True)
    frozen = wrap(module, Bridge(eps=0.1))
    checkpoint(frozen, x, use_reentrant=False).sum().backward()
    assert frozen.stats["gradient"]["backwards"] == 1
    torch.testing.assert_close(x.grad, back(wrap(module, Bridge(eps=0.1)), x, torch.ones(2, 3)))


def test_lightning_trains_with_clipping_accumulation_and_look_ahead(tmp_path: Path) -> None:
    import lightning as L

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.adapter = nn.Linear(4, 4)
            self.npu = wrap(linear(4, 3), Bridge(m=2, eps=0.1))

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self.npu(self.adapter(batch[0])).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log("seen", self.npu(batch[0]).mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.05)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    prefetch = npu.Prefetch(2)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=8, gradient_clip_val=1.0, accumulate_grad_batches=2, callbacks=[prefetch],
        default_root_dir=tmp_path, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model = Model()
    before = model.npu(model.adapter(data.tensors[0])).square().mean()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*encoded on the spot.*")  # no miss: it cannot be asked for ahead
        trainer.fit(model, loader, loader)
    assert model.npu(model.adapter(data.tensors[0])).square().mean() < 0.5 * before
    assert model.npu.stats["gradient"]["backwards"] == 64
    assert prefetch.statistics.hits >= 7 * 8, "validation asks ahead as ever"
    assert prefetch.statistics.misses["not_a_batch_leaf"] == 0


# ---- ranks


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    module = linear(4, 3)
    frozen = npu.NPUFrozenModule.from_runtime(SimulatedRuntime(module, latency_s=0.0), gradient=Bridge(eps=0.1, seed=9))
    noise = back(frozen, torch.ones(2, 4), torch.ones(2, 3))
    adapter = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.Adam(adapter.parameters(), lr=0.05)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = frozen(adapter(x)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    torch.save(
        {"noise": noise, "parameters": list(adapter.module.parameters()), "losses": losses}, f"{folder}/{rank}.pt"
    )
    frozen.close()
    dist.barrier()  # none leaves while another still needs it
    dist.destroy_process_group()


def test_ranks_see_other_directions_and_end_with_the_same_parameters(tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert not torch.equal(first["noise"], second["noise"])
    assert all(map(torch.equal, first["parameters"], second["parameters"]))
    assert first["losses"][-1] < 0.5 * first["losses"][0]


# ---- checkpoints and copies


def test_a_resumed_training_is_bit_exact(compiled: npu.Artifact, tmp_path: Path) -> None:
    def build() -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(4)
        frozen = npu.NPUFrozenModule(compiled, gradient=Bridge(m=2))
        MADE.append(frozen)
        model = nn.ModuleDict({"adapter": nn.Conv2d(3, 3, 1), "npu": frozen, "head": nn.Linear(8, 1)})
        return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def train(model: nn.ModuleDict, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model["head"](model["npu"](model["adapter"](make_images(4, seed=step)))[1]).square().mean().backward()
            optimizer.step()

    whole, optimizer = build()
    train(whole, optimizer, range(6))
    model, optimizer = build()
    train(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    resumed, optimizer = build()
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    resumed.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(resumed, optimizer, range(3, 6))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert resumed["npu"].stats["gradient"]["backwards"] == 6


def test_a_step_that_the_first_batch_decided_is_kept(compiled_fp32: npu.Artifact) -> None:
    def module() -> npu.NPUFrozenModule:
        MADE.append(npu.NPUFrozenModule(compiled_fp32, gradient="forward"))
        return MADE[-1]

    first, second = module(), module()
    back(nn.Sequential(first, Second()), make_images(2), torch.ones(2, 8))
    second.load_state_dict(first.state_dict())
    back(nn.Sequential(second, Second()), 5 * make_images(2), torch.ones(2, 8))
    assert second.stats["gradient"]["eps"] == first.stats["gradient"]["eps"]
    without = npu.NPUFrozenModule(compiled_fp32)
    MADE.append(without)
    without.load_state_dict(first.state_dict())
    first.load_state_dict(without.state_dict())
    assert first.stats["gradient"]["backwards"] == 1, "a checkpoint without the option leaves the counter alone"


class Second(nn.Module):
    def forward(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
        return outputs[1]


def test_copies_go_on_by_themselves(compiled: npu.Artifact) -> None:
    frozen = npu.NPUFrozenModule(compiled, gradient=Bridge(seed=3))
    MADE.append(frozen)
    net = nn.Sequential(frozen, Second())
    x, v = make_images(2), torch.ones(2, 8)
    back(net, x, v)
    twins = [copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))]
    MADE.extend(twins)
    expected = back(net, x, v)
    for twin in twins:
        assert torch.equal(back(nn.Sequential(twin, Second()), x, v), expected)
        assert twin.stats["gradient"]["backwards"] == 2


# ---- the step


def test_the_step_is_four_of_the_input_grid(
    tmp_path: Path, compiled: npu.Artifact, compiled_fp32: npu.Artifact
) -> None:
    import onnx

    graph = onnx.load(compiled.file("model")).graph
    constants = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    first = {"images", graph.node[0].output[0]}  # the images, or these in blocks
    (scale,) = (
        float(constants[n.input[1]]) for n in graph.node if n.op_type == "QuantizeLinear" and n.input[0] in first
    )
    wide = compile_encoder(tmp_path / "wide.npu", precision="a16w8")
    seen = {}
    for name, artifact in (("a8w8", compiled), ("fp32", compiled_fp32), ("a16w8", wide)):
        frozen = npu.NPUFrozenModule(artifact, gradient="forward")
        MADE.append(frozen)
        back(nn.Sequential(frozen, Second()), make_images(2), torch.ones(2, 8))
        seen[name] = frozen.stats["gradient"]["eps"]["images"]
    assert math.isclose(seen["a8w8"]["value"], 4 * scale, rel_tol=1e-6)
    assert seen["a8w8"]["source"].startswith("4 steps of the input's INT8 scale")
    spread = float(make_images(2).max() - make_images(2).min())
    assert math.isclose(seen["fp32"]["value"], 4 / 255 * spread, rel_tol=1e-6)
    assert "range of the first batch" in seen["fp32"]["source"]
    assert math.isclose(seen["a16w8"]["value"], seen["a8w8"]["value"], rel_tol=0.2)
    assert "16-bit range" in seen["a16w8"]["source"]


def test_int8_gradients_point_where_fp32_gradients_do(compiled: npu.Artifact, encoder: nn.Module) -> None:
    x = make_images(8, seed=11)
    v = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    exact = back(nn.Sequential(encoder, Second()), x, v)
    frozen = npu.NPUFrozenModule(compiled, gradient=Bridge(m=768))
    MADE.append(frozen)
    estimate = back(nn.Sequential(frozen, Second()), x, v)
    cosine = torch.cosine_similarity(exact.flatten(1), estimate.flatten(1)).mean()
    assert cosine > 0.4  # of 768 values each, rounding noise included; sqrt(1/2) without it


# ---- structured directions


@pytest.mark.parametrize("structure", [Blocks(4), LowFrequency(3), Colour()])
def test_structured_directions_give_the_gradient_projected(structure: Structure) -> None:
    torch.manual_seed(0)
    images, m = torch.rand(1, 3, 8, 8), 20_000
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    frozen = wrap(net, Bridge(m=m, eps=0.1, structure=structure, max_batch=4096))
    v = torch.randn(1, 2)
    exact, estimate = back(net, images, v), back(frozen, images, v)
    draws = torch.stack([structure.direction(images, torch.randn).flatten() for _ in range(60)], dim=1)
    assert math.isclose(float(draws.square().mean()), 1.0, rel_tol=0.2)
    subspace = torch.linalg.svd(draws, full_matrices=False)
    rank = int((subspace.S > 1e-3).sum())
    assert math.isclose(structure.share((1, 3, 8, 8)), rank / 192, rel_tol=1e-6)
    basis = subspace.U[:, :rank]
    projected = basis @ (basis.T @ exact.flatten())
    assert (estimate.flatten() - projected).norm() < 0.1 * projected.norm()


def test_colour_directions_hold_the_whole_gradient_of_a_colour_correction() -> None:
    torch.manual_seed(0)
    images = torch.rand(4, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))
    v = torch.randn(4, 3)
    gradients = {}
    for name, through in (
        ("exact", net),
        ("colour", wrap(net, Bridge(m=256, eps=0.02, structure=Colour()))),
        ("pixels", wrap(net, Bridge(m=256, eps=0.02))),
    ):
        torch.manual_seed(1)
        correction = nn.Conv2d(3, 3, 1)
        through(correction(images)).backward(v)
        gradients[name] = torch.cat([parameter.grad.flatten() for parameter in correction.parameters()])
    colour, pixels = (torch.cosine_similarity(gradients["exact"], gradients[n], dim=0) for n in ("colour", "pixels"))
    assert colour > 0.97
    assert colour > pixels


# ---- figures


def test_the_agreement_of_halves_tells_the_cosine() -> None:
    torch.manual_seed(0)
    toy = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 6))
    frozen = wrap(toy, Bridge(m=8, eps=1e-2))
    actual = []
    for _ in range(20):
        x, v = torch.randn(64, 24), torch.randn(64, 6)
        exact, estimate = back(toy, x, v), back(frozen, x, v)
        actual.append(torch.cosine_similarity(exact.flatten(), estimate.flatten(), dim=0))
    stats = frozen.stats["gradient"]
    assert abs(stats["cosine"] - float(torch.stack(actual).mean())) < 0.05
    assert 0 < stats["agreement"] < stats["cosine"]
    assert stats["backwards"] == stats["calls"] == 20
    assert stats["samples"] == 20 * 2 * 8 * 64
    assert frozen.stats["calls"] == 40
    single = wrap(toy, Bridge(m=1))
    back(single, x, v)
    assert single.stats["gradient"]["agreement"] is None
    assert single.stats["gradient"]["cosine"] is None


# ---- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"m": 0}, r"Bridge\(m=...\) is wrong(.|\n)*an integer from 1 on(.|\n)*Got: 0"),
        ({"m": 1.5}, r"Bridge\(m=...\)"),
        ({"eps": 0.0}, r"Bridge\(eps=...\)(.|\n)*'auto', a positive number"),
        ({"eps": float("nan")}, r"Bridge\(eps=...\)"),
        ({"eps": {"x": "big"}}, r"Bridge\(eps=...\)(.|\n)*'big'"),
        ({"distribution": "normal"}, r"distribution is wrong(.|\n)*'rademacher', 'gaussian'"),
        ({"max_batch": 0}, r"Bridge\(max_batch=...\)"),
        ({"seed": "a"}, r"Bridge\(seed=...\)"),
        ({"structure": "colour"}, r"Bridge\(structure=...\)(.|\n)*Colour\(\)"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(npu.InputError, match=message):
        Bridge(**options)


def test_wrong_gradients_and_names_are_refused() -> None:
    with pytest.raises(npu.InputError, match=r"gradient is wrong(.|\n)*'forward'(.|\n)*Got: 'backward'"):
        wrap(linear(2, 2), "backward")
    x = torch.randn(1, 2, requires_grad=True)
    with pytest.raises(
        npu.InputError, match=r"inputs that the module does not have(.|\n)*\['input'\](.|\n)*\['image'\]"
    ):
        wrap(linear(2, 2), Bridge(eps={"image": 0.1}))(x)
    with pytest.raises(npu.InputError, match=r"Colour\(\) is for images, and input 'input' is none"):
        wrap(linear(2, 2), Bridge(structure=Colour()))(x)
    image = torch.randn(1, 3, 6, 6, requires_grad=True)
    with pytest.raises(npu.InputError, match=r"Blocks of 4 pixels do not divide(.|\n)*take Blocks\(6\)"):
        wrap(nn.Flatten(), Bridge(structure=Blocks(4)))(image)
    with pytest.raises(npu.InputError, match="fewer pixels than"):
        wrap(nn.Flatten(), Bridge(structure=LowFrequency(7)))(image)


def test_without_the_option_the_error_names_it() -> None:
    with pytest.raises(npu.InputError, match=r"has no backward pass(.|\n)*gradient='forward'"):
        wrap(linear(2, 2), None)(torch.randn(1, 2, requires_grad=True))


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(1, 2, requires_grad=True)
    frozen = wrap(linear(2, 2))
    with pytest.raises(npu.InputError, match=r"second derivatives cannot be had(.|\n)*create_graph=True"):
        torch.autograd.grad(frozen(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("gradient", [None, "forward"])
def test_forward_mode_differentiation_is_refused(gradient: str | None) -> None:
    frozen, before, x = wrap(linear(2, 2), gradient), linear(2, 2), torch.randn(1, 2)
    words = r"'input' carries a tangent(.|\n)*torch.func.jvp"
    with pytest.raises(npu.InputError, match=words):
        torch.func.jvp(lambda x: frozen(before(x)), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(npu.InputError, match=words):
            frozen(dual)
        assert frozen(x).shape == (1, 2)


def test_a_future_has_no_gradient_and_says_so() -> None:
    frozen, x = wrap(linear(2, 2)), torch.randn(1, 2, requires_grad=True)
    with pytest.raises(npu.InputError, match=r"submit\(\) gives features without a gradient(.|\n)*call the module"):
        frozen.submit(x)
    assert torch.equal(frozen.submit(x.detach()).result(), frozen(x))


def test_an_input_edited_after_the_call_is_noticed_by_autograd() -> None:
    x = torch.randn(1, 2, requires_grad=True) * 1.0
    y = wrap(linear(2, 2))(x)
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- a device that fails


def breaking(at: int, fault: Callable[[Any], Any] = raises, **options: Any) -> tuple[npu.NPUFrozenModule, nn.Module]:
    """A device whose calls fail from number ``at`` on, counted from 0: the first is the forward pass."""
    module = linear(4, 3)
    runtime = SimulatedRuntime(module, latency_s=0.0)
    original, calls = runtime._compute, iter(range(10_000))
    runtime._compute = lambda inputs: (  # type: ignore[method-assign]
        fault(original(inputs)) if next(calls) >= at else original(inputs)
    )
    bridge = Bridge(m=4, eps=0.1, max_batch=4)
    MADE.append(npu.NPUFrozenModule.from_runtime(runtime, gradient=bridge, **options))
    return MADE[-1], module


@pytest.mark.parametrize("fault", [raises, not_a_number])
@pytest.mark.parametrize("at", [1, 3])
def test_a_failure_in_the_backward_pass_surfaces(at: int, fault: Any) -> None:
    frozen, _ = breaking(at, fault)
    y = frozen(torch.randn(2, 4, requires_grad=True))
    with pytest.raises(npu.DeviceError, match="backward pass 0, probe"):
        y.sum().backward()


@pytest.mark.parametrize("at", [0, 1, 3])
def test_the_reference_takes_over_for_all_directions_of_the_pass(at: int) -> None:
    module = linear(4, 3)
    frozen, _ = breaking(at, reference=module, on_failure="reference")
    healthy = wrap(module, Bridge(m=4, eps=0.1))
    x, v = torch.randn(2, 4), torch.randn(2, 3)
    torch.testing.assert_close(back(frozen, x, v), back(healthy, x, v), rtol=1e-4, atol=1e-4)
    assert frozen.failure is not None
    assert frozen.stats["reference_calls"] == (4 if at else 5)  # 8 sides of 2 samples in calls of 4, and the forward
    torch.testing.assert_close(back(frozen, x, v), back(healthy, x, v), rtol=1e-4, atol=1e-4)


# ---- the digits of benchmarks/bridge_digits.py, shorter


def test_an_adapter_before_an_int8_encoder_learns_rotated_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    import bridge_digits as digits

    data = digits.load(0)
    encoder, head = digits.pretrain(data, 0, steps=400)
    artifact = digits.compile_encoder(encoder, data, tmp_path)
    frozen = npu.NPUFrozenModule(artifact, gradient=Bridge(m=1))
    MADE.append(frozen)
    model = nn.Sequential(digits.Adapter(), frozen, head)
    before = digits.accuracy(model, data.test)
    digits.descend(model, data.adapt, 300, 1e-2, 0)
    assert digits.accuracy(model, data.test) > max(84.0, before + 30)
    assert frozen.stats["gradient"]["samples"] == 300 * 2 * digits.BATCH
