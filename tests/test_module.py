"""The frozen module stands in for the original: calls, dtypes, devices, copies, torch.compile."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Encoder, Layer, compile_encoder, make_encoder, make_images
from test_worker import Doubler
from torch import Tensor, nn

import lightning_npu as npu
from lightning_npu.compile.fidelity import compare


def close(reference: Any, candidate: Any, least_db: float = 60.0) -> bool:
    return all(
        a.shape == b.shape and compare(a.float(), b.float()).sqnr_db >= least_db
        for a, b in zip(reference, candidate, strict=True)
    )


@pytest.fixture
def frozen(compiled_fp32: npu.Artifact) -> Iterator[npu.NPUFrozenModule]:
    module = npu.NPUFrozenModule(compiled_fp32.path)
    yield module
    module.close()


# ---- calls


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_it_computes_what_the_original_computes(frozen: npu.NPUFrozenModule, encoder: Encoder, batch: int) -> None:
    x = make_images(batch, seed=9)
    result = frozen(x)
    assert isinstance(result, tuple)
    assert close(encoder(x), result, least_db=100)


def test_int8_is_near_the_original(compiled: npu.Artifact, encoder: Encoder, images: Tensor) -> None:
    assert close(encoder(images), npu.NPUFrozenModule(compiled)(images), least_db=15)


def test_keywords_and_defaults_work_as_before(frozen: npu.NPUFrozenModule, images: Tensor) -> None:
    expected = frozen(images)
    for result in (frozen(images=images), frozen(images, 1.0), frozen(images, scale=1.0)):
        assert all(map(torch.equal, expected, result))
    with pytest.raises(npu.InputError, match=r"Argument 'scale'(.|\n)*Expected: 1.0, as when it was compiled"):
        frozen(images, 2.0)


def test_results_never_require_grad_and_are_ours_to_edit(frozen: npu.NPUFrozenModule, images: Tensor) -> None:
    first = frozen(images)[0]
    assert not first.requires_grad
    expected = first.clone()
    first.add_(1.0)
    assert torch.equal(frozen(images)[0], expected)


def test_submit_gives_a_future(frozen: npu.NPUFrozenModule, images: Tensor) -> None:
    batches = [images + i for i in range(5)]
    futures = [frozen.submit(x) for x in batches]
    for x, future in zip(batches, futures, strict=True):
        assert all(map(torch.equal, future.result(), frozen(x)))
        assert future.done()


class Everything(nn.Module):
    """Dicts, tuples, a token input, a tensor handed through, one that is returned twice, and plain data."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.project = nn.Linear(5, 4)

    def forward(self, batch: dict[str, Tensor], *, state: Tensor | None = None) -> dict[str, Any]:
        features = self.conv(batch["image"]).relu()
        tokens = features.flatten(2).transpose(1, 2)
        if state is not None:
            tokens = torch.cat([self.project(state)[:, None], tokens], dim=1)
        return {"tokens": tokens, "pair": (features, [tokens]), "state": state, "kind": "everything"}


def test_any_structure_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Everything().eval()
    calls = [((), {"batch": {"image": make_images(4, seed=i)}, "state": torch.randn(4, 5)}) for i in range(4)]
    npu.compile_module(
        module,
        (),
        example_kwargs=calls[0][1],
        calibration=[kwargs for _, kwargs in calls],
        output=tmp_path / "e.npu",
        precision="fp32",
    )
    frozen = npu.NPUFrozenModule(tmp_path / "e.npu")
    batch, state = {"image": make_images(2, seed=8)}, torch.randn(2, 5)
    result, expected = frozen(batch, state=state), module(batch, state=state)
    assert list(result) == list(expected)
    assert close([expected["tokens"], expected["pair"][0]], [result["tokens"], result["pair"][0]], 100)
    assert result["pair"][1][0] is result["tokens"]
    assert result["state"] is state
    assert result["kind"] == "everything"
    with pytest.raises(npu.InputError, match="Argument 'state' is missing"):
        frozen(batch)
    with pytest.raises(npu.InputError, match=r"Argument 'batch' is not(.|\n)*a dict with \['image'\]"):
        frozen({"img": batch["image"]}, state=state)
    with pytest.raises(npu.InputError, match=r"disagree about the number of samples"):
        frozen(batch, state=torch.randn(3, 5))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.rand(2, 3, 16, 17), r"wrong shape(.|\n)*\[batch, 3, 16, 16\] \(NCHW\)(.|\n)*\[2, 3, 16, 17\]"),
        (torch.rand(3, 16, 16), r"wrong shape(.|\n)*\[3, 16, 16\]"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), r"wrong dtype(.|\n)*Expected: float32\n  Got: uint8"),
        ("image.png", r"Expected: a tensor\n  Got: 'image.png'"),
    ],
)
def test_inputs_that_do_not_fit_are_named(frozen: npu.NPUFrozenModule, bad: Any, message: str) -> None:
    with pytest.raises(npu.InputError, match=message):
        frozen(bad)


