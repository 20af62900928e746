"""An INT8 ONNX graph whose weights of some layers come in as inputs, and the same graph with new weights inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from lightning_npu.compile.qdq import DEQUANTIZE, PRODUCTS, QUANTIZE
from lightning_npu.forward_gradient.integer import Grid

_SUFFIX, _EXPORTED = "_quantized", "module."
_WIDE_DOMAIN = "com.microsoft"  # there DequantizeLinear takes 16 bits whatever the opset
_SPARE_BITS = 8
_BIAS_BOUND = 2**24


@dataclass(frozen=True)
class Layer:
    """A weight or bias of a layer as the graph holds it.

    Attributes:
        name: as torch calls it, such as "classifier.weight".
        constant: the initializer of integers.
        dequantized: what the DequantizeLinear node that reads it gives.
        values: the integers, without zero point.
        zero_point: 0, or 128 where the graph's weights are unsigned.
        grid: what the integers stand for, and their bounds.
        transposed: whether the exporter stored the transpose of torch's weight.
        wide: whether the graph holds it in 16 bits already, as one that was trained so and saved.
    """

    name: str
    constant: str
    dequantized: str
    values: np.ndarray[Any, Any]
    zero_point: int
    grid: Grid
    transposed: bool = False
    wide: bool = False

    @property
    def is_bias(self) -> bool:
        """Whether it is held in the 32 bits of the accumulator."""
        return self.grid.upper == _BIAS_BOUND

    def stored_dtype(self, bits: int) -> np.dtype[Any]:
        """The dtype of the graph's integers where weights have ``bits`` bits."""
        if self.is_bias:
            return np.dtype(np.int32)
        return np.dtype(np.int16 if bits == 16 or self.wide else np.uint8 if self.zero_point else np.int8)

    def trained_grid(self, bits: int, headroom: int) -> Grid:
        """The grid on which it is trained."""
        if self.is_bias or self.wide or bits == 8:
            return self.grid
        return Grid(self.grid.scale * 2.0 ** (headroom - _SPARE_BITS), -(2**15 - 1), 2**15 - 1)


def layers_of(model: onnx.ModelProto, *, narrow: bool = False) -> dict[str, Layer]:
    """Every integer weight and bias of a product in ``model``, by torch's name.

    Args:
        model: a quantised graph.
        narrow: whether its weights use 7 bits of 8, so that sums in 16 bits do not saturate.
    """
    graph = model.graph
    constants = {item.name: item for item in graph.initializer}
    readers = {node.output[0]: node for node in graph.node if node.op_type == DEQUANTIZE}
    uses = [name for node in graph.node for name in node.input]
    found: dict[str, Layer] = {}
    for product in (node for node in graph.node if node.op_type in PRODUCTS):
        bias_name = _torch_name(product.input[2]) if len(product.input) > 2 else None
        for position, name in list(enumerate(product.input))[1:3]:
            reader = readers.get(name)
            constant = constants.get(reader.input[0]) if reader is not None else None
            # a weight that several products read cannot be told apart by its name
            if reader is None or constant is None or uses.count(name) != 1:
                continue
            stem = constant.name.removesuffix(_SUFFIX)
            title = _torch_name(stem)
            renamed = position == 1 and title == stem and bias_name is not None and bias_name.endswith(".bias")
            if renamed and bias_name is not None:
                title = bias_name.removesuffix("bias") + "weight"
            found[title] = _layer(title, reader, constants, bias=position == 2, narrow=narrow, transposed=renamed)
    return found


def with_inputs(model: onnx.ModelProto, layers: Sequence[Layer], *, bits: int, headroom: int) -> onnx.ModelProto:
    """A copy of ``model`` in which the integers of ``layers`` are graph inputs, named as their initializers are."""
    edited = _copied(model)
    for layer in layers:
        if bits == 16 and not layer.is_bias and not layer.wide:
            _widen(edited, layer, headroom)
        edited.graph.initializer.remove(_constant(edited, layer.constant))
        kind = onnx.helper.np_dtype_to_tensor_dtype(layer.stored_dtype(bits))
        edited.graph.input.append(onnx.helper.make_tensor_value_info(layer.constant, kind, layer.values.shape))
    return edited


def with_values(
    model: onnx.ModelProto,
    layers: Sequence[Layer],
    stored: Mapping[str, np.ndarray[Any, Any]],
    *,
    bits: int,
    headroom: int,
) -> onnx.ModelProto:
    """A copy of ``model`` with new integers inside, by the layers' names, zero points added where there are any."""
    edited = _copied(model)
    for layer in layers:
        if bits == 16 and not layer.is_bias and not layer.wide:
            _widen(edited, layer, headroom)
        value = numpy_helper.from_array(stored[layer.name].astype(layer.stored_dtype(bits)), layer.constant)
        _constant(edited, layer.constant).CopyFrom(value)
    return edited


