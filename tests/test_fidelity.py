from __future__ import annotations

import json
import math

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_npu.compile.fidelity import (
    FEWEST_SAMPLES,
    LIMIT_DB,
    OutputFidelity,
    check,
    compare,
    format_table,
    measure,
)
from lightning_npu.errors import CompileError, FidelityError, InputError
from lightning_npu.runtimes.onnx import OnnxRuntime
from lightning_npu.tensor_spec import TensorSpec


@given(st.integers(0, 2**31), st.floats(-20, 120), st.integers(1, 5), st.integers(2, 40))
@settings(deadline=None, max_examples=50)
def test_sqnr_is_that_of_noise_of_known_power(seed, level_db, samples, size):
    generator = torch.Generator().manual_seed(seed)
    reference, noise = torch.randn(2, samples, size, generator=generator, dtype=torch.float64)
    noise *= reference.norm() / noise.norm() * 10 ** (-level_db / 20)
    assert compare(reference, reference + noise).sqnr_db == pytest.approx(level_db, abs=1e-5)


@given(st.integers(0, 2**31), st.floats(0.01, 100))
@settings(deadline=None, max_examples=30)
def test_cosine_ignores_scale_and_sqnr_does_not(seed, factor):
    reference = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    result = compare(reference, factor * reference)
    assert result.cosine == pytest.approx(1)
    if factor != 1:
        assert result.sqnr_db == pytest.approx(-20 * math.log10(abs(factor - 1)), abs=1e-6)


def test_cosine_is_the_mean_over_samples_along_the_batch_axis():
    reference = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    candidate = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    assert compare(reference, candidate).cosine == pytest.approx(0.5)
    assert compare(reference, candidate, batch_axis=None).cosine == pytest.approx(1 / 5)
    moved = compare(reference.T, candidate.T, batch_axis=1)
    assert moved == compare(reference, candidate)
    assert moved.max_abs_error == 2


def test_equal_tensors_and_zeros():
    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    assert compare(ones, ones) == OutputFidelity(1.0, LIMIT_DB, 0.0, LIMIT_DB)
    assert compare(zeros, zeros) == OutputFidelity(1.0, LIMIT_DB, 0.0, LIMIT_DB)
    assert compare(zeros, ones) == OutputFidelity(0.0, -LIMIT_DB, 1.0, -LIMIT_DB)
    assert compare(ones, zeros).sqnr_db == 0
    assert compare(torch.tensor(2.0), torch.tensor(1.0)).max_abs_error == 1
    assert compare(torch.tensor([3, 4]), torch.tensor([3, 4])).sqnr_db == LIMIT_DB


def test_values_that_are_not_finite():
    mask = torch.tensor([[0.0, -math.inf, math.nan]])
    assert compare(mask, mask.clone()) == OutputFidelity(1.0, LIMIT_DB, 0.0, LIMIT_DB)
    for bad in (math.nan, math.inf):
        worthless = compare(torch.ones(1, 2), torch.tensor([[1.0, bad]]))
        assert worthless == OutputFidelity(0.0, -LIMIT_DB, math.inf, -LIMIT_DB)
    assert compare(torch.tensor([math.inf]), torch.tensor([-math.inf])).sqnr_db == -LIMIT_DB


@pytest.mark.parametrize("figures", [OutputFidelity(0.5, 12.5, 0.25), OutputFidelity(0.0, -LIMIT_DB, math.inf, -3.5)])
def test_json_keeps_everything(figures):
    text = json.dumps(figures.to_json(), allow_nan=False)
    assert OutputFidelity.from_json(json.loads(text)) == figures


def test_shapes_must_agree_and_hold_something():
    with pytest.raises(InputError, match=r"Expected: \[2, 3\].*\n.*Got: \[3, 2\]"):
        compare(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(InputError, match="at least one value"):
        compare(torch.ones(0, 3), torch.ones(0, 3))


def _scaler(path, factor):
    """A file that multiplies by ``factor`` and adds it, on a dynamic batch."""
    float_type = onnx.TensorProto.FLOAT
    shapes = [onnx.helper.make_tensor_value_info(name, float_type, ["batch", 4]) for name in ("x", "product", "sum")]
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Mul", ["x", "factor"], ["product"]),
            onnx.helper.make_node("Add", ["x", "one"], ["sum"]),
        ],
        "scaler",
        shapes[:1],
        shapes[1:],
        [
            onnx.numpy_helper.from_array(np.float32(factor), "factor"),
            onnx.numpy_helper.from_array(np.float32(1), "one"),
        ],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, path)
    specs = {name: TensorSpec(name, (None, 4)) for name in ("x", "product", "sum")}
    return OnnxRuntime(path, [specs["x"]], [specs["product"], specs["sum"]], threads=1)


def test_measure_pools_over_batches_of_any_size(tmp_path):
    reference, candidate = _scaler(tmp_path / "a.onnx", 1.0), _scaler(tmp_path / "b.onnx", 1.1)
    batches = [torch.randn(size, 4) for size in (1, 5, 2)]
    fidelity = measure(reference, candidate, ([batch] for batch in batches))
    together = torch.cat(batches)
    whole = compare(together, together * 1.1)
    assert fidelity["product"].sqnr_db == pytest.approx(whole.sqnr_db, abs=1e-4) == pytest.approx(20, abs=1e-4)
    assert fidelity["product"].cosine == pytest.approx(1)
    assert fidelity["product"].max_abs_error == pytest.approx(together.abs().max().item() / 10, rel=1e-4)
    assert fidelity["sum"].sqnr_db == LIMIT_DB


