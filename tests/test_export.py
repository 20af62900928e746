from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

from lightning_npu.compile.export import IR_VERSION, OPSET, export_onnx
from lightning_npu.errors import CompileError
from lightning_npu.runtimes.onnx import OnnxRuntime
from lightning_npu.tensor_spec import TensorSpec


class Flat(nn.Module):
    """Gives the wrapped module's output as a tuple."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *tensors):
        output = self.inner(*tensors)
        return output if isinstance(output, tuple) else (output,)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def spec(name, *shape, axis=0, dtype="float32"):
    return TensorSpec(name, shape, dtype, batch_axis=axis)


def export(module, example, tmp_path, inputs, outputs, **options):
    return export_onnx(Flat(module).eval(), example, tmp_path / "model.onnx", inputs=inputs, outputs=outputs, **options)


def run(tmp_path, inputs, outputs, *tensors):
    return OnnxRuntime(tmp_path / "model.onnx", inputs, outputs, threads=1).run(tensors)


def small_convolution():
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_dynamic_batch_runs_at_any_size_and_says_so(tmp_path):
    module, inputs, outputs = small_convolution().eval(), [spec("image", None, 3, 16, 16)], [spec("out", None, 8)]
    report = export(module, (torch.rand(1, 3, 16, 16),), tmp_path, inputs, outputs)
    assert report.checked_batches == (1, 2, 3)
    assert report.opset == OPSET
    assert 0 <= report.max_abs_error["out"] < 1e-5
    images = torch.rand(7, 3, 16, 16)
    torch.testing.assert_close(run(tmp_path, inputs, outputs, images)[0], module(images), atol=1e-5, rtol=1e-4)
    model = onnx.load(tmp_path / "model.onnx")
    assert report.node_count == len(model.graph.node)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert model.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    onnx.checker.check_model(model, full_check=True)


def test_static_batch_is_fixed_and_checked_at_itself(tmp_path):
    inputs, outputs = [spec("image", 2, 3, 16, 16)], [spec("out", 2, 8)]
    report = export(small_convolution(), (torch.rand(2, 3, 16, 16),), tmp_path, inputs, outputs)
    assert report.checked_batches == (2,)
    dims = onnx.load(tmp_path / "model.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in dims] == [2, 3, 16, 16]


@pytest.mark.parametrize("layers", [1, 2])
def test_torch_transformer_layers_stay_dynamic_from_an_example_of_one(tmp_path, layers):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    module = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    inputs, outputs = [spec("tokens", None, 5, 16)], [spec("out", None, 5, 16)]
    export(module, (torch.randn(1, 5, 16),), tmp_path, inputs, outputs, check_batches=(1, 4))
    tokens = torch.randn(6, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(run(tmp_path, inputs, outputs, tokens)[0], module(tokens), atol=1e-5, rtol=1e-4)


def test_multihead_attention_with_batch_on_the_second_axis(tmp_path):
    attention = nn.MultiheadAttention(16, 2)
    module = Function(lambda x, key: attention(x, key, key, need_weights=False)[0])
    module.attention = attention
    inputs = [spec("query", 5, None, 16, axis=1), spec("memory", 7, None, 16, axis=1)]
    outputs = [spec("out", 5, None, 16, axis=1)]
    example = (torch.randn(5, 1, 16), torch.randn(7, 1, 16))
    report = export(module, example, tmp_path, inputs, outputs)
    assert report.max_abs_error["out"] < 1e-5


def test_inputs_that_all_samples_share_and_integer_inputs(tmp_path):
    embedding = nn.Embedding(11, 4)
    module = Function(lambda index, shift: (embedding(index) + shift, index + 1))
    module.embedding = embedding
    inputs = [spec("index", None, 3, dtype="int64"), spec("shift", 3, 4, axis=None)]
    outputs = [spec("embedded", None, 3, 4), spec("next", None, 3, dtype="int64")]
    report = export(module, (torch.arange(3)[None], torch.randn(3, 4)), tmp_path, inputs, outputs)
    assert report.max_abs_error["next"] == 0


def test_file_tells_nothing_about_where_it_was_made(tmp_path):
    export(
        small_convolution(), (torch.rand(1, 3, 16, 16),), tmp_path, [spec("x", None, 3, 16, 16)], [spec("y", None, 8)]
    )
    content = (tmp_path / "model.onnx").read_bytes()
    for secret in (b"stack_trace", b".py", b"site-packages", str(tmp_path).encode()):
        assert secret not in content
    model = onnx.load_from_string(content)
    assert model.ir_version == IR_VERSION
    assert model.opset_import[0].version == OPSET
    assert all(node.name for node in model.graph.node)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_module_and_torch_settings_are_left_as_they_were(tmp_path):
    module = Flat(small_convolution())
    module.train()
    module.inner[1].eval()
    modes = [child.training for child in module.modules()]
    statistics = module.inner[1].running_mean.clone()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    export_onnx(
        module,
        (torch.rand(2, 3, 16, 16),),
        tmp_path / "model.onnx",
        inputs=[spec("x", None, 3, 16, 16)],
        outputs=[spec("y", None, 8)],
    )
    assert [child.training for child in module.modules()] == modes
    assert torch.equal(module.inner[1].running_mean, statistics)
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x)


def refuse(module, tmp_path, *, shape=(None, 4, 4), output=(None, 4), example=None):
    example = example if example is not None else torch.randn(2, 4, 4)
    with pytest.raises(CompileError) as caught:
        export(module, (example,), tmp_path, [spec("x", *shape)], [spec("y", *output)])
    assert list(tmp_path.iterdir()) == []
    return str(caught.value)


def test_unsupported_operator_is_named_with_its_place(tmp_path):
    message = refuse(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Spectrum())), tmp_path)
    assert "svd" in message.splitlines()[0]
    assert "'inner.1.1' (Spectrum)" in message
    assert "torch.linalg.svdvals(x)" in message
    assert "cut the module before that place" in message


def test_decision_on_a_value_is_named_with_its_line(tmp_path):
    def decide(x):
        if x.sum() > 0:
            return x
        return -x

    message = refuse(Function(decide), tmp_path, output=(None, 4, 4))
    assert "if x.sum() > 0" in message
    assert "torch.where" in message


def test_module_of_one_batch_size_is_refused_for_a_dynamic_batch(tmp_path):
    message = refuse(Function(lambda x: x.reshape(2, 16)), tmp_path, output=(None, 16))
    assert "one batch size only" in message
    assert "fix the batch size to 2" in message
    assert "static batch" in message


def test_batch_that_the_graph_does_not_follow_is_found(tmp_path):
    message = refuse(Function(lambda x: x.mean(0, keepdim=True)), tmp_path, output=(None, 4, 4))
    assert "output 'y' another shape" in message
    assert "fixed the batch size" in message


def test_random_module_is_refused(tmp_path):
    message = refuse(Function(lambda x: x + torch.rand_like(x)), tmp_path, output=(None, 4, 4))
    assert "computes something else than torch; output 'y'" in message
    assert "randomness" in message
