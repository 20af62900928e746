"""Turns a module into one flat graph, by ``torch.fx`` or by ``torch.export``, and marks where the cut's call ends."""

from __future__ import annotations

import dis
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from lightning_npu.compile.quiet import quiet
from lightning_npu.compile.trees import put_together, take_apart

Scope = tuple[tuple[str, int], ...]
"""The calls a node was made in, outermost first: (module's name, how many calls of it came before)."""


class FlatRoot(nn.Module):
    """Calls a module with its input tensors in a row, and returns its output tensors in a row.

    Args:
        module: the module.
        signature: of its ``forward``.
        template: its arguments by name, with a slot per tensor.
        names: a name per input tensor.
    """

    def __init__(
        self, module: nn.Module, signature: inspect.Signature, template: dict[str, Any], names: Sequence[str]
    ) -> None:
        super().__init__()
        self.module = module
        self.signature = signature
        self.input_template = template
        self.input_names = list(names)
        self._seen = _Seen()

    def call(self, leaves: Sequence[Any]) -> Any:
        """The module's own result."""
        bound = self.signature.bind_partial()
        bound.arguments.update(put_together(self.input_template, leaves))
        return self.module(*bound.args, **bound.kwargs)

    def forward(self, *leaves: Any) -> tuple[Any, ...]:
        """Remembers the structure of the outputs."""
        self._seen.outputs, outputs, _ = take_apart(self.call(leaves))
        return tuple(outputs)

    @property
    def output_template(self) -> Any:
        """The structure of the outputs of the last call."""
        return self._seen.outputs


class _Seen:
    """Holds what a call showed; torch.export takes back what is set on the module itself."""

    outputs: Any = None


@dataclass
class Traced:
    """A flat graph of a module.

    Attributes:
        root: gives ``graph``'s ``get_attr`` and ``call_module`` targets, by name.
        graph: one placeholder per input tensor, one output, a tuple.
        scopes: the calls that each node was made in.
        cut_nodes: what the last call of the cut executed, in order.
        output_template: structure of the outputs.
        method: "fx" or "export".
        sizes: per input its sizes for which the graph holds, a number or a symbol; empty if all are free.
        ranges: of symbols, least and greatest value, None for no limit.
    """

    root: nn.Module
    graph: fx.Graph
    scopes: dict[fx.Node, Scope]
    cut_nodes: list[fx.Node]
    output_template: Any
    method: str
    sizes: list[tuple[Any, ...]] = field(default_factory=list)
    ranges: dict[str, tuple[int, int | None]] = field(default_factory=dict)


class CutTracer(fx.Tracer):
    """Traces with modules as leaves, and with buffers by name instead of by value."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Everything is a leaf."""
        return True


class _ThroughTracer(CutTracer):
    """Goes through the modules that hold the cut; all others stay calls, so whatever they do stays as it is."""

    def __init__(self, root: FlatRoot, cut: nn.Module) -> None:
        super().__init__()
        self._names = root.input_names
        self.through = [m for m in root.modules() if m is not cut and any(s is cut for s in m.modules())]
        self._cut = cut
        self._stack: list[tuple[str, int]] = []
        self._calls: dict[str, int] = {}
        self.scopes: dict[fx.Node, Scope] = {}
        self.cut_nodes: list[fx.Node] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(m is through for through in self.through)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = self.path_of_module(m)
        self._stack.append((original_name(name), self._calls.get(name, 0)))
        self._calls[name] = self._calls.get(name, 0) + 1
        try:
            result = super().call_module(m, forward, args, kwargs)
        finally:
            self._stack.pop()
        if m is self._cut:
            self.cut_nodes = [result.node]
        return result

    def to_bool(self, obj: fx.Proxy) -> bool:
        """An ``assert`` is taken to hold, as it did for the examples; any other decision cannot be traced."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__") in (__name__, fx.proxy.__name__):
            frame = frame.f_back
        return (frame is not None and _at_assert(frame)) or super().to_bool(obj)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.scopes[node] = tuple(self._stack)
        return node

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        inputs = [self.create_proxy("placeholder", identifier(name), (), {}) for name in self._names]
        return root_fn, [self.root, *inputs]


def trace_fx(root: FlatRoot, cut: nn.Module) -> Traced:
    """Traces symbolically. Sizes stay symbols, so any batch size that the module takes is taken.

    Raises:
        Exception: whatever the module's Python raises when it meets a placeholder instead of a tensor.
    """
    tracer = _ThroughTracer(root, cut)
    with _traceable_len(tracer.through):
        graph = tracer.trace(root)
    _merge_parts(graph)
    return Traced(root, graph, tracer.scopes, tracer.cut_nodes, root.output_template, "fx")


def _merge_parts(graph: fx.Graph) -> None:
    """Makes one node of all that take the same part of the same result, so that no tensor crosses twice."""
    seen: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (operator.getitem, getattr) and not node.kwargs:
            source, key = node.args[0], node.args[1]
            if isinstance(key, int | str):
                first = seen.setdefault((source, node.target, key), node)
                if first is not node:
                    node.replace_all_uses_with(first)
                    graph.erase_node(node)


def _at_assert(frame: FrameType) -> bool:
    following = [i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti and i.opname != "CACHE"]
    if following and "IF_TRUE" in following[0].opname:  # since Python 3.13 the jump comes after the decision
        following = [i for i in following[1:] if i.opname != "NOT_TAKEN"]
    return bool(following) and (following[0].opname == "LOAD_ASSERTION_ERROR" or following[0].argval is AssertionError)


@contextmanager
def _traceable_len(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Lets ``len(x)`` in the modules' own code become a node; otherwise a batch size would be fixed by it."""
    scopes = [getattr(type(module).forward, "__globals__", globals()) for module in modules]
    scopes = [scope for scope in scopes if "len" not in scope and scope is not globals()]
    for scope in scopes:
        scope["len"] = length
    try:
        yield
    finally:
        for scope in scopes:
            scope.pop("len", None)


