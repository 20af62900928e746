"""Writes the two graphs of a partition and makes modules of them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lightning_npu.compile.split.partition import Partition, closure
from lightning_npu.compile.split.parts import Attributes, Crossing, Head, Inputs, Tail
from lightning_npu.compile.split.trace import CutTracer, FlatRoot, Traced, identifier, original_name
from lightning_npu.compile.split.values import Values
from lightning_npu.compile.trees import Slot, take_apart


def build(root: FlatRoot, traced: Traced, values: Values, parts: Partition, inputs: Inputs) -> tuple[Head, Tail]:
    """Makes head and tail."""
    head_graph, names = _head_graph(traced, values, parts)
    tail_graph = _tail_graph(traced, values, parts, names)
    tensors = sum(len(values.of[node].tensors) for node in parts.crossing if node.op != "placeholder")
    passed = [node for node in parts.crossing if node.op == "placeholder"]
    positions = {node: i for i, node in enumerate(n for n in traced.graph.nodes if n.op == "placeholder")}
    crossing = Crossing(tuple(names), {tensors + i: root.input_names[positions[node]] for i, node in enumerate(passed)})
    modules = []
    for cls, graph, kept in (
        (Head, head_graph, {"inputs": inputs, "crossing": crossing}),
        (Tail, tail_graph, {"outputs": traced.output_template, "crossing": crossing}),
    ):
        attributes = Attributes(root.module, [(root, ""), (traced.root, "")])
        copies, transient = attributes.collect(graph, original_name)
        graph.lint()
        modules.append(cls.build(copies, graph, transient, **kept))
    return modules[0], modules[1]


def _head_graph(traced: Traced, values: Values, parts: Partition) -> tuple[fx.Graph, list[str]]:
    graph = fx.Graph(tracer_cls=CutTracer)
    needed = closure(parts.crossing)
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = _copy(graph, node, copies)
    results: list[fx.Node] = []
    for node in parts.crossing:
        results += _take_out(graph, copies[node], values.of[node].template)
    graph.output(tuple(results))
    return graph, [node.name for node in results]


def _tail_graph(traced: Traced, values: Values, parts: Partition, names: list[str]) -> fx.Graph:
    graph = fx.Graph(tracer_cls=CutTracer)
    placeholders = [graph.placeholder(name) for name in names]
    mapped: dict[fx.Node, Any] = {}
    position = 0
    for node in parts.crossing:
        value = values.of[node]
        own = placeholders[position : position + len(value.tensors)]
        position += len(value.tensors)
        if node in parts.cloned:  # what comes from a device may be its own buffer, or cached: never edit it
            own = [graph.call_method("clone", (tensor,)) for tensor in own]
        mapped[node] = _assemble(graph, value.template, own)
    for node, (tensor, axis) in parts.sizes.items():
        mapped[node] = graph.call_function(torch.ops.aten.sym_size.int, (mapped[tensor], axis))
    for node in parts.tail:
        mapped[node] = _copy(graph, node, mapped)
    output = next(iter(reversed(traced.graph.nodes)))
    graph.output(fx.map_arg(output.args[0], mapped.__getitem__))
    return graph


def _copy(graph: fx.Graph, node: fx.Node, mapped: Mapping[fx.Node, Any]) -> fx.Node:
    copied = graph.node_copy(node, mapped.__getitem__)
    if copied.name.startswith("module_"):  # the flat root's name for the split module
        copied._rename(copied.name.removeprefix("module_"))
    if copied.op == "call_function" and copied.target in (operator.getitem, getattr):
        _name_part(copied)
    return copied


def _name_part(node: fx.Node) -> None:
    """Names a part of a result after both: ``layers_0_1`` instead of ``getitem_7``."""
    source, key = node.args[0], node.args[1]
    if isinstance(source, fx.Node) and isinstance(key, int | str):
        node._rename(identifier(f"{source.name}_{key}"))


def _take_out(graph: fx.Graph, node: fx.Node, template: Any) -> list[fx.Node]:
    """Nodes that take each tensor out of a structured value, in the order of its slots."""
    if isinstance(template, Slot):
        return [node]
    found: list[fx.Node] = []
    for how, key, value in _children(template):
        if take_apart(value, is_slot=lambda leaf: isinstance(leaf, Slot))[1]:
            part = graph.call_function(how, (node, key))
            _name_part(part)
            found += _take_out(graph, part, value)
    return found


def _children(template: Any) -> list[tuple[Callable[..., Any], Any, Any]]:
    if isinstance(template, Mapping):
        return [(operator.getitem, key, value) for key, value in template.items()]
    if dataclasses.is_dataclass(template):
        return [(getattr, f.name, getattr(template, f.name)) for f in dataclasses.fields(template)]
    if isinstance(template, tuple | list) and not isinstance(template, torch.Size):
        return [(operator.getitem, index, value) for index, value in enumerate(template)]
    return []


def _assemble(graph: fx.Graph, template: Any, tensors: Sequence[fx.Node]) -> Any:
    """The reverse: an argument with the template's structure, as a graph can hold it."""
    if isinstance(template, Slot):
        return tensors[template.index]
    if dataclasses.is_dataclass(template) and not isinstance(template, type):
        fields = {f.name: _assemble(graph, getattr(template, f.name), tensors) for f in dataclasses.fields(template)}
        return graph.call_function(type(template), (), fields)
    if isinstance(template, Mapping):
        return {key: _assemble(graph, value, tensors) for key, value in template.items()}
    if isinstance(template, tuple | list) and not isinstance(template, torch.Size):
        parts = [_assemble(graph, value, tensors) for value in template]
        return type(template)(*parts) if hasattr(template, "_fields") else type(template)(parts)
    return template
