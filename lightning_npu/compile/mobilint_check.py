"""Whether a graph is one that Mobilint's compiler is known to take in one piece."""

from __future__ import annotations

import onnx

from lightning_npu.compile.static_graph import StaticGraph, attribute
from lightning_npu.errors import CompileError

# ONNX operators with a counterpart in the vendor's list of operations that the hardware has (compiler manual 1.3), but
# for those that are known to break a graph up: conditions, look-ups, repetition, anything of a size known at run time
KNOWN_GOOD = frozenset(
    {"Conv", "ConvTranspose", "MatMul", "Gemm", "BatchNormalization", "InstanceNormalization", "LayerNormalization"}
    | {"Add", "Sub", "Mul", "Div", "Pow", "Abs", "Neg", "Sqrt", "Exp", "Log", "Erf", "Sin", "Cos", "Ceil", "Clip"}
    | {"Relu", "LeakyRelu", "PRelu", "Elu", "Celu", "Selu", "Mish", "HardSigmoid", "HardSwish", "Sigmoid", "Tanh"}
    | {"Softplus", "Softsign", "Softmax", "LogSoftmax", "MaxPool", "AveragePool", "GlobalAveragePool"}
    | {"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2"}
    | {"Reshape", "Transpose", "Concat", "Slice", "Pad", "Resize", "Identity"}
)
_WHY = {
    "Gather": "a look-up, as of an embedding, or an index that is not constant",
    "If": "a decision at run time",
    "Loop": "a loop at run time",
    "Shape": "a size that is computed at run time",
    "Tile": "a repetition",
    "Expand": "a repetition",
    "Where": "a choice per element, as of a mask that depends on an input",
    "Cast": "a change of dtype inside the network",
    "Split": "a split that could not be written as slices",
}
_SHOWN = 12


def check_graph(graph: StaticGraph, *, prefix: str = "") -> None:
    """Refuse a graph that the compiler would split, misread or not take, naming each place.

    Args:
        graph: after :func:`lightning_npu.compile.static_graph.simplify`.
        prefix: what the names of nodes begin with before the head's own modules.

    Raises:
        CompileError: lists the violations, each with the module that it comes from as far as known.
    """
    found = [*_sizes(graph), *_operators(graph, prefix), *_axes(graph, prefix), *_masks(graph, prefix), *_pieces(graph)]
    if not found:
        return
    more = f"\n  - and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise CompileError(
        "Mobilint's compiler is not known to take this head in one piece:\n  - " + "\n  - ".join(found[:_SHOWN]) + more,
        expected="fixed shapes, one connected graph, operators of the vendor's list, masks that are constant",
        remedy="rewrite these places (masks and positions as buffers, slices instead of look-ups), or cut the head "
        "before them: cut='...'",
    )


def check_sizes(graph: StaticGraph, *, prefix: str = "") -> None:
    """Refuse a graph of which a size is known at run time only; the passes that simplify it need all of them.

    Raises:
        CompileError: names the operators from which on sizes are not fixed, each with its module.
    """
    known = {*graph.shapes, ""}
    first = [
        node for node in graph.nodes if not known.issuperset(node.output) and known.issuperset(node.input)
    ] or graph.nodes[:0]
    if not first and known.issuperset(name for node in graph.nodes for name in node.output):
        return
    raise CompileError(
        "Sizes in this head depend on its inputs' values:\n  - "
        + "\n  - ".join(f"{node.op_type} {_at(node, prefix)}" for node in first[:_SHOWN]),
        expected="fixed shapes throughout",
        remedy="replace selections of elements by masks or slices, or cut the head before these places: cut='...'",
    )


def module_of(node: onnx.NodeProto, prefix: str = "") -> str:
    """The dotted path of the module that a node was traced in; "" for the head itself."""
    parts = node.name.removeprefix(prefix).strip("/").split("/")[:-1]
    path: list[str] = []
    for part in parts:
        if path and part.startswith(f"{path[-1]}."):  # "layers", "layers.0"
            path[-1] = part
        else:
            path.append(part)
    return ".".join(path)


