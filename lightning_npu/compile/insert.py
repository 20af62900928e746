"""FP32 ONNX to ONNX with quantisation marked on it (QDQ), by ONNX Runtime's quantiser."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from lightning_npu.compile.calibrate import is_mask
from lightning_npu.errors import CompileError

# what an accelerator computes on 8 bits; what is not here stays in float and is counted in the report. Instance norms
# (GroupNorm) are not here: ONNX Runtime's quantiser refuses graphs in which several share a constant scale
OPERATORS = (
    *("Conv", "ConvTranspose", "Gemm", "MatMul"),
    *("Add", "Mul", "Relu", "LeakyRelu", "Clip", "Sigmoid", "Gelu", "Softmax", "LayerNormalization"),
    *("MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "Pad", "Where"),
    *("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split", "Concat", "Gather"),
)


@dataclass(frozen=True)
class WeightType:
    """How weights are stored: symmetric around zero in int8, or around 128 in uint8.

    Attributes:
        signed: int8 instead of uint8.
        reduce_range: 7 of the 8 bits, so that sums in 16 bits do not saturate.
    """

    signed: bool
    reduce_range: bool

    @property
    def largest(self) -> int:
        """Largest magnitude of a stored weight."""
        return 64 if self.reduce_range else 127


def prepare(source: Path, scratch: Path) -> onnx.ModelProto:
    """The graph as quantisation wants it: batch normalisation folded into convolutions, constants folded.

    Args:
        source: the FP32 file.
        scratch: a file that may be written.

    Returns:
        the model, with inferred shapes.

    Raises:
        CompileError: ONNX Runtime cannot optimise the graph.
    """
    from onnxruntime.quantization import quant_pre_process

    try:
        with _quiet():
            quant_pre_process(str(source), str(scratch))
    except Exception as error:  # symbolic shape inference does not know every operator
        try:
            with _quiet():
                quant_pre_process(str(source), str(scratch), skip_symbolic_shape=True)
        except Exception:
            raise CompileError(
                f"The graph cannot be prepared for quantisation: {error}",
                remedy="compile with precision='fp32', or report it with the module's code",
            ) from error
    model = onnx.load(scratch)
    return onnx.shape_inference.infer_shapes(model)


def insert_qdq(
    model: onnx.ModelProto,
    ranges: Mapping[str, tuple[float, float]],
    weights: WeightType,
    precision: str,
    *,
    per_channel: bool = True,
    operators: Sequence[str] = OPERATORS,
) -> onnx.ModelProto:
    """Put QuantizeLinear and DequantizeLinear around what shall compute on integers.

    Nodes that read or write a mask stay in float: its infinities leave no range in which 8 bits could count.

    Args:
        model: FP32, with inferred shapes; not changed.
        ranges: (smallest, largest) per activation.
        weights: how weights are stored.
        precision: "a8w8" or "a16w8".
        per_channel: a scale per output channel of a weight, instead of one for all.
        operators: the operators to quantise.

    Raises:
        CompileError: ONNX Runtime's quantiser fails on the graph.
    """
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
    try:
        with _quiet():
            quantizer = QDQQuantizer(
                copy,
                per_channel=per_channel,
                reduce_range=weights.reduce_range,
                weight_qType=QuantType.QInt8 if weights.signed else QuantType.QUInt8,
                activation_qType=QuantType.QUInt8 if precision == "a8w8" else QuantType.QUInt16,
                tensors_range=data,
                nodes_to_quantize=[],
                nodes_to_exclude=excluded,
                op_types_to_quantize=list(operators),
                extra_options={"WeightSymmetric": True},
            )
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
