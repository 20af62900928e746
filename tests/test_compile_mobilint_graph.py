"""The graph for the vendor's compiler: torch's numbers, plain operators, one piece; or refused, with the places."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from act_encoder import ACTConfig, ACTEncoder, act_front
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_npu.compile.flat import FlatModule, tensor_specs
from lightning_npu.compile.mobilint_check import KNOWN_GOOD, module_of
from lightning_npu.compile.mobilint_export import OPSET, MobilintExport, export_for_mobilint
from lightning_npu.compile.mobilint_layout import hwc_shape, to_hwc
from lightning_npu.compile.samples import Samples
from lightning_npu.compile.split import split_module
from lightning_npu.compile.static_graph import StaticGraph
from lightning_npu.compile.undisturbed import undisturbed
from lightning_npu.errors import CompileError
from lightning_npu.tensor_spec import TensorSpec

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def export(module: nn.Module, args: tuple[Tensor, ...], path: Path, **options: object) -> MobilintExport:
    with undisturbed(module, fused_attention=False):
        flat = FlatModule(module, args, {}).eval()
        inputs, outputs = tensor_specs(flat, **options)
        axis = inputs[0].batch_axis or 0
        return export_for_mobilint(flat, inputs, outputs, Samples(inputs, args, args[0].shape[axis]), path)


def assert_plain(path: Path) -> StaticGraph:
    """What the vendor's compiler is given, looked at without the code that checks it."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
    assert {node.op_type for node in model.graph.node} <= KNOWN_GOOD - {"Identity"}
    graph = StaticGraph(model)
    for node in model.graph.node:
        for name in node.output:
            assert len(graph.shapes[name]) <= 4
            assert graph.shapes[name][0] == 1
    for tensor in model.graph.initializer:
        tensor.raw_data = b""
    assert not re.search(rb"\.py|/site-packages|flat.module", model.SerializeToString())
    return graph


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_act_encoders_with_latent_and_state_tokens(pre_norm: bool, activation: str, tmp_path: Path) -> None:
    model = act_front(pre_norm=pre_norm, feedforward_activation=activation)
    args = (torch.rand(5, 3, 32, 32), torch.randn(5, 8), torch.randn(5, 6))
    made = export(model, args, tmp_path / "act.onnx")
    assert made.attentions == 2
    assert max(made.max_abs_error.values()) < 1e-5
    graph = assert_plain(tmp_path / "act.onnx")
    assert graph.shapes["latent"] == (1, 1, 8)
    assert graph.shapes["output"] == (1, 18, 32)
    kinds = [node.op_type for node in graph.nodes]
    # taken apart and stacked one by one in torch: 16 image tokens stay one tensor here
    assert kinds.count("Concat") == 1
    assert "Slice" not in kinds
    assert kinds.count("MatMul") == 2 * (4 + 2 + 2)
    assert made.score_products == (
        "/head/encoder/layers.0/self_attn/MatMul_3",
        "/head/encoder/layers.1/self_attn/MatMul_3",
    )


def test_the_encoder_alone_in_sequence_first_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = ACTEncoder(ACTConfig()).eval()
    tokens, positions = torch.randn(9, 4, 32), torch.randn(9, 1, 32)
    made = export(encoder, (tokens, positions), tmp_path / "encoder.onnx", batch_axis=[1, None])
    graph = assert_plain(tmp_path / "encoder.onnx")
    assert graph.shapes["x"] == graph.shapes["pos_embed"] == graph.shapes["output"] == (1, 9, 32)
    assert made.max_abs_error["output"] < 1e-5
    transposes = [node for node in graph.nodes if node.op_type == "Transpose"]
    assert all(len(list(node.attribute[0].ints)) == 4 for node in transposes), "tokens themselves are never transposed"


