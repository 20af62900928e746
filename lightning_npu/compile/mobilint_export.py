"""A head as Mobilint's compiler wants it: ONNX opset 17, a batch of one, attention in plain operators, one piece."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from lightning_npu.compile.attention import ExplicitAttention
from lightning_npu.compile.export_check import RELATIVE_TOLERANCE
from lightning_npu.compile.flat import FlatModule
from lightning_npu.compile.mobilint_check import check_graph, check_sizes, score_products
from lightning_npu.compile.mobilint_layout import (
    Array,
    PixelScale,
    graph_shape,
    hwc_shape,
    put_pixel_scale,
    sample_shape,
    take_pixel_scale,
    to_hwc,
)
from lightning_npu.compile.quiet import quiet
from lightning_npu.compile.samples import Samples
from lightning_npu.compile.static_graph import StaticGraph, fold, simplify
from lightning_npu.errors import CompileError
from lightning_npu.tensor_spec import TensorSpec

OPSET = 17  # what the vendor's tutorials export with
PREFIX = "/head"  # of what is inside the user's module, in names of nodes and tensors
_TRACED = "/flat/module"
_CHECKED = 3


@dataclass(frozen=True)
class MobilintExport:
    """What was exported for the compiler.

    Attributes:
        max_abs_error: per output, the largest absolute difference between the file by ONNX Runtime FP32 and the
            module by torch, over a few real samples.
        attentions: how many attentions were written out.
        score_products: names of the products of queries and keys.
        node_counts: nodes of the file, per operator.
        pixels: per uint8 input, what the head does to raw pixels first; that part is not in the file, but for what
            ``fused`` says.
        inputs: what the head takes, with the layout "NHWC" where its first operator moves the channels.
        fused: whether mean and standard deviation are left to the compiler; else they are the first operators of
            the file, which then takes pixels in 0 .. 1.
    """

    max_abs_error: dict[str, float]
    attentions: int
    score_products: tuple[str, ...]
    node_counts: dict[str, int]
    pixels: dict[str, PixelScale]
    inputs: tuple[TensorSpec, ...]
    fused: bool


class _OneSample(nn.Module):
    """The head on one sample in the layouts of :func:`graph_shape`; with a batch of one these are reshapes."""

    def __init__(self, flat: FlatModule, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        super().__init__()
        self.flat, self.inputs, self.outputs = flat, tuple(inputs), tuple(outputs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = [tensor.reshape(single_shape(spec)) for tensor, spec in zip(tensors, self.inputs, strict=True)]
        results = self.flat(*given)
        return tuple(tensor.reshape(_traced_shape(spec)) for tensor, spec in zip(results, self.outputs, strict=True))


def single_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape that the head itself takes or gives for one sample."""
    return tuple(1 if axis == spec.batch_axis or size is None else int(size) for axis, size in enumerate(spec.shape))


def _traced_shape(spec: TensorSpec) -> tuple[int, ...]:
    """As :func:`graph_shape`; but channels stay where the head has them."""
    shape = sample_shape(spec)
    return (1, *shape) if len(shape) == 3 else graph_shape(spec)


def export_for_mobilint(
    flat: FlatModule, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], samples: Samples, path: Path
) -> MobilintExport:
    """Write the head as one ONNX file for the compiler, checked against its rules and against torch.

    Args:
        flat: the head, in eval mode, without fused attention kernels.
        inputs: what it takes; float32 or uint8.
        outputs: what it gives.
        samples: real inputs, to compare with.
        path: the file to write; appears only once it was checked.

    Raises:
        CompileError: the head cannot be traced, has inputs or operators that the NPU has no place for, or the file
            computes something else.
    """
    _check_specs(inputs, outputs)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        traced = Path(scratch) / "traced.onnx"
        attentions = _trace(flat, inputs, outputs, samples, traced)
        graph = _plain(traced, Path(scratch) / "folded.onnx")
        pixels = {spec.name: take_pixel_scale(graph, spec) for spec in inputs if spec.dtype == "uint8"}
        inputs = [
            replace(spec, layout="NHWC") if spec.name in pixels and pixels[spec.name].channels_last else spec
            for spec in inputs
        ]
        fused = len(inputs) == 1  # how the compiler's preprocessing picks one of several inputs is not documented
        if not fused:
            for name, scale in pixels.items():
                put_pixel_scale(graph, name, scale)
        check_graph(graph, prefix=PREFIX)
        checked = Path(scratch) / path.name
        onnx.checker.check_model(graph.model, full_check=True)
        onnx.save(graph.model, checked)
        errors = _compare(flat, inputs, outputs, samples, checked, pixels, fused)
        checked.replace(path)
    counts: dict[str, int] = {}
    for node in graph.nodes:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return MobilintExport(errors, attentions, tuple(score_products(graph)), counts, pixels, tuple(inputs), fused)


def graph_input(tensor: Tensor, spec: TensorSpec, index: int, pixels: PixelScale | None, fused: bool) -> Array:
    """Sample ``index`` as the exported file takes it: float32, in the shape of :func:`graph_shape`."""
    hwc = to_hwc(tensor, spec, index).astype(np.float32)
    if pixels is not None:
        hwc = (hwc / 255).astype(np.float32)
        if fused:
            hwc = ((hwc - np.array(pixels.mean)) / np.array(pixels.std)).astype(np.float32)
    chw = hwc.transpose(2, 0, 1) if len(sample_shape(spec)) == 3 else hwc
    return np.ascontiguousarray(chw.reshape(graph_shape(spec)))