def without_float(layer: Layer, reference: onnx.ModelProto) -> str | None:
    """Why new integers of ``layer`` could not be written to the FP32 graph; None if they can be."""
    name = layer.constant.removesuffix(_SUFFIX)
    constant = _constant(reference, name)
    if constant is None:
        return f"the FP32 reference has no initializer {name}"
    if tuple(constant.dims) != layer.values.shape:
        return f"it is {list(layer.values.shape)} in the INT8 graph and {list(constant.dims)} in the FP32 reference"
    return None


def with_floats(
    reference: onnx.ModelProto, layers: Sequence[Layer], values: Mapping[str, np.ndarray[Any, Any]]
) -> onnx.ModelProto:
    """A copy of the FP32 graph with what the layers' new integers stand for; see :func:`without_float`."""
    edited = _copied(reference)
    for layer in layers:
        name = layer.constant.removesuffix(_SUFFIX)
        _constant(edited, name).CopyFrom(numpy_helper.from_array(values[layer.name].astype(np.float32), name))
    return edited


def leave_outputs_wide(model: onnx.ModelProto, layers: Sequence[Layer]) -> onnx.ModelProto:
    """A copy in which what the layers hand straight to the graph's outputs is not rounded to 8 bits.

    It leaves in the accumulator's width, rescaled to float, as logits do on accelerators: their range was calibrated on
    the weights before training, and one step of 8 bits hides the difference between a probe's two ends.
    """
    edited = _copied(model)
    graph = edited.graph
    made_by = {name: node for node in graph.node for name in node.output}
    dequantized = {layer.dequantized for layer in layers}
    for output in graph.output:
        last = made_by.get(output.name)
        before = made_by.get(last.input[0]) if last is not None and last.op_type == DEQUANTIZE else None
        if before is None or before.op_type != QUANTIZE or sum(before.output[0] in n.input for n in graph.node) != 1:
            continue
        product = made_by.get(before.input[0])
        if product is None or product.op_type not in PRODUCTS or not dequantized & set(product.input):
            continue
        if sum(before.input[0] in node.input for node in graph.node) != 1:
            continue
        product.output[0] = output.name
        graph.node.remove(last)
        graph.node.remove(before)
    return edited


def _layer(
    title: str,
    node: onnx.NodeProto,
    constants: Mapping[str, onnx.TensorProto],
    *,
    bias: bool,
    narrow: bool,
    transposed: bool,
) -> Layer:
    stored = numpy_helper.to_array(constants[node.input[0]])
    scale = numpy_helper.to_array(constants[node.input[1]]).astype(np.float64)
    zero_points = numpy_helper.to_array(constants[node.input[2]]) if len(node.input) > 2 else np.zeros(1, np.int64)
    zero_point = int(zero_points.flat[0])
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1) % max(1, stored.ndim)
    if scale.size > 1:
        scale = scale.reshape([-1 if a == axis else 1 for a in range(stored.ndim)])
    wide = stored.dtype == np.int16
    bound = _BIAS_BOUND if bias else 2**15 - 1 if wide else 63 if narrow else 127
    grid = Grid(torch.from_numpy(np.array(scale.reshape(()) if scale.size == 1 else scale)), -bound, bound)
    values = np.clip(stored.astype(np.int64) - zero_point, -bound, bound)
    return Layer(title, node.input[0], node.output[0], values, zero_point, grid, transposed, wide)


def _constant(model: onnx.ModelProto, name: str) -> Any:
    return next((item for item in model.graph.initializer if item.name == name), None)


def _widen(model: onnx.ModelProto, layer: Layer, headroom: int) -> None:
    """Let the layer's DequantizeLinear take 16 bits: finer steps of the same scale, with headroom."""
    graph = model.graph
    node = next(node for node in graph.node if layer.dequantized in node.output)
    scale_name, zero_name = f"{layer.constant}_wide_scale", f"{layer.constant}_wide_zero_point"
    scale = numpy_helper.to_array(_constant(model, node.input[1])) * np.float32(2.0 ** (headroom - _SPARE_BITS))
    graph.initializer.append(numpy_helper.from_array(scale.astype(np.float32), scale_name))
    graph.initializer.append(numpy_helper.from_array(np.zeros(scale.shape, np.int16), zero_name))
    node.input[1] = scale_name
    if len(node.input) > 2:
        node.input[2] = zero_name
    else:
        node.input.append(zero_name)
    node.domain = _WIDE_DOMAIN
    if not any(entry.domain == _WIDE_DOMAIN for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(_WIDE_DOMAIN, 1))


def _torch_name(name: str) -> str:
    return name.removesuffix(_SUFFIX).removeprefix(_EXPORTED)


def _copied(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy
