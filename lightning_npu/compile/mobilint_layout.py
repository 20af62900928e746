"""How a sample looks to the NPU: height, width, channels; and the first operators that only scale raw pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from lightning_npu.compile.static_graph import StaticGraph, attribute
from lightning_npu.errors import CompileError
from lightning_npu.tensor_spec import TensorSpec

Array = np.ndarray[Any, Any]


def sample_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Sizes of one sample: the spec's shape without its batch axis, or without axes of length 1 if it has none.

    Raises:
        CompileError: it has more than three axes, or its dtype has no place on the NPU.
    """
    sizes = [int(size) for axis, size in enumerate(spec.shape) if axis != spec.batch_axis and size is not None]
    if spec.batch_axis is None:
        sizes = [size for size in sizes if size != 1]
    if len(sizes) > (3 if spec.batch_axis is not None else 2):
        raise CompileError(
            f"'{spec.name}' has too many axes for the NPU.",
            expected="images (N, C, H, W), tokens (N, tokens, features) or vectors (N, features)",
            got=spec.describe_shape(),
            remedy="flatten axes in the head, for example heads into features, or cut it elsewhere",
        )
    return tuple(sizes)


def hwc_shape(spec: TensorSpec) -> tuple[int, int, int]:
    """Height, width and channels of one sample; tokens are (1, tokens, features), a vector is (1, 1, features)."""
    sizes = sample_shape(spec)
    if len(sizes) == 3:
        return (sizes[1], sizes[2], sizes[0]) if spec.layout != "NHWC" else (sizes[0], sizes[1], sizes[2])
    first, second = (1, 1, *sizes)[-2:]
    return (1, first, second)


