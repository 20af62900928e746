"""The first convolution of an image network, written so that INT8 kernels run it at full speed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

_MAX_CHANNELS = 4  # of an image; kernels multiply in groups of four channels and waste the rest


def stem_on_blocks(model: onnx.ModelProto) -> onnx.ModelProto:
    """Write convolutions of stride 2 on images as convolutions of stride 1 on blocks of 2 x 2 pixels.

    The sums are the same: 7 x 7 taps on 3 channels become 4 x 4 taps on 12, with zeros where the taps do not reach.
    Twelve channels fill what three leave empty in the processor's dot products.

    Args:
        model: FP32, with inferred shapes; not changed.

    Returns:
        the rewritten model, with inferred shapes.
    """
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    values = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    constants = {constant.name: constant for constant in graph.initializer}
    uses = [name for node in graph.node for name in node.input]
    position = 0
    while position < len(graph.node):
        node = graph.node[position]
        position += 1
        if node.op_type != "Conv" or node.input[1] not in constants or uses.count(node.input[1]) > 1:
            continue
        weight = onnx.numpy_helper.to_array(constants[node.input[1]])
        given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        pads = _block_pads(weight.shape, given, values.get(node.input[0]))
        if pads is None:
            continue
        blocks = f"{node.output[0]}_blocks"
        constants[node.input[1]].CopyFrom(
            onnx.numpy_helper.from_array(_on_blocks(weight, given["pads"]), node.input[1])
        )
        replaced = onnx.helper.make_node(
            "Conv", [blocks, *node.input[1:]], list(node.output), name=node.name, strides=[1, 1], pads=pads
        )
        arrange = onnx.helper.make_node("SpaceToDepth", [node.input[0]], [blocks], name=blocks, blocksize=2)
        node.CopyFrom(replaced)
        graph.node.insert(position - 1, arrange)
        position += 1
    return onnx.shape_inference.infer_shapes(changed)


def _block_pads(weight: tuple[int, ...], given: dict[str, Any], value: onnx.ValueInfoProto | None) -> list[int] | None:
    """Padding in blocks, (top, left, bottom, right); None where the convolution cannot be written on blocks."""
    dims = [] if value is None else [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    plain = (
        len(weight) == 4
        and weight[1] <= _MAX_CHANNELS
        and given.get("group", 1) == 1
        and list(given.get("strides", [1, 1])) == [2, 2]
        and list(given.get("dilations", [1, 1])) == [1, 1]
        and given.get("auto_pad", b"NOTSET") == b"NOTSET"
        and len(given.get("pads", [])) == 4
    )
    if not plain or len(dims) != 4:
        return None
    first, last = [], []
    for axis in range(2):
        size, taps = dims[2 + axis], weight[2 + axis]
        before, after = given["pads"][axis], given["pads"][2 + axis]
        if size == 0 or size % 2:
            return None
        outputs = (size + before + after - taps) // 2 + 1
        shift = before % 2
        block_taps, block_before = -(-(taps + shift) // 2), (before + shift) // 2
        first.append(block_before)
        last.append(outputs - 1 + block_taps - block_before - size // 2)
    return [*first, *last] if min(last) >= 0 else None


def _on_blocks(weight: np.ndarray, pads: list[int]) -> np.ndarray:
    """(outputs, channels, rows, columns) to (outputs, 4 * channels, rows / 2, columns / 2), zeros added."""
    outputs, channels = weight.shape[:2]
    shifts = [before % 2 for before in pads[:2]]
    fill = [(shift, (taps + shift) % 2) for shift, taps in zip(shifts, weight.shape[2:], strict=True)]
    padded = np.pad(weight, ((0, 0), (0, 0), *fill))
    rows, columns = (size // 2 for size in padded.shape[2:])
    # SpaceToDepth orders its channels by row in the block, column in the block, channel
    parts = padded.reshape(outputs, channels, rows, 2, columns, 2).transpose(0, 3, 5, 1, 2, 4)
    return np.ascontiguousarray(parts.reshape(outputs, 4 * channels, rows, columns))
