from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_npu.compile.calibrate import calibrate, float_tensors, session
from lightning_npu.compile.export import export_onnx
from lightning_npu.compile.fidelity import measure
from lightning_npu.compile.insert import WeightType, insert_qdq, prepare
from lightning_npu.compile.qdq import QuantizedGraph
from lightning_npu.compile.quantize import quantize_onnx
from lightning_npu.compile.rewrite import biases_into_products, keep_scores_in_float
from lightning_npu.compile.rounding import round_second_order
from lightning_npu.compile.stem import stem_on_blocks
from lightning_npu.errors import CompileError
from lightning_npu.runtimes.cpu import exact_u8s8
from lightning_npu.runtimes.onnx import OnnxRuntime
from lightning_npu.tensor_spec import TensorSpec

INPUTS, OUTPUTS = [TensorSpec("image", (None, 3, 32, 32))], [TensorSpec("features", (None, 16, 24))]


class SmallEncoder(nn.Module):
    """Convolutions, a residual sum and a Transformer layer: each kind of operator that an encoder has."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 5, 2, 2, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(12, 12, 3, 1, 1), nn.ReLU(), nn.Conv2d(12, 12, 3, 1, 1))
        self.project = nn.Conv2d(12, 24, 4, 4)
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True)

    def forward(self, image):
        x = self.stem((image - 0.5) / 0.25)
        x = torch.relu(x + self.block(x))
        return (self.layer(self.project(x).flatten(2).transpose(1, 2)),)


def images(count, seed):
    """Smooth images with an edge, since noise is no image."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear")
    return (smooth + 0.5 * (smooth > 0.6)).clamp(0, 1)