def test_a_wrong_count_of_inputs_is_named(frozen: npu.NPUFrozenModule, images: Tensor) -> None:
    with pytest.raises(npu.InputError, match="Argument 'images' is missing"):
        frozen()
    with pytest.raises(npu.InputError, match="too many arguments"):
        frozen(images, 1.0, images)


def test_a_fixed_batch_takes_any(tmp_path: Path, encoder: Encoder) -> None:
    artifact = compile_encoder(tmp_path / "b4.npu", precision="fp32", batch_size=4)
    assert artifact.inputs[0].shape == (4, 3, 16, 16)
    frozen = npu.NPUFrozenModule(artifact)
    for batch in (1, 4, 6):
        x = make_images(batch, seed=3)
        assert close(encoder(x), frozen(x), 100)


# ---- gradients and modes


def test_an_input_that_requires_grad_is_refused_unless_no_gradient_is_wanted(
    frozen: npu.NPUFrozenModule, images: Tensor
) -> None:
    x = images.clone().requires_grad_()
    with pytest.raises(npu.InputError, match=r"'images' requires grad(.|\n)*detach\(\)"):
        frozen(x)
    with torch.no_grad():
        frozen(x)
    with torch.inference_mode():
        frozen(images)


def test_it_stays_frozen(frozen: npu.NPUFrozenModule) -> None:
    parent = nn.Sequential(frozen, nn.Linear(8, 1)).train()
    assert parent.training
    assert not frozen.training
    assert not list(frozen.parameters())
    assert not list(frozen.buffers())
    assert frozen.requires_grad_(False) is frozen
    parent.requires_grad_(True)
    with pytest.raises(npu.InputError, match="cannot be trained"):
        frozen.requires_grad_(True)


def test_who_asks_for_the_first_parameter_gets_an_answer(frozen: npu.NPUFrozenModule) -> None:
    """A StopIteration would be taken for the end of the data by a training loop."""
    assert sum(parameter.numel() for parameter in frozen.parameters()) == 0
    assert list(nn.Sequential(frozen).parameters()) == []
    with pytest.raises(npu.InputError, match=r"no first one(.|\n)*encoder.device"):
        next(frozen.parameters())


def test_a_tail_that_a_parent_unfreezes_is_frozen_again(compiled_fp32: npu.Artifact, images: Tensor) -> None:
    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def forward(self, tokens: Tensor, mean: Tensor) -> Tensor:
            return self.mix(mean)

    frozen = npu.NPUFrozenModule(compiled_fp32, tail=Tail())
    assert len(list(frozen.parameters())) == 2
    nn.Sequential(frozen).requires_grad_(True)
    with pytest.warns(UserWarning, match="is frozen again"):
        result = frozen(images)
    assert not result.requires_grad
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    frozen.close()


def test_an_empty_batch_gives_empty_features(frozen: npu.NPUFrozenModule) -> None:
    assert [list(tensor.shape) for tensor in frozen(torch.rand(0, 3, 16, 16))] == [[0, 16, 8], [0, 8]]


# ---- dtype and device


def test_dtype_follows_to_half_and_autocast(frozen: npu.NPUFrozenModule, images: Tensor) -> None:
    assert frozen.dtype == torch.float32
    expected = frozen(images)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert frozen(images)[0].dtype == torch.bfloat16
    frozen.to(torch.bfloat16)
    assert frozen.dtype == torch.bfloat16
    result = frozen(images.bfloat16())[0]
    assert result.dtype == torch.bfloat16
    assert compare(expected, result.float()).sqnr_db > 30
    assert frozen.float()(images)[0].dtype == torch.float32
    assert frozen.double()(images)[0].dtype == torch.float64


def test_device_follows_to(frozen: npu.NPUFrozenModule) -> None:
    assert frozen.device == torch.device("cpu")
    frozen.to("meta")
    assert frozen.device == torch.device("meta")
    frozen.to_empty(device="cpu")
    assert frozen.device == torch.device("cpu")


