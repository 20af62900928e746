"""Layers inside an INT8 artifact: exposed, trained and saved as integers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import lightning_npu as npu
from lightning_npu.errors import ArtifactError, InputError
from lightning_npu.forward_gradient import FixedPoint, ForwardGradient, GraphWeights, graph_edit

LAYERS = ["classifier.weight", "classifier.bias"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, 2, 1)
        self.tokens = nn.Linear(8, 12)
        self.classifier = nn.Linear(16 * 12, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.conv(image)).flatten(2).transpose(1, 2)
        return self.classifier(torch.relu(self.tokens(x)).flatten(1))


def images(count: int = 64, seed: int = 0) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> npu.Artifact:
    torch.manual_seed(0)
    net = Net().eval().requires_grad_(False)
    folder = tmp_path_factory.mktemp("graph")
    return npu.compile_module(net, (images(4),), calibration=[images()], output=folder / "net.npu", min_sqnr_db=None)


def compile_net(net: Net, path: Path) -> npu.Artifact:
    net.eval().requires_grad_(False)
    return npu.compile_module(net, (images(4),), calibration=[images()], output=path, min_sqnr_db=None)


def with_plain_stem() -> Net:
    """Of stride 1: such a convolution is not rearranged for blocks of pixels."""
    torch.manual_seed(0)
    net = Net()
    net.conv, net.classifier = nn.Conv2d(1, 8, 3), nn.Linear(36 * 12, 4)
    return net


@pytest.fixture(scope="module")
def plain_stem(tmp_path_factory: pytest.TempPathFactory) -> npu.Artifact:
    return compile_net(with_plain_stem(), tmp_path_factory.mktemp("plain") / "net.npu")


@pytest.fixture(scope="module")
def expected(artifact: npu.Artifact) -> Tensor:
    frozen = npu.NPUFrozenModule(artifact)
    outputs: Tensor = frozen(images())
    frozen.close()  # threads must not outlive a test
    return outputs


def labels() -> Tensor:
    return (images().flatten(1) @ torch.randn(64, 4, generator=torch.Generator().manual_seed(1))).argmax(1)


def test_it_says_what_can_be_trained(artifact: npu.Artifact, plain_stem: npu.Artifact) -> None:
    shapes = GraphWeights.trainable(artifact.path)
    layers = ("conv", "tokens", "classifier")
    names = {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    assert set(shapes) == names - {"conv.weight"}, "a stem in blocks of pixels could not be saved"
    assert shapes["classifier.weight"] == (4, 192)
    assert set(GraphWeights.trainable(plain_stem)) == names
    with pytest.raises(
        InputError, match=r"could not be saved(.|\n)*\[8, 4, 2, 2\](.|\n)*\[8, 1, 3, 3\](.|\n)*trainable"
    ):
        GraphWeights(artifact, ["conv.weight"])


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("layers", [LAYERS, ["conv.bias"], ["tokens.weight"]], ids=lambda n: n[0])
def test_untrained_it_computes_what_the_artifact_does(
    bits: int, layers: list[str], artifact: npu.Artifact, expected: Tensor
) -> None:
    weights = GraphWeights(artifact, layers, weight_bits=bits, wide_outputs=False)
    if bits == 8:  # integers in, integers out: nothing may differ
        assert torch.equal(weights(images()), expected)
    else:  # the product is summed in float, and may round to the next step of the following activation
        assert (weights(images()) - expected).abs().max() < 0.05 * expected.abs().max()
    assert [name for name, _ in weights.named_parameters()] == layers
    kinds = {name: p.dtype for name, p in weights.named_parameters()}
    narrow = torch.int8 if bits == 8 else torch.int16
    assert all(kind == (torch.int32 if name.endswith("bias") else narrow) for name, kind in kinds.items())


def test_wide_outputs_are_not_rounded(artifact: npu.Artifact, expected: Tensor) -> None:
    weights = GraphWeights(artifact, LAYERS)
    wide = weights(images())
    assert len(weights(images(512, seed=1)).unique()) > 256
    assert (wide - expected).abs().max() < 0.01 * expected.abs().max()


def test_products_stay_in_integers(artifact: npu.Artifact, tmp_path: Path) -> None:
    """No float weights, and the kernels that run are those of the artifact."""
    import onnxruntime

    model = onnx.load(artifact.file("model"))
    layers = graph_edit.layers_of(model)
    chosen = [layers["classifier.weight"], layers["conv.weight"]]
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "o.onnx"), 3
    edited = graph_edit.with_inputs(graph_edit.leave_outputs_wide(model, chosen), chosen, bits=8, headroom=0)
    onnxruntime.InferenceSession(edited.SerializeToString(), options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "o.onnx").graph.node]
    assert kinds.count("QLinearConv") == 1
    assert kinds.count("QGemm") == 2
    assert not {"Conv", "Gemm", "MatMul"} & set(kinds)


@pytest.mark.parametrize("bits", [8, 16])
def test_training_inside_the_graph_and_saving(bits: int, artifact: npu.Artifact, tmp_path: Path) -> None:
    weights = GraphWeights(artifact, [*LAYERS, "tokens.weight"], weight_bits=bits)
    x, y = images(), labels()
    optimizer = ForwardGradient(
        weights.parameters(), 0.01, eps=0.01, m=4, estimator="normalized",
        fixed_point=FixedPoint(bits, rounding="error_feedback"),
    )  # fmt: skip
    losses = [float(optimizer.step(lambda: nn.functional.cross_entropy(weights(x), y))) for _ in range(150)]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert not any(p.is_floating_point() for p in weights.parameters())
    assert all(p.abs().max() <= p.grid.upper for p in weights.parameters())  # type: ignore[attr-defined]

    saved = weights.save(tmp_path / "adapted.npu")
    assert saved.fingerprint != artifact.fingerprint
    assert saved.precision == ("a8w8" if bits == 8 else "mixed")
    assert saved.manifest["source"]["adapted_from"] == artifact.fingerprint
    assert f"in {bits} bits" in saved.manifest["recipe"]["remedies"][-1]
    changed = {
        name
        for name, value in saved.manifest["source"]["state"].items()
        if value != artifact.manifest["source"]["state"][name]
    }
    assert changed == {*LAYERS, "tokens.weight"}
    assert saved.fidelity["output"].sqnr_db > 15
    frozen = npu.NPUFrozenModule(saved)
    assert torch.equal(frozen(x), weights(x))
    frozen.close()
    with pytest.raises(ArtifactError, match="exists already"):
        weights.save(tmp_path / "adapted.npu")
    weights.save(tmp_path / "adapted.npu", overwrite=True)
    again = GraphWeights(saved, [*LAYERS, "tokens.weight"], weight_bits=bits)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), weights.parameters(), strict=True))
    assert torch.equal(again(x), weights(x)), "what was saved can be trained on, from where it was left"
    twice = npu.NPUFrozenModule(again.save(tmp_path / "twice.npu"))
    assert torch.equal(twice(x), weights(x))
    twice.close()
    if bits == 16:
        with pytest.raises(InputError, match=r"holds weights in 16 bits(.|\n)*'tokens.weight'(.|\n)*weight_bits=16"):
            GraphWeights(saved, [*LAYERS, "tokens.weight"])
        assert torch.equal(GraphWeights(saved, "classifier.bias")(x), weights(x)), "biases have one form"


def test_weights_of_graphs_for_processors_without_vnni_are_unsigned_inside(tmp_path: Path) -> None:
    from lightning_npu.compile import quantize

    torch.manual_seed(0)
    net = Net().eval().requires_grad_(False)
    made = npu.compile_module(net, (images(4),), calibration=[images()], output=tmp_path / "fp32.npu", precision="fp32")
    for recipe, kind, bound in (("faithful", onnx.TensorProto.UINT8, 127), ("fast", onnx.TensorProto.INT8, 63)):
        report = quantize.quantize_onnx(
            made.file("model"), tmp_path / f"{recipe}.onnx", [{"image": images(16).numpy()}], recipe=recipe,
            instruction_set="x86_64-avx2",
        )  # fmt: skip
        model = onnx.load(tmp_path / f"{recipe}.onnx")
        layer = graph_edit.layers_of(model, narrow=report.reduce_range)["classifier.weight"]
        assert (layer.grid.lower, layer.grid.upper) == (-bound, bound)
        assert abs(layer.values).max() <= bound
        edited = graph_edit.with_inputs(model, [layer], bits=8, headroom=0)
        assert edited.graph.input[-1].type.tensor_type.elem_type == kind
        same = graph_edit.with_values(model, [layer], {layer.name: layer.values + layer.zero_point}, bits=8, headroom=0)
        assert same.SerializeToString() == model.SerializeToString() or abs(layer.values).max() == bound


def test_copies_pickles_and_checkpoints(artifact: npu.Artifact, tmp_path: Path) -> None:
    weights = GraphWeights(artifact, LAYERS)
    before = weights(images())
    with torch.no_grad():
        weights.get_parameter("classifier.weight").add_(1).clamp_(-127, 127)
    changed = weights(images())
    assert not torch.equal(before, changed)
    for other in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        assert torch.equal(other(images()), changed)
    torch.save(weights.state_dict(), tmp_path / "w.pt")
    fresh = GraphWeights(artifact, LAYERS)
    fresh.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
    assert torch.equal(fresh(images()), changed)
    weights.close()
    assert torch.equal(weights(images()), changed)


def test_state_dicts_of_other_integers_are_refused(artifact: npu.Artifact, plain_stem: npu.Artifact) -> None:
    layers = ["conv.bias", "tokens.weight"]
    narrow = GraphWeights(artifact, layers)
    for other, words in (
        (GraphWeights(artifact, layers, weight_bits=16), r"another width for 'tokens.weight'(.|\n)*int8(.|\n)*int16"),
        (GraphWeights(plain_stem, layers), r"another grid for(.|\n)*the scales of this artifact(.|\n)*saved with"),
    ):
        holder, source = nn.Sequential(narrow), nn.Sequential(other)
        before = narrow(images())
        with pytest.raises(InputError, match=words):
            holder.load_state_dict(source.state_dict())
        assert torch.equal(narrow(images()), before)
    beyond = narrow.state_dict()
    beyond["tokens.weight"] = torch.full_like(beyond["tokens.weight"], -128)
    with pytest.raises(InputError, match=r"beyond the grid(.|\n)*-127 to 127"):
        narrow.load_state_dict(beyond)


def test_assigned_integers_keep_their_grid(artifact: npu.Artifact) -> None:
    trained, fresh = GraphWeights(artifact, LAYERS), GraphWeights(artifact, LAYERS)
    with torch.no_grad():
        trained.get_parameter("classifier.weight").mul_(-1)
    nn.Sequential(fresh).load_state_dict(nn.Sequential(trained).state_dict(), assign=True)
    assert torch.equal(fresh(images()), trained(images()))
    optimizer = ForwardGradient(fresh.parameters(), 0.01, fixed_point=FixedPoint(8, rounding="error_feedback"))
    optimizer.step(lambda: fresh(images()).square().mean())


@pytest.mark.parametrize("dead", [[3], list(range(8))], ids=["one channel", "all"])
def test_channels_of_zeros_get_steps_of_a_useful_size(dead: list[int], tmp_path: Path) -> None:
    """The quantiser knows no scale for them and writes 1.0: a probe would move them by a whole 1.0."""
    net = with_plain_stem()
    with torch.no_grad():
        net.conv.weight[dead] = 0
        net.conv.bias[dead] = 0.3
    made = compile_net(net, tmp_path / "dead.npu")
    frozen = npu.NPUFrozenModule(made)
    weights = GraphWeights(made, ["conv.weight", "conv.bias"], wide_outputs=False)
    assert (weights(images()) - frozen(images())).abs().max() < 0.02 * frozen(images()).abs().max()
    frozen.close()
    parameter: Any = weights.get_parameter("conv.weight")
    assert parameter.grid.scale.max() < 0.05
    assert len(parameter.grid.scale[dead].unique()) == 1
    before = parameter.grid.dequantize(parameter)
    optimizer = ForwardGradient([parameter], 0.01, eps=0.02, fixed_point=FixedPoint(8))
    moved: list[Tensor] = []
    optimizer.step(
        lambda: (
            moved.append(parameter.grid.dequantize(parameter) - before)  # type: ignore[func-returns-value]
            or nn.functional.cross_entropy(weights(images()), labels())
        )
    )
    assert 0 < moved[0][dead].abs().max() < 0.15  # 4 standard deviations of eps, and rounding
    saved = weights.save(tmp_path / "saved.npu")
    frozen = npu.NPUFrozenModule(saved)
    assert torch.equal(frozen(images()), weights(images()))
    frozen.close()
    again: Any = GraphWeights(saved, "conv.weight").get_parameter("conv.weight")
    assert torch.equal(again, parameter)


def test_inputs_that_require_grad_are_not_detached_without_a_word(artifact: npu.Artifact) -> None:
    weights, x = GraphWeights(artifact, LAYERS), images(2).requires_grad_()
    with pytest.raises(InputError, match=r"'image' requires grad(.|\n)*no backward pass(.|\n)*detach\(\)"):
        weights(x)
    with torch.no_grad():
        assert torch.equal(weights(x), weights(x.detach()))


def test_what_cannot_be_is_refused(artifact: npu.Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, dict[str, Any], str]] = [
        (["head.weight"], {}, r"no such integer weights(.|\n)*classifier.weight(.|\n)*trainable"),
        ([], {}, "choice of layers is wrong"),
        ([*LAYERS, LAYERS[0]], {}, "choice of layers is wrong"),
        (LAYERS, {"weight_bits": 4}, "weight_bits is wrong"),
        (LAYERS, {"headroom": 9}, "headroom is wrong"),
    ]
    for layers, options, words in calls:
        with pytest.raises(InputError, match=words):
            GraphWeights(artifact, layers, **options)
    with pytest.raises(InputError, match="wrong shape"):
        GraphWeights(artifact, LAYERS)(torch.zeros(2, 3, 8, 8))
    monkeypatch.setattr(type(artifact), "target", "mobilint")
    with pytest.raises(ArtifactError, match=r"compiled in(.|\n)*gradient='forward'"):
        GraphWeights(artifact, LAYERS)


def test_an_artifact_with_a_fixed_batch_wants_whole_batches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = npu.compile_module(
        Net().eval().requires_grad_(False), (images(4),), calibration=[images()], output=tmp_path / "fixed.npu",
        batch_size=8, min_sqnr_db=None,
    )  # fmt: skip
    weights = GraphWeights(made, LAYERS)
    assert weights(images(8)).shape == (8, 4)
    with pytest.raises(InputError, match="another number of samples"):
        weights(images(4))
    assert weights.save(tmp_path / "saved.npu").inputs == made.inputs
