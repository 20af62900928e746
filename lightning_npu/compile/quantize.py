"""FP32 ONNX to static INT8 in QDQ form, by a recipe that fits the processor."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from lightning_npu.compile.calibrate import calibrate, is_mask
from lightning_npu.compile.qdq import QuantizedGraph
from lightning_npu.compile.ranges import least_error_ranges
from lightning_npu.compile.rounding import WeightRounding
from lightning_npu.errors import CompileError
from lightning_npu.runtimes.cpu import exact_u8s8
from lightning_npu.runtimes.cpu import instruction_set as this_instruction_set

RECIPES = ("faithful", "fast")
PRECISIONS = ("a8w8", "a16w8")

# what an accelerator computes on 8 bits; what is not here stays in float and is counted in the report
_OPERATORS = (
    *("Conv", "ConvTranspose", "Gemm", "MatMul"),
    *("Add", "Mul", "Relu", "LeakyRelu", "Clip", "Sigmoid", "Gelu", "Softmax", "LayerNormalization"),
    *("InstanceNormalization", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "Pad", "Where"),
    *("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split", "Concat", "Gather"),
)


@dataclass(frozen=True)
class QuantizationReport:
    """How a file was quantised and what it became.

    Attributes:
        recipe: "faithful" or "fast".
        precision: what the graph is: "a8w8", "a16w8", "mixed" or "fp32"; read from the graph, not from the wish.
        weight_type: "int8" or "uint8" (zero point 128).
        activation_type: "uint8" or "uint16".
        per_channel: whether every output channel of a weight has a scale of its own.
        reduce_range: whether weights use 7 of their 8 bits, so that sums in 16 bits do not saturate.
        calibration: how activation ranges were found.
        calibration_batches: batches that were read.
        float_nodes: per operator, nodes left in float.
        node_counts: per operator, nodes of the file.
        instruction_set: the instruction set that the recipe was chosen for.
        remedies: what was done for fidelity, in words.
        tools: versions of the packages that did it.
    """

    recipe: str
    precision: str
    weight_type: str
    activation_type: str
    per_channel: bool
    reduce_range: bool
    calibration: str
    calibration_batches: int
    float_nodes: Mapping[str, int]
    node_counts: Mapping[str, int]
    instruction_set: str
    remedies: tuple[str, ...]
    tools: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready primitives."""
        return {**asdict(self), "remedies": list(self.remedies)}


@dataclass(frozen=True)
class _Weights:
    signed: bool
    reduce_range: bool


def _weights(recipe: str, instruction_set: str) -> _Weights:
    """The weight type with which this processor computes what the recipe promises.

    Where sums of products saturate at 16 bits, signed weights are either wrong or cut to 7 bits: faithful takes
    unsigned weights, which are exact and slower; fast takes the 7 bits. Elsewhere signed weights are both.
    """
    if exact_u8s8(instruction_set):
        return _Weights(signed=True, reduce_range=False)
    if recipe == "faithful":
        return _Weights(signed=False, reduce_range=False)
    return _Weights(signed=True, reduce_range=True)


