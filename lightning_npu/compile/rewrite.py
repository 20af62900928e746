"""Graph rewrites around quantisation: where rounding would cost most, round once, or not at all."""

from __future__ import annotations

import numpy as np
import onnx

from lightning_npu.compile.qdq import DEQUANTIZE, QUANTIZE

_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Where", "Clip"})


def biases_into_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """Write ``x @ weight + bias`` as Gemm, so that the bias joins the 32-bit sums instead of being rounded twice.

    Accelerators keep a layer's bias in the accumulator. As a MatMul and an Add, both the product and the constant
    would be rounded to 8 bits on the way to the sum.

    Args:
        model: FP32, with inferred shapes; not changed.

    Returns:
        the rewritten model, with inferred shapes.
    """
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    values = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    constants = {constant.name: tuple(constant.dims) for constant in graph.initializer}
    consumers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    outputs = {output.name for output in graph.output}
    nodes: list[onnx.NodeProto] = []
    replaced: set[str] = set()
    for node in graph.node:
        if node.output[0] in replaced:
            continue
        readers = consumers.get(node.output[0], [])
        alone = len(readers) == 1 and readers[0].op_type == "Add" and node.output[0] not in outputs
        shape = _gemm_shape(node, readers[0], constants, values) if alone else None
        if shape is None:
            nodes.append(node)
            continue
        prefix, result = node.output[0], readers[0].output[0]
        bias = next(name for name in readers[0].input if name != prefix)
        for name, numbers in ((f"{prefix}_rows", [-1, shape[-2]]), (f"{prefix}_shape", [*shape[:-2], shape[-1]])):
            graph.initializer.append(onnx.numpy_helper.from_array(np.array(numbers, np.int64), name))
        steps = (
            ("Reshape", [node.input[0], f"{prefix}_rows"], f"{prefix}_flat"),
            ("Gemm", [f"{prefix}_flat", node.input[1], bias], f"{prefix}_product"),
            ("Reshape", [f"{prefix}_product", f"{prefix}_shape"], result),
        )
        nodes += [onnx.helper.make_node(kind, names, [output], name=output) for kind, names, output in steps]
        replaced.add(result)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(_in_order(copies, graph))
    return onnx.shape_inference.infer_shapes(changed)


def _gemm_shape(
    product: onnx.NodeProto,
    add: onnx.NodeProto,
    constants: dict[str, tuple[int, ...]],
    values: dict[str, onnx.ValueInfoProto],
) -> list[int] | None:
    """[..., inputs, outputs] of a constant product with a bias, -1 for a dynamic size; None where it is none."""
    bias = next((name for name in add.input if name != product.output[0]), "")
    if product.op_type != "MatMul" or product.input[0] in constants or add.output[0] not in values:
        return None
    weight = constants.get(product.input[1], ())
    if len(weight) != 2 or constants.get(bias) != weight[1:]:
        return None
    sizes = [dim.dim_value or -1 for dim in values[add.output[0]].type.tensor_type.shape.dim]
    return [*sizes[:-1], *weight] if len(sizes) >= 2 and sizes.count(-1) <= 1 else None


def _in_order(nodes: list[onnx.NodeProto], graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes with every producer before its consumers."""
    known = {value.name for value in graph.input} | {constant.name for constant in graph.initializer} | {""}
    ordered: list[onnx.NodeProto] = []
    waiting = nodes
    while waiting:
        left = []
        for node in waiting:
            if known.issuperset(node.input):
                ordered.append(node)
                known.update(node.output)
            else:
                left.append(node)
        waiting = left
    return ordered


def keep_scores_in_float(quantized: onnx.ModelProto) -> int:
    """Hand attention scores from the integer product to Softmax without rounding them to 8 bits in between.

    Softmax takes the exponential of differences between scores. Where scores span hundreds, a step of 8 bits is a
    factor of ten in attention. Both factors of the product stay in 8 bits; so does what Softmax gives.

    Args:
        quantized: QDQ model; changed in place.

    Returns:
        how many Softmax nodes now read unrounded scores.
    """
    graph = quantized.graph
    producers = {output: node for node in graph.node for output in node.output}
    count = 0
    for node in graph.node:
        if node.op_type == "Softmax":
            count += _read_unrounded(node, 0, producers)
    _remove_unused(graph)
    return count


def _read_unrounded(node: onnx.NodeProto, index: int, producers: dict[str, onnx.NodeProto]) -> bool:
    source = producers.get(node.input[index])
    rounded = False
    if source is not None and source.op_type == DEQUANTIZE:
        quantize = producers.get(source.input[0])
        if quantize is None or quantize.op_type != QUANTIZE:
            return False
        node.input[index] = quantize.input[0]
        source, rounded = producers.get(quantize.input[0]), True
    if source is not None and source.op_type in _ELEMENTWISE:  # scale and mask, on the way from the product
        for position in range(len(source.input)):
            rounded |= _read_unrounded(source, position, producers)
    return rounded


def _remove_unused(graph: onnx.GraphProto) -> None:
    """Drop quantisation nodes that nothing reads any more, and their constants."""
    while True:
        used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
        dead = [
            node for node in graph.node if node.op_type in (QUANTIZE, DEQUANTIZE) and not used.intersection(node.output)
        ]
        if not dead:
            break
        for node in dead:
            graph.node.remove(node)
    kept = [constant for constant in graph.initializer if constant.name in used]
    if len(kept) < len(graph.initializer):
        copies = [onnx.TensorProto.FromString(constant.SerializeToString()) for constant in kept]
        del graph.initializer[:]
        graph.initializer.extend(copies)
