"""From module to artifact: batch axes, calibration data, precision, and every refusal on the way."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import Enum
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
        ({"target": "tpu"}, r"no target 'tpu'(.|\n)*\['onnx', 'mobilint'\]"),
        ({"precision": "a4w4"}, r"no precision 'a4w4'(.|\n)*'a8w8'"),
        ({"recipe": "best"}, r"no recipe 'best'(.|\n)*'faithful', 'fast'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": "2"}, r"batch_size must be at least 1(.|\n)*Got: '2'"),
        ({"min_sqnr_db": "20"}, r"min_sqnr_db is not a finite number(.|\n)*decibels(.|\n)*'20'"),
        ({"min_sqnr_db": float("-inf")}, r"min_sqnr_db is not a finite number(.|\n)*None to accept any"),
        ({"min_sqnr_db": float("nan")}, "min_sqnr_db is not a finite number"),
        ({"calibration_samples": -40}, r"calibration_samples must be at least 1(.|\n)*Got: -40"),
        ({"holdout_samples": 0}, r"holdout_samples must be at least 1(.|\n)*judged on held-out samples"),
        ({"batch_axis": 7}, "The example inputs have no samples"),
        ({"batch_axis": -1}, "batch_axis is negative"),
        ({"batch_axis": [4]}, r"batch_axis does not fit(.|\n)*0 to 3"),
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


def test_as_many_samples_calibrate_as_are_asked_for(tmp_path: Path) -> None:
    made = compile_encoder(tmp_path / "m.npu", precision="fp32", calibration_samples=1, holdout_samples=7)
    assert (made.manifest["calibration"]["samples"], made.manifest["calibration"]["holdout_samples"]) == (1, 7)


def test_calibration_on_one_batch_again_and_again_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"judged on samples that calibrated: 3 of the 3 last"):
        npu.compile_module(
            make_encoder(),
            (make_images(2),),
            calibration=[make_images(5)] * 3,
            output=tmp_path / "x.npu",
            precision="fp32",
        )


# ---- samples that depend on each other


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x - x.mean(0)


def sequence_first() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False)


@pytest.mark.parametrize("batch_size", [None, 1, 4])
def test_modules_that_mix_samples_are_refused(tmp_path: Path, batch_size: int | None) -> None:
    data = torch.randn(6, 3, 8)
    with pytest.raises(
        npu.CompileError, match=r"'output_1' mixes samples(.|\n)*axis 0 of 'x'(.|\n)*batch_axis=\[...\]"
    ):
        compile_(Mixes(), (data,), tmp_path / "m.npu", batch_size=batch_size)
    with pytest.raises(npu.CompileError, match=r"'output' mixes samples(.|\n)*batch_axis=1 for modules that take"):
        compile_(sequence_first(), (data,), tmp_path / "m.npu", batch_size=batch_size)
    assert list(tmp_path.iterdir()) == []


def test_mixing_is_found_from_calibration_of_equal_samples(tmp_path: Path) -> None:
    with pytest.raises(npu.CompileError, match="mixes samples"):
        compile_(Mixes(), (torch.randn(1, 3).expand(4, 3),), tmp_path / "m.npu")


def test_modules_that_mix_samples_run_on_the_right_axis_or_the_whole_batch(tmp_path: Path) -> None:
    module, data = sequence_first().eval(), torch.randn(6, 3, 8)
    frozen = npu.NPUFrozenModule(compile_(module, (data,), tmp_path / "axis.npu", batch_axis=1))
    other = torch.randn(6, 5, 8)
    assert torch.allclose(frozen(other), module(other), atol=1e-5)
    with pytest.warns(UserWarning, match=r"right for calls of exactly 6 samples"):
        whole = npu.NPUFrozenModule(compile_(Mixes(), (data,), tmp_path / "whole.npu", batch_size=6))
    assert torch.allclose(whole(data)[1], Mixes()(data)[1], atol=1e-6)


def test_eval_mode_batch_norm_is_independent(tmp_path: Path) -> None:
    compile_(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train(), (torch.randn(4, 3),), tmp_path / "m.npu")
    with pytest.raises(npu.CompileError, match="mixes samples"):
        compile_(nn.BatchNorm1d(3, track_running_stats=False), (torch.randn(4, 3),), tmp_path / "n.npu")


# ---- what is not a tensor


@pytest.mark.parametrize("batch_size", [None, 3])
def test_values_that_follow_the_batch_size_are_refused(tmp_path: Path, batch_size: int | None) -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"feat": x * 2, "batch": x.shape[0], "width": x.shape[1]}

    with pytest.raises(
        npu.CompileError, match=r"output\['batch'\](.|\n)*8 for the example inputs, [23] for [23] samples"
    ):
        compile_(Counts(), (torch.randn(8, 4),), tmp_path / "c.npu", batch_size=batch_size)


@dataclass
class Batch:
    image: Tensor
    mask: Tensor | None = None


class Mode(str, Enum):
    A = "a"


def test_odd_arguments_survive_the_artifact(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, file: Batch, mode: Mode, max_depth: float = float("inf")) -> dict[str, Any]:
            assert file.mask is None
            return {"x": file.image.clamp(max=max_depth) * 2, "mode": mode.value}

    class Named(nn.Module):
        def forward(self, file: Tensor) -> Tensor:  # np.savez has a parameter of this name
            return file * 2

    x = torch.randn(4, 3)
    frozen = npu.NPUFrozenModule(compile_(Odd(), (Batch(x), Mode.A), tmp_path / "o.npu"))
    assert torch.equal(frozen(Batch(x), Mode.A)["x"], x * 2)
    with pytest.raises(npu.InputError, match="max_depth"):
        frozen(Batch(x), Mode.A, max_depth=2.0)
    artifact = compile_(Named(), (x,), tmp_path / "f.npu")
    assert load_probe(artifact)[0].shape[1] == 3


def test_returned_keys_must_be_plain(tmp_path: Path) -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> dict[Any, Tensor]:
            return {("a", 1): x * 2}

    with pytest.raises(npu.CompileError, match=r"keys that an artifact cannot record(.|\n)*\('a', 1\)"):
        compile_(Pairs(), (torch.randn(4, 3),), tmp_path / "p.npu")


def test_normalisation_in_place_is_compiled_and_warned_of(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.sub_(1).div_(2), x.relu()

    x = torch.randn(4, 3)
    kept = x.clone()
    with pytest.warns(UserWarning, match=r"InPlace changes its input x in place"):
        artifact = compile_(InPlace(), (x,), tmp_path / "i.npu", precision="a8w8", min_sqnr_db=None)
    assert torch.equal(x, kept)
    scaled, positive = npu.NPUFrozenModule(artifact)(x)
    assert torch.equal(x, kept)
    assert torch.allclose(scaled, (x - 1) / 2)
    assert torch.allclose(positive, scaled.relu())


# ---- masks


class Masked(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor, is_causal: bool | None = False) -> Tensor:
        if self.causal:
            return self.layers(x, mask=mask, is_causal=is_causal)
        return self.layers(x, src_key_padding_mask=mask)


@pytest.mark.parametrize("precision", ["fp32", "a8w8"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_masks(tmp_path: Path, causal: bool, precision: str) -> None:
    module, x = Masked(causal).eval(), torch.randn(8, 5, 8)
    padding = torch.arange(5)[None].repeat(8, 1) > torch.arange(8)[:, None] // 3 + 1
    mask = nn.Transformer.generate_square_subsequent_mask(5) if causal else padding
    batches = [(torch.randn(8, 5, 8), mask) for _ in range(3)]
    artifact = npu.compile_module(
        module, (x, mask), calibration=batches, output=tmp_path / "m.npu", precision=precision
    )
    frozen = npu.NPUFrozenModule(artifact)
    with torch.no_grad():
        expected, found = module(x, mask), frozen(x, mask)
    seen = torch.ones(8, 5, dtype=torch.bool) if causal else ~padding  # torch's fused kernels zero what is padded
    assert (expected - found)[seen].norm() < (1e-4 if precision == "fp32" else 0.1) * expected[seen].norm()


def test_a_transformer_that_looks_at_its_mask_says_what_to_pass(tmp_path: Path) -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with pytest.raises(npu.CompileError, match=r"cannot trace the module(.|\n)*pass is_causal=True or False"):
        compile_(Masked(causal=True), (torch.randn(4, 5, 8), mask, None), tmp_path / "m.npu")


def test_infinities_that_are_no_mask_are_refused(tmp_path: Path) -> None:
    for value, held in ((-float("inf"), 0.5), (float("inf"), 0.0), (float("nan"), 0.0)):
        data = torch.full((4, 3), held)
        data[1, 1] = value
        with pytest.raises(npu.InputError, match=r"holds NaN or infinity(.|\n)*a mask of 0 and -inf is fine"):
            compile_(nn.Linear(3, 2), (torch.randn(4, 3),), tmp_path / "m.npu", calibration=[data] * 2)


# ---- refusals and warnings that say what is wrong


def test_features_that_collapse_are_refused(tmp_path: Path) -> None:
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = make_encoder()

        def forward(self, images: Tensor) -> dict[str, Tensor]:
            return {"tokens": self.encoder(images)[0], "summary": self.encoder(images)[1] + 30}

    batches = list(make_images(40).split(8))
    with pytest.raises(npu.FidelityError, match=r"Output 'output_summary'.*has lost what varies between samples"):
        npu.compile_module(Offset(), (batches[0],), calibration=batches, output=tmp_path / "o.npu")
    artifact = compile_encoder(tmp_path / "sound.npu", min_sqnr_db=20.0)
    assert all(figures.centred_sqnr_db > 10 for figures in artifact.fidelity.values())
    written = json.loads((artifact.path / "manifest.json").read_text())["fidelity"]["outputs"]
    assert {name: entry["centred_sqnr_db"] for name, entry in written.items()} == {
        name: figures.centred_sqnr_db for name, figures in artifact.fidelity.items()
    }


def test_inference_mode_and_half_precision_are_named(tmp_path: Path) -> None:
    with torch.inference_mode():
        module = nn.Linear(3, 2)
    with pytest.raises(npu.CompileError, match=r"Linear was built or loaded under torch.inference_mode(.|\n)*deepcopy"):
        compile_(module, (torch.randn(4, 3),), tmp_path / "m.npu")
    with pytest.raises(npu.CompileError, match=r"in half precision(.|\n)*offload in FP32 first"):
        compile_(nn.Linear(3, 2).bfloat16(), (torch.randn(4, 3),), tmp_path / "m.npu")


def test_a_shared_input_that_looks_like_one_sample_is_warned_of(tmp_path: Path) -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            return x + position

    position = torch.randn(1, 3)
    single = [(torch.randn(1, 3), position) for _ in range(4)]
    with pytest.warns(UserWarning, match=r"'position'.*pass batch_axis=\[0, None\]"):
        compile_(Shifted(), single[0], tmp_path / "m.npu", calibration=single)
    with pytest.raises(npu.InputError, match=r"Calibration item 1 does not fit(.|\n)*batch_axis=\[...\], with None"):
        compile_(Shifted(), single[0], tmp_path / "n.npu", calibration=[single[0], (torch.randn(5, 3), position)])


@pytest.mark.parametrize("kind", ["size", "flag"])
def test_two_ways_of_calling_are_named(tmp_path: Path, kind: str) -> None:
    class Encoder(nn.Module):
        def forward(self, x: Tensor, flip: bool = False) -> Tensor:
            return (x.flip(-1) if flip else x).mean((2, 3))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, x: Tensor) -> Tensor:
            other = self.encoder(x, flip=True) if kind == "flag" else self.encoder(x[..., :8])
            return self.encoder(x) + other

    with pytest.raises(npu.InputError, match=r"model calls the submodule in more than one way(.|\n)*run=lambda"):
        npu.offload(Two(), "encoder", calibration=[make_images(4)] * 2, output=tmp_path / "e.npu")


@pytest.mark.parametrize(("batches", "precision", "said"), [(2, "a8w8", True), (2, "fp32", False), (5, "a8w8", False)])
def test_few_calibration_samples_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batches: int, precision: str, said: bool
) -> None:
    images = [(make_images(8, seed=i),) for i in range(batches)]
    npu.compile_module(
        make_encoder(), images[0], calibration=images, output=tmp_path / "e.npu", precision=precision, min_sqnr_db=None
    )
    assert ("Only 13 samples calibrate the ranges of" in caplog.text) == said


def test_another_precision_than_asked_for_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = [torch.rand(4, 3, 4, 4) for _ in range(3)]
    with pytest.warns(
        UserWarning, match=r"a8w8 was asked for, but the artifact of AdaptiveAvgPool2d is fp32.*AveragePool"
    ):
        compile_(nn.AdaptiveAvgPool2d(2), (data[0],), tmp_path / "p.npu", calibration=data, precision="a8w8")
    assert "require grad" not in caplog.text
    compile_(nn.Linear(3, 2), (torch.randn(4, 3),), tmp_path / "l.npu")
    assert "2 parameters of Linear require grad: the artifact holds them as they are now" in caplog.text


def test_errors_and_successes_come_without_the_exporters_notes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    class Decides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            print("from the module", file=sys.stderr)
            return x * 2 if x.sum() > 0 else x

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.register_buffer("position", torch.randn(1, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            print("from the module", file=sys.stderr)
            return self.lstm(x)[0], self.position

    with pytest.raises(npu.CompileError, match=r"if x.sum\(\) > 0"):
        compile_(Decides(), (torch.ones(4, 3),), tmp_path / "d.npu")
    compile_(Recurrent(), (torch.randn(4, 5, 3),), tmp_path / "r.npu")
    shown = capfd.readouterr()
    assert set(shown.err.splitlines()) - {"from the module"} == set() == set(shown.out.splitlines())
    assert not [str(w.message) for w in recwarn if "assigned during export" in str(w.message)]


def test_many_group_norms_compile(tmp_path: Path) -> None:
    """Eight of one group count share constants in the graph, which the quantiser once refused."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(8):
        layers += [nn.Conv2d(8 if index else 3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU()]
    batches = list(make_images(24).split(8))
    artifact = npu.compile_module(
        nn.Sequential(*layers).eval(), (batches[0],), calibration=batches, output=tmp_path / "g.npu", min_sqnr_db=15.0
    )
    assert artifact.precision == "a8w8"
    assert artifact.manifest["recipe"]["node_counts"]["InstanceNormalization"] == 8
