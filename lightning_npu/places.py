"""What is at which place of a structure: the names of its tensors, its constants, its keys."""

from __future__ import annotations

from typing import Any

from lightning_npu.structure import PRIMITIVES, Constant, Items, Leaf, Named, Node


def leaf_names(node: Node, prefix: str) -> list[str]:
    """One name per leaf of ``node``, in flat order, joined by underscores: ``batch_image``, ``features_0``."""
    if isinstance(node, Leaf):
        return [prefix]
    if isinstance(node, Items):
        return [n for i, item in enumerate(node.items) for n in leaf_names(item, f"{prefix}_{i}")]
    if isinstance(node, Named):
        return [n for key, item in zip(node.keys, node.items, strict=True) for n in leaf_names(item, f"{prefix}_{key}")]
    return []


def constants(node: Node, where: str) -> dict[str, Constant]:
    """The values in ``node`` that are no tensors, by their place: ``output['size']``."""
    if isinstance(node, Constant):
        return {where: node}
    if isinstance(node, Items):
        return {k: v for i, item in enumerate(node.items) for k, v in constants(item, f"{where}[{i}]").items()}
    if isinstance(node, Named):
        pairs = zip(node.keys, node.items, strict=True)
        return {k: v for key, item in pairs for k, v in constants(item, f"{where}[{key!r}]").items()}
    return {}


def unwritable_keys(node: Node) -> list[Any]:
    """Keys in ``node`` that a file cannot hold: all but texts and numbers."""
    own = [key for key in node.keys if type(key) not in PRIMITIVES] if isinstance(node, Named) else []
    return own + [key for item in getattr(node, "items", ()) for key in unwritable_keys(item)]
