"""Scales of weights that are all zero: the quantiser has nothing to take them from, and trained weights need some."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from lightning_npu.compile.qdq import DEQUANTIZE, PRODUCTS

_UNKNOWN = 1.0
"""The scale that quantisers give to zeros."""

_SUFFIX = "_useful_scale"


def with_useful_scales(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that computes the same, and in which channels of zeros have the steps of the layer's other channels.

    With a scale of 1.0 the least that a probe could move such a weight is a whole 1.0. Channels of zeros get the median
    scale of the others; where all are zero, one for values up to 1. Biases are in steps of the product of input and
    weight scale, so theirs are divided alike.
    """
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    constants = {item.name: item for item in edited.graph.initializer}
    readers = {node.output[0]: node for node in edited.graph.node if node.op_type == DEQUANTIZE}
    for product in (node for node in edited.graph.node if node.op_type in PRODUCTS):
        weight = readers.get(product.input[1])
        if weight is None or weight.input[0] not in constants:
            continue
        scale = numpy_helper.to_array(constants[weight.input[1]])
        useful = _useful(_integers(weight, constants), scale, _axis(weight))
        if useful is None:
            continue
        bias = readers.get(product.input[2]) if len(product.input) > 2 else None
        if bias is not None and bias.input[0] in constants:
            _divide(edited, bias, constants, useful / scale)
        _replace_scale(edited, weight, useful)
    return edited


def _useful(integers: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], axis: int) -> np.ndarray[Any, Any] | None:
    """The scales with those of zeros replaced; None where there are none."""
    rows = integers if scale.size == 1 else np.moveaxis(integers, axis, 0)
    zero = ~rows.reshape(scale.size, -1).any(axis=1).reshape(scale.shape)
    dead = np.logical_and(zero, scale == _UNKNOWN)
    if not dead.any():
        return None
    step = np.median(scale[~dead]) if not dead.all() else 1.0 / np.iinfo(np.int8).max
    return np.where(dead, step, scale).astype(scale.dtype)


def _divide(
    model: onnx.ModelProto, node: onnx.NodeProto, constants: dict[str, onnx.TensorProto], ratio: np.ndarray[Any, Any]
) -> None:
    """Express a bias in steps that are ``ratio`` times as long."""
    stored = constants[node.input[0]]
    values = numpy_helper.to_array(stored)
    limit = np.iinfo(values.dtype)
    finer = np.rint(values / ratio.astype(np.float64)).clip(limit.min, limit.max)
    stored.CopyFrom(numpy_helper.from_array(finer.reshape(values.shape).astype(values.dtype), stored.name))
    scale = numpy_helper.to_array(constants[node.input[1]])
    _replace_scale(model, node, (scale * ratio).astype(scale.dtype))


def _replace_scale(model: onnx.ModelProto, node: onnx.NodeProto, scale: np.ndarray[Any, Any]) -> None:
    name = node.input[0] + _SUFFIX
    model.graph.initializer.append(numpy_helper.from_array(scale, name))
    node.input[1] = name


def _integers(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> np.ndarray[Any, Any]:
    values = numpy_helper.to_array(constants[node.input[0]]).astype(np.int64)
    if len(node.input) < 3:
        return values
    return values - int(numpy_helper.to_array(constants[node.input[2]]).flat[0])


def _axis(node: onnx.NodeProto) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
