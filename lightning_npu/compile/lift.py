"""Tensors without a batch axis, as flattened tokens or heads: given one of length 1, where the hardware wants it."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from lightning_npu.compile.static_graph import StaticGraph, attribute
from lightning_npu.compile.token_order import ELEMENTWISE, REDUCTIONS


def lift(graph: StaticGraph) -> None:
    """Give tensors of two or three axes whose first is not 1 a batch axis of 1 in front, as far as the graph allows.

    Such are tokens flattened for a projection, (tokens, features), and heads as torch's own attention has them, (heads,
    tokens, features). What numbers they hold in which order stays the same. An operator that is not known here gets its
    operands as it had them.
    """
    _Lift(graph).run()


class _Lift:
    """One walk over the graph; ``lifted`` names the tensors that have one axis more."""

    def __init__(self, graph: StaticGraph) -> None:
        self.graph = graph
        self.lifted: set[str] = set()
        self.nodes: list[onnx.NodeProto] = []
        self.restored: dict[str, str] = {}

    def run(self) -> None:
        for node in self.graph.nodes:
            if len(node.output) == 1 and self._wanted(node.output[0]) and self._rewritten(node):
                self._keep(node.output[0])
                continue
            if node.op_type != "Reshape":  # reads either alike
                self._restore(node)
            self.nodes.append(node)
        self.graph.replace(self.nodes)

    def _wanted(self, name: str) -> bool:
        shape = self.graph.shapes.get(name, ())
        return len(shape) in (2, 3) and shape[0] != 1 and name not in self.graph.outputs

    def _keep(self, name: str) -> None:
        self.lifted.add(name)
        if self.graph.shapes[name][0] != 1:  # a reshape has noted its new shape already
            self.graph.shapes[name] = (1, *self.graph.shapes[name])

    def _rewritten(self, node: onnx.NodeProto) -> bool:
        """Whether the node now gives its output with a batch axis; it is among the nodes then."""
        kind, first = node.op_type, node.input[0]
        if kind == "Reshape":
            shape = self.graph.shapes[node.output[0]]
            self.nodes.append(self.graph.reshape(first, node.output[0], (1, *shape), node.name))
            return True
        if kind == "Gemm":
            return self._gemm(node)
        if kind == "Concat":
            return self._concat(node)
        if first not in self.lifted and kind not in ELEMENTWISE:
            return False
        if kind == "Transpose":
            order = [0, *(axis + 1 for axis in attribute(node, "perm"))]
            self.nodes.append(helper.make_node("Transpose", [first], list(node.output), name=node.name, perm=order))
            return True
        if kind == "Slice":
            return self._slice(node)
        if kind == "MatMul":
            return self._append(node, self._is_product(node))
        if kind in REDUCTIONS:
            return self._reduce(node)
        if kind in ("Softmax", "LayerNormalization"):
            last = len(self.graph.shapes[node.output[0]]) - 1
            return self._append(node, attribute(node, "axis", -1) in (-1,) or self._last(node, last))
        # operands are aligned at their last axes, so that one more in front changes nothing
        return self._append(node, kind in ELEMENTWISE and bool(self.lifted.intersection(node.input)))

    def _append(self, node: onnx.NodeProto, right: bool) -> bool:
        if right:
            self.nodes.append(node)
        return right

    def _last(self, node: onnx.NodeProto, last: int) -> bool:
        for item in node.attribute:
            if item.name == "axis" and item.i == last:
                item.i = -1
                return True
        return False

    def _is_product(self, node: onnx.NodeProto) -> bool:
        left, right = node.input
        weight = self.graph.constants.get(right)
        if weight is not None:
            return weight.ndim == 2
        return right in self.lifted and len(self.graph.shapes[left]) == len(self.graph.shapes[right])

    def _gemm(self, node: onnx.NodeProto) -> bool:
        """A product with a constant matrix and a bias, on flattened tokens."""
        weight = self.graph.constants.get(node.input[1])
        plain = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0 and not attribute(
            node, "transA", 0
        )
        if weight is None or not plain or node.input[0] not in self.lifted:
            return False
        if attribute(node, "transB", 0):
            weight = weight.T
        factor = self.graph.constant(f"{node.input[1]}/lifted", weight)
        has_bias = len(node.input) > 2 and bool(node.input[2])
        product = f"{node.output[0]}/product" if has_bias else node.output[0]
        self.nodes.append(helper.make_node("MatMul", [node.input[0], factor], [product], name=f"{node.name}:MatMul"))
        if has_bias:
            operands = [product, node.input[2]]
            self.nodes.append(helper.make_node("Add", operands, list(node.output), name=f"{node.name}:Add"))
        return True

    def _concat(self, node: onnx.NodeProto) -> bool:
        for place, name in enumerate(node.input):
            if name in self.lifted:
                continue
            if name not in self.graph.constants:
                return False
            node.input[place] = self.graph.constant(f"{name}/lifted", self.graph.constants[name][None])
        for item in node.attribute:
            if item.name == "axis" and item.i >= 0:
                item.i += 1
        self.nodes.append(node)
        return True

    def _slice(self, node: onnx.NodeProto) -> bool:
        axes = self.graph.constants.get(node.input[3]) if len(node.input) > 3 else None
        if axes is None:
            return False
        new = np.where(axes >= 0, axes + 1, axes).astype(np.int64)
        node.input[3] = self.graph.constant(f"{node.name}/axis", new)
        self.nodes.append(node)
        return True

    def _reduce(self, node: onnx.NodeProto) -> bool:
        axes = attribute(node, "axes")
        if not axes:
            return False
        for item in node.attribute:
            if item.name == "axes":
                item.ints[:] = [axis + 1 if axis >= 0 else axis for axis in axes]
        self.nodes.append(node)
        return True

    def _restore(self, node: onnx.NodeProto) -> None:
        for place, name in enumerate(node.input):
            if name not in self.lifted:
                continue
            if name not in self.restored:
                target = f"{name}/unlifted"
                shape = self.graph.shapes[name][1:]
                self.nodes.append(self.graph.reshape(name, target, shape, f"{node.name}:unlifted"))
                self.restored[name] = target
            node.input[place] = self.restored[name]
