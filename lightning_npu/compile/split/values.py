"""Runs a graph once on the examples and notes what each node gives, and who edits whose result in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from lightning_npu.compile.trees import take_apart


@dataclass
class Value:
    """What a node gave.

    Attributes:
        template: its structure, with a slot per tensor; the value itself where there is none.
        tensors: shape and dtype of each tensor.
        carries: whether it holds tensors computed from the data of an input: neither a constant (however computed
            from parameters and sizes) nor a size.
    """

    template: Any
    tensors: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    carries: bool = False


@dataclass
class Values:
    """What a run showed: each node's value, and in-place edits as (who edited, whose result)."""

    of: dict[fx.Node, Value]
    edits: list[tuple[fx.Node, fx.Node]]


def watch(root: nn.Module, graph: fx.Graph, leaves: Sequence[torch.Tensor]) -> Values:
    """Runs ``graph`` on copies of ``leaves``."""
    watcher = _Watcher(root, graph=graph)
    watcher.run(*[leaf.clone() for leaf in leaves])
    return watcher.values


class _Watcher(fx.Interpreter):
    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, garbage_collect_values=True, graph=graph)
        self.values = Values({}, [])

    def run_node(self, n: fx.Node) -> Any:
        # Views share the version counter of their base, so an edit shows in every alias that is still needed.
        before = [(node, [(t, t._version) for t in _tensors(value)]) for node, value in self.env.items()]
        result = super().run_node(n)
        for node, versions in before:
            if any(tensor._version != version for tensor, version in versions):
                self.values.edits.append((n, node))
        template, leaves, _ = take_apart(result, is_slot=lambda leaf: isinstance(leaf, torch.Tensor))
        sources = [self.values.of[node] for node in n.all_input_nodes]
        carries = bool(leaves) and (n.op == "placeholder" or any(value.carries for value in sources))
        self.values.of[n] = Value(template, [(tuple(t.shape), t.dtype) for t in leaves], carries)
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    yield from take_apart(value, is_slot=lambda leaf: isinstance(leaf, torch.Tensor))[1]
