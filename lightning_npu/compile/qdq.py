"""What a quantised ONNX graph really does: which operators compute on 8 bits, which are left in float."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import onnx

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
# operators that multiply activations with weights or with one another: nearly all of a network's arithmetic
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "LSTM", "GRU", "RNN", "Attention"})
_BITS = {
    onnx.TensorProto.UINT8: 8,
    onnx.TensorProto.INT8: 8,
    onnx.TensorProto.UINT16: 16,
    onnx.TensorProto.INT16: 16,
    onnx.TensorProto.INT32: 32,
}


class QuantizedGraph:
    """Reads a QDQ graph.

    Args:
        model: a model in which DequantizeLinear nodes mark what is quantised.

    Attributes:
        node_counts: nodes per operator.
        float_nodes: per operator, the nodes that compute on float tensors which no DequantizeLinear gives.
        precision: "a8w8" or "a16w8" where every product takes both factors so, "fp32" where no product is quantised,
            else "mixed".
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        model = onnx.shape_inference.infer_shapes(model)
        graph = model.graph
        self._constants = {constant.name: constant.data_type for constant in graph.initializer}
        self._types: dict[str, int] = {
            value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)
        }
        self._dequantized = {node.output[0]: node for node in graph.node if node.op_type == DEQUANTIZE}
        self.node_counts: Mapping[str, int] = dict(Counter(node.op_type for node in graph.node).most_common())
        work = [node for node in graph.node if node.op_type not in (QUANTIZE, DEQUANTIZE)]
        self.float_nodes: Mapping[str, int] = dict(
            Counter(node.op_type for node in work if self._is_float(node)).most_common()
        )
        self.precision = self._precision([node for node in work if node.op_type in PRODUCTS])

    def _is_float(self, node: onnx.NodeProto) -> bool:
        return any(
            name not in self._dequantized and self._types.get(name) == onnx.TensorProto.FLOAT
            for name in node.input
            if name and name not in self._constants
        )

    def _bits(self, name: str) -> int:
        """Bits in which a tensor is stored before the product; 32 for a float."""
        node = self._dequantized.get(name)
        if node is None:
            return 32
        zero_point = node.input[2] if len(node.input) > 2 else node.input[0]
        kind = self._constants.get(zero_point, self._types.get(zero_point, onnx.TensorProto.UINT8))
        return _BITS.get(kind, 32)

    def _precision(self, products: list[onnx.NodeProto]) -> str:
        factors = [tuple(self._bits(name) for name in node.input[:2]) for node in products]
        if all(pair == (8, 8) for pair in factors):
            quantized_at_all = bool(self._dequantized)
            return "a8w8" if quantized_at_all else "fp32"
        if all(32 in pair for pair in factors):
            return "fp32"
        sixteen = all(
            (16 in pair or pair == (8, 8)) and 32 not in pair and self._weight_bits(node) in (8, None)
            for node, pair in zip(products, factors, strict=True)
        )
        return "a16w8" if sixteen else "mixed"

    def _weight_bits(self, node: onnx.NodeProto) -> int | None:
        """Bits of the constant factor; None for a product of two activations."""
        for name in node.input[:2]:
            source = self._dequantized.get(name)
            if source is not None and source.input[0] in self._constants:
                return self._bits(name)
        return None