def length(value: Any) -> Any:
    """``len`` that becomes a node when it is traced, also when a pickled part is traced anew."""
    if isinstance(value, fx.Proxy):
        return value.tracer.create_proxy("call_function", length, (value,), {})
    return len(value)


def trace_export(root: FlatRoot, cut_name: str, leaves: Sequence[torch.Tensor]) -> Traced:
    """Traces with example tensors: Python that asks for sizes runs, and its answer is fixed.

    Axis 0 of every input is declared dynamic, and all axes of inputs of up to three axes (sequences, whose batch may
    come second); torch finds out which of them are not.

    Raises:
        Exception: whatever ``torch.export`` raises.
    """
    shapes = tuple({a: torch.export.Dim.AUTO for a in range(x.ndim) if a == 0 or x.ndim <= 3} for x in leaves)
    with quiet():
        program = torch.export.export(root, tuple(leaves), dynamic_shapes=(shapes,), strict=False)
    template = root.output_template
    # An empty table decomposes nothing, it only rewrites in-place operators: no aliases have to be followed then.
    module = program.run_decompositions({}).module()
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":  # first, as parts expect them; torch puts parameters before them
            copies[node] = graph.node_copy(node)
    for node in module.graph.nodes:
        if node.op != "placeholder" and not (node.op == "call_module" and node.target == "_guards_fn"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    scopes = {copies[node]: _export_scope(node) for node in module.graph.nodes if node in copies}
    inside = [(node, call) for node in graph.nodes for name, call in scopes[node] if name == cut_name]
    last = max((call for _, call in inside), default=0)
    cut_nodes = [node for node, call in inside if call == last]
    sizes = [tuple(node.meta["val"].shape) for node in graph.nodes if node.op == "placeholder"]
    ranges = {str(symbol): (_bound(r.lower) or 1, _bound(r.upper)) for symbol, r in program.range_constraints.items()}
    return Traced(module, graph, scopes, cut_nodes, template, "export", sizes, ranges)


def _bound(limit: Any) -> int | None:
    """A limit of a range as a number; None for an infinity."""
    return int(limit) if isinstance(limit, int) or getattr(limit, "is_Integer", False) else None


def _export_scope(node: fx.Node) -> Scope:
    scope = []
    for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items():
        path = name.partition("@")[0]
        if path == "module" or path.startswith("module."):
            call = re.search(r"@(\d+)$", key)
            scope.append((original_name(path), int(call[1]) if call else 0))
    return tuple(scope)


def original_name(target: str) -> str:
    """The name in the split module of what the flat root calls ``target``."""
    return target.removeprefix("module").removeprefix(".")


def identifier(name: str) -> str:
    """A Python name made of a leaf's name: ``batch['image']`` becomes ``batch_image``."""
    return re.sub(r"\W+", "_", name).strip("_")