def _at(node: onnx.NodeProto, prefix: str) -> str:
    path = module_of(node, prefix)
    return f"in '{path}' ({node.name})" if path else f"in the head's forward ({node.name})"


def _sizes(graph: StaticGraph) -> list[str]:
    unknown = [value.name for value in graph.model.graph.input if value.name not in graph.shapes]
    unknown += [name for node in graph.nodes for name in node.output if name and name not in graph.shapes]
    return [f"the size of {name} is not fixed" for name in unknown]


def _operators(graph: StaticGraph, prefix: str) -> list[str]:
    return [
        f"{node.op_type} {_at(node, prefix)}: " + _WHY.get(node.op_type, "not in the vendor's list of operations")
        for node in graph.nodes
        if node.op_type not in KNOWN_GOOD or node.domain not in ("", "ai.onnx")
    ]


def _axes(graph: StaticGraph, prefix: str) -> list[str]:
    """The hardware takes a batch of one and up to four axes."""
    found = []
    for node in graph.nodes:
        for name in node.output:
            shape = graph.shapes.get(name)
            if shape is not None and (len(shape) > 4 or (len(shape) > 1 and shape[0] != 1)):
                wanted = "four axes at most" if len(shape) > 4 else "a batch of one as the first axis"
                found.append(f"{node.op_type} {_at(node, prefix)} gives {list(shape)}: expected {wanted}")
    return found


def _masks(graph: StaticGraph, prefix: str) -> list[str]:
    """What is added to scores may not come from an input: walk from each softmax to what is no product."""
    inputs = {value.name for value in graph.model.graph.input}
    found = []
    for softmax in graph.nodes:
        if softmax.op_type != "Softmax":
            continue
        waiting, seen = [softmax.input[0]], set[str]()
        products = False
        free: str | None = None
        while waiting:
            name = waiting.pop()
            if name in seen or name in graph.constants:
                continue
            seen.add(name)
            node = graph.producers.get(name)
            if node is None:
                free = name if name in inputs else free
            elif node.op_type == "MatMul":
                products = True
            else:
                waiting += node.input
        if products and free is not None:
            found.append(
                f"Softmax {_at(softmax, prefix)}: its mask is computed from input '{free}', and must be constant"
            )
    return found


def _pieces(graph: StaticGraph) -> list[str]:
    """One connected graph, and every output depends on an input."""
    group: dict[str, str] = {}

    def root(name: str) -> str:
        while group.setdefault(name, name) != name:
            name = group[name]
        return name

    fed = {value.name for value in graph.model.graph.input}
    for node in graph.nodes:
        names = [name for name in (*node.input, *node.output) if name and name not in graph.constants]
        for name in names[1:]:
            group[root(name)] = root(names[0])
        if fed.intersection(node.input):
            fed.update(node.output)
    found = [
        f"output '{name}' does not depend on any input: what is constant, such as positions, has to be a buffer of "
        "what follows in torch"
        for name in sorted(graph.outputs - fed)
    ]
    pieces = {root(name) for name in (*graph.outputs, *(value.name for value in graph.model.graph.input))}
    if len(pieces) > 1:
        members = [sorted(name for name in graph.outputs if root(name) == piece) for piece in sorted(pieces)]
        found.append(f"the graph is in {len(pieces)} pieces that share nothing; their outputs: {members}")
    return found


def score_products(graph: StaticGraph) -> list[str]:
    """Names of the products of queries and keys: those whose result reaches a softmax by scaling or masks alone."""
    found: list[str] = []
    for softmax in graph.nodes:
        if softmax.op_type != "Softmax" or attribute(softmax, "axis", -1) not in (-1, 3):
            continue
        waiting = [softmax.input[0]]
        while waiting:
            node = graph.producers.get(waiting.pop())
            if node is None:
                continue
            if node.op_type == "MatMul":
                found.append(node.name)
            elif node.op_type in ("Mul", "Div", "Add", "Sub", "Reshape", "Transpose", "Identity"):
                waiting += node.input
    return found