def _check_specs(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    for kind, specs, allowed in (("input", inputs, ("float32", "uint8")), ("output", outputs, ("float32",))):
        for spec in specs:
            hwc_shape(spec)
            if spec.dtype not in allowed:
                raise CompileError(
                    f"The NPU takes no {spec.dtype} {kind}: '{spec.name}'.",
                    expected=" or ".join(allowed),
                    got=f"{spec.dtype} {spec.describe_shape()}",
                    remedy="look embeddings up in torch and feed their vectors; make masks and positions buffers of "
                    "the head",
                )
            if spec.dtype == "uint8" and len(sample_shape(spec)) != 3:
                raise CompileError(
                    f"The uint8 input '{spec.name}' is no image.", expected="(N, C, H, W)", got=spec.describe_shape()
                )
    if len({spec.dtype for spec in inputs}) > 1:
        raise CompileError(
            "The vendor's runtime takes one dtype for all inputs of a model.",
            expected="float32 for all, or uint8 images alone",
            got=", ".join(f"{spec.name}: {spec.dtype}" for spec in inputs),
            remedy="normalise the images before the head, or cut so that images and tokens enter different parts",
        )


def _trace(
    flat: FlatModule, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], samples: Samples, path: Path
) -> int:
    """Trace one sample by the exporter that the vendor's tutorials use; gives the number of attentions."""
    first = samples.part(0, 1).tensors
    device = flat.example[0].device
    example = tuple(tensor.reshape(_traced_shape(spec)).to(device) for tensor, spec in zip(first, inputs, strict=True))
    explicit = ExplicitAttention()
    try:
        with torch.no_grad(), explicit, quiet(), warnings.catch_warnings():
            # it warns of every size that it fixes, which is what is wanted here
            warnings.simplefilter("ignore", Warning)
            torch.onnx.export(
                _OneSample(flat, inputs, outputs).eval(),
                example,
                str(path),
                dynamo=False,
                opset_version=OPSET,
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in outputs],
            )
    except CompileError:
        raise
    except Exception as error:  # torch's exporters raise many kinds without a common base
        raise CompileError(
            f"The head cannot be traced for Mobilint's compiler: {str(error).strip().splitlines()[0]}",
            expected=f"operators that ONNX opset {OPSET} has, and no decisions on tensor values",
            remedy="cut the head before that place, or rewrite it with plain operators",
        ) from error
    return explicit.count


def _plain(traced: Path, scratch: Path) -> StaticGraph:
    """The traced graph, folded and simplified."""
    try:
        folded = _clean(fold(traced, scratch))
        check_sizes(StaticGraph(folded), prefix=PREFIX)
        return StaticGraph(simplify(folded))
    except CompileError:
        raise
    except Exception as error:  # ONNX Runtime and ONNX have no common base for what they raise
        raise CompileError(
            f"The traced head cannot be simplified for Mobilint's compiler: {str(error).strip().splitlines()[0]}",
            remedy="cut the head elsewhere, or report it with the module's code",
        ) from error


def _clean(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove what would tell local paths or code, and name what is in the head so."""
    model.ir_version = 8  # that of opset 17
    model.producer_name, model.producer_version, model.doc_string = "lightning-npu", "", ""
    for thing in (model, model.graph, *model.graph.node):
        thing.doc_string = ""
        if hasattr(thing, "metadata_props"):  # nodes have them since onnx 1.16
            del thing.metadata_props[:]
    for node in model.graph.node:
        node.name = _named(node.name)
        node.input[:] = [_named(name) for name in node.input]
        node.output[:] = [_named(name) for name in node.output]
    for tensor in model.graph.initializer:
        tensor.name = _named(tensor.name)
    return model


def _named(name: str) -> str:
    return name.replace(_TRACED, PREFIX).replace(_TRACED[1:].replace("/", "."), PREFIX[1:])


def _compare(
    flat: FlatModule,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    samples: Samples,
    path: Path,
    pixels: dict[str, PixelScale],
    fused: bool,
) -> dict[str, float]:
    """The largest absolute difference per output between the file and torch, on single samples spread over all."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    errors = {spec.name: 0.0 for spec in outputs}
    few = samples.spread(min(_CHECKED, samples.count))
    for index in range(few.count):
        feeds = {
            spec.name: graph_input(tensor, spec, index, pixels.get(spec.name), fused)
            for spec, tensor in zip(inputs, few.tensors, strict=True)
        }
        with torch.no_grad():
            one = [
                tensor if spec.batch_axis is None else tensor.narrow(spec.batch_axis, index, 1)
                for spec, tensor in zip(inputs, few.tensors, strict=True)
            ]
            wanted = [tensor.cpu() for tensor in flat(*(tensor.to(flat.example[0].device) for tensor in one))]
        results = session.run([spec.name for spec in outputs], feeds)
        for spec, expected, result in zip(outputs, wanted, results, strict=True):
            reference = expected.reshape(_traced_shape(spec)).double().numpy()
            error = float(np.abs(reference - result).max())
            limit = RELATIVE_TOLERANCE * max(float(np.abs(reference).max()), 1e-6)
            if not error <= limit:
                raise CompileError(
                    f"The file for Mobilint's compiler computes something else than torch; output '{spec.name}'.",
                    expected=f"a difference of {limit:.3g} or less",
                    got=f"{error:.3g}",
                    remedy="look for randomness and for state that changes between calls; else report it with the "
                    "module's code",
                )
            errors[spec.name] = max(errors[spec.name], error)
    return errors