def feeds(count=4, seed=1):
    return [{"image": images(8, seed + index).numpy()} for index in range(count)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    module = SmallEncoder()
    module.train()
    with torch.no_grad():
        for seed in range(20):
            module.stem(images(8, seed))
    path = tmp_path_factory.mktemp("export") / "fp32.onnx"
    export_onnx(module.eval(), (images(2, 0),), path, inputs=INPUTS, outputs=OUTPUTS)
    return path


def fidelity_db(source, target):
    runtimes = [OnnxRuntime(path, INPUTS, OUTPUTS, threads=1) for path in (source, target)]
    return measure(*runtimes, [[images(8, seed)] for seed in (101, 102, 103)])["features"].sqnr_db


@pytest.mark.parametrize(
    ("recipe", "instruction_set", "weight_type", "reduced"),
    [
        ("faithful", "x86_64-avx512_vnni", "int8", False),
        ("faithful", "x86_64-avx2", "uint8", False),
        ("fast", "x86_64-avx2", "int8", True),
        ("fast", "aarch64-asimddp", "int8", False),
        ("faithful", "x86_64-unknown", "uint8", False),
    ],
)
def test_recipe_and_instruction_set_choose_the_weights(source, tmp_path, recipe, instruction_set, weight_type, reduced):
    target = tmp_path / "int8.onnx"
    report = quantize_onnx(source, target, feeds(), recipe=recipe, instruction_set=instruction_set)
    assert (report.weight_type, report.reduce_range) == (weight_type, reduced)
    assert report.precision == "a8w8"
    assert report.calibration_batches == 4
    assert report.float_nodes == {"Sub": 1, "Div": 1, "SpaceToDepth": 1, "Softmax": 1}, "input and attention scores"
    model = onnx.load(target)
    constants = {constant.name: onnx.numpy_helper.to_array(constant) for constant in model.graph.initializer}
    dequantized = {node.output[0]: node for node in model.graph.node if node.op_type == "DequantizeLinear"}
    for node in model.graph.node:
        if node.op_type == "Conv":
            weight = constants[dequantized[node.input[1]].input[0]]
            centre = 128 if weight_type == "uint8" else 0
            assert weight.dtype == np.dtype(weight_type)
            assert np.abs(weight.astype(int) - centre).max() <= (64 if reduced else 128)
    if (
        exact_u8s8() or weight_type == "uint8" or reduced
    ):  # else this processor saturates, which is not the file's fault
        assert fidelity_db(source, target) > 30
    json.dumps(report.to_json(), allow_nan=False)
    assert list(tmp_path.iterdir()) == [target]


def test_sixteen_bits_are_named_so_and_are_better(source, tmp_path):
    eight, sixteen = tmp_path / "a8.onnx", tmp_path / "a16.onnx"
    quantize_onnx(source, eight, feeds())
    report = quantize_onnx(source, sixteen, iter(feeds()), precision="a16w8")
    assert (report.precision, report.activation_type) == ("a16w8", "uint16")
    assert fidelity_db(source, sixteen) > fidelity_db(source, eight) + 3


def test_unknown_recipe_or_precision(source, tmp_path):
    with pytest.raises(CompileError, match=r"no recipe 'best'.*\n.*one of \['faithful', 'fast'\]"):
        quantize_onnx(source, tmp_path / "x.onnx", feeds(), recipe="best")
    with pytest.raises(CompileError, match=r"no precision 'a4w4'"):
        quantize_onnx(source, tmp_path / "x.onnx", feeds(), precision="a4w4")


def test_bad_calibration_data_leave_nothing_behind(source, tmp_path):
    target = tmp_path / "int8.onnx"
    with pytest.raises(CompileError, match=r"no calibration data.*\n.*at least one batch"):
        quantize_onnx(source, target, [])
    bad = feeds()
    bad[2]["image"][3, 1, 5, 5] = np.nan
    with pytest.raises(CompileError, match="batch 3 holds values of input 'image' that are not finite") as caught:
        quantize_onnx(source, target, bad)
    assert "1 of 24576 values" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def _graph(nodes, inputs, outputs, constants):
    values = [
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in group.items()]
        for group in (inputs, outputs)
    ]
    tensors = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = onnx.helper.make_graph(nodes, "test", *values, tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


def test_weights_that_make_nan_are_named(tmp_path):
    model = _graph(
        [onnx.helper.make_node("Add", ["x", "c"], ["sum"]), onnx.helper.make_node("Sqrt", ["sum"], ["root"])],
        {"x": [2]},
        {"root": [2]},
        {"c": np.float32([-10, 0])},
    )
    with pytest.raises(CompileError, match="Tensor 'root' becomes NaN in FP32 on calibration batch 1"):
        calibrate(model, [{"x": np.float32([1, 1])}])


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=1, max_size=5))
@settings(deadline=None, max_examples=20)
def test_calibration_finds_the_extremes_of_all_batches(rows):
    model = _graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])], {"x": [3]}, {"y": [3]}, {"unused": np.zeros(1, np.float32)}
    )
    assert float_tensors(model) == ["x", "y"]
    batches = [{"x": np.float32(row)} for row in rows]
    values = np.float32(rows)
    ranges = calibrate(model, batches)
    assert ranges["x"] == (values.min(), values.max())
    assert ranges["y"] == (np.maximum(values, 0).min(), np.maximum(values, 0).max())


class Masked(nn.Module):
    """Attention whose mask holds minus infinity, or the smallest float as some libraries write it."""

    def __init__(self, fill):
        super().__init__()
        self.query, self.key, self.fill = nn.Linear(8, 8), nn.Linear(8, 8), fill

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        return (scores.masked_fill(~mask, self.fill).softmax(-1) @ x,)


@pytest.mark.parametrize("fill", [float("-inf"), torch.finfo(torch.float32).min])
def test_masks_stay_in_float_and_do_not_spoil_the_scores(tmp_path, fill):
    torch.manual_seed(0)
    specs = [TensorSpec("x", (None, 6, 8))], [TensorSpec("y", (None, 6, 8))]
    export_onnx(Masked(fill).eval(), (torch.randn(2, 6, 8),), tmp_path / "a.onnx", inputs=specs[0], outputs=specs[1])
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 6, 8, generator=generator) for _ in range(6)]
    report = quantize_onnx(tmp_path / "a.onnx", tmp_path / "b.onnx", [{"x": x.numpy()} for x in batches[:4]])
    assert report.precision == "a8w8"
    assert report.float_nodes == {"Where": 1, "Softmax": 1}, "scores and mask"
    runtimes = [OnnxRuntime(tmp_path / name, *specs, threads=1) for name in ("a.onnx", "b.onnx")]
    assert measure(*runtimes, [[x] for x in batches[4:]])["y"].sqnr_db > 30


