"""Decides which nodes of a graph belong to the head, and what the head has to hand to the tail."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from lightning_npu.compile.split.trace import Traced
from lightning_npu.compile.split.values import Values
from lightning_npu.compile.trees import Slot
from lightning_npu.errors import CompileError


class EditedInPlaceError(Exception):
    """An in-place edit is seen by others, so the graph cannot be cut as it stands."""


@dataclass
class Partition:
    """Where each node goes.

    Attributes:
        head: nodes of the head.
        crossing: head nodes and inputs whose tensors the tail takes, in order; inputs come last.
        tail: nodes that the tail computes, in order, copies of the head's constants and sizes included.
        sizes: sizes that the tail reads from an axis of a crossing tensor.
        cloned: crossing nodes that the tail edits in place, and therefore copies first.
    """

    head: set[fx.Node]
    crossing: list[fx.Node]
    tail: list[fx.Node]
    sizes: dict[fx.Node, tuple[fx.Node, int]] = field(default_factory=dict)
    cloned: set[fx.Node] = field(default_factory=set)


def partition(traced: Traced, values: Values) -> Partition:
    """Splits the graph where the last call of the cut ends.

    The head is what the cut's result is made from, and what else ran before and used that work (an auxiliary output).
    What ran before but only looks at inputs (a branch for the robot's state, say) is left to the tail, in full
    precision. Sizes and constants are computed where they are used, on both sides if need be.

    Raises:
        EditedInPlaceError: somebody else looks at a value after it was edited in place.
        CompileError: nothing that the head computes is used after it.
    """
    order = {node: index for index, node in enumerate(traced.graph.nodes)}
    for editor, edited in values.edits:
        if any(order[user] > order[editor] for user in edited.users):
            raise EditedInPlaceError(
                f"'{editor.name}' edits the result of '{edited.name}' in place, and it is used again later."
            )
    head = _head(traced, values, order)
    crossing, tail, sizes = _needs(traced, values, head, order)
    computed = [node for node in crossing if node.op != "placeholder"]
    if not computed:
        raise CompileError(
            "Nothing that is computed up to the cut is used after it, so the head would have no outputs.",
            remedy="cut after a layer whose result the module's outputs depend on",
        )
    inputs = [node for node in crossing if node.op == "placeholder"]
    cloned: set[fx.Node] = set()
    for editor in tail:
        victims = {node for who, node in values.edits if who is editor and node in crossing}
        if len(victims) > 1:
            raise EditedInPlaceError(f"'{editor.name}' edits several tensors in place that share their memory.")
        cloned |= victims
    return Partition(head, computed + inputs, tail, sizes, cloned)


def _head(traced: Traced, values: Values, order: dict[fx.Node, int]) -> set[fx.Node]:
    end = order[traced.cut_nodes[-1]]
    made_from = closure(traced.cut_nodes)
    working = {node for node in made_from if values.of[node].carries and node.op != "placeholder"}
    before = [n for n in traced.graph.nodes if order[n] <= end and n.op not in ("placeholder", "get_attr", "output")]
    used_work: set[fx.Node] = set(working)
    for node in before:
        if values.of[node].carries and any(source in used_work for source in node.all_input_nodes):
            used_work.add(node)
    head = closure(used_work)
    edited = {node for _, node in values.edits}
    left_out = [node for node in before if node not in head and values.of[node].carries]
    if any(source in edited for node in left_out for source in node.all_input_nodes):
        head = closure([*used_work, *left_out])  # read before it is edited: the order has to stay
    # The parts of a result that is a tuple or a dict are taken out on the head's side: only tensors can cross.
    for node in traced.graph.nodes:
        takes_out = node.op == "call_function" and node.target in (operator.getitem, builtins.getattr)
        if takes_out and node not in head and values.of[node].carries and set(node.all_input_nodes) <= head:
            source = node.args[0]
            if isinstance(source, fx.Node) and not isinstance(values.of[source].template, Slot):
                head.add(node)
    return head


def _needs(
    traced: Traced, values: Values, head: set[fx.Node], order: dict[fx.Node, int]
) -> tuple[list[fx.Node], list[fx.Node], dict[fx.Node, tuple[fx.Node, int]]]:
    """What crosses, what the tail computes, and which sizes it can read from what crosses."""
    crossing: set[fx.Node] = set()
    tail: set[fx.Node] = set()
    sizes: dict[fx.Node, tuple[fx.Node, int]] = {}
    postponed: list[fx.Node] = []
    output = next(iter(reversed(traced.graph.nodes)))

    def visit(nodes: Iterable[fx.Node]) -> None:
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node in tail or node in crossing:
                continue
            if node.op == "placeholder" or (node in head and values.of[node].carries):
                crossing.add(node)
            elif _symbol(node) is not None:
                if node not in postponed:
                    postponed.append(node)
            else:
                tail.add(node)
                stack.extend(node.all_input_nodes)

    visit(output.all_input_nodes)
    # Sizes last: most are an axis of something that crosses anyway, which need not drag the image along.
    while pending := [node for node in postponed if node not in tail and node not in sizes]:
        for node in pending:
            found = _axis_of_size(node, [n for n in crossing if n.op != "placeholder"])
            if found is not None:
                sizes[node] = found
            else:
                tail.add(node)
                visit(node.all_input_nodes)
    key = order.__getitem__
    return sorted(crossing, key=key), sorted(tail, key=key), sizes


def _symbol(node: fx.Node) -> str | None:
    size = node.meta.get("val")
    expression = getattr(getattr(size, "node", None), "expr", None)
    return None if expression is None or hasattr(size, "shape") else str(expression)


def _axis_of_size(node: fx.Node, tensors: list[fx.Node]) -> tuple[fx.Node, int] | None:
    wanted = _symbol(node)
    for tensor in tensors:
        for axis, size in enumerate(getattr(tensor.meta.get("val"), "shape", ())):
            if not isinstance(size, int) and str(size.node.expr) == wanted:
                return tensor, axis
    return None


def closure(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they are made from."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def describe(partition: Partition, values: Values) -> list[str]:
    """Dtypes and shapes of the tensors that cross, for messages."""
    return [f"{dtype} {list(shape)}" for node in partition.crossing for shape, dtype in values.of[node].tensors]