def quantize_onnx(
    source: Path,
    target: Path,
    calibration: Iterable[Mapping[str, np.ndarray]],
    *,
    recipe: str = "faithful",
    precision: str = "a8w8",
    instruction_set: str | None = None,
) -> QuantizationReport:
    """Quantise an FP32 ONNX file with real data.

    Args:
        source: the FP32 file.
        target: the file to write; appears only when it is complete.
        calibration: per batch, an array per input; kept in memory, as it is read several times.
        recipe: "faithful": the numerics of an INT8 accelerator, executed exactly on the processor; "fast": the
            fastest INT8 of the processor.
        precision: "a8w8", or "a16w8" for activations in 16 bits.
        instruction_set: the processor to quantise for, as ``runtimes.cpu.instruction_set`` names it; default: this
            machine's.

    Raises:
        CompileError: unknown recipe or precision; no calibration data; data or activations that are NaN; a graph that
            cannot be quantised.
    """
    for option, value, allowed in (("recipe", recipe, RECIPES), ("precision", precision, PRECISIONS)):
        if value not in allowed:
            raise CompileError(f"There is no {option} '{value}'.", expected=f"one of {list(allowed)}", got=repr(value))
    instruction_set = instruction_set or this_instruction_set()
    weights = _weights(recipe, instruction_set)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch, _quiet():
        model = _prepare(source, Path(scratch) / "prepared.onnx")
        batches = list(calibration)
        extremes = calibrate(model, batches)
        ranges = least_error_ranges(model, batches, extremes, levels=256 if precision == "a8w8" else 65536)
        rounding = WeightRounding(model)
        rounding.observe(batches)
        quantized = _quantize(model, ranges, weights, precision)
        rounded = rounding.apply(quantized, largest=64 if weights.reduce_range else 127)
        complete = Path(scratch) / target.name
        onnx.save(quantized, complete)
        complete.replace(target)
    graph = QuantizedGraph(quantized)
    return QuantizationReport(
        recipe=recipe,
        precision=graph.precision,
        weight_type="int8" if weights.signed else "uint8",
        activation_type="uint8" if precision == "a8w8" else "uint16",
        per_channel=True,
        reduce_range=weights.reduce_range,
        calibration="least squared error",
        calibration_batches=len(batches),
        float_nodes=graph.float_nodes,
        node_counts=graph.node_counts,
        instruction_set=instruction_set,
        remedies=(
            "activation ranges of least squared error",
            f"weights of {rounded} convolutions rounded by second order",
        ),
        tools=_tools(),
    )


def _prepare(source: Path, scratch: Path) -> onnx.ModelProto:
    """Batch normalisation folded into convolutions, constants folded, shapes inferred."""
    from onnxruntime.quantization import quant_pre_process

    try:
        quant_pre_process(str(source), str(scratch))
    except Exception as error:  # symbolic shape inference does not know every operator
        try:
            quant_pre_process(str(source), str(scratch), skip_symbolic_shape=True)
        except Exception:
            raise CompileError(
                f"The graph cannot be prepared for quantisation: {error}",
                remedy="compile with precision='fp32', or report it with the module's code",
            ) from error
    model = onnx.load(scratch)
    return onnx.shape_inference.infer_shapes(model)


def _quantize(
    model: onnx.ModelProto, ranges: Mapping[str, tuple[float, float]], weights: _Weights, precision: str
) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.calibrate import TensorData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    masks = {name for name, extremes in ranges.items() if is_mask(extremes)}
    data = {
        name: TensorData(lowest=np.float32(low), highest=np.float32(high))
        for name, (low, high) in ranges.items()
        if name not in masks
    }
    excluded = [node.name for node in model.graph.node if masks.intersection((*node.input, *node.output))]
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    quantizer = QDQQuantizer(
        copy,
        per_channel=True,
        reduce_range=weights.reduce_range,
        weight_qType=QuantType.QInt8 if weights.signed else QuantType.QUInt8,
        activation_qType=QuantType.QUInt8 if precision == "a8w8" else QuantType.QUInt16,
        tensors_range=data,
        nodes_to_quantize=[],
        nodes_to_exclude=excluded,
        op_types_to_quantize=list(_OPERATORS),
        extra_options={"WeightSymmetric": True},
    )
    try:
        quantizer.quantize_model()
    except Exception as error:  # the quantizer asserts and raises many kinds
        raise CompileError(
            f"The graph cannot be quantised: {error}",
            remedy="compile with precision='fp32', or report it with the module's code",
        ) from error
    quantized: onnx.ModelProto = quantizer.model.model
    return quantized


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the notes that the quantiser logs at the root logger about its own steps."""
    root = logging.getLogger()
    hold = _Hold()
    root.addFilter(hold)
    try:
        yield
    finally:
        root.removeFilter(hold)


class _Hold(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "onnxruntime" not in record.pathname.split("/") or record.levelno >= logging.ERROR


def _tools() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("onnx", "onnxruntime", "numpy")}