def test_label_is_read_from_the_graph():
    def product(first, second):
        weight = {"w": np.ones((4, 4), np.float32), "scale": np.float32(0.1)}
        zeros = {"zero8": np.uint8(0), "zero16": np.uint16(0)}
        nodes = []
        for name, bits in ((first, "a"), (second, "b")):
            if name != "float":
                nodes += [
                    onnx.helper.make_node("QuantizeLinear", ["x", "scale", name], [f"q{bits}"]),
                    onnx.helper.make_node("DequantizeLinear", [f"q{bits}", "scale", name], [f"d{bits}"]),
                ]
        factors = ["x" if first == "float" else "da", "w" if second == "float" else "db"]
        nodes.append(onnx.helper.make_node("MatMul", factors, ["y"]))
        return nodes, weight | zeros

    def label(*pairs):
        nodes, constants = [], {}
        for index, pair in enumerate(pairs):
            part, values = product(*pair)
            for node in part:
                renamed = {name: f"{name}_{index}" for name in (*node.output,)}
                node.output[:] = [renamed[name] for name in node.output]
                node.input[:] = [f"{name}_{index}" if name in ("qa", "qb", "da", "db") else name for name in node.input]
            nodes += part
            constants |= values
        outputs = {f"y_{index}": [4, 4] for index in range(len(pairs))}
        return QuantizedGraph(_graph(nodes, {"x": [4, 4]}, outputs, constants))

    eight, sixteen, single = ("zero8", "zero8"), ("zero16", "zero8"), ("float", "zero8")
    assert label(eight, eight).precision == "a8w8"
    assert label(sixteen, eight).precision == "a16w8"
    assert label(eight, single).precision == "mixed"
    assert label(eight, ("float", "float")).precision == "mixed"
    assert label(("float", "float")).precision == "fp32"
    assert label(eight, single).float_nodes == {"MatMul": 1}


@given(st.integers(0, 2**31), st.integers(8, 16), st.integers(16, 60))
@settings(deadline=None, max_examples=25)
def test_second_order_rounding_loses_less_on_inputs_that_resemble_one_another(seed, outputs, inputs):
    random = np.random.default_rng(seed)
    data = random.standard_normal((400, 1)) + 0.1 * random.standard_normal((400, inputs))
    weight = random.standard_normal((outputs, inputs))
    scales = np.abs(weight).max(axis=1) / 7
    levels = round_second_order(weight, data.T @ data, scales, 7)
    nearest = np.rint(weight / scales[:, None])
    assert np.abs(levels).max() <= 7

    def loss(integers):
        return np.square((integers * scales[:, None] - weight) @ data.T).sum()

    assert loss(levels) < 0.5 * loss(nearest)


def test_second_order_rounding_without_data_is_the_nearest():
    weight = np.array([[0.4, 1.6, -9.0]])
    assert round_second_order(weight, np.zeros((3, 3)), np.ones(1), 7).tolist() == [[0, 2, -7]]


def test_bias_joins_the_product_and_nothing_else_changes(source):
    model = onnx.shape_inference.infer_shapes(onnx.load(source))
    rewritten = biases_into_products(model)
    kinds = [[node.op_type for node in graph.node] for graph in (model.graph, rewritten.graph)]
    assert kinds[1].count("Gemm") > kinds[0].count("Gemm")
    assert kinds[1].count("MatMul") == 2, "scores and weighted values have no bias"
    onnx.checker.check_model(rewritten, full_check=True)
    for size in (1, 5):
        feed = {"image": images(size, 3).numpy()}
        expected, actual = (session(graph).run(None, feed)[0] for graph in (model, rewritten))
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_product_that_is_used_twice_or_given_out_keeps_its_sum():
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["p"]),
        onnx.helper.make_node("Add", ["p", "b"], ["y"]),
    ]
    constants = {"w": np.eye(3, dtype=np.float32), "b": np.ones(3, np.float32)}
    given_out = _graph(nodes, {"x": [2, 3]}, {"p": [2, 3], "y": [2, 3]}, constants)
    assert [node.op_type for node in biases_into_products(given_out).graph.node] == ["MatMul", "Add"]
    other_bias = _graph(nodes, {"x": [2, 3]}, {"y": [2, 3]}, constants | {"b": np.ones((2, 3), np.float32)})
    assert [node.op_type for node in biases_into_products(other_bias).graph.node] == ["MatMul", "Add"]
    alone = _graph(nodes, {"x": [2, 3]}, {"y": [2, 3]}, constants)
    assert [node.op_type for node in biases_into_products(alone).graph.node] == ["Reshape", "Gemm", "Reshape"]


