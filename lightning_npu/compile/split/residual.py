"""Finds out whether a cut lies inside a residual branch, and which cuts nearby do not."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import torch
from torch import fx, nn

from lightning_npu.compile.split.trace import Scope, Traced
from lightning_npu.compile.split.values import Values

Call = tuple[str, int]
_ADDITIONS = (operator.add, operator.iadd, torch.add, torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


def residual_join(traced: Traced, values: Values, module: nn.Module, cut: Iterable[fx.Node]) -> fx.Node | None:
    """The addition that joins the cut's branch with a shortcut around it, in the block that calls the cut.

    The block is the innermost module that calls the cut, containers left out; additions inside of other modules
    and in the outermost module do not count: positional embeddings that are handed from layer to layer and long
    skips as in a U-Net are no residuals.

    Args:
        traced: the graph.
        values: what its nodes gave.
        module: the module that was traced.
        cut: the nodes of the cut's last call.

    Returns:
        The addition, or None where the cut is clean.
    """
    cut = list(cut)
    block = _block(traced.scopes[cut[-1]], module, cut_depth=_depth(traced, cut))
    if block is None:
        return None
    nodes: list[fx.Node] = [node for node in traced.graph.nodes if block in traced.scopes[node]]
    inside = set(nodes)
    made_from = _within(cut, inside, values)
    after = set(cut)
    for node in nodes:  # in the order of execution
        if values.of[node].carries and any(source in after for source in node.all_input_nodes):
            after.add(node)
    for node in nodes[nodes.index(cut[-1]) + 1 :]:
        if traced.scopes[node][-1] != block or not _is_addition(node):
            continue
        operands = [arg for arg in node.args[:2] if isinstance(arg, fx.Node) and values.of[arg].carries]
        if len(operands) != 2 or sum(operand in after for operand in operands) != 1:
            continue
        shortcut, branch = operands if operands[1] in after else operands[::-1]
        # What is broadcast is an embedding or a bias: a shortcut has the size of what it goes around.
        if _count(values, shortcut) >= _count(values, branch) and _within([shortcut], inside, values) & made_from:
            return node
    return None


def clean_cuts(traced: Traced, values: Values, module: nn.Module, cut: list[fx.Node]) -> tuple[str | None, str | None]:
    """Names of the nearest clean cuts before and after the block that calls the cut; None where there is none."""
    scope = traced.scopes[cut[-1]]
    block = _block(scope, module, cut_depth=_depth(traced, cut))
    depth = scope.index(block) if block is not None else 0
    enclosing = [call for call in reversed(scope[: depth + 1]) if call[0]]
    after = next((call[0] for call in enclosing if _clean(traced, values, module, call)), None)
    outer = next((call for call in enclosing if call[0] == after), block)
    nodes = list(traced.graph.nodes)
    first = next(index for index, node in enumerate(nodes) if outer in traced.scopes[node])
    scope = traced.scopes[nodes[first]]
    for node in reversed(nodes[:first]):
        other = traced.scopes[node]
        common = next((i for i, (a, b) in enumerate(zip(other, scope, strict=False)) if a != b), len(scope))
        if len(other) > common and _clean(traced, values, module, other[common]):
            return other[common][0], after
    return None, after


def _clean(traced: Traced, values: Values, module: nn.Module, call: Call) -> bool:
    last = max(scope[1] for node in traced.graph.nodes for scope in traced.scopes[node] if scope[0] == call[0])
    nodes = [node for node in traced.graph.nodes if (call[0], last) in traced.scopes[node]]
    return residual_join(traced, values, module, nodes) is None


def _depth(traced: Traced, cut: list[fx.Node]) -> int:
    """How deep the cut's own call lies: the deepest call that all of its nodes share."""
    scopes = [traced.scopes[node] for node in cut]
    return max(i for i in range(len(scopes[0])) if all(s[: i + 1] == scopes[0][: i + 1] for s in scopes))


def _block(scope: Scope, module: nn.Module, cut_depth: int) -> Call | None:
    for name, call in reversed(scope[:cut_depth]):
        if not name:
            return None
        if not isinstance(module.get_submodule(name), nn.Sequential):
            return name, call
    return None


def _within(nodes: Iterable[fx.Node], inside: set[fx.Node], values: Values) -> set[fx.Node]:
    """What the nodes are made from inside of a block, with what enters it, but not what that is made from."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and values.of[node].carries:
            found.add(node)
            if node in inside:
                stack.extend(node.all_input_nodes)
    return found


def _is_addition(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("add", "add_", "__add__", "__iadd__", "__radd__")
    return node.op == "call_function" and node.target in _ADDITIONS


def _count(values: Values, node: fx.Node) -> int:
    return sum(math.prod(shape) for shape, _ in values.of[node].tensors)
