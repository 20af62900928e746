"""Weights rounded so that each error is made up for by the weights that come after it.

This is the second-order rounding of Optimal Brain Quantization in the fixed order of GPTQ (Frantar et al., 2022): the
inputs' covariance says how an error in one weight can be cancelled in the others. Neighbouring pixels are so alike that
in early convolutions most of the rounding error can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx

from lightning_npu.compile.calibrate import session
from lightning_npu.compile.qdq import DEQUANTIZE

_MAX_INPUTS = 1200  # the covariance is inputs x inputs: beyond this, time grows and the early layers are done
_ROWS_PER_INPUT = 8  # calibration rows per input; with fewer than half of them the covariance is noise
_MOST_BATCHES = 16  # spread over the data: patches of one image are many
_BYTES_AT_ONCE = 256 << 20
_DAMPING = 0.01  # of the mean of the covariance's diagonal
_BLOCK = 128


@dataclass
class _Convolution:
    """One convolution whose weights are rounded, and the covariance of its inputs so far."""

    source: str
    weight: np.ndarray
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int, int, int]
    covariance: np.ndarray = field(init=False)
    rows: int = 0

    def __post_init__(self) -> None:
        self.covariance = np.zeros((self.inputs, self.inputs))

    @property
    def inputs(self) -> int:
        return int(np.prod(self.weight.shape[1:]))

    def add(self, activations: np.ndarray, count: int, random: np.random.Generator) -> None:
        """Take up to ``count`` of the patches under the kernel into the covariance; (N, C, H, W)."""
        top, left, bottom, right = self.pads
        padded = np.pad(activations, ((0, 0), (0, 0), (top, bottom), (left, right)))
        spans = [(size - 1) * dilation + 1 for size, dilation in zip(self.kernel, self.dilations, strict=True)]
        high, wide = (
            (size - span) // stride + 1
            for size, span, stride in zip(padded.shape[2:], spans, self.strides, strict=True)
        )
        total = padded.shape[0] * high * wide
        places = random.choice(total, size=min(count, total), replace=False)
        sample, place = np.divmod(places, high * wide)
        rows = (place // wide * self.strides[0])[:, None] + np.arange(self.kernel[0]) * self.dilations[0]
        columns = (place % wide * self.strides[1])[:, None] + np.arange(self.kernel[1]) * self.dilations[1]
        # (count, kernel rows, kernel columns, channels)
        patches = padded[sample[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        matrix = patches.transpose(0, 3, 1, 2).reshape(len(places), -1)
        self.covariance += matrix.T @ matrix
        self.rows += len(places)


class WeightRounding:
    """Rounds the weights of a model's convolutions for the data that they see.

    Args:
        model: FP32; its convolutions of up to 1200 inputs per output, without groups, are taken.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._layers = _convolutions(model)

    def observe(self, batches: list[Mapping[str, np.ndarray]]) -> None:
        """Collect the covariance of every convolution's inputs."""
        if not self._layers:
            return
        batches = batches[:: -(-len(batches) // _MOST_BATCHES)]
        random = np.random.default_rng(0)
        groups = _groups({layer.source for layer in self._layers.values()}, self._model, batches[0])
        for sources in groups:
            run = session(_with_outputs(self._model, sources))
            for batch in batches:
                for source, activations in zip(sources, run.run(None, dict(batch)), strict=True):
                    for layer in self._layers.values():
                        if layer.source == source:
                            count = -(-_ROWS_PER_INPUT * layer.inputs // len(batches))
                            layer.add(activations, count, random)

    def apply(self, quantized: onnx.ModelProto, largest: int) -> int:
        """Replace the rounded weights of the QDQ model made from the observed one; scales stay as they are.

        Args:
            quantized: changed in place.
            largest: largest magnitude of a quantised weight.

        Returns:
            how many convolutions were rounded anew.
        """
        graph = quantized.graph
        constants = {constant.name: constant for constant in graph.initializer}
        dequantized = {node.output[0]: node for node in graph.node if node.op_type == DEQUANTIZE}
        done: set[str] = set()
        for node in graph.node:
            layer = self._layers.get(node.name) if node.op_type == "Conv" else None
            source = dequantized.get(node.input[1]) if layer else None
            if layer is None or source is None or source.input[0] in done:
                continue
            if layer.rows < _ROWS_PER_INPUT * layer.inputs // 2:
                continue
            name, scale_name, zero_name = source.input[:3]
            if name not in constants:
                continue
            scale = onnx.numpy_helper.to_array(constants[scale_name]).astype(np.float64).reshape(-1)
            zero = onnx.numpy_helper.to_array(constants[zero_name]).reshape(-1)
            matrix = layer.weight.reshape(len(layer.weight), -1).astype(np.float64)
            scales = np.broadcast_to(scale, len(matrix)).copy()
            levels = round_second_order(matrix, layer.covariance, scales, largest)
            stored = (levels + zero.astype(np.int64)[:, None]).astype(zero.dtype).reshape(layer.weight.shape)
            constants[name].CopyFrom(onnx.numpy_helper.from_array(stored, name))
            done.add(name)
        return len(done)


def round_second_order(weight: np.ndarray, covariance: np.ndarray, scales: np.ndarray, largest: int) -> np.ndarray:
    """Integers near ``weight / scales`` with a small error of ``weight @ inputs``.

    Args:
        weight: float64, shape (outputs, inputs).
        covariance: sum of outer products of the inputs, shape (inputs, inputs).
        scales: per output.
        largest: largest magnitude of an integer.

    Returns:
        int64, shape (outputs, inputs).
    """
    diagonal = np.diag(covariance).copy()
    if not diagonal.any():
        nearest: np.ndarray = np.clip(np.rint(weight / scales[:, None]), -largest, largest).astype(np.int64)
        return nearest
    order = np.argsort(-diagonal)  # the inputs that matter most first, while others are left to make up for them
    rest = weight[:, order].copy()
    damped = covariance[np.ix_(order, order)] + _DAMPING * diagonal.mean() * np.eye(len(order))
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    levels = np.empty_like(rest)
    for start in range(0, rest.shape[1], _BLOCK):
        stop = min(start + _BLOCK, rest.shape[1])
        errors = np.empty((len(rest), stop - start))
        for column in range(start, stop):
            levels[:, column] = np.clip(np.rint(rest[:, column] / scales), -largest, largest)
            error = (rest[:, column] - levels[:, column] * scales) / upper[column, column]
            rest[:, column + 1 : stop] -= np.outer(error, upper[column, column + 1 : stop])
            errors[:, column - start] = error
        rest[:, stop:] -= errors @ upper[start:stop, stop:]
    result = np.empty(levels.shape, np.int64)
    result[:, order] = levels.astype(np.int64)
    return result


def _convolutions(model: onnx.ModelProto) -> dict[str, _Convolution]:
    """By node name, the convolutions that can be rounded so; one that shares its weights with another cannot."""
    constants = {constant.name: constant for constant in model.graph.initializer}
    uses: dict[str, int] = {}
    for node in model.graph.node:
        for name in node.input:
            uses[name] = uses.get(name, 0) + 1
    found = {}
    for node in model.graph.node:
        if node.op_type != "Conv" or node.input[1] not in constants or uses[node.input[1]] > 1 or not node.name:
            continue
        weight = onnx.numpy_helper.to_array(constants[node.input[1]])
        given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        plain = given.get("group", 1) == 1 and given.get("auto_pad", b"NOTSET") == b"NOTSET"
        if weight.ndim == 4 and plain and np.prod(weight.shape[1:]) <= _MAX_INPUTS:
            found[node.name] = _Convolution(
                source=node.input[0],
                weight=weight,
                kernel=(weight.shape[2], weight.shape[3]),
                strides=tuple(given.get("strides", (1, 1))),
                dilations=tuple(given.get("dilations", (1, 1))),
                pads=tuple(given.get("pads", (0, 0, 0, 0))),
            )
    return found


def _groups(sources: Iterable[str], model: onnx.ModelProto, batch: Mapping[str, np.ndarray]) -> list[list[str]]:
    """The tensors in groups that fit into memory together."""
    samples = max((array.shape[0] for array in batch.values() if array.ndim), default=1)
    values = {value.name: value for value in (*model.graph.value_info, *model.graph.input)}
    groups: list[list[str]] = [[]]
    held = 0.0
    for source in sorted(sources):
        dims = values[source].type.tensor_type.shape.dim if source in values else ()
        size = 4.0 * np.prod([dim.dim_value or samples for dim in dims])
        if groups[-1] and held + size > _BYTES_AT_ONCE:
            groups.append([])
            held = 0.0
        groups[-1].append(source)
        held += size
    return groups


def _with_outputs(model: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.output[:]
    for name in names:
        changed.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return changed