class LargeScores(nn.Module):
    """Attention whose scores span hundreds, as those of features without normalisation do."""

    def forward(self, x):
        return ((x @ x.transpose(1, 2)).softmax(-1) @ x,)


def test_large_scores_keep_their_resolution(tmp_path):
    specs = [TensorSpec("x", (None, 6, 256))], [TensorSpec("y", (None, 6, 256))]
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(256, generator=generator).sign() * torch.linspace(0.2, 1, 8)[:, None, None]
    batches = [common + 0.1 * torch.randn(8, 6, 256, generator=generator) for _ in range(6)]
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx", tmp_path / "c.onnx"]
    export_onnx(LargeScores().eval(), (batches[0],), files[0], inputs=specs[0], outputs=specs[1])
    feed = [{"x": x.numpy()} for x in batches[:4]]
    report = quantize_onnx(files[0], files[1], feed)
    assert report.precision == "a8w8"
    model = prepare(files[0], tmp_path / "prepared.onnx")
    rounded = insert_qdq(model, calibrate(model, feed), WeightType(signed=True, reduce_range=False), "a8w8")
    onnx.save(rounded, files[2])
    runtimes = [OnnxRuntime(path, *specs, threads=1) for path in files]
    kept, lost = (measure(runtimes[0], other, [[x] for x in batches[4:]])["y"].sqnr_db for other in runtimes[1:])
    assert kept > lost + 3
    assert keep_scores_in_float(rounded) == 1
    producers = {node.output[0]: node.op_type for node in rounded.graph.node}
    assert [producers[node.input[0]] for node in rounded.graph.node if node.op_type == "Softmax"] == ["MatMul"]


@given(
    st.integers(1, 4),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.tuples(*[st.integers(0, 4)] * 4),
    st.tuples(st.integers(4, 9), st.integers(4, 9)),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_stem_on_blocks_gives_the_same_sums(channels, taps, pads, half_size, batch):
    size = [2 * half for half in half_size]
    weight = np.random.default_rng(0).standard_normal((5, channels, *taps)).astype(np.float32)
    nodes = [onnx.helper.make_node("Conv", ["x", "w", "b"], ["y"], name="stem", strides=[2, 2], pads=list(pads))]
    shape = {"x": [None, channels, *size]}
    out = [(size[axis] + pads[axis] + pads[axis + 2] - taps[axis]) // 2 + 1 for axis in range(2)]
    assume(min(out) > 0)
    model = _graph(nodes, shape, {"y": [None, 5, *out]}, {"w": weight, "b": np.arange(5, dtype=np.float32)})
    rewritten = stem_on_blocks(model)
    feed = {"x": np.random.default_rng(1).standard_normal((batch, channels, *size)).astype(np.float32)}
    expected, actual = (session(graph).run(None, feed)[0] for graph in (model, rewritten))
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    event(rewritten.graph.node[0].op_type)


@pytest.mark.parametrize(
    ("shape", "attributes", "changes"),
    [
        ((None, 3, 16, 16), {"strides": [2, 2], "pads": [3, 3, 3, 3]}, True),
        ((None, 3, 15, 16), {"strides": [2, 2], "pads": [3, 3, 3, 3]}, False),
        ((None, 3, 16, 16), {"strides": [1, 1], "pads": [3, 3, 3, 3]}, False),
        ((None, 3, None, 16), {"strides": [2, 2], "pads": [3, 3, 3, 3]}, False),
        ((None, 8, 16, 16), {"strides": [2, 2], "pads": [3, 3, 3, 3]}, False),
    ],
)
def test_only_stems_on_images_are_written_on_blocks(shape, attributes, changes):
    weight = np.ones((4, shape[1], 7, 7), np.float32)
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], name="stem", **attributes)
    model = _graph([node], {"x": list(shape)}, {"y": [None, 4, None, None]}, {"w": weight})
    kinds = [node.op_type for node in stem_on_blocks(model).graph.node]
    assert kinds == (["SpaceToDepth", "Conv"] if changes else ["Conv"])