def test_the_paper_size_encoder_at_every_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from paper_encoder import FrozenBatchNorm2d, PaperEncoder

    torch.manual_seed(0)
    model = PaperEncoder(4, (64, 64), every_cut=True).eval()
    for module in model.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.running_var.uniform_(0.5, 2)
            module.running_mean.normal_(0, 0.1)
    made = export(model, (torch.rand(2, 3, 64, 64),), tmp_path / "paper.onnx")
    assert made.attentions == 4
    assert list(made.max_abs_error) == [f"output_{level}" for level in range(5)]
    assert max(made.max_abs_error.values()) < 2e-5
    graph = assert_plain(tmp_path / "paper.onnx")
    kinds = [node.op_type for node in graph.nodes]
    assert kinds.count("Softmax") == 4
    assert kinds.count("Conv") == 21  # frozen batch norms are in them
    assert "Gemm" not in kinds  # tokens are not flattened for their projections


class Normalizing(nn.Module):
    def __init__(self, mean: list[float], std: list[float], order: str, channels_last: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])
        self.conv = nn.Conv2d(len(mean), 4, 3, 2, 1)
        self.order, self.channels_last = order, channels_last

    def forward(self, frames: Tensor) -> Tensor:
        x = frames.permute(0, 3, 1, 2) if self.channels_last else frames
        x = x.float()
        if self.order == "unit":
            x = (x / 255 - self.mean) / self.std
        elif self.order == "pixels":
            x = (x - self.mean * 255) * (1 / (self.std * 255))
        else:
            x = x * (1 / (255 * self.std)) + (-self.mean / self.std)
        return self.conv(x)


numbers = st.lists(st.floats(0.0625, 0.9375, width=32), min_size=3, max_size=3)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mean=numbers, std=numbers, order=st.sampled_from(["unit", "pixels", "affine"]), channels_last=st.booleans())
def test_normalisation_of_raw_frames_is_recognised(
    mean: list[float], std: list[float], order: str, channels_last: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    frames = torch.randint(0, 256, (3, 8, 12, 3) if channels_last else (3, 3, 8, 12), dtype=torch.uint8)
    made = export(Normalizing(mean, std, order, channels_last), (frames,), tmp_path / "n.onnx")
    np.testing.assert_allclose(made.pixels["frames"].mean, mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(made.pixels["frames"].std, std, rtol=1e-5)
    assert made.fused
    assert made.inputs[0].layout == ("NHWC" if channels_last else "NCHW")
    assert hwc_shape(made.inputs[0]) == (8, 12, 3)
    graph = assert_plain(tmp_path / "n.onnx")
    assert [node.op_type for node in graph.nodes] == ["Conv"]
    assert graph.shapes["frames"] == (1, 3, 8, 12)


class TwoCameras(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, 2, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.cat([self.conv(x.float() / 127.5 - 1) for x in (left, right)], dim=-1)


def test_with_several_cameras_the_scale_stays_in_the_graph(tmp_path: Path) -> None:
    frames = [torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8) for _ in range(2)]
    made = export(TwoCameras(), tuple(frames), tmp_path / "two.onnx")
    assert not made.fused
    assert made.max_abs_error["output"] < 1e-5
    assert [node.op_type for node in assert_plain(tmp_path / "two.onnx").nodes][:2] == ["Mul", "Add"]


def test_a_sample_in_height_width_channels() -> None:
    images = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    spec = TensorSpec("x", (None, 3, 4, 5), "float32", "NCHW")
    assert hwc_shape(spec) == (4, 5, 3)
    np.testing.assert_array_equal(to_hwc(images, spec, 1), images[1].permute(1, 2, 0).numpy())
    tokens = torch.arange(24).reshape(4, 2, 3)
    spec = TensorSpec("t", (4, None, 3), "float32", "LNC", 1)
    np.testing.assert_array_equal(to_hwc(tokens, spec, 1), tokens[:, 1].numpy()[None])
    spec = TensorSpec("s", (None, 6), "float32", "NC")
    assert hwc_shape(spec) == (1, 1, 6)


# ---- what is refused, and where it is


class Part(nn.Module):
    """Calls what a test wants, in a submodule of a known name."""

    def __init__(self, call: object) -> None:
        super().__init__()
        self.call, self.linear = call, nn.Linear(8, 8)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.linear, *inputs)


class Head(nn.Module):
    def __init__(self, call: object) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Part(call)])

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.blocks[1](*inputs)


TOKENS = torch.randn(2, 5, 8)


@pytest.mark.parametrize(
    ("call", "inputs", "message"),
    [
        (lambda f, x: f(x)[..., x[..., 0].argmax(1)[:1]], (TOKENS,), r"ArgMax in 'blocks\.1'"),
        (lambda f, x: f(x).cumsum(1), (TOKENS,), r"CumSum in 'blocks\.1' .*not in the vendor's list"),
        (lambda f, x: torch.where(x > 0, f(x), x), (TOKENS,), r"Where in 'blocks\.1' .*a choice per element"),
        (lambda f, x: f(x).repeat(1, 2, 1), (TOKENS,), r"(Tile|Expand) in 'blocks\.1' .*a repetition"),
        (
            lambda f, x: nn.functional.conv1d(f(x).reshape(-1, 1, 8), torch.ones(1, 1, 3), padding=1).reshape(x.shape),
            (TOKENS,),
            r"gives \[5, 1, 8\]: expected a batch of one as the first axis",
        ),
        (
            lambda f, x: f(x).reshape(-1, 5, 2, 2, 2).transpose(2, 4).sum((2, 3)),
            (TOKENS,),
            r"gives \[1, 5, 2, 2, 2\]: expected four axes at most",
        ),
        (
            lambda f, x, m: torch.softmax(f(x) @ x.transpose(1, 2) + m[:, None], -1) @ x,
            (TOKENS, torch.randn(2, 5)),
            r"Softmax in 'blocks\.1' .*its mask is computed from input 'inputs_1', and must be constant",
        ),
        (
            lambda f, x, y: (f(x), y * 2),
            (TOKENS, torch.randn(2, 5)),
            r"the graph is in 2 pieces that share nothing; their outputs: ",
        ),
        (
            lambda f, x: (f(x), torch.ones(x.shape[0], 4)),
            (TOKENS,),
            r"output 'output_1' does not depend on any input",
        ),
    ],
)
def test_every_violation_is_named_with_its_module(
    call: object, inputs: tuple[Tensor, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match=message) as caught:
        export(Head(call), inputs, tmp_path / "head.onnx")
    assert "is not known to take this head in one piece" in caught.value.what
    assert "cut='...'" in str(caught.value.remedy)
    assert not list(tmp_path.iterdir())


def test_sizes_that_depend_on_values_are_named_with_their_module(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"Sizes in this head depend(.|\n)*NonZero in 'blocks\.1'") as caught:
        export(Head(lambda f, x: f(x)[x > 0].sum() + x), (TOKENS,), tmp_path / "head.onnx")
    assert "masks or slices" in str(caught.value.remedy)
    assert not list(tmp_path.iterdir())


def test_embeddings_are_refused_before_anything_is_traced(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"takes no int64 input: 'input'(.|\n)*look embeddings up in torch"):
        export(nn.Embedding(4, 8), (torch.tensor([[1], [2]]),), tmp_path / "e.onnx")


def test_a_constant_mask_is_fine(tmp_path: Path) -> None:
    hidden = torch.ones(5, 5).triu(1).bool()

    def call(linear: nn.Module, x: Tensor) -> Tensor:
        x = linear(x)[:, None]
        return nn.functional.scaled_dot_product_attention(x, x, x, ~hidden)[:, 0]

    made = export(Head(call), (TOKENS,), tmp_path / "m.onnx")
    assert made.attentions == 1
    assert made.max_abs_error["output"] < 1e-5
    assert_plain(tmp_path / "m.onnx")


def test_frames_and_numbers_cannot_be_mixed(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def forward(self, frame: Tensor, state: Tensor) -> Tensor:
            return frame.float().mean((2, 3)) + state

    args = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 3)
    with pytest.raises(CompileError, match=r"one dtype for all inputs(.|\n)*frame: uint8, state: float32"):
        export(Mixed(), args, tmp_path / "x.onnx")


def test_names_of_modules_from_names_of_nodes() -> None:
    node = onnx.helper.make_node("Add", ["a"], ["b"], name="/head/encoder/layers/layers.0/self_attn/Add_1")
    assert module_of(node, "/head") == "encoder.layers.0.self_attn"
    assert module_of(onnx.helper.make_node("Add", ["a"], ["b"], name="/head/Add"), "/head") == ""


# ---- token order


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: f(x).reshape(-1, 8)[:, :4].reshape(x.shape[0], 5, 4),
        lambda f, x: f(f(x).reshape(-1, 8).relu()).reshape(x.shape),
        lambda f, x: torch.addmm(f.bias, f(x).reshape(-1, 8), f.weight.T).reshape(x.shape),
        lambda f, x: f(x).reshape(-1, 4, 2).amax(1).softmax(-1).reshape(x.shape[0], 5, 2),
        lambda f, x: torch.cat([f(x).reshape(-1, 8), x.reshape(-1, 8)], 1).reshape(x.shape[0], 5, 16),
    ],
)
def test_what_lost_its_batch_axis_gets_it_back(call: object, tmp_path: Path) -> None:
    made = export(Head(call), (TOKENS,), tmp_path / "l.onnx")
    assert made.max_abs_error["output"] < 1e-5
    assert_plain(tmp_path / "l.onnx")