def test_a_meta_context_and_another_default_dtype_do_no_harm(compiled_fp32: npu.Artifact, images: Tensor) -> None:
    with torch.device("meta"):
        frozen = npu.NPUFrozenModule(compiled_fp32.path)
    assert frozen.device == torch.device("cpu")
    expected = frozen(images)[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(frozen(images)[0], expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_copies_are_counted_by_reason(frozen: npu.NPUFrozenModule, images: Tensor) -> None:
    frozen(images)
    assert frozen.stats["copies"] == {}
    frozen(images.bfloat16())
    frozen(images.to(memory_format=torch.channels_last))
    assert frozen.stats["copies"] == {"input dtype": 1, "input layout": 1}
    assert frozen.stats["calls"] == 3
    assert frozen.stats["samples"] == 12
    assert frozen.stats["run_s"] > 0


# ---- copies and processes


def test_deepcopy_shares_the_device_and_copies_the_rest(frozen: npu.NPUFrozenModule, images: Tensor) -> None:
    expected = frozen(images)[0]
    twin = copy.deepcopy(nn.Sequential(frozen))[0]
    assert twin is not frozen
    assert twin._worker is frozen._worker
    assert torch.equal(twin(images)[0], expected)
    twin.to(torch.bfloat16)
    assert frozen.dtype == torch.float32
    assert torch.equal(torch.compile(twin.float(), backend="eager", fullgraph=True)(images)[0], expected)


def test_pickle_reopens_the_artifact(frozen: npu.NPUFrozenModule, images: Tensor) -> None:
    expected = frozen(images)[0]
    twin = pickle.loads(pickle.dumps(frozen.to(torch.bfloat16)))
    assert twin.dtype == torch.bfloat16
    assert torch.equal(twin.float()(images)[0], expected)


def test_unpickling_where_the_artifact_was_replaced_is_refused(tmp_path: Path, compiled_fp32: npu.Artifact) -> None:
    compile_encoder(tmp_path / "a.npu", precision="fp32")
    frozen = npu.NPUFrozenModule(tmp_path / "a.npu")
    data = pickle.dumps(frozen)
    compile_encoder(tmp_path / "a.npu", precision="fp32", seed=5, overwrite=True)
    with pytest.raises(npu.ArtifactError, match=r"was replaced(.|\n)*fingerprint(.|\n)*fingerprint"):
        pickle.loads(data)


def _encode_elsewhere(frozen: npu.NPUFrozenModule, x: Tensor, answers: Any) -> None:
    answers.put(frozen(x)[0].tolist())


def test_a_spawned_process_opens_its_own_device(frozen: npu.NPUFrozenModule, images: Tensor) -> None:
    import torch.multiprocessing as mp

    expected = frozen(images)[0]
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=_encode_elsewhere, args=(frozen, images, answers))
    process.start()
    result = answers.get()
    process.join(60)
    assert process.exitcode == 0
    assert torch.equal(torch.tensor(result), expected)


# ---- torch.compile


class Policy(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens, mean = self.encoder(images=x * 1.0)
        return self.head(tokens.mean(1) + mean)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_keeps_one_graph(frozen: npu.NPUFrozenModule, backend: str) -> None:
    policy = Policy(frozen)
    compiled = torch.compile(policy, backend=backend, fullgraph=True, dynamic=True)
    for batch in (2, 5):
        x = make_images(batch)
        expected = policy(x)
        expected.sum().backward()
        gradient = policy.head.weight.grad
        policy.zero_grad()
        result = compiled(x)
        result.sum().backward()
        assert torch.allclose(result, expected, atol=1e-6)
        assert torch.allclose(policy.head.weight.grad, gradient, atol=1e-5)
        policy.zero_grad()


def test_a_float64_output_has_one_dtype_everywhere(tmp_path: Path, images: Tensor) -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mean((2, 3))).double()

    artifact = npu.compile_module(
        Doubles().eval(), (images,), calibration=[images], output=tmp_path / "d.npu", precision="fp32"
    )
    frozen = npu.NPUFrozenModule(artifact)
    eager = frozen(images)
    assert eager.dtype == torch.float32
    assert torch.equal(torch.compile(frozen, backend="aot_eager", fullgraph=True)(images), eager)
    frozen.close()


def test_torch_compile_follows_autocast(frozen: npu.NPUFrozenModule, images: Tensor) -> None:
    compiled = torch.compile(Policy(frozen), backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(images).dtype == torch.bfloat16
    assert compiled(images).dtype == torch.float32


# ---- runtimes without an artifact


def test_from_runtime_wraps_any_runtime() -> None:
    module = npu.NPUFrozenModule.from_runtime(Doubler(), tail=nn.Flatten(0))
    assert torch.equal(module(torch.ones(2, 3)), torch.full((6,), 2.0))
    assert torch.equal(copy.deepcopy(module)(torch.ones(2, 3)), torch.full((6,), 2.0))
    assert "runtime='doubler'" in repr(module)
    assert module.describe()["device"] == "test device"
    with pytest.raises(npu.InputError, match="made from an open runtime"):
        pickle.dumps(module)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 3)), torch.full((6,), 2.0))


def test_it_says_what_it_is(frozen: npu.NPUFrozenModule, compiled_fp32: npu.Artifact) -> None:
    count = sum(p.numel() for p in make_encoder().parameters())
    assert f"replaces Encoder with {count:,} parameters" in repr(frozen)
    facts = frozen.describe()
    assert facts["runtime"] == "onnx"
    assert facts["precision"] == "fp32"
    assert facts["fingerprint"] == compiled_fp32.fingerprint
    assert isinstance(facts["device"], str)


def test_close_releases_and_the_next_call_opens(frozen: npu.NPUFrozenModule, images: Tensor) -> None:
    expected = frozen(images)[0]
    frozen.close()
    frozen.close()
    assert torch.equal(frozen(images)[0], expected)


def test_layer_is_pre_norm_residual() -> None:
    """The shared encoder really is nonlinear, or the tests above would prove little."""
    layer = Layer(8).eval()
    x = torch.randn(2, 4, 8)
    assert not torch.allclose(layer(2 * x), 2 * layer(x), atol=1e-3)
