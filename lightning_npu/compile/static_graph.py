"""An ONNX graph of fixed shapes, made plainer: constants folded, no splitting and squeezing, one token order."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

SHAPE_ONLY = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
# they would hide tokens behind two-dimensional products, and mix the order of axes that the passes below look for
_NOT_WANTED = ("MatMulAddFusion", "TransposeOptimizer", "GatherToSplitFusion", "GatherToSliceFusion")


class StaticGraph:
    """Nodes, constants and shapes of a model, for passes that rewrite it.

    Args:
        model: every shape is fixed; changed by the passes.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.refresh()

    def refresh(self) -> None:
        """Read constants and shapes again, after nodes were changed."""
        del self.model.graph.value_info[:]
        inferred = onnx.shape_inference.infer_shapes(self.model, strict_mode=True, data_prop=True)
        graph = inferred.graph
        self.constants: dict[str, np.ndarray[Any, Any]] = {
            tensor.name: numpy_helper.to_array(tensor) for tensor in self.model.graph.initializer
        }
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(array.shape) for name, array in self.constants.items()}
        for value in (*graph.value_info, *graph.input, *graph.output):
            dims = value.type.tensor_type.shape.dim
            if value.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
                self.shapes[value.name] = tuple(dim.dim_value for dim in dims)
        self.producers = {name: node for node in self.nodes for name in node.output}

    @property
    def nodes(self) -> list[onnx.NodeProto]:
        """The nodes, in topological order."""
        return list(self.model.graph.node)

    @property
    def outputs(self) -> set[str]:
        """Names of the graph's outputs."""
        return {value.name for value in self.model.graph.output}

    def replace(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Take these nodes instead, without those that nothing uses, and read constants and shapes again."""
        kept: list[onnx.NodeProto] = []
        needed = self.outputs
        for node in reversed(list(nodes)):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(name for name in node.input if name)
        graph = self.model.graph
        constants = [tensor for tensor in graph.initializer if tensor.name in needed]
        del graph.node[:], graph.initializer[:]
        graph.node.extend(reversed(kept))
        graph.initializer.extend(constants)
        self.refresh()

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> str:
        """Add a constant under a name that is free; gives the name."""
        free, number = name, 2
        while free in self.constants or free in self.shapes:
            free, number = f"{name}_{number}", number + 1
        self.model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), free))
        self.constants[free], self.shapes[free] = array, tuple(array.shape)
        return free

    def reshape(self, source: str, target: str, shape: tuple[int, ...], name: str) -> onnx.NodeProto:
        """A node that reshapes ``source`` to ``target``."""
        wanted = self.constant(f"{name}/shape", np.array(shape, dtype=np.int64))
        self.shapes[target] = shape
        return helper.make_node("Reshape", [source, wanted], [target], name=name)


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """The value of a node's attribute."""
    return next((helper.get_attribute_value(item) for item in node.attribute if item.name == name), default)


def fold(source: Path, scratch: Path) -> onnx.ModelProto:
    """Let ONNX Runtime compute what is constant and fold scales, offsets and batch norms into convolutions.

    Args:
        source: an ONNX file of fixed shapes.
        scratch: a file that may be written.
    """
    import onnxruntime

    opset = [entry for entry in onnx.load(source).opset_import if entry.domain in ("", "ai.onnx")]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(scratch)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(
        str(source), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(_NOT_WANTED)
    )
    model = onnx.load(scratch)
    del model.opset_import[:]  # it lists every domain that it knows, used or not
    model.opset_import.extend(opset)
    return model


def simplify(model: onnx.ModelProto) -> onnx.ModelProto:
    """Rewrite a folded graph in few, plain operators; it computes the same.

    Tokens that are taken apart and put together again stay together, ``Split`` and constant ``Gather`` become
    ``Slice``, all changes of shape become ``Reshape``, sequence-first tokens (tokens, 1, features) become (1, tokens,
    features), and what has lost its batch axis gets it back.
    """
    from lightning_npu.compile.lift import lift
    from lightning_npu.compile.token_order import batch_first

    graph = StaticGraph(model)
    _without_gather(graph)
    _without_split(graph)
    _plain_shapes(graph)
    batch_first(graph)
    _plain_shapes(graph)
    lift(graph)
    _plain_shapes(graph)
    _without_identity(graph)
    return graph.model


def _without_gather(graph: StaticGraph) -> None:
    """``x[:, 2]`` and ``x[:, [2, 3, 4]]``: a slice, and a reshape where the axis goes."""
    nodes: list[onnx.NodeProto] = []
    for node in graph.nodes:
        index = graph.constants.get(node.input[1]) if node.op_type == "Gather" else None
        shape = graph.shapes.get(node.input[0]) if index is not None else None
        if index is None or shape is None or index.ndim > 1 or index.size == 0:
            nodes.append(node)
            continue
        axis = attribute(node, "axis", 0) % len(shape)
        wanted = np.where(index < 0, index + shape[axis], index).reshape(-1)
        if not np.array_equal(wanted, np.arange(wanted[0], wanted[0] + wanted.size)):
            nodes.append(node)
            continue
        cut = f"{node.output[0]}/slice"
        nodes.append(_slice(graph, node.input[0], cut, axis, int(wanted[0]), int(wanted[-1]) + 1, f"{node.name}:Slice"))
        nodes.append(graph.reshape(cut, node.output[0], graph.shapes[node.output[0]], f"{node.name}:Reshape"))
    graph.replace(nodes)


def _without_split(graph: StaticGraph) -> None:
    """Pieces of one split that are concatenated in order again are one slice; the other pieces are one each."""
    origin = {
        name: (node, place) for node in graph.nodes if node.op_type == "Split" for place, name in enumerate(node.output)
    }
    nodes: list[onnx.NodeProto] = []
    for node in graph.nodes:
        if node.op_type == "Split":
            bounds = _bounds(graph, node)
            axis = attribute(node, "axis", 0) % len(graph.shapes[node.input[0]])
            nodes += [
                _slice(graph, node.input[0], name, axis, bounds[place], bounds[place + 1], f"{node.name}:Slice_{place}")
                for place, name in enumerate(node.output)
            ]
            continue
        if node.op_type == "Concat":
            nodes += _joined(graph, node, origin)
        nodes.append(node)
    graph.replace(nodes)


def _joined(
    graph: StaticGraph, concat: onnx.NodeProto, origin: dict[str, tuple[onnx.NodeProto, int]]
) -> list[onnx.NodeProto]:
    """Slices of whole runs of pieces, which replace the pieces among the inputs of ``concat``."""
    axis = attribute(concat, "axis")
    rank = len(graph.shapes[concat.output[0]])
    pieces = [_same_values(graph, name, origin) for name in concat.input]
    nodes: list[onnx.NodeProto] = []
    inputs: list[str] = []
    place = 0
    while place < len(pieces):
        split, first = origin.get(pieces[place], (None, 0))
        last = first
        while split is not None and place + last - first + 1 < len(pieces):
            if origin.get(pieces[place + last - first + 1], (None, 0)) != (split, last + 1):
                break
            last += 1
        if split is None or last == first or attribute(split, "axis", 0) % rank != axis % rank:
            inputs.append(concat.input[place])
            place += 1
            continue
        bounds = _bounds(graph, split)
        name = f"{concat.name}:pieces_{place}"
        nodes.append(_slice(graph, split.input[0], name, axis % rank, bounds[first], bounds[last + 1], name))
        inputs.append(name)
        place += last - first + 1
    del concat.input[:]
    concat.input.extend(inputs)
    return nodes


def _same_values(graph: StaticGraph, name: str, origin: dict[str, Any]) -> str:
    """The piece that ``name`` is a copy of: only its shape was changed, and changed back."""
    source = name
    while source not in origin:
        node = graph.producers.get(source)
        if node is None or node.op_type not in SHAPE_ONLY:
            return name
        source = node.input[0]
    return source if graph.shapes[source] == graph.shapes[name] else name


def _bounds(graph: StaticGraph, split: onnx.NodeProto) -> list[int]:
    axis = attribute(split, "axis", 0)
    return [0, *np.cumsum([graph.shapes[name][axis] for name in split.output]).tolist()]


def _slice(graph: StaticGraph, source: str, target: str, axis: int, start: int, stop: int, name: str) -> onnx.NodeProto:
    shape = list(graph.shapes[source])
    if (start, stop) == (0, shape[axis]):
        node = helper.make_node("Identity", [source], [target], name=name)
    else:
        limits = [
            graph.constant(f"{name}/{title}", np.array([value], dtype=np.int64))
            for title, value in (("start", start), ("stop", stop), ("axis", axis))
        ]
        node = helper.make_node("Slice", [source, *limits], [target], name=name)
    shape[axis] = stop - start
    graph.shapes[target] = tuple(shape)
    return node


def _plain_shapes(graph: StaticGraph) -> None:
    """All changes of shape as ``Reshape``; those in a row as one, those that change nothing left out."""
    alias: dict[str, str] = {}  # a tensor that another one stands for
    root: dict[str, str] = {}  # a reshaped tensor and what it was before the first reshape of the row
    nodes: list[onnx.NodeProto] = []
    for node in graph.nodes:
        for place, name in enumerate(node.input):
            node.input[place] = alias.get(name, name)
        if node.op_type == "Transpose":
            shape, order = graph.shapes[node.input[0]], list(attribute(node, "perm", []))
            moved = [axis for axis in order if shape[axis] != 1]
            if order and moved == sorted(moved):  # only axes of length 1 change their place
                _reshaped(graph, node, alias, root, nodes)
                continue
        if node.op_type in SHAPE_ONLY:
            _reshaped(graph, node, alias, root, nodes)
        else:
            nodes.append(node)
    graph.replace(nodes)


def _without_identity(graph: StaticGraph) -> None:
    """Let an output's last operator give it, where a copy stood between them."""
    outputs = graph.outputs
    renamed = {
        node.input[0]: node.output[0]
        for node in graph.nodes
        if node.op_type == "Identity"
        and node.output[0] in outputs
        and node.input[0] in graph.producers
        and node.input[0] not in outputs
    }
    nodes = [node for node in graph.nodes if renamed.get(node.input[0]) != node.output[0]]
    for node in nodes:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = renamed.get(name, name)
    graph.replace(nodes)


def _reshaped(
    graph: StaticGraph, node: onnx.NodeProto, alias: dict[str, str], root: dict[str, str], nodes: list[onnx.NodeProto]
) -> None:
    source, target = root.get(node.input[0], node.input[0]), node.output[0]
    shape = graph.shapes[target]
    if graph.shapes[source] == shape and target not in graph.outputs:
        alias[target] = source
        return
    root[target] = source
    if graph.shapes[source] == shape:
        nodes.append(helper.make_node("Identity", [source], [target], name=node.name))
    else:
        nodes.append(graph.reshape(source, target, shape, node.name))
