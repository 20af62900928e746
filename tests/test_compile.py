"""From module to artifact: batch axes, calibration data, precision, and every refusal on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compile_encoder, make_encoder, make_images
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lightning_npu as npu
from lightning_npu.compile.flat import FlatModule, tensor_specs
from lightning_npu.compile.samples import collect, divide
from lightning_npu.remeasure import load_probe, remeasure
from lightning_npu.runtimes.cpu import instruction_set
from lightning_npu.signature import CallSignature
from lightning_npu.tensor_spec import TensorSpec


def compile_(module: nn.Module, example: tuple[Any, ...], output: Path, **options: Any) -> npu.Artifact:
    options = {"calibration": [example] * 3, "precision": "fp32", **options}
    return npu.compile_module(module.eval(), example, output=output, **options)


class SequenceFirst(nn.Module):
    """(sequence, batch, width) tokens, as in ACT, and positions that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        mixed = self.layer(tokens + position)
        return mixed, mixed.mean(0)


def test_batch_axes_are_found(tmp_path: Path) -> None:
    example = (torch.randn(5, 2, 4), torch.randn(5, 1, 4))
    artifact = compile_(SequenceFirst(), example, tmp_path / "s.npu", batch_axis=[1, None])
    assert [(s.shape, s.batch_axis, s.layout) for s in artifact.inputs] == [
        ((5, None, 4), 1, "LNC"),
        ((5, 1, 4), None, "???"),
    ]
    assert [(s.shape, s.batch_axis) for s in artifact.outputs] == [((5, None, 4), 1), ((None, 4), 0)]
    torch.manual_seed(0)
    module = SequenceFirst()
    frozen = npu.NPUFrozenModule(compile_(module, example, tmp_path / "t.npu", batch_axis=[1, None], batch_size=3))
    x = torch.randn(5, 7, 4)
    for a, b in zip(module(x, example[1]), frozen(x, example[1]), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_module_for_one_batch_size_needs_it_fixed(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(2, 12) * 2

    with pytest.raises(npu.CompileError, match=r"does not run on a batch of 3(.|\n)*batch_size=N"):
        compile_(Fixed(), (torch.randn(2, 3, 4),), tmp_path / "f.npu")
    artifact = compile_(Fixed(), (torch.randn(2, 3, 4),), tmp_path / "f.npu", batch_size=2)
    x = torch.randn(5, 3, 4)
    assert torch.allclose(npu.NPUFrozenModule(artifact)(x), x.reshape(5, 12) * 2)


def test_an_output_that_folds_samples_is_refused(tmp_path: Path) -> None:
    class Folds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(-1, 2)

    with pytest.raises(npu.CompileError, match=r"does not keep samples apart(.|\n)*2 samples"):
        compile_(Folds(), (torch.randn(2, 4),), tmp_path / "f.npu")


def test_the_module_is_left_as_it_was(tmp_path: Path) -> None:
    module = make_encoder().train()
    module.layer.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flags = [part.training for part in module.modules()]
    npu.compile_module(
        module, (make_images(2),), calibration=[make_images(10)], output=tmp_path / "m.npu", precision="fp32"
    )
    assert [part.training for part in module.modules()] == flags
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_equal_compilations_have_equal_fingerprints(tmp_path: Path, compiled: npu.Artifact) -> None:
    again = compile_encoder(tmp_path / "again.npu")
    assert again.fingerprint == compiled.fingerprint
    assert compile_encoder(tmp_path / "other.npu", seed=3).fingerprint != compiled.fingerprint


# ---- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "tpu"}, r"no target 'tpu'(.|\n)*\['onnx'\]"),
        ({"precision": "a4w4"}, r"no precision 'a4w4'(.|\n)*'a8w8'"),
        ({"recipe": "best"}, r"no recipe 'best'(.|\n)*'faithful', 'fast'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_options_that_do_not_exist_list_those_that_do(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(npu.NPUError, match=message):
        compile_encoder(tmp_path / "x.npu", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([], r"calibration data is empty(.|\n)*read only once"),
        ([make_images(1)], "one calibration sample only"),
        ([make_images(4), make_images(4)[:, :2]], r"Calibration item 1 does not fit(.|\n)*\[batch, 3, 16, 16\]"),
        (
            [torch.full((4, 3, 16, 16), float("nan"))],
            r"item 0 holds NaN or infinity in input 'images'(.|\n)*3072 of 3072",
        ),
        ([(make_images(4), 2.0)], r"item 0 does not fit(.|\n)*'scale'"),
        ([make_images(4).to(torch.uint8)], r"wrong dtype(.|\n)*uint8"),
        (["image.png"], r"item 0 does not fit(.|\n)*a tensor"),
    ],
)
def test_bad_calibration_data_is_named(tmp_path: Path, calibration: Any, message: str) -> None:
    with pytest.raises(npu.InputError, match=message):
        npu.compile_module(
            make_encoder(), (make_images(2),), calibration=calibration, output=tmp_path / "x.npu", min_sqnr_db=None
        )
    assert list(tmp_path.iterdir()) == []


def test_fidelity_below_the_threshold_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(npu.FidelityError, match=r"output_\d(.|\n)*150"):
        compile_encoder(tmp_path / "x.npu", min_sqnr_db=150.0)
    assert list(tmp_path.iterdir()) == []


def test_half_precision_modules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(npu.CompileError, match=r"bfloat16(.|\n)*\.float\(\)"):
        compile_(nn.Linear(2, 2).bfloat16(), (torch.randn(2, 2).bfloat16(),), tmp_path / "h.npu")


def test_what_is_no_tensor_cannot_be_returned(tmp_path: Path) -> None:
    class Cache:
        pass

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 2, Cache()

    with pytest.raises(npu.CompileError, match=r"neither a tensor nor plain data(.|\n)*return its tensors"):
        compile_(Odd(), (torch.randn(2, 2),), tmp_path / "o.npu")


def test_a_module_that_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(npu.CompileError, match=r"Linear fails on the example inputs"):
        compile_(nn.Linear(3, 2), (torch.randn(2, 2),), tmp_path / "l.npu")
    with pytest.raises(npu.InputError, match="hold no tensor"):
        compile_(nn.Identity(), (1,), tmp_path / "l.npu")
    with pytest.raises(npu.CompileError, match="computes no tensor"):
        compile_(nn.Identity(), (torch.randn(2, 2),), tmp_path / "l.npu")
    with pytest.raises(npu.InputError, match=r"do not fit the module's forward"):
        compile_(nn.Identity(), (torch.randn(2, 2), 1, 2), tmp_path / "l.npu")


# ---- measuring again


def test_on_another_instruction_set_fidelity_is_measured_again(
    compiled: npu.Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = npu.runtimes.open_runtime(compiled)
    assert remeasure(compiled, runtime) is None
    monkeypatch.setattr("lightning_npu.remeasure.instruction_set", lambda: "x86_64-avx2")
    measured = remeasure(compiled, runtime)
    assert measured is not None
    assert set(measured) == set(compiled.fidelity)
    strict = {**compiled.manifest, "fidelity": {**compiled.manifest["fidelity"], "min_sqnr_db": 150.0}}
    with pytest.raises(npu.FidelityError):
        remeasure(npu.Artifact(**{**vars(compiled), "manifest": strict}), runtime)
    blind = {**compiled.manifest, "files": {k: v for k, v in compiled.manifest["files"].items() if k != "probe"}}
    with pytest.warns(UserWarning, match=rf"measured on {instruction_set()} and not on this machine \(x86_64-avx2\)"):
        assert remeasure(npu.Artifact(**{**vars(compiled), "manifest": blind}), runtime) is None
    runtime.close()


def test_a_probe_without_pickles_is_checked(artifact_copy: Path) -> None:
    np.savez(artifact_copy / "probe.npz", other=np.zeros(3))
    artifact = npu.Artifact.load
    with pytest.raises(npu.ArtifactError, match=r"probe\.npz"):
        artifact(artifact_copy)


def test_the_probe_holds_judging_samples(compiled: npu.Artifact) -> None:
    assert torch.equal(load_probe(compiled)[0], make_images(40)[32:40])


# ---- calibration data


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), limit=st.integers(2, 12))
@settings(deadline=None)
def test_samples_are_taken_in_order_up_to_the_limit(sizes: list[int], limit: int) -> None:
    total = sum(sizes)
    data = torch.arange(total, dtype=torch.float32)[:, None]
    spec = TensorSpec("x", (None, 1))
    taken = collect(data.split(sizes), CallSignature.positional(["x"]), [spec], limit=limit)
    assert torch.equal(taken.tensors[0], data[: min(limit, total)])
    if taken.count >= 2:
        calibrating, judging = divide(taken, holdout=3)
        assert calibrating.count + judging.count == taken.count
        assert 1 <= judging.count <= 3
        assert torch.equal(torch.cat([calibrating.tensors[0], judging.tensors[0]]), taken.tensors[0])
        joined = torch.cat([batch[0] for batch in calibrating.batches(4)])
        assert torch.equal(joined, calibrating.tensors[0])


def test_an_endless_loader_is_read_no_further_than_needed() -> None:
    def endless() -> Any:
        while True:
            yield torch.zeros(2, 1)

    taken = collect(endless(), CallSignature.positional(["x"]), [TensorSpec("x", (None, 1))], limit=5)
    assert taken.count == 5


def test_flat_names_are_valid_and_unique() -> None:
    class Odd(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"a.b": batch["x y"] + batch["x_y"], "batch_x_y": batch["x y"] * 2}

    flat = FlatModule(Odd(), ({"x y": torch.ones(2, 2), "x_y": torch.ones(2, 2)},), {})
    names = [*flat.input_names(), *flat.output_names()]
    assert len(set(names)) == 4
    assert all(name.isidentifier() for name in names)
    assert [spec.name for specs in tensor_specs(flat) for spec in specs] == names