def test_measure_needs_a_batch_and_equal_outputs(tmp_path):
    runtime = _scaler(tmp_path / "a.onnx", 1.0)
    with pytest.raises(CompileError, match="at least one batch that was not used to calibrate"):
        measure(runtime, runtime, [])
    other = OnnxRuntime(tmp_path / "a.onnx", runtime.inputs, runtime.outputs[:1], threads=1)
    with pytest.raises(CompileError, match="different outputs"):
        measure(runtime, other, [[torch.ones(1, 4)]])


def test_check_names_the_worst_output_and_the_remedies_in_order():
    fidelity = {"key": OutputFidelity(0.99, 18.04, 0.5), "value": OutputFidelity(0.9991, 31.0, 0.1)}
    check(fidelity, min_sqnr_db=18, recipe="fast", precision="a8w8")
    with pytest.raises(FidelityError) as caught:
        check(fidelity, min_sqnr_db=27, recipe="fast", precision="a8w8")
    message = str(caught.value)
    assert "Output 'key'" in message
    assert "1 of 2 outputs" in message
    assert "27.0 dB or more" in message
    assert "18.0 dB, cosine 0.9900, largest error 0.5" in message
    order = [message.index(text) for text in ("recipe='faithful'", "more varied inputs", "a16w8", "min_sqnr_db, if")]
    assert order == sorted(order)


def test_check_offers_only_what_is_left():
    bad = {"out": OutputFidelity(0.1, 3.0, 9.0)}
    with pytest.raises(FidelityError) as caught:
        check(bad, min_sqnr_db=27, recipe="faithful", precision="a16w8")
    assert "recipe='faithful'" not in str(caught.value)
    assert "precision='a16w8'" not in str(caught.value)
    with pytest.raises(FidelityError, match="an FP32 file should be exact"):
        check(bad, min_sqnr_db=27, recipe="faithful", precision="fp32")
    with pytest.raises(FidelityError):
        check({"out": OutputFidelity(math.nan, math.nan, math.nan)}, min_sqnr_db=0, recipe="fast", precision="a8w8")
    with pytest.raises(CompileError, match="no fidelity"):
        check({}, min_sqnr_db=0, recipe="fast", precision="a8w8")


def test_table_has_a_line_per_output():
    lines = format_table({"key": OutputFidelity(0.99, 18.04, 0.5), "long name": OutputFidelity(1.0, 200.0, 0.0)})
    assert [line.split()[0] for line in lines.splitlines()] == ["output", "key", "long"]
    assert "18.0" in lines
    line = format_table({"key": OutputFidelity(1.0, 60.0, 0.1, -16.46)}).splitlines()[1]
    assert line.split()[1:3] == ["60.0", "-16.5"]


@given(st.integers(0, 2**31), st.floats(-10, 60), st.integers(4, 40), st.floats(-1000, 1000), st.floats(0.001, 1000))
@settings(deadline=None, max_examples=50)
def test_centred_sqnr_ignores_offsets_and_a_strong_feature(seed, level_db, samples, offset, gain):
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(samples, 9, generator=generator, dtype=torch.float64)
    noise = torch.randn(samples, 9, generator=generator, dtype=torch.float64)
    noise *= (reference.var(0) / noise.square().mean(0)).sqrt() * 10 ** (-level_db / 20)  # in every feature alike
    reference[:, :4] *= gain
    noise[:, :4] *= gain
    assert compare(reference + offset, reference + offset + noise).centred_sqnr_db == pytest.approx(level_db, abs=1e-3)
    turned = compare((reference + offset).T, (reference + offset + noise).T, batch_axis=1)
    assert turned.centred_sqnr_db == pytest.approx(level_db, abs=1e-3)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
@settings(deadline=None, max_examples=20)
def test_centred_sqnr_does_not_depend_on_how_samples_are_batched(sizes):
    class Plain:
        inputs = outputs = (TensorSpec("y", (None, 5)),)

        def __init__(self, error):
            self.error = error

        def run(self, tensors):
            return [tensors[0] + self.error * torch.sin(100 * tensors[0])]

    together = torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 50
    exact, off = Plain(0.0), Plain(0.1)
    measured = measure(exact, off, ([batch] for batch in together.split(sizes)))["y"]
    whole = compare(exact.run([together])[0], off.run([together])[0])
    assert measured.centred_sqnr_db == pytest.approx(whole.centred_sqnr_db, abs=1e-6)
    if sum(sizes) < FEWEST_SAMPLES:
        assert whole.centred_sqnr_db == whole.sqnr_db
    else:
        assert whole.centred_sqnr_db < whole.sqnr_db - 20


def test_outputs_that_do_not_vary_are_judged_by_the_plain_figure():
    position = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)).expand(8, 12)
    figures = compare(position, position + 0.01)
    assert figures.centred_sqnr_db == figures.sqnr_db > 35
    varied = torch.cat([position, torch.randn(8, 3, generator=torch.Generator().manual_seed(1))], dim=1)
    assert compare(varied, varied + 0.01).centred_sqnr_db == pytest.approx(40, abs=6)  # of the three that vary


def test_check_refuses_features_that_collapsed():
    fidelity = {"key": OutputFidelity(1.0, 60.1, 0.1, -16.5), "value": OutputFidelity(1.0, 30.0, 0.1, 14.0)}
    with pytest.raises(FidelityError, match=r"Output 'key'.*lost what varies between samples") as caught:
        check(fidelity, min_sqnr_db=20, recipe="faithful", precision="a8w8")
    assert "3.0 dB or more in the median feature" in str(caught.value)
    assert "-16.5 dB, though 60.1 dB over all values" in str(caught.value)
    assert "cut before the layer that adds the offset" in str(caught.value)
    check({"value": fidelity["value"]}, min_sqnr_db=20, recipe="faithful", precision="a8w8")
