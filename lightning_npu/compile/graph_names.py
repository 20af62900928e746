"""Names of tensors in a graph, made from those in Python."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_npu.places import leaf_names
from lightning_npu.structure import Items, Leaf, Named, Node


def identifier(name: str) -> str:
    """A name that graphs and Python take."""
    clean = re.sub(r"\W+", "_", name).strip("_") or "tensor"
    return clean if not clean[0].isdigit() else f"_{clean}"


def unique(names: Sequence[str], taken: set[str]) -> list[str]:
    """The names with numbers behind those that are taken already; adds them to ``taken``."""
    result = []
    for name in names:
        candidate, number = name, 2
        while candidate in taken:
            candidate, number = f"{name}_{number}", number + 1
        taken.add(candidate)
        result.append(candidate)
    return result


def leaves(node: Node, prefix: str) -> list[tuple[int, str]]:
    """Index and readable name of every tensor in a structure."""
    names = iter(leaf_names(node, prefix))
    pairs: list[tuple[int, str]] = []

    def visit(part: Node) -> None:
        if isinstance(part, Leaf):
            pairs.append((part.index, next(names)))
        elif isinstance(part, (Items, Named)):
            for item in part.items:
                visit(item)

    visit(node)
    return pairs
