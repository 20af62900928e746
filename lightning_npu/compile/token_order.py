"""Sequence-first tokens (tokens, 1, features) laid out as (1, tokens, features), where a batch of one comes first."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from lightning_npu.compile.static_graph import StaticGraph, attribute

# operators that treat every token alike, given operands that are laid out alike
ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Abs", "Neg", "Sqrt", "Exp", "Log", "Erf", "Clip", "Tanh", "Sigmoid", "Relu"}
    | {"LeakyRelu", "Elu", "Celu", "Selu", "HardSigmoid", "HardSwish", "Softplus", "Softsign", "Mish", "Gelu"}
)
REDUCTIONS = frozenset({"ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2"})


def batch_first(graph: StaticGraph) -> None:
    """Lay out every tensor of shape (tokens, 1, features) as (1, tokens, features), as far as the graph allows.

    With a batch of one both layouts hold the same numbers in the same order, so that the change costs nothing.
    Where an operator looks at the axes in a way that is not known here, a reshape puts the tokens back for it.
    """
    _BatchFirst(graph).run()


class _BatchFirst:
    """One walk over the graph; ``swapped`` names the tensors whose first two axes changed places."""

    def __init__(self, graph: StaticGraph) -> None:
        self.graph = graph
        self.swapped: set[str] = set()
        self.nodes: list[onnx.NodeProto] = []
        self.restored: dict[str, str] = {}

    def run(self) -> None:
        for node in self.graph.nodes:
            if not self._rewritten(node):
                self._restore(node)
                self.nodes.append(node)
        self.graph.replace(self.nodes)

    def _rewritten(self, node: onnx.NodeProto) -> bool:
        """Whether the node now works on tokens in the new layout."""
        output = node.output[0]
        if output not in self.graph.outputs and node.input[:1] and node.input[0] in self.swapped:
            if node.op_type == "Slice":
                return self._slice(node)
            if node.op_type in REDUCTIONS and list(attribute(node, "axes", [])) in ([0], [-3]):
                return self._reduce(node)
        if len(node.output) != 1 or output in self.graph.outputs or not self._is_sequence(output):
            return node.op_type == "Transpose" and self._transpose(node, swap_output=False)
        if node.op_type == "Transpose":
            return self._transpose(node, swap_output=True)
        if node.op_type == "Reshape":
            tokens, _, features = self.graph.shapes[output]
            self.nodes.append(self.graph.reshape(node.input[0], output, (1, tokens, features), node.name))
            self.swapped.add(output)
            return True
        if node.op_type == "Concat":
            return attribute(node, "axis") in (0, -3) and self._on_axis_1(node)
        if not self._treats_tokens_alike(node):
            return False
        return self._operands(node)

    def _is_sequence(self, name: str) -> bool:
        shape = self.graph.shapes.get(name, ())
        return len(shape) == 3 and shape[0] > 1 and shape[1] == 1

    def _treats_tokens_alike(self, node: onnx.NodeProto) -> bool:
        if node.op_type in ELEMENTWISE:
            return True
        if node.op_type == "MatMul":
            weight = self.graph.constants.get(node.input[1])
            return weight is not None and weight.ndim == 2
        return node.op_type in ("LayerNormalization", "Softmax") and attribute(node, "axis", -1) in (-1, 2)

    def _operands(self, node: onnx.NodeProto) -> bool:
        """Lay out all operands alike; False if one of them cannot be."""
        replaced: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {}
        for place, name in enumerate(node.input):
            shape = self.graph.shapes.get(name, ())
            if not name or name in self.swapped or len(shape) < 3 or shape[:2] == (1, 1):
                continue
            if name not in self.graph.constants or not self._is_sequence(name):
                return False
            replaced[place] = self.graph.constants[name].swapaxes(0, 1)
        for place, array in replaced.items():
            node.input[place] = self.graph.constant(f"{node.input[place]}/batch_first", array)
        self._keep_swapped(node)
        return True

    def _on_axis_1(self, node: onnx.NodeProto) -> bool:
        if not self._operands(node):
            return False
        for item in node.attribute:
            if item.name == "axis":
                item.i = 1
        return True

    def _slice(self, node: onnx.NodeProto) -> bool:
        axes = self.graph.constants.get(node.input[3]) if len(node.input) > 3 else None
        if axes is None:
            return False
        new = np.array([{0: 1, 1: 0}.get(int(axis) % 3, 2) for axis in axes.reshape(-1)], dtype=np.int64)
        node.input[3] = self.graph.constant(f"{node.name}/axis", new)
        self._keep_swapped(node)
        return True

    def _reduce(self, node: onnx.NodeProto) -> bool:
        """Over the tokens: what is left has none, and lies alike in both layouts."""
        for item in node.attribute:
            if item.name == "axes":
                item.ints[:] = [1]
        self.nodes.append(node)
        return True

    def _transpose(self, node: onnx.NodeProto, *, swap_output: bool) -> bool:
        """Permute what is stored, so that the output is stored in its new layout."""
        source, output = node.input[0], node.output[0]
        order = list(attribute(node, "perm", []))
        if len(order) != 3 or not (swap_output or source in self.swapped):
            return False
        if source in self.swapped:
            order = [{0: 1, 1: 0}.get(axis, axis) for axis in order]
        if swap_output:
            order[0], order[1] = order[1], order[0]
            self.swapped.add(output)
        self.nodes.append(helper.make_node("Transpose", [source], [output], name=node.name, perm=order))
        if swap_output:
            tokens, _, features = self.graph.shapes[output]
            self.graph.shapes[output] = (1, tokens, features)
        return True

    def _keep_swapped(self, node: onnx.NodeProto) -> None:
        output = node.output[0]
        if self.graph.shapes[output][0] > 1:  # one token lies alike in both layouts
            self.swapped.add(output)
        tokens, _, features = self.graph.shapes[output]
        self.graph.shapes[output] = (1, tokens, features)
        self.nodes.append(node)

    def _restore(self, node: onnx.NodeProto) -> None:
        """Give an operator that is not known here its tokens as it had them; reshaping reads either layout alike."""
        if node.op_type == "Reshape":
            return
        for place, name in enumerate(node.input):
            if name not in self.swapped:
                continue
            if name not in self.restored:
                _, tokens, features = self.graph.shapes[name]
                target = f"{name}/sequence_first"
                self.nodes.append(self.graph.reshape(name, target, (tokens, 1, features), f"{node.name}:tokens_first"))
                self.restored[name] = target
            node.input[place] = self.restored[name]