def graph_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape in the graph for the compiler, a batch of one: (1, C, H, W) or (1, tokens, features)."""
    height, width, channels = hwc_shape(spec)
    return (1, channels, height, width) if len(sample_shape(spec)) == 3 else (1, width, channels)


def to_hwc(tensor: torch.Tensor, spec: TensorSpec, index: int) -> Array:
    """Sample ``index`` of a batch as an array (height, width, channels), contiguous."""
    sample = tensor if spec.batch_axis is None else tensor.select(spec.batch_axis, index)
    if len(sample_shape(spec)) == 3 and spec.layout != "NHWC":
        sample = sample.permute(1, 2, 0)
    array: Array = sample.reshape(hwc_shape(spec)).contiguous().numpy()
    return array


@dataclass(frozen=True)
class PixelScale:
    """What the head does to raw pixels 0 .. 255 before anything else, per channel: ``scale * pixel + offset``.

    Attributes:
        scale: one factor per channel, positive.
        offset: one summand per channel.
        channels_last: whether the head takes (N, H, W, C).
    """

    scale: tuple[float, ...]
    offset: tuple[float, ...]
    channels_last: bool = False

    @property
    def mean(self) -> list[float]:
        """The mean of ``(pixel / 255 - mean) / std``."""
        return [0.0 - offset * std for offset, std in zip(self.offset, self.std, strict=True)]

    @property
    def std(self) -> list[float]:
        """The divisor of ``(pixel / 255 - mean) / std``."""
        return [1 / (255 * scale) for scale in self.scale]

    @property
    def only_unit(self) -> bool:
        """Whether it is nothing but a division by 255."""
        return bool(np.allclose(self.std, 1, rtol=1e-6, atol=0) and np.allclose(self.offset, 0, atol=1e-7))


def take_pixel_scale(graph: StaticGraph, spec: TensorSpec) -> PixelScale:
    """Remove the operators that scale the uint8 input ``spec.name``; the graph then takes what they gave, in float32.

    Raises:
        CompileError: the input is not converted to float first, or is used in more than one place.
    """
    name, shape = spec.name, graph.shapes[spec.name]
    scale, offset = np.ones(1), np.zeros(1)
    channels_last = converted = False
    last = name
    while last not in graph.outputs and len(users := _users(graph, last)) == 1:
        node = users[0]
        if node.op_type == "Transpose" and list(attribute(node, "perm")) == [0, 3, 1, 2] and not channels_last:
            channels_last, shape = True, tuple(shape[place] for place in (0, 3, 1, 2))
        elif node.op_type == "Cast" and not converted:
            converted = True
        else:
            axis = 3 if not channels_last and shape[3] <= 4 < shape[1] else 1  # where a head's channels can be
            step = _step(graph, node, last, shape, axis) if converted else None
            if step is None:
                break
            factor, summand = step
            scale, offset = scale * factor, offset * factor + summand
        last = node.output[0]
    if not converted:
        found = ", ".join(f"{node.op_type} ({node.name})" for node in _users(graph, name))
        raise CompileError(
            f"The uint8 input '{name}' is not converted to float before anything else.",
            expected="x.float(), then scaling by constants, as in (x.float() / 255 - mean) / std",
            got=found or "an input that nothing uses",
            remedy="convert it once, first thing in the head's forward",
        )
    _start_at(graph, name, last)
    channels = graph.shapes[name][1]
    scale, offset = np.broadcast_to(scale, channels), np.broadcast_to(offset, channels)
    if not (scale > 0).all():
        raise CompileError(f"The scale of input '{name}' is not positive.", got=scale.tolist())
    return PixelScale(tuple(scale.tolist()), tuple(offset.tolist()), channels_last)


def put_pixel_scale(graph: StaticGraph, name: str, pixels: PixelScale) -> None:
    """Let the graph take pixels in 0 .. 1 at input ``name`` and scale them by constants itself."""
    if pixels.only_unit:
        return
    shape = (1, len(pixels.scale), 1, 1)
    scaled, shifted = f"{name}/scaled", f"{name}/shifted"
    factor = graph.constant(f"{name}/scale", np.array(pixels.scale, np.float32).reshape(shape) * np.float32(255))
    summand = graph.constant(f"{name}/offset", np.array(pixels.offset, np.float32).reshape(shape))
    nodes = graph.nodes
    for node in nodes:
        for place, used in enumerate(node.input):
            if used == name:
                node.input[place] = shifted
    first = [
        helper.make_node("Mul", [name, factor], [scaled], name=f"/{name}/Mul"),
        helper.make_node("Add", [scaled, summand], [shifted], name=f"/{name}/Add"),
    ]
    graph.replace([*first, *nodes])


def _users(graph: StaticGraph, name: str) -> list[onnx.NodeProto]:
    return [node for node in graph.nodes if name in node.input]


def _step(
    graph: StaticGraph, node: onnx.NodeProto, source: str, shape: Sequence[int], axis: int
) -> tuple[Array, Array] | None:
    """Factor and summand per channel of a node that scales or shifts by constants; None for any other."""
    if node.op_type not in ("Add", "Sub", "Mul", "Div") or len(node.input) != 2:
        return None
    other = node.input[1] if node.input[0] == source else node.input[0]
    if other not in graph.constants or (node.op_type == "Div" and node.input[0] != source):
        return None
    try:
        whole = np.moveaxis(np.broadcast_to(graph.constants[other], shape), axis, 0).reshape(shape[axis], -1)
    except ValueError:
        return None
    if (whole != whole[:, :1]).any():
        return None
    value = whole[:, 0].astype(np.float64)
    if node.op_type in ("Mul", "Div"):
        return (value if node.op_type == "Mul" else 1 / value), np.zeros(1)
    if node.op_type == "Add":
        return np.ones(1), value
    return (np.ones(1), -value) if node.input[0] == source else (-np.ones(1), value)


def _start_at(graph: StaticGraph, name: str, start: str) -> None:
    """Make the tensor ``start`` the graph's float32 input ``name``; what came before it goes."""
    shape = graph.shapes[start]
    nodes = graph.nodes
    for node in nodes:
        for place, used in enumerate(node.input):
            if used == start:
                node.input[place] = name
    for value in graph.model.graph.input:
        if value.name == name:
            value.CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    graph.shapes[name] = shape
    graph.replace(node for node in nodes if start not in node.output)