def test_a_cut_encoder_whose_attention_torch_export_has_taken_apart(tmp_path: Path) -> None:
    """Its tokens are stacked from a list, so the cut goes through torch.export: heads come first, without a batch."""
    args = (torch.rand(3, 3, 32, 32), torch.randn(3, 8), torch.randn(3, 6))
    head, _ = split_module(act_front(), "encoder.layers.1", args)
    made = export(head, args, tmp_path / "cut.onnx")
    assert max(made.max_abs_error.values()) < 1e-5
    assert len(made.score_products) == 2
    graph = assert_plain(tmp_path / "cut.onnx")
    scores = [graph.shapes[node.output[0]] for node in graph.nodes if node.op_type == "Softmax"]
    assert scores == [(1, 4, 18, 18)] * 2
    # one layer earlier the positions, which do not depend on an input, would have to come out of the board
    head, _ = split_module(act_front(), "encoder.layers.0", args)
    with pytest.raises(CompileError, match="does not depend on any input: what is constant, such as positions"):
        export(head, args, tmp_path / "cut.onnx")


class SequenceFirst(nn.Module):
    """Tokens (L, N, 8) all the way, as DETR and ACT have them."""

    def __init__(self, call: object) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("extra", torch.randn(2, 1, 8))
        self.register_buffer("position", torch.randn(7, 1, 8))
        self.call = call

    def forward(self, tokens: Tensor) -> Tensor:
        return self.call(self, tokens)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: m.second(m.norm(m.first(x) + m.position).relu()),
        lambda m, x: m.second(torch.cat([m.extra.expand(-1, x.shape[1], -1), m.first(x)])),
        lambda m, x: m.second(m.first(x)[1:5] * 2),
        lambda m, x: m.second(m.first(x))[0],
        lambda m, x: m.second(m.first(x)).mean(0),
        lambda m, x: m.second(m.first(x).softmax(-1)) * m.first(x)[:1],
        lambda m, x: m.second(m.first(x).permute(1, 2, 0).flip(0).permute(2, 0, 1)),
        lambda m, x: torch.stack(list(m.first(x))[2:6]),
        lambda m, x: torch.stack([*m.first(x)][:2] + [*m.second(x)][4:]),
        lambda m, x: torch.cat(m.first(x).split([3, 4])[::-1]),
        lambda m, x: m.first(x).transpose(0, 1).softmax(1).transpose(0, 1) + m.second(x),
        lambda m, x: m.first(x).permute(1, 0, 2) @ m.second(x).permute(1, 2, 0),
        lambda m, x: (m.first(x), m.norm(x).transpose(0, 1)),
    ],
)
def test_sequence_first_modules_compute_the_same_batch_first(call: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = export(SequenceFirst(call).eval(), (torch.randn(7, 3, 8),), tmp_path / "s.onnx", batch_axis=1)
    assert max(made.max_abs_error.values()) < 1e-5
    graph = assert_plain(tmp_path / "s.onnx")
    assert graph.shapes["tokens"] == (1, 7, 8)
